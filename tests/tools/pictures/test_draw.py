"""`mesh.draw()` and `universe.draw()`: what they draw, in which forms, and what they refuse."""

from __future__ import annotations

import math
import re
import sys
from xml.etree import ElementTree

import pytest
import torch.distributed as dist

from helpers.worlds import fake_world, groups_created, in_worlds
from meshverse import DeviceMesh, Topology, Universe, init_device_mesh, isolate
from meshverse._core import AxisLayout, RankMap
from meshverse.tools.pictures import Picture, PicturedGroups, PicturedView
from meshverse.tools.planner import plan

HOSTILE = (
    "</script><script>alert(1)</script>",
    "\"quote\" & 'apostrophe'",
    "new\nline \x1b[31m\x00",
)


def _mesh(**options: object) -> DeviceMesh:
    return init_device_mesh("cpu", (2, 2, 2), mesh_dim_names=("pp", "dp", "tp"), **options)


@in_worlds((8, 5))
def test_a_mesh_as_text(world) -> None:
    assert str(_mesh().draw(node_size=4)) == (
        "Each place is a rank, and the number is its group's; [ ]: the group of rank 5; "
        "< >: rank 5.\n"
        "\n"
        "pp  4 groups of 2, layout 2:4\n"
        "  node 0  0 [1] 2  3 \n"
        "  node 1  0 <1> 2  3 \n"
        "\n"
        "dp  4 groups of 2, layout 2:2\n"
        "  node 0  0  1  0  1 \n"
        "  node 1  2 <3> 2 [3]\n"
        "\n"
        "tp  4 groups of 2, layout 2:1\n"
        "  node 0  0  0  1  1 \n"
        "  node 1 [2]<2> 3  3"
    )


@in_worlds((8, 5))
def test_one_axis_by_name_or_index(world) -> None:
    mesh = _mesh()
    titles = [[panel.title for panel in mesh.draw(axis).panels] for axis in ("dp", 1, -2)]
    assert titles == [["dp"]] * 3
    assert [panel.title for panel in mesh["tp"].draw().panels] == ["tp"]
    mesh["dp", "tp"].flatten("both")
    for axes in (("tp", "dp"), ["tp", -2], ("both", "dp")):
        drawn = [panel.title for panel in mesh.draw(axes).panels]
        assert drawn == [axes[0], "dp"]
    with pytest.raises(KeyError, match="There is no axis 'cp' to draw"):
        mesh.draw(("dp", "cp"))
    with pytest.raises(KeyError, match=r"no axis 'cp' to draw: the axes are \['pp', 'dp', 'tp'\]"):
        mesh.draw("cp")
    with pytest.raises(IndexError, match="no axis 3 to draw: the mesh has 3"):
        mesh.draw(3)
    for size in (0, -1, True, 2.0, "2", math.nan):
        with pytest.raises(ValueError, match=f"node_size={size!r}: give an int above 0"):
            mesh.draw(node_size=size)


@in_worlds((8, 5))
def test_a_universe_draws_each_set_of_groups_once(world) -> None:
    mesh = _mesh()
    mesh["pp", "dp"].flatten("loss")
    other = init_device_mesh(
        "cpu", (2, 4), mesh_dim_names=("stage", "rest"), universe=mesh.universe
    )
    with isolate("apart"):
        _ = other["rest"]
    picture = mesh.universe.draw(node_size=4)
    titles = [panel.title for panel in picture.panels]
    assert titles == ["pp, stage", "dp", "tp", "loss", "rest", "rest"]
    assert [panel.title for panel in mesh.universe.draw("stage").panels] == ["pp, stage"]
    assert [view.title for view in picture.views] == ["pp=2, dp=2, tp=2", "stage=2, rest=4"]
    assert picture.views[0].axes == (("pp", 0), ("dp", 1), ("tp", 2), ("loss", 3))
    assert picture.views[1].axes == (("stage", 0), ("rest", 4))
    with pytest.raises(KeyError, match="no axis 'cp' to draw"):
        mesh.universe.draw("cp")


@in_worlds((8, 5))
def test_drawing_makes_no_group(world) -> None:
    with groups_created(0):
        mesh = _mesh(lazy=True)
        pictures = [mesh.draw(), mesh.universe.draw(), mesh.universe.explain().picture]
        for picture in pictures:
            assert picture is not None
            assert str(picture)
            assert picture.to_html()
    with groups_created(3):
        mesh.get_all_groups()


@in_worlds((8, 5))
def test_a_universe_without_groups_says_so(world) -> None:
    universe = Universe(8)
    report = universe.explain()
    assert report.picture is None
    for draw in (universe.draw, report.to_html):
        with pytest.raises(ValueError, match="nothing to draw of ranks 0 to 7 yet: create a mesh"):
            draw()


def test_torchruns_nodes_are_known(monkeypatch: pytest.MonkeyPatch) -> None:
    with fake_world(8, 5):
        mesh = _mesh()
        assert "ranks 0-7" in str(mesh.draw())
        monkeypatch.setenv("LOCAL_WORLD_SIZE", "4")
        assert "node 1" in str(mesh.draw())
        assert "node 1" in str(mesh.universe.draw())
        assert "node 3" in str(mesh.draw(node_size=2))


@in_worlds((8, 0))
def test_a_rank_outside_the_mesh_has_no_group_to_mark(world) -> None:
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("a", "b"), ranks=[4, 5, 6, 7])
    text = str(mesh.draw(node_size=4))
    assert "node 1  0  0  1  1" in text
    assert "rank 0" not in text
    assert "[" not in text


@in_worlds((8, 5))
def test_colors_on_a_terminal_are_beside_the_same_text(world, capsys) -> None:
    console = pytest.importorskip("rich.console", reason="the picture is colored with rich")
    picture = _mesh().draw(node_size=4)
    terminal = console.Console(color_system="truecolor", force_terminal=True, width=40)
    with terminal.capture() as captured:
        terminal.print(picture, soft_wrap=True)
    colored = captured.get()
    assert "\x1b[38;2;0;0;0;48;2;86;180;233m" in colored
    assert re.sub(r"\x1b\[[\d;]*m", "", colored).rstrip("\n") == str(picture)
    picture.show()
    assert capsys.readouterr().out.rstrip("\n") == str(picture)


@in_worlds((8, 5))
def test_without_rich_it_is_shown_as_text(world, monkeypatch: pytest.MonkeyPatch, capsys) -> None:
    monkeypatch.setitem(sys.modules, "rich.console", None)
    picture = _mesh().draw()
    picture.show()
    assert capsys.readouterr().out == f"{picture}\n"


def _svg_of(picture: Picture) -> ElementTree.Element:
    svg = ElementTree.fromstring(picture.to_svg())
    assert svg.tag == "{http://www.w3.org/2000/svg}svg"
    return svg


@in_worlds((8, 5))
def test_svg_has_numbers_outlines_and_words_for_those_who_do_not_see_it(world) -> None:
    picture = _mesh().draw("tp", node_size=4)
    svg = _svg_of(picture)
    name = "{http://www.w3.org/2000/svg}"
    numbers = [t.text for t in svg.iter(f"{name}text") if t.get("class", "").startswith("n ")]
    assert numbers == list("00112233")
    outlines = [rect.get("class") for rect in svg.iter(f"{name}rect")]
    assert outlines.count("mine") == 2
    assert sum((kind or "").startswith("me") for kind in outlines) == 1
    assert svg.get("role") == "img"
    assert svg.get("aria-label") == "Mesh pp=2, dp=2, tp=2 of ranks 0 to 7"
    assert "tp: 4 groups of 2" in (svg.findtext(f"{name}desc") or "")
    assert "prefers-color-scheme:dark" in (svg.findtext(f"{name}style") or "")
    (drawn,) = ElementTree.fromstring(picture._repr_html_()).iter(f"{name}svg")  # in a notebook
    assert len(list(drawn.iter(f"{name}rect"))) == len(outlines)


@in_worlds((8, 5))
def test_names_of_users_are_only_text(world) -> None:
    mesh = init_device_mesh("cpu", (2, 2, 2), mesh_dim_names=HOSTILE)
    text = str(mesh.draw())
    assert "\x1b" not in text
    assert "\x00" not in text
    svg = _svg_of(mesh.draw())
    assert not [element for element in svg.iter() if element.tag.endswith("script")]
    assert any(text and HOSTILE[0] in text for text in svg.itertext())
    topology = Topology({HOSTILE[0]: list("aaaabbbb")})
    planned = plan(["dp=2,tp=4"], topology=topology).to_html()
    assert "<script" not in planned
    page = mesh.universe.explain().to_html()
    assert "<script" not in page
    assert "&lt;script&gt;alert(1)&lt;/script&gt;" in page


@in_worlds((8, 5))
def test_groups_that_were_given_and_of_other_universes(world) -> None:
    given = DeviceMesh.from_group(dist.new_group([1, 5, 7]), "cpu", mesh_dim_names=("own",))
    assert "ranks 1-7 (3) [0]<0>[0]" in str(given.universe.draw())
    mesh, other = _mesh(), _mesh()
    joined = DeviceMesh.concatenate([mesh["dp"], other["tp"]])
    picture = joined.universe.draw()
    assert [panel.title for panel in picture.panels][:3] == ["pp", "dp", "tp"]
    assert all(str(each) for each in (picture, joined.draw()))
    part = init_device_mesh("cpu", (2, 2), mesh_dim_names=("a", "b"), ranks=[1, 3, 5, 7])
    assert part.universe.draw().to_html()


@in_worlds((8, 5))
def test_ranks_in_another_order(world) -> None:
    """Where ranks do not ascend along an axis, cells stand by rank and groups by the mesh."""
    ranks = [[[6, 1], [4, 3]], [[2, 5], [0, 7]]]
    mesh = DeviceMesh("cpu", ranks, mesh_dim_names=("pp", "dp", "tp"))
    for axis, name in enumerate(mesh.mesh_dim_names):
        (panel,) = mesh.draw(name).panels
        cells = [cell for line in panel.drawn for cell in line.cells]
        assert [cell.rank for cell in cells] == list(range(8))
        mine = sorted(cell.rank for cell in cells if cell.is_mine)
        assert mine == dist.get_process_group_ranks(mesh.get_group(axis))


@in_worlds((16, 5))
def test_a_page_draws_each_view_and_lists_the_groups_of_a_rank(world) -> None:
    mesh = init_device_mesh("cpu", (2, 8), mesh_dim_names=("pp", "rest"))
    mesh.unflatten("rest", (2, 4), ("dp", "tp"))
    report = mesh.universe.explain(communicator_bytes={"fake": 1 << 20})
    page = report.to_html()
    views = re.findall(
        r"<summary>(.*?)</summary>.*?aria-label=\"(.*?)\"", page.replace("<wbr>", ""), re.DOTALL
    )
    assert views == [("1: pp=2, rest=8",) * 2, ("2: pp=2, dp=2, tp=4",) * 2]
    assert page.count("<details open>") == 1
    body = re.findall("<tbody>(.*)</tbody>", page)[-1]
    rows = [re.findall(r"<t[hd][^>]*>(.*?)</t[hd]>", row) for row in body.split("</tr>")[:-1]]
    assert [row[:6] for row in rows] == [
        ["pp", "2", "8", "5", "5, 13", "-"],
        ["rest", "8", "2", "0", "0, 1, 2, 3, 4, 5, 6, 7", "-"],
        ["dp", "2", "8", "1", "1, 5", "-"],
        ["tp", "4", "4", "1", "4, 5, 6, 7", "-"],
    ]
    shared = "<ul><li>pp of view 1</li><li>pp of view 2</li></ul>"
    assert rows[0][6:9] == [shared, "1 (1 MiB)", "1 (1 MiB)"]
    assert (
        "Besides the default group, each rank has 4 communicators (about 4 MiB of device "
        "memory). With torch, which creates one for every request, it would have 4 (about 4 MiB of "
        "device memory)."
    ) in page
    assert "Warnings" not in page


@in_worlds((16, 5))
def test_a_page_says_which_axes_share_a_process_group(world) -> None:
    mesh = init_device_mesh("cpu", (2, 4, 2), mesh_dim_names=("pp", "dp", "tp"))
    assert mesh.universe.draw().sharing is None  # one view shares nothing
    other = mesh.universe.explain().views
    data = init_device_mesh(
        "cpu", (2, 2, 4), mesh_dim_names=("pp", "batch", "ep"), universe=mesh.universe
    )
    data["pp", "batch"].flatten("loss")
    assert len(mesh.universe.explain().views) == len(other) + 1
    picture = mesh.universe.draw()
    sharing = picture.sharing
    assert sharing is not None
    assert sharing.title == "Process groups on each rank: 8 with torch, 7 with Meshverse"
    assert sharing.views == ("pp=2, dp=4, tp=2", "pp=2, batch=2, ep=4")
    assert [(column.names, column.is_shared) for column in sharing.columns] == [
        ((("pp",), ("pp",)), True),
        ((("dp",), ()), False),
        ((("tp",), ()), False),
        (((), ("batch",)), False),
        (((), ("ep",)), False),
        ((("loss",), ()), False),  # flattened axes belong to the first mesh, the others' root
    ]
    assert [column.title for column in sharing.columns][:2] == ["2 ranks", "4 ranks"]
    page = picture.to_html()
    shown = re.findall(r"<td style=[^>]*;background:[^>]*>(.*?)</td>", page)
    assert shown == ["pp", "pp"]
    assert sharing.title in picture.to_svg()


def test_of_many_groups_those_that_are_shared_are_shown() -> None:
    groups = [PicturedGroups((f"a{index}",), AxisLayout(2, 1)) for index in range(30)]
    views = (
        PicturedView("one", tuple((f"a{index}", index) for index in range(30))),
        PicturedView("two", (("a5", 5), ("b5", 5))),
    )
    sharing = Picture("A world", RankMap.identity(8), 0, tuple(groups), views).sharing
    assert sharing is not None
    assert [column.names for column in sharing.columns] == [(("a5",), ("a5", "b5"))]
    assert sharing.title == "Process groups on each rank"  # how many were created is unknown


def test_the_legend_does_not_promise_a_color_for_each_of_many_groups() -> None:
    words = "with the number and color of its group"
    for size, end in ((16, "; outlined"), (18, " (eight colors, which repeat); outlined")):
        groups = (PicturedGroups(("tp",), AxisLayout(2, 1)),)
        picture = Picture("A world", RankMap.identity(size), 0, groups)
        assert f"{words}{end}" in " ".join(picture.to_svg().split())
        assert "color" not in str(picture)  # which has none


@in_worlds((8, 5))
def test_a_page_draws_groups_that_are_in_no_view_too(world) -> None:
    mesh = _mesh()
    with isolate("apart"):
        _ = mesh["tp"]
    page = mesh.universe.explain().to_html()
    titles = re.findall("<summary>(.*?)</summary>", page.replace("<wbr>", ""))
    assert titles == ["1: pp=2, dp=2, tp=2", "all groups"]


@in_worlds((8, 0))
def test_a_page_of_a_rank_outside_the_mesh(world) -> None:
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("a", "b"), ranks=[4, 5, 6, 7])
    page = mesh.universe.explain().to_html()
    assert '<td class="number">-</td><td>none</td>' in page


def test_a_page_allows_no_script_and_needs_no_network() -> None:
    notes = ("Mind <this>.",)
    groups = (PicturedGroups(("tp",), AxisLayout(8, 1)),)
    page = Picture("A world", RankMap.identity(8), 0, groups, notes=notes).to_html()
    assert "default-src 'none'" in page
    assert "script" not in page
    assert set(re.findall(r"https?://[^\"]*", page)) == {"http://www.w3.org/2000/svg"}
    assert "<li>Mind &lt;this&gt;.</li>" in page
    assert "unknown" in page  # how often it was made


def test_a_picture_of_nothing_is_refused() -> None:
    with pytest.raises(ValueError, match="nothing to draw yet: A world has no process groups"):
        Picture("A world", RankMap.identity(8), 0, ())


def test_pictures_do_not_grow_with_the_world() -> None:
    with fake_world(10_240, 777):
        mesh = init_device_mesh("cpu", (8, 160, 8), mesh_dim_names=("pp", "dp", "tp"))
        picture = mesh.universe.draw(node_size=8)
        assert len(str(picture).splitlines()) < 40
        assert len(picture.to_svg()) < 40_000
        assert len(picture.to_html()) < 60_000
        permuted = init_device_mesh(
            "cpu", (8, 160, 8), mesh_dim_names=("pp", "dp", "tp"), ranks=range(10_239, -1, -1)
        )
        assert len(permuted.universe.explain().to_html()) < 200_000
        assert len(str(permuted.draw(node_size=8)).splitlines()) < 40
