"""Pipeline parallelism: splits a model by layers into stages, and runs torch's schedules."""
