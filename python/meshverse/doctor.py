"""Former place of `meshverse.tools.doctor`, for one release."""

import warnings

from .tools.doctor import *  # noqa: F403
from .tools.doctor import __all__ as __all__

warnings.warn(
    "meshverse.doctor has moved: import from meshverse.tools.doctor.",
    DeprecationWarning,
    stacklevel=2,
)
