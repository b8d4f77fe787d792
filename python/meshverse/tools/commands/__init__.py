"""`meshverse` (or `python -m meshverse`) on the command line.

- `main`: chooses the command, and returns its exit status. It imports that command's module only:
  `NAME_command` describes and runs `meshverse NAME`.
- `program`, `process_setup`: for `meshverse run`, run the program, and install Meshverse in this
  process and its children.
"""
