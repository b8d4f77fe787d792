"""`meshverse` (or `python -m meshverse`) on the command line.

- `main`: the choice of the command, and its exit status.
- `plan_command`: `meshverse plan`.
- `doctor_command`: `meshverse doctor`.
"""
