"""Pipeline parallelism: a model split by its layers into stages, and torch's schedules over them."""
