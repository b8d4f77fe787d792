"""Former place of `meshverse.tools.pictures`, for one release."""

import warnings

from .tools.pictures import *  # noqa: F403
from .tools.pictures import __all__ as __all__

warnings.warn(
    "meshverse.pictures has moved: import from meshverse.tools.pictures.",
    DeprecationWarning,
    stacklevel=2,
)
