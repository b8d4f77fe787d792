"""The documentation site: `make docs` builds it into build/docs, without a network.

The pages are Markdown that GitHub shows too. Where the two differ, this file adapts the site.
"""

from __future__ import annotations

import re
from typing import Any

import meshverse

project = "Meshverse"
author = "The Meshverse authors"
version = release = meshverse.__version__

extensions = ["myst_parser", "sphinx.ext.autodoc", "sphinx.ext.napoleon"]
exclude_patterns = ["conf.py"]
html_theme = "furo"
html_title = f"Meshverse {release}"
html_show_copyright = False
html_copy_source = False
html_static_path = ["_static"]
html_css_files = ["site.css"]
html_theme_options = {"navigation_with_keys": True}

myst_heading_anchors = 4  # links go to headings, by the names that GitHub gives them
myst_enable_extensions = ["colon_fence"]

autodoc_member_order = "bysource"
autodoc_typehints = "signature"
autodoc_class_signature = "mixed"
autodoc_default_options = {"members": True, "show-inheritance": False}
autodoc_preserve_defaults = True  # `share="mesh"` as it is written
napoleon_use_rtype = False
python_use_unqualified_type_names = True
default_role = "literal"  # docstrings have `names` in single quotes, as Markdown does

# Links inside Meshverse must lead somewhere. Those to torch and to Python's own library would need
# their inventories from the network.
nitpicky = True
nitpick_ignore_regex = [
    (r"py:.*", r"(?!meshverse).*"),
    (r"py:.*", r"meshverse(\.\w+)*\._.*"),
]

_PICTURE = re.compile(
    r'<picture>\s*<source [^>]*srcset="(?P<dark>[^"]+)">\s*'
    r'<img alt="(?P<alt>[^"]*)" src="(?P<light>[^"]+)">\s*</picture>'
)


def _pictures(app: Any, page: str, source: list[str]) -> None:
    """A picture for light and one for dark pages: in HTML for GitHub, here as images of each."""

    def images(match: re.Match[str]) -> str:
        parts = [
            f"```{{image}} {match[theme]}\n:alt: {match['alt']}\n:class: only-{theme}\n```"
            for theme in ("light", "dark")
        ]
        return "\n\n".join(parts)

    source[0] = _PICTURE.sub(images, source[0])


def setup(app: Any) -> None:
    """Adapt pages that are written for GitHub."""
    app.connect("source-read", _pictures)
