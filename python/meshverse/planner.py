"""Former place of `meshverse.tools.planner`, for one release."""

import warnings

from .tools.planner import *  # noqa: F403
from .tools.planner import __all__ as __all__

warnings.warn(
    "meshverse.planner has moved: import from meshverse.tools.planner.",
    DeprecationWarning,
    stacklevel=2,
)
