"""A Python program, run in this process as the interpreter would run it."""

from __future__ import annotations

import builtins
import contextlib
import importlib
import importlib.util
import os
import pkgutil
import sys
from collections.abc import Callable, Iterator, Sequence
from importlib.machinery import ModuleSpec, PathFinder, SourceFileLoader, SourcelessFileLoader
from pathlib import Path
from types import CodeType, ModuleType, TracebackType
from typing import Any

# Launchers, which start each rank as another program, and how each of them starts Meshverse.
_TORCHRUN = "torchrun ... -m meshverse run train.py"
_LAUNCHERS = {
    "torch.distributed.run": _TORCHRUN,
    "torch.distributed.launch": _TORCHRUN,
    "torchrun": _TORCHRUN,
    "accelerate": "accelerate launch ... -m meshverse run train.py",
    "accelerate.commands.launch": "accelerate launch ... -m meshverse run train.py",
    "deepspeed": "deepspeed --module meshverse run train.py",
    "deepspeed.launcher.runner": "deepspeed --module meshverse run train.py",
}


# Files of the functions that import a module, in tracebacks.
_IMPORTING = ("<frozen importlib", importlib.__file__)


class NoProgramError(ValueError):
    """There is no such module, or it has no Python code."""


class Program:
    """A program that is ready to run: a script, a folder or archive with a `__main__`, or a module.

    Args:
        name: path of the script, folder or archive; or, with `is_module`, a module's name.
        arguments: arguments that follow the name on the command line.
        is_module: whether the program is a module, as for `python -m`.

    Raises:
        ValueError: the program is a launcher, which starts each rank as another program; or a
            folder without a `__main__`.
        OSError: the file cannot be read.
    """

    def __init__(self, name: str, arguments: Sequence[str], *, is_module: bool = False) -> None:
        launcher = _LAUNCHERS.get(name if is_module else Path(name).name)
        if launcher is not None:
            raise ValueError(
                f"{name} starts each rank as another program, which would run without Meshverse. "
                f"Let it start Meshverse: {launcher}"
            )
        self._name, self._arguments = name, list(arguments)
        self._main = ModuleType("__main__")
        self._main.__dict__["__builtins__"] = builtins  # `exec` would set it to a dictionary
        self._code: CodeType | None = None
        self._find: Callable[[], CodeType]
        self._is_archive = False
        if is_module:
            self._folder = os.getcwd()
            self._find = self._load_module
        elif _has_main(name):
            self._folder, self._is_archive = os.path.abspath(name), True
            self._find = self._load_archive
        else:
            if os.path.isdir(name):
                raise ValueError(f"{name} is a folder without a __main__.py: name a script in it.")
            if not os.access(name, os.R_OK):
                Path(name).open("rb").close()  # raises
            self._folder = str(Path(name).resolve().parent)
            self._find = self._load_script

    def load(self) -> None:
        """Load the program as `__main__`, with its arguments, and its folder first on `sys.path`.

        Raises:
            NoProgramError: there is no such module, or it has no Python code.
            SyntaxError: the program is not valid Python.
            Whatever a package raises that is imported to find the module.
        """
        sys.argv[:] = [self._name, *self._arguments]
        # `sys.path` begins with the folder of `meshverse run`, except under -I, -P, PYTHONSAFEPATH.
        if not (sys.flags.isolated or getattr(sys.flags, "safe_path", False)):
            del sys.path[0]
            sys.path.insert(0, self._folder)
        elif self._is_archive:
            sys.path.insert(0, self._folder)
        # By the second name, multiprocessing's spawned processes know it: it is in the pickles that
        # they send.
        sys.modules["__main__"] = sys.modules["__mp_main__"] = self._main
        with self._as_python_shows_it():
            self._code = self._find()

    def run(self) -> None:
        """Run the loaded program.

        Raises:
            Whatever the program raises. The traceback that Python prints has only its own frames.
        """
        assert self._code is not None
        with self._as_python_shows_it():
            exec(self._code, vars(self._main))

    @contextlib.contextmanager
    def _as_python_shows_it(self) -> Iterator[None]:
        try:
            yield
        except BaseException:
            sys.excepthook = self._without_our_frames(sys.excepthook)
            raise

    def _without_our_frames(self, hook: Callable[..., Any]) -> Callable[..., Any]:
        def show(
            kind: type[BaseException], error: BaseException, trace: TracebackType | None
        ) -> None:
            frames = list[TracebackType]()
            while trace is not None:
                frames.append(trace)
                trace = trace.tb_next
            of_program = (one for one in frames if one.tb_frame.f_globals is vars(self._main))
            trace = next(of_program, None) or _after_ours(frames)
            hook(kind, error.with_traceback(trace), trace)

        return show

    # --- the code of a program ------------------------------------------------------------------

    def _load_script(self) -> CodeType:
        path = os.path.abspath(self._name)
        kind = SourcelessFileLoader if path.endswith(".pyc") else SourceFileLoader
        loader = kind("__main__", path)
        self._main.__file__, self._main.__loader__ = path, loader
        self._main.__dict__["__cached__"] = None
        if isinstance(loader, SourceFileLoader):
            return loader.source_to_code(loader.get_data(path), path)
        code = loader.get_code("__main__")
        assert code is not None
        return code

    def _load_archive(self) -> CodeType:
        return self._load_from(PathFinder.find_spec("__main__", [self._folder]), "__main__")

    def _load_module(self) -> CodeType:
        name = self._name
        self._import_package(name.rpartition(".")[0])
        spec = self._find_spec(name)
        if spec is not None and spec.submodule_search_locations is not None:
            self._import_package(name)
            name += ".__main__"
            spec = self._find_spec(name)
        code = self._load_from(spec, name)
        sys.argv[0] = self._main.__file__ or name
        return code

    def _import_package(self, name: str) -> None:
        """Import a package of the program, whose own errors pass through, as with `python -m`."""
        parents = [name[:end] for end, char in enumerate(f"{name}.") if char == "."]
        try:
            if name:
                importlib.import_module(name)
        except ModuleNotFoundError as error:
            if error.name not in parents:  # the package itself imports what is missing
                raise
            raise self._not_found(error) from error

    def _find_spec(self, name: str) -> ModuleSpec | None:
        try:
            return importlib.util.find_spec(name)
        except (ImportError, AttributeError, TypeError, ValueError) as error:
            raise self._not_found(error) from error

    def _not_found(self, error: Exception) -> NoProgramError:
        return NoProgramError(
            f"No module named {self._name!r} was found to run: {type(error).__name__}: {error}"
        )

    def _load_from(self, spec: ModuleSpec | None, name: str) -> CodeType:
        get_code = getattr(None if spec is None else spec.loader, "get_code", None)
        code: CodeType | None = None if get_code is None else get_code(name)
        if spec is None or code is None:
            raise NoProgramError(f"No module named {name!r} with Python code was found to run.")
        self._main.__file__, self._main.__loader__ = spec.origin, spec.loader
        self._main.__package__, self._main.__spec__ = spec.parent, spec
        self._main.__dict__["__cached__"] = spec.cached
        return code


def _after_ours(frames: Sequence[TracebackType]) -> TracebackType | None:
    """Return the first frame of a package that could not be imported, after ours; or None."""
    files = [one.tb_frame.f_code.co_filename for one in frames]
    start = len(files) - files[::-1].index(__file__) if __file__ in files else 0
    left = (index for index in range(start, len(files)) if not files[index].startswith(_IMPORTING))
    first = next(left, None)
    return None if first is None else frames[first]


def _has_main(path: str) -> bool:
    """Return whether a path is a folder or an archive, which Python runs by its `__main__`."""
    importer = pkgutil.get_importer(path)
    return importer is not None and PathFinder.find_spec("__main__", [path]) is not None
