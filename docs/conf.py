"""The documentation site: `make docs` builds it into build/docs, without a network.

The pages are Markdown that GitHub shows too. Where the two differ, this file adapts the site.
"""

from __future__ import annotations

import re
from pathlib import Path
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
autodoc_default_options = {"members": True}
autodoc_preserve_defaults = True  # `share="mesh"` as it is written
napoleon_use_ivar = True  # attributes as a list: dataclasses have them in one docstring
napoleon_use_rtype = False
maximum_signature_line_length = 88
python_use_unqualified_type_names = True
default_role = "literal"  # docstrings have `names` in single quotes, as Markdown does

# Links inside Meshverse must lead somewhere. Those to torch and to Python's own library would need
# their inventories from the network.
nitpicky = True
nitpick_ignore_regex = [
    (r"py:.*", r"(?!meshverse).*"),
    (r"py:.*", r"meshverse\.\w+\..*"),  # classes in the subpackages that are not public
]

_PUBLIC = ("", ".parallel", ".tools.planner", ".tools.pictures", ".tools.doctor")

_BELOW = {  # pages that the navigation shows below another one
    "hangs": ("mismatches", "troubleshooting"),
    "parallel": ("huggingface", "compile"),
    "process_groups": ("rank_lists",),
    "several_meshes": ("reshard", "worlds"),
    "when": ("benchmarks",),
}
_ONLY_LINKED = ("huggingface_families", "torch_versions")  # pages that it leaves out

_RESULTS = Path(__file__).parents[1] / "benchmarks" / "results"
_LINK_TO_RESULTS = re.compile(r"\]\(\.\./benchmarks/results/(\w+\.md)\)")


def _results(app: Any) -> None:
    """The tables of the benchmarks' suites, as pages: Sphinx reads none outside its folder."""
    folder = Path(app.srcdir) / "results"  # git ignores it
    folder.mkdir(exist_ok=True)
    for page in _RESULTS.glob("*.md"):
        (folder / page.name).write_text(f"---\norphan: true\n---\n\n{page.read_text()}")


def _for_the_site(app: Any, page: str, source: list[str]) -> None:
    """Mend links to results, and put pages into the navigation, below others or not at all."""
    source[0] = _LINK_TO_RESULTS.sub(r"](results/\1)", source[0])
    if page in _ONLY_LINKED:
        source[0] = f"---\norphan: true\n---\n\n{source[0]}"
    if page in _BELOW:
        names = "\n".join(_BELOW[page])
        source[0] += f"\n```{{toctree}}\n:hidden:\n\n{names}\n```\n"


def _public_name(app: Any, env: Any, node: Any, content: Any) -> Any:
    """Link a class that an annotation names by the file it is in, to where the reference has it."""
    if node.get("refdomain") != "py":
        return None
    name = node["reftarget"].rpartition(".")[2]
    objects = env.domains["py"].objects
    for module in _PUBLIC:
        known = objects.get(f"meshverse{module}.{name}")
        if known is not None:
            target = node.copy()
            target["reftarget"] = f"meshverse{module}.{name}"
            return env.domains["py"].resolve_xref(
                env,
                node["refdoc"],
                app.builder,
                node["reftype"],
                target["reftarget"],
                target,
                content,
            )
    return None


def _signature(app: Any, what: str, name: str, of: Any, options: Any, text: str, gives: str) -> Any:
    """A dataclass's default that is made anew each time: `<factory>` would be no Python."""
    return text and text.replace("<factory>", "..."), gives


def setup(app: Any) -> None:
    """Adapt pages that are written for GitHub, and docstrings that are written for editors."""
    app.connect("autodoc-process-signature", _signature)
    app.connect("builder-inited", _results)
    app.connect("source-read", _for_the_site)
    app.connect("missing-reference", _public_name)
