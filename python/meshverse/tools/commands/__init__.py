"""`meshverse` (or `python -m meshverse`) on the command line.

- `main`: chooses the command, and returns its exit status.
- `plan_command`: `meshverse plan`.
- `doctor_command`: `meshverse doctor`.
- `hang_command`: `meshverse hang`.
- `run_command`: `meshverse run`; `program` runs the program, `process_setup` installs Meshverse in
  this process and its children.
"""
