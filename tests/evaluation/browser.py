"""A headless Chromium, driven over the WebDriver protocol with the standard library alone.

Debian packages: chromium, chromium-driver.
"""

from __future__ import annotations

import base64
import json
import os
import re
import shutil
import subprocess
import tempfile
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from tests.processes import HANGS_S, wait_until

REQUIRED = "TINYVAE_REQUIRE_BROWSER"
LEVELS = ("WARNING", "SEVERE")  # not DEBUG: a slow machine's browser tells there how slow it is
FLAGS = ["--headless=new", "--no-sandbox", "--disable-gpu", "--hide-scrollbars", "--mute-audio"]


def find_browser() -> tuple[str, str]:
    """(browser, driver), or a skip that names the packages; a failure where TINYVAE_REQUIRE_BROWSER=1."""
    browser = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)
    driver = shutil.which("chromedriver")
    if browser is None or driver is None:
        missing = "no Chromium with its driver here (Debian packages: chromium, chromium-driver)"
        if os.environ.get(REQUIRED) == "1":
            pytest.fail(f"{missing}, and {REQUIRED}=1")
        pytest.skip(missing)
    return browser, driver


class Page:
    """One tab."""

    def __init__(self, session: str) -> None:
        self._session = session

    def call(self, path: str, **body: Any) -> Any:
        request = urllib.request.Request(
            f"{self._session}/{path}", json.dumps(body).encode(), {"Content-Type": "application/json"}
        )
        with urllib.request.urlopen(request, timeout=HANGS_S) as answer:
            return json.load(answer)["value"]

    def open(self, file: Path, *, width: int, height: int = 900, dark: bool = False) -> None:
        metrics = {"width": width, "height": height, "deviceScaleFactor": 1, "mobile": width < 600}
        self.command("Emulation.setDeviceMetricsOverride", **metrics)
        scheme = {"name": "prefers-color-scheme", "value": "dark" if dark else "light"}
        self.command("Emulation.setEmulatedMedia", features=[scheme])
        self.call("url", url=file.absolute().as_uri())
        self.wait("return document.documentElement.dataset.ready === 'true'")

    def command(self, name: str, **parameters: Any) -> Any:
        return self.call("goog/cdp/execute", cmd=name, params=parameters)

    def run(self, script: str, *arguments: Any) -> Any:
        return self.call("execute/sync", script=script, args=list(arguments))

    def wait(self, condition: str) -> None:
        wait_until(lambda: self.run(condition), shows=lambda: f"did not come true: {condition}")

    def complaints(self) -> list[str]:
        """Warnings and errors of the console since the last call."""
        return [entry["message"] for entry in self.call("se/log", type="browser") if entry["level"] in LEVELS]

    def screenshot(self, file: Path, *, width: int, top: int, height: int) -> None:
        clip = {"x": 0, "y": top, "width": width, "height": height, "scale": 1}
        taken = self.command("Page.captureScreenshot", format="png", captureBeyondViewport=True, clip=clip)
        file.write_bytes(base64.b64decode(taken["data"]))


@contextmanager
def open_browser() -> Iterator[Page]:
    browser, driver = find_browser()
    # The driver leaves a profile of 21 MB in TMPDIR now and then.
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as folder:
        process = subprocess.Popen(
            [driver, "--port=0"],
            env={**os.environ, "TMPDIR": folder},
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        try:
            yield from _open_session(process, browser)
        finally:
            process.terminate()
            process.wait(timeout=HANGS_S)


def _open_session(process: subprocess.Popen[str], browser: str) -> Iterator[Page]:
    assert process.stdout is not None
    line = next(line for line in process.stdout if "started successfully on port" in line)
    port = re.search(r"port (\d+)", line)
    assert port is not None, line
    root = f"http://127.0.0.1:{port.group(1)}"
    wanted = {
        "goog:chromeOptions": {"binary": browser, "args": FLAGS},
        "goog:loggingPrefs": {"browser": "ALL"},
    }
    session = Page(root).call("session", capabilities={"alwaysMatch": wanted})
    page = Page(f"{root}/session/{session['sessionId']}")
    try:
        yield page
    finally:
        urllib.request.urlopen(urllib.request.Request(page._session, method="DELETE"), timeout=HANGS_S).close()
