"""The page in a real browser: what it shows, by mouse and by keyboard, without a network."""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from helpers.worlds import fake_world
from meshverse import init_device_mesh
from meshverse._core import AxisLayout, Layout, RankGroups, RankMap
from meshverse.pictures import Picture, PicturedGroups, PicturedView
from meshverse.pictures.model import Gap, Panel
from meshverse.planner import plan

_BROWSERS = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable")
_OPTIONS = ("--headless=new", "--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage")
VIEWS = ("pp=8,dp=160,tp=8,loss=pp*dp", "pp=8,replicate=4,shard=40,tp=8")
HOSTILE = ("</script><script>document.title='broken'</script>", "\"a\" <b> & 'c'", "]]>-->")

_TABLE = """
return [...document.querySelectorAll("#cells tr")].map((row) => [
  row.querySelector("th") ? row.querySelector("th").textContent : "",
  [...row.querySelectorAll("[data-rank]")].map((cell) => [
    Number(cell.dataset.rank), Number(cell.textContent),
    cell.classList.contains("mine"), cell.classList.contains("me")]),
  (row.querySelector(".gap, .times") || {textContent: ""}).textContent]);
"""


# --- the browser ---------------------------------------------------------------------------------


class Browser:
    """Chromium on one page: what it shows, and all that went wrong or over the network."""

    def __init__(self, driver: Any) -> None:
        self.driver = driver

    def open(
        self, page: Path, mode: str = "light", width: int = 1_200, height: int = 1_000
    ) -> None:
        """Load a page, to a reader whose screen is light or dark."""
        self.driver.execute_cdp_cmd(
            "Emulation.setEmulatedMedia",
            {"features": [{"name": "prefers-color-scheme", "value": mode}]},
        )
        metrics = {"width": width, "height": height, "deviceScaleFactor": 1, "mobile": False}
        self.driver.execute_cdp_cmd("Emulation.setDeviceMetricsOverride", metrics)
        self.read_logs()
        self.driver.get(page.as_uri())

    def js(self, code: str, *arguments: object) -> Any:
        """What a function with this body returns, called in the page."""
        return self.driver.execute_script(code, *arguments)

    def read_logs(self) -> tuple[list[str], list[str]]:
        """Messages of the console, and addresses that were asked for, since the last call."""
        console = [entry["message"] for entry in self.driver.get_log("browser")]
        asked = []
        for entry in self.driver.get_log("performance"):
            message = json.loads(entry["message"])["message"]
            if message["method"] == "Network.requestWillBeSent":
                asked.append(message["params"]["request"]["url"])
        return console, [url for url in asked if not url.startswith("data:")]


@pytest.fixture(scope="module")
def browser() -> Iterator[Browser]:
    """A browser; without one, the test is skipped."""
    webdriver = pytest.importorskip("selenium.webdriver", reason="a browser is driven by selenium")
    binaries = [path for path in map(shutil.which, _BROWSERS) if path is not None]
    driver = shutil.which("chromedriver")
    if not binaries or driver is None:
        pytest.skip("there is no Chromium or Chrome with its chromedriver on this machine")
    chrome = _started(webdriver, binaries, driver)
    try:
        yield Browser(chrome)
    finally:
        chrome.quit()


def _started(webdriver: Any, binaries: list[str], driver: str) -> Any:
    """The first of these browsers that the driver is for."""
    from selenium.common.exceptions import SessionNotCreatedException

    for binary in binaries:
        options = webdriver.ChromeOptions()
        options.binary_location = binary
        for option in _OPTIONS:
            options.add_argument(option)
        options.set_capability("goog:loggingPrefs", {"browser": "ALL", "performance": "ALL"})
        try:
            return webdriver.Chrome(options=options, service=webdriver.ChromeService(driver))
        except SessionNotCreatedException:
            if binary == binaries[-1]:
                raise
    raise AssertionError("there is no browser to start")


# --- the pages -----------------------------------------------------------------------------------


def _write(tmp_path: Path, html: str) -> Path:
    page = tmp_path / "page.html"
    page.write_text(html, encoding="utf-8")
    return page


@pytest.fixture
def planned(tmp_path: Path) -> Path:
    return _write(tmp_path, plan(VIEWS, node_size=8, rank=777).to_html())


def _pick(browser: Browser, *, view: int = 0, axis: int = 0, rank: int) -> None:
    browser.js(
        """
        const [view, axis, rank] = arguments;
        const change = (element, value, event) => {
          element.value = value;
          element.dispatchEvent(new Event(event, {bubbles: true}));
        };
        change(document.getElementById("view"), view, "change");
        document.getElementById(`axis-${axis}`).click();
        change(document.getElementById("rank"), rank, "input");
        """,
        view,
        axis,
        rank,
    )


def _status(browser: Browser) -> str:
    return str(browser.js("return document.getElementById('status').textContent"))


def _expected(panel: Panel) -> list[object]:
    rows: list[object] = []
    for line in panel.lines:
        if isinstance(line, Gap):
            rows.append(["", [], f"... {line.text}"])
            continue
        cells = [[cell.rank, cell.group, cell.is_mine, cell.is_me] for cell in line.cells]
        for start in range(0, len(cells), 16):
            is_last = start + 16 >= len(cells)
            times = f"x{line.times:,}" if line.times > 1 and is_last else ""
            rows.append([line.label if start == 0 else "", cells[start : start + 16], times])
    return rows


def test_it_loads_without_a_message_or_a_request(browser: Browser, planned: Path) -> None:
    for mode in ("light", "dark"):
        browser.open(planned, mode)
        console, asked = browser.read_logs()
        assert console == []
        assert asked == [planned.as_uri()]
    assert "Rank 777 is on node 97, at pp=0, dp=97, tp=1" in _status(browser)


@pytest.mark.parametrize(
    ("shape", "node_size", "ranks"),
    [
        ((8, 160, 8), 8, None),
        ((2, 3, 4), 8, None),
        ((6, 20, 8), 8, [(7 * position) % 1_200 for position in range(960)]),
        pytest.param((8, 4, 40, 8), 8, None, marks=pytest.mark.long),
        pytest.param((8, 160, 8), None, None, marks=pytest.mark.long),
        pytest.param((4, 80, 6), 8, None, marks=pytest.mark.long),
        pytest.param((16, 5, 64, 2), 72, None, marks=pytest.mark.long),
        pytest.param((2, 128, 4), 256, None, marks=pytest.mark.long),
        pytest.param((8, 40, 8), 8, list(range(2_559, -1, -1)), marks=pytest.mark.long),
    ],
    ids=str,
)
def test_it_draws_what_python_draws(
    browser: Browser, tmp_path: Path, shape: tuple[int, ...], node_size: int | None, ranks
) -> None:
    """The page computes groups and lines in its own language: they are the same."""
    layout = Layout.from_shape(shape)
    rank_map = RankMap.from_ranks(ranks) if ranks else RankMap.identity(layout.size)
    groups = tuple(PicturedGroups((f"a{i}",), axis) for i, axis in enumerate(layout))
    view = PicturedView("all", tuple((f"a{i}", i) for i in range(len(groups))))
    picture = Picture("A world", rank_map, rank_map.rank_at(0), groups, (view,), node_size)
    browser.open(_write(tmp_path, picture.to_html()))
    for index, one in enumerate(groups):
        for rank in {rank_map.rank_at(layout.size // 3), rank_map.rank_at(layout.size - 1)}:
            _pick(browser, axis=index, rank=rank)
            picked = Picture("", rank_map, rank, (one,), (), node_size)
            assert browser.js(_TABLE) == _expected(picked.panels[0])
            mine = RankGroups(one.axis, rank_map).ranks_of(rank_map.position_of(rank))
            told = ", ".join(map(str, sorted(mine)[:8]))
            assert f": {told}" in _status(browser)
    assert browser.read_logs()[0] == []


def test_a_click_on_a_rank_chooses_it(browser: Browser, planned: Path) -> None:
    browser.open(planned)
    by = browser.driver.find_element
    by("css selector", '[data-rank="1279"]').click()
    assert "Rank 1279 is on node 159, at pp=0, dp=159, tp=7" in _status(browser)
    assert by("id", "rank").get_property("value") == "1279"
    assert by("id", "groups-title").text == "The groups of rank 1279"


def test_a_view_and_an_axis_are_chosen_by_mouse(browser: Browser, planned: Path) -> None:
    browser.open(planned)
    by = browser.driver.find_element
    by("id", "axis-2").click()
    assert "Its tp group is number 97 of 1,280 groups of 8: 776, 777," in _status(browser)
    by("css selector", "#view option[value='1']").click()
    assert "Its tp group" in _status(browser)  # the axis of the same name
    by("xpath", "//button[text()='shard']").click()
    assert "Its shard group is number 17 of 256 groups of 40: 641, 649," in _status(browser)
    assert browser.read_logs()[0] == []


def test_everything_is_reached_by_keyboard(browser: Browser, planned: Path) -> None:
    keys = pytest.importorskip("selenium.webdriver.common.keys").Keys
    browser.open(planned)

    def press(*pressed: str) -> None:
        for key in pressed:
            browser.driver.switch_to.active_element.send_keys(key)

    def focused() -> str:
        code = "const e = document.activeElement; return e.id || e.dataset.rank || e.textContent"
        return str(browser.js(code))

    browser.driver.find_element("tag name", "body").send_keys(keys.TAB)
    assert focused() == "view"
    press(keys.TAB)
    assert focused() == "axis-0"
    press(keys.ARROW_RIGHT)
    assert focused() == "axis-1"
    assert "Its dp group" in _status(browser)
    press(keys.TAB)
    assert focused() == "rank"
    press(keys.ARROW_UP, keys.ENTER)
    assert _status(browser).startswith("Rank 778 ")
    assert browser.js("return location.search") == ""  # nothing was sent, nor the page loaded anew
    press(keys.TAB)  # one stop for all ranks, on the one that stands for rank 778
    assert focused() == "2"
    assert "me" in browser.js("return document.activeElement.className")
    press(keys.ARROW_DOWN, keys.ARROW_RIGHT, keys.ENTER)
    assert _status(browser).startswith("Rank 1283 ")
    press(keys.HOME, " ")
    assert _status(browser).startswith("Rank 1280 ")
    press(keys.TAB)
    assert focused() == "pp"
    press(keys.ENTER)
    assert "Its pp group" in _status(browser)
    assert focused() == "pp"
    assert browser.read_logs()[0] == []


def test_a_rank_that_is_not_there_is_refused(browser: Browser, planned: Path) -> None:
    browser.open(planned)
    before = browser.js(_TABLE)
    for value in ("10240", "-1", "1.5", ""):
        _pick(browser, rank=value)  # type: ignore[arg-type]
        assert _status(browser).startswith("There is no such rank: the ranks are 0 to 10239")
        assert browser.js("return document.getElementById('rank').ariaInvalid") == "true"
    assert browser.js(_TABLE) == before


def test_a_screen_reader_is_told(browser: Browser, planned: Path) -> None:
    """Every control has a name, tables have headers, and what changes is announced."""
    browser.open(planned)
    tree = browser.driver.execute_cdp_cmd("Accessibility.getFullAXTree", {})["nodes"]
    nodes = [
        (node["role"]["value"], node.get("name", {}).get("value", ""))
        for node in tree
        if not node["ignored"]
    ]
    assert ("combobox", "View") in nodes
    assert ("radio", "pp 8") in nodes
    assert ("spinbutton", "Rank") in nodes
    assert ("grid", "Ranks by node, with the number of their group") in nodes
    assert ("rowheader", "node 97") in nodes
    assert (
        "gridcell",
        "rank 777, group 777, the group of rank 777, the same on 8 nodes",
    ) in nodes
    assert ("columnheader", "Stock would hold") in nodes
    assert "status" in {role for role, _ in nodes}
    controls = {"combobox", "radio", "spinbutton", "button", "grid", "group", "form"}
    assert [role for role, name in nodes if role in controls and not name] == []


def test_names_of_users_are_only_text(browser: Browser, tmp_path: Path) -> None:
    with fake_world(8, 5):
        mesh = init_device_mesh("cpu", (2, 2, 2), mesh_dim_names=HOSTILE)
        browser.open(_write(tmp_path, mesh.universe.explain().to_html()))
    assert browser.read_logs()[0] == []
    assert browser.js("return document.title") == "Process groups of ranks 0 to 7"
    labels = browser.js(
        "return [...document.querySelectorAll('#axes label')].map((e) => e.innerText)"
    )
    assert labels == [f"{name} 2" for name in HOSTILE]
    assert "rank" in _status(browser).lower()


def test_what_is_shared_and_what_stock_would_hold(browser: Browser, tmp_path: Path) -> None:
    with fake_world(16, 5):
        mesh = init_device_mesh("cpu", (2, 8), mesh_dim_names=("pp", "rest"))
        mesh.unflatten("rest", (2, 4), ("dp", "tp"))
        told = mesh.universe.explain(communicator_bytes={"fake": 1 << 20})
        browser.open(_write(tmp_path, told.to_html()))
    rows = browser.js(
        "return [...document.querySelectorAll('#groups tr')]"
        ".map((row) => [...row.cells].map((cell) => cell.innerText))"
    )
    assert [row[0].strip() for row in rows] == ["pp", "rest", "dp", "tp"]
    assert rows[0][-4:-1] == ["pp of view 1\npp of view 2", "1 (1 MiB)", "1 (1 MiB)"]
    assert browser.js("return document.getElementById('totals').textContent") == (
        "Besides the default group, each rank holds 4 communicators (about 4 MiB of device "
        "memory). Stock torch, which makes one for every request, would hold 4 (about 4 MiB of "
        "device memory)."
    )


def test_it_is_quick_and_small_at_a_million_ranks(browser: Browser, tmp_path: Path) -> None:
    html = plan(["pp=8,dp=16384,tp=8"], node_size=8, rank=777_777).to_html()
    assert len(html) < 60_000
    browser.open(_write(tmp_path, html))
    assert "Rank 777777 is on node 97222" in _status(browser)
    seconds = browser.js(
        "const start = performance.now();"
        "document.getElementById('axis-2').click();"
        "return (performance.now() - start) / 1000"
    )
    assert "Its tp group is number 97222" in _status(browser)
    assert seconds < 60  # half a second where nothing else runs


def test_it_fits_a_narrow_screen(browser: Browser, planned: Path) -> None:
    browser.open(planned, width=380, height=800)
    width = browser.js("return document.documentElement.scrollWidth")
    assert width <= 380  # tables scroll in their own boxes


def test_dark_is_dark(browser: Browser, planned: Path) -> None:
    for mode, expected in (("light", "rgb(255, 255, 255)"), ("dark", "rgb(13, 17, 23)")):
        browser.open(planned, mode)
        assert browser.js("return getComputedStyle(document.body).backgroundColor") == expected


def test_a_picture_as_svg_loads_alone(browser: Browser, tmp_path: Path) -> None:
    picture = Picture(
        HOSTILE[0], RankMap.identity(64), 5, (PicturedGroups(HOSTILE, AxisLayout(8, 8)),)
    )
    page = tmp_path / "picture.svg"
    page.write_text(picture.to_svg(), encoding="utf-8")
    for mode, expected in (("light", "rgb(255, 255, 255)"), ("dark", "rgb(13, 17, 23)")):
        browser.open(page, mode)
        assert browser.read_logs() == ([], [page.as_uri()])
        fill = browser.js("return getComputedStyle(document.querySelector('.bg')).fill")
        assert fill == expected
    assert json.dumps(HOSTILE[0])[1:-1] in browser.js("return document.documentElement.textContent")
