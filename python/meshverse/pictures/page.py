"""A picture as one HTML page that needs nothing else: no server, no network, no library.

The page has the layouts as data and computes the groups from them, so it does not grow with the
world. Names come from users: they are escaped here, and put into the page as text there.
"""

from __future__ import annotations

import base64
import functools
import hashlib
import json
import re
from collections.abc import Sequence
from html import escape
from importlib import resources
from typing import Any

from meshverse._core import AxisLayout, RankGroups, RankMap

from .model import PicturedGroups, PicturedView, printable
from .palette import COLOURS, INKS


def as_page(
    title: str,
    rank_map: RankMap,
    rank: int,
    *,
    groups: Sequence[PicturedGroups],
    views: Sequence[PicturedView],
    node_size: int | None,
    summary: str,
    notes: Sequence[str],
    legend: str,
) -> str:
    """The page. What the arguments are is said at `Picture`."""
    data = {
        "world": rank_map.size,
        "ranks": None if rank_map.is_identity else rank_map.ranks().tolist(),
        "rank": rank,
        "nodeSize": node_size,
        "nColours": len(COLOURS),
        "groups": [_groups(one, rank_map) for one in groups],
        "views": [
            {"title": printable(view.title), "axes": [(printable(n), i) for n, i in view.axes]}
            for view in views
        ],
        "notes": [printable(note) for note in notes],
    }
    style = _part("page.css") + "".join(
        f".c{index}{{background:{colour};color:{ink}}}"
        for index, (colour, ink) in enumerate(zip(COLOURS, INKS, strict=True))
    )
    script = f"(() => {{\n{_part('lines.js')}\n{_part('page.js')}}})();"
    return _filled(
        _part("page.html"),
        {
            "TITLE": escape(printable(title)),
            "SUMMARY": escape(printable(summary)),
            "LEGEND": escape(legend),
            "STYLE": style,
            "STYLE_HASH": _hash(style),
            "SCRIPT": script,
            "SCRIPT_HASH": _hash(script),
            "DATA": _in_script(data),
        },
    )


def _groups(groups: PicturedGroups, rank_map: RankMap) -> dict[str, Any]:
    of_ranks = RankGroups(groups.axis, rank_map)
    return {
        "names": [printable(name) for name in groups.names],
        "axis": _layout(groups.axis if groups.keeps_order else groups.axis.sorted()),
        "offsets": _layout(of_ranks.offsets),
        "size": of_ranks.group_size,
        "count": of_ranks.n_groups,
        "keepsOrder": groups.keeps_order,
        "made": groups.made,
        "stock": groups.stock_copies,
        "bytes": groups.bytes_each,
        "facts": {title: printable(text) for title, text in groups.facts.items()},
    }


def _layout(axis: AxisLayout) -> dict[str, Any]:
    return {"sizes": axis.sizes, "strides": axis.strides}


def _in_script(data: object) -> str:
    """JSON that cannot end the script element it is in, nor begin a comment there."""
    text = json.dumps(data, separators=(",", ":"))  # of ASCII only
    return text.replace("&", r"\u0026").replace("<", r"\u003c").replace(">", r"\u003e")


def _filled(page: str, values: dict[str, str]) -> str:
    # In one pass, so that nothing that was put in is taken for a place to fill.
    return re.sub(r"\{\{([A-Z_]+)\}\}", lambda place: values[place[1]], page)


def _hash(text: str) -> str:
    """What the page's policy allows to run: this very text, and nothing that got in besides."""
    return f"sha256-{base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()}"


@functools.cache
def _part(name: str) -> str:
    return (resources.files("meshverse.pictures") / "page_parts" / name).read_text(encoding="utf-8")
