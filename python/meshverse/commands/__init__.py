"""`meshverse` (or `python -m meshverse`) on the command line.

- `main`: the choice of the command, and its exit status.
- `plan_command`: `meshverse plan`.
- `doctor_command`: `meshverse doctor`.
- `run_command`: `meshverse run`; `program` runs the program, `process_setup` installs Meshverse in
  this process and its children.
"""
