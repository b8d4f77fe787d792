"""Former place of `meshverse.tools.topology`, for one release."""

import warnings

from .tools.topology import *  # noqa: F403
from .tools.topology import __all__ as __all__

warnings.warn(
    "meshverse.topology has moved: import from meshverse.tools.topology.",
    DeprecationWarning,
    stacklevel=2,
)
