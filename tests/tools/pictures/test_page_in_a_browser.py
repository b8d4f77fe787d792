"""The page in a real browser: by mouse, by keyboard and without a network."""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from helpers.turns import wait_until
from helpers.worlds import fake_world
from meshverse import init_device_mesh
from meshverse._core import AxisLayout, RankMap
from meshverse.tools.pictures import Picture, PicturedGroups
from meshverse.tools.planner import plan

_BROWSERS = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable")
_OPTIONS = ("--headless=new", "--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage")
VIEWS = ("pp=8,dp=160,tp=8,loss=pp*dp", "pp=8,replicate=4,shard=40,tp=8")
HOSTILE = ("</script><script>document.title='broken'</script>", "\"a\" <b> & 'c'", "]]>-->")


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
        """Return the result of a function with this body, called in the page."""
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


def test_it_loads_without_a_message_or_a_request(browser: Browser, planned: Path) -> None:
    for mode in ("light", "dark"):
        browser.open(planned, mode)
        assert browser.read_logs() == ([], [planned.as_uri()])


def test_a_view_is_opened_by_mouse_and_by_keyboard(browser: Browser, planned: Path) -> None:
    keys = pytest.importorskip("selenium.webdriver.common.keys").Keys
    browser.open(planned)
    code = "return [...document.querySelectorAll('details')].map((e) => e.open)"
    assert browser.js(code) == [True, False]
    browser.driver.find_elements("css selector", "summary")[1].click()
    assert browser.js(code) == [True, True]
    browser.driver.switch_to.active_element.send_keys(keys.ENTER)
    assert browser.js(code) == [True, False]


def test_a_screen_reader_reads_headers_and_drawings(browser: Browser, planned: Path) -> None:
    browser.open(planned)

    def read() -> list[tuple[str, str]]:
        tree = browser.driver.execute_cdp_cmd("Accessibility.getFullAXTree", {})["nodes"]
        return [
            (node["role"]["value"], node.get("name", {}).get("value", ""))
            for node in tree
            if not node["ignored"]
        ]

    wait_until(lambda: len(read()) > 1)  # Chromium builds the tree when it is first read
    nodes, title = read(), "1: pp=8,dp=160,tp=8,loss=pp*dp"
    assert ("DisclosureTriangle", title) in nodes
    assert ("figure", title) in nodes
    pp = "pp: 1,280 groups of 8, layout 8:1280"
    assert any(role in ("image", "img") and name == pp for role, name in nodes)
    assert ("columnheader", "torch would create") in nodes
    assert ("rowheader", "tp") in nodes


def test_names_of_users_are_only_text(browser: Browser, tmp_path: Path) -> None:
    with fake_world(8, 5):
        mesh = init_device_mesh("cpu", (2, 2, 2), mesh_dim_names=HOSTILE)
        browser.open(_write(tmp_path, mesh.universe.explain().to_html()))
    assert browser.read_logs()[0] == []
    assert browser.js("return document.title") == "Process groups of ranks 0 to 7"
    heads = "return [...document.querySelectorAll('tbody th')].map((e) => e.textContent)"
    assert browser.js(heads) == list(HOSTILE)


def test_it_fits_a_narrow_screen(browser: Browser, planned: Path) -> None:
    browser.open(planned, width=380, height=800)
    width = browser.js("return document.documentElement.scrollWidth")
    assert width <= 380  # tables scroll in their own boxes


# --- how it looks --------------------------------------------------------------------------------

_NOTEBOOK = (
    '<!doctype html><meta name="viewport" content="width=device-width"><link rel="icon" '
    'href="data:,"><body style="background:{paper};color:{ink};font:14px sans-serif">{html}</body>'
)
_LAYOUT = """
const outside = (inner, outer) => inner.left < outer.left - 1 || inner.right > outer.right + 1
  || inner.top < outer.top - 1 || inner.bottom > outer.bottom + 1;
const texts = [...document.querySelectorAll('svg text')].filter((e) => e.checkVisibility());
const pictures = [...document.querySelectorAll('svg')].filter((e) => e.checkVisibility());
const words = (e) => { const range = document.createRange(); range.selectNodeContents(e);
  return range.getBoundingClientRect(); };
const cells = [...document.querySelectorAll('tr')].filter((e) => e.checkVisibility())
  .flatMap((row) => [...row.cells].slice(1).map((cell, at) => [row.cells[at], cell]));
const scale = (e) => e.getBoundingClientRect().width / e.viewBox.baseVal.width;
return {
  width: document.documentElement.scrollWidth,
  texts: texts.length,
  cut: texts.filter((e) => outside(e.getBoundingClientRect(),
    e.ownerSVGElement.getBoundingClientRect())).map((e) => e.textContent),
  letters: Math.min(...texts.map((e) => parseFloat(getComputedStyle(e).fontSize)
    * scale(e.ownerSVGElement))),
  apart: pictures.every((one, at) => pictures.slice(at + 1).every((other) => {
    const [a, b] = [one, other].map((e) => e.parentElement.getBoundingClientRect());
    return a.right <= b.left + 1 || b.right <= a.left + 1 || a.bottom <= b.top + 1
      || b.bottom <= a.top + 1; })),
  touching: cells.filter(([one, next]) => words(one).width && words(next).width
    && words(one).right + 6 > words(next).left).map(([one]) => one.textContent),
  paper: getComputedStyle(document.querySelector('.bg')).fill,
  ink: getComputedStyle(document.querySelector('svg .t')).fill,
};
"""
_FIVE_AXES = (2, 1, 4, 2, 2), ("pp", "dp_replicate", "dp_shard", "cp", "tp")


def _shown(what: str, light: bool) -> tuple[str, str]:
    """Return a page and the name of its file."""
    if what == "planned":
        return "page.html", plan(VIEWS, node_size=8, rank=777).to_html()
    if what == "picture":
        return "picture.svg", plan(VIEWS, node_size=8, rank=777).to_svg()
    with fake_world(32, 5):
        mesh = init_device_mesh("cpu", _FIVE_AXES[0], mesh_dim_names=_FIVE_AXES[1])
        init_device_mesh(
            "cpu", (2, 4, 4), mesh_dim_names=("pp", "efsdp", "ep"), universe=mesh.universe
        )
        if what == "report":
            return "page.html", mesh.universe.explain().to_html()
        html = {"mesh": mesh, "universe": mesh.universe}[what]._repr_html_()
    paper, ink = ("#ffffff", "#101010") if light else ("#101010", "#eeeeee")
    return "page.html", _NOTEBOOK.format(paper=paper, ink=ink, html=html)


@pytest.mark.parametrize("width", [pytest.param(1_200, marks=pytest.mark.long), 380])
@pytest.mark.parametrize("what", ["planned", "report", "picture", "mesh", "universe"])
def test_nothing_is_cut_or_covered_and_letters_can_be_read(
    browser: Browser, tmp_path: Path, what: str, width: int
) -> None:
    name, text = _shown(what, light=True)
    page = tmp_path / name
    page.write_text(text, encoding="utf-8")
    for mode in ("light", "dark"):
        browser.open(page, mode, width=width, height=900)
        found = browser.js(_LAYOUT)
        assert found["texts"] > 20
        assert found["cut"] == []
        assert found["letters"] >= 12
        assert found["apart"]
        assert found["touching"] == []
        if what != "picture":  # a reader scrolls a drawing of its own
            assert found["width"] <= width


@pytest.mark.parametrize("what", ["mesh", "universe"])
@pytest.mark.parametrize("light", [True, False])
def test_a_notebook_has_its_own_colors_whatever_the_system_prefers(
    browser: Browser, tmp_path: Path, what: str, light: bool
) -> None:
    page = _write(tmp_path, _shown(what, light)[1])
    for mode in ("light", "dark"):
        browser.open(page, mode)
        found = browser.js(_LAYOUT)
        assert found["paper"] == "none"
        assert found["ink"] == ("rgb(16, 16, 16)" if light else "rgb(238, 238, 238)")


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
