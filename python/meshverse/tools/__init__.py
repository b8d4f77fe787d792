"""Tools beside a job: what a program does not need to train, and nothing else imports.

- `planner`: the process groups of a job, computed without it.
- `doctor`: checks of a job's machines.
- `topology`: the node and switch of each rank; rank orders that fit a mesh.
- `pictures`: process groups as pictures.
- `commands`: the `meshverse` command line.
- `environment`: versions and environment variables, for bug reports.
"""
