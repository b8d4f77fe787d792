"""What `meshverse` (or `python -m meshverse`) does on the command line.

- `main`: which command is called.
- `plan_command`: `meshverse plan`.
- `versions`: `meshverse --version`, and the report of an environment.
"""
