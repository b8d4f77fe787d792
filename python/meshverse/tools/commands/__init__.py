"""`meshverse` (or `python -m meshverse`) on the command line.

- `main`: chooses the command, and returns its exit status. It imports that command's module only.
- `run_command`, `plan_command`, `doctor_command`, `hang_command`, `versions_command`,
  `completion_command`: each describes and runs the command of that name.
- `summary`: the process groups that several axes share, in a few lines.
- `program`, `process_setup`: for `meshverse run`, run the program, and install Meshverse in this
  process and its children.
"""
