"""A real Chromium for suites: one window, its console, every request that it makes."""

from __future__ import annotations

import json
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from selenium.webdriver import Chrome, ChromeOptions
from selenium.webdriver.chrome.service import Service

from degarble.harness.plugins.presence import find_programs

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

FLAGS = (
    "--headless=new",
    "--no-sandbox",
    "--disable-gpu",
    "--disable-quic",
    "--no-first-run",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
    "--window-size=1280,900",
)


class Window:
    """One browser window."""

    def __init__(self, driver: Chrome) -> None:
        self.driver = driver

    def open(self, path: Path) -> None:
        """Load a page from a file, with empty logs."""
        self._log("browser")
        self._log("performance")
        self.driver.get(path.as_uri())

    def _log(self, kind: str) -> list[dict[str, Any]]:
        entries: list[dict[str, Any]] = self.driver.get_log(kind)  # type: ignore[no-untyped-call]
        return entries

    def run(self, script: str, *arguments: object) -> Any:
        """Run JavaScript and give what it returns."""
        return self.driver.execute_script(script, *arguments)

    def media(self, media: str = "", scheme: str = "light", width: int = 1280) -> None:
        """Set paper or screen, light or dark, and the width of the window."""
        features = [{"name": "prefers-color-scheme", "value": scheme}]
        self.driver.execute_cdp_cmd(
            "Emulation.setEmulatedMedia", {"media": media, "features": features}
        )
        size = {"width": width, "height": 900, "deviceScaleFactor": 1, "mobile": False}
        self.driver.execute_cdp_cmd("Emulation.setDeviceMetricsOverride", size)

    def press(self, key: str, text: str = "") -> None:
        """Press one key, as a keyboard does."""
        for kind in ("keyDown", "keyUp"):
            event = {"type": kind, "key": key, "code": key, "windowsVirtualKeyCode": KEYS[key]}
            if text and kind == "keyDown":
                event["text"] = text
            self.driver.execute_cdp_cmd("Input.dispatchKeyEvent", event)

    def complaints(self) -> list[str]:
        """Everything in the console since the page was opened."""
        return [entry["message"] for entry in self._log("browser")]

    def requests(self) -> list[str]:
        """Return every address that was requested since the page was opened.

        The browser's own new tab may still load then, from addresses that no page may ask for.
        """
        events = [json.loads(e["message"])["message"] for e in self._log("performance")]
        sent = [e for e in events if e["method"] == "Network.requestWillBeSent"]
        asked = [event["params"]["request"]["url"] for event in sent]
        own = {"chrome", "chrome-untrusted", "chrome-search"}
        first = [event["params"].get("documentURL", "") for event in sent]
        pairs = zip(asked, first, strict=True)
        return [url for url, page in pairs if page.partition(":")[0] not in own]


KEYS = {
    "Enter": 13,
    "Escape": 27,
    "Tab": 9,
    "ArrowRight": 39,
    "ArrowDown": 40,
    "ArrowLeft": 37,
}


@contextmanager
def chromium(profile: Path) -> Iterator[Window]:
    """Start Chromium with a fresh profile, and end it."""
    binary, driver_path = find_programs("chromium")
    options = ChromeOptions()
    options.binary_location = binary or ""
    for flag in (*FLAGS, f"--user-data-dir={profile}"):
        options.add_argument(flag)
    options.set_capability("goog:loggingPrefs", {"browser": "ALL", "performance": "ALL"})
    driver = Chrome(options=options, service=Service(driver_path))
    try:
        yield Window(driver)
    finally:
        driver.quit()
