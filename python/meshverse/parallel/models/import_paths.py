"""Classes and functions by their import paths, as configuration files name them.

Example:
    >>> import_class_from_path("torch.nn.Linear")
    <class 'torch.nn.modules.linear.Linear'>
"""

from __future__ import annotations

import importlib
import logging
from collections.abc import Sequence
from typing import Any

__all__ = ["import_class_from_path", "import_classes_from_paths"]

_logger = logging.getLogger(__name__)


def import_class_from_path(path: str) -> Any:
    """What an import path such as "package.module.Class" names: a class, function or value.

    Raises:
        ImportError: the module cannot be imported, or has nothing of this name.
        ValueError: the path has no dot, so that it names no member of a module.
    """
    module_name, _, name = path.rpartition(".")
    if not module_name:
        raise ValueError(
            f"{path!r} is no import path of a member of a module. Give one such as "
            "'package.module.Class'."
        )
    module = importlib.import_module(module_name)
    if not hasattr(module, name):
        raise ImportError(f"{path!r}: the module {module_name!r} has no {name!r}.", name=path)
    return getattr(module, name)


def import_classes_from_paths(paths: Sequence[str]) -> list[Any]:
    """What import paths name, in order; those that fail are left out with a logged warning."""
    return [found for path in paths for found in _import_or_warn(path)]


def _import_or_warn(path: str) -> list[Any]:
    try:
        return [import_class_from_path(path)]
    except Exception as error:  # noqa: BLE001  (a module that is imported runs, and raises, anything)
        _logger.warning("Left out the import path %r: %s", path, error)
        return []
