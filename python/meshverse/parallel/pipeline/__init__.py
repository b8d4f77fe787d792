"""Pipeline parallelism: a model split by layers into stages, and torch's schedules over them."""
