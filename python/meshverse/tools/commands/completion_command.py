"""`meshverse completion`: completion of these commands in a shell, by the library shtab."""

from __future__ import annotations

import argparse

_SHELLS = ("bash", "zsh", "tcsh")
_FILES = {"FILE", "DUMP", "SCRIPT ..."}  # arguments that a shell completes by its files

_EXAMPLES = """\
examples:
  meshverse completion bash > ~/.local/share/bash-completion/completions/meshverse
  meshverse completion zsh > ~/.zfunc/_meshverse
"""


def describe(parser: argparse.ArgumentParser) -> None:
    """Add the command's description and arguments."""
    parser.description = (
        "Prints a script that completes commands, options and files of `meshverse` in a shell. "
        "Needs shtab: pip install 'meshverse[completion]'."
    )
    parser.epilog = _EXAMPLES
    parser.add_argument("shell", choices=_SHELLS, help="the shell")
    parser.set_defaults(run=_run)


def _run(arguments: argparse.Namespace) -> int:
    try:
        import shtab
    except ImportError:
        raise ValueError(
            "Completion needs shtab: pip install 'meshverse[completion]' or shtab."
        ) from None
    from .main import parser_of

    parser, parsers = parser_of()
    for action in (action for each in parsers.values() for action in each._actions):
        if action.metavar in _FILES:
            action.complete = shtab.FILE  # type: ignore[attr-defined]
    print(shtab.complete(parser, arguments.shell))  # noqa: T201
    return 0
