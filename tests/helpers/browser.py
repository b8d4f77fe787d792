"""A real browser without a screen, where this machine has one."""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

_BROWSERS = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable")
_OPTIONS = ("--headless=new", "--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage")


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


@pytest.fixture(scope="session")
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
