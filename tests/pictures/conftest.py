from __future__ import annotations

from helpers.browser import browser

__all__ = ["browser"]
