"""The reference has every public name, once, and no other."""

from __future__ import annotations

import importlib
import re

from helpers.pages import ROOT

_TOOLS = [".tools.doctor", ".tools.pictures", ".tools.planner"]
_MODULES = ["", ".hang", ".parallel", *_TOOLS]
# What configuration files name, and what public functions give.
_BY_PATH = {
    "meshverse.tools.planner.crossings.Crossing",
    "meshverse.tools.planner.plan.Mine",
    "meshverse.tools.topology.levels.Level",
    "meshverse.universe.suspension.GroupMemory",
    "meshverse.universe.warm_up.WarmedUp",
}


def test_every_public_name_is_in_the_reference() -> None:
    pages = [path.read_text(encoding="utf-8") for path in (ROOT / "docs" / "api").glob("*.md")]
    documented = re.findall(r"^\.\. auto\w+:: (\S+)$", "\n".join(pages), re.MULTILINE)
    public = {
        f"meshverse{module}.{name}"
        for module in _MODULES
        for name in importlib.import_module(f"meshverse{module}").__all__
        if name != "__version__"
    }
    assert sorted(documented) == sorted(public | _BY_PATH)
