"""What `meshverse` (or `python -m meshverse`) does on the command line.

- `main`: which command is called.
- `plan_command`: `meshverse plan`.
- `doctor_command`: `meshverse doctor`.
"""
