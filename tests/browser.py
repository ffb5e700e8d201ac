"""A headless Chromium: what a reader's browser makes of a page, light and dark."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pytest
from PIL import Image


REQUIRE_BROWSER = "TRL_DARTS_REQUIRE_BROWSER"
FLAGS = (
    "--headless",
    "--no-sandbox",  # containers run tests as root
    "--disable-gpu",
    "--disable-dev-shm-usage",
    "--no-first-run",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
    "--hide-scrollbars",
    "--force-color-profile=srgb",
    "--host-resolver-rules=MAP * ~NOTFOUND",  # a page that asks for anything gets nothing
    "--enable-logging=stderr",
)
# The browser itself asks these.
OWN_HOSTS = ("accounts.google.com", "clients2.google.com", "update.googleapis.com", "www.google.com")


@dataclass(frozen=True)
class Shot:
    """A page as it was shown: `pixels` of shape `(H, W, 3)`, what it wrote to the console, what it asked for."""

    pixels: np.ndarray
    messages: list[str]
    requests: list[str]


def show(page: Path, directory: Path, *, dark: bool = False, height: int = 2000, width: int = 1280) -> Shot:
    """
    Opens a page, with an empty `directory` for the browser. Without one, the test is skipped, or fails where
    `TRL_DARTS_REQUIRE_BROWSER=1` promises it.
    """
    browser = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)
    if browser is None:
        reason = "Chromium is not there. Install it with `apt-get install chromium`."
        if os.environ.get(REQUIRE_BROWSER) == "1":
            pytest.fail(f"{REQUIRE_BROWSER}=1, but {reason}", pytrace=False)
        pytest.skip(reason)
    own = {
        "screenshot": directory / "page.png",
        "log-net-log": directory / "net.json",
        "user-data-dir": directory / "profile",
        "window-size": f"{width},{height}",
        "blink-settings": f"preferredColorScheme={0 if dark else 1}",
    }
    command = [browser, *FLAGS, *(f"--{name}={value}" for name, value in own.items()), page.resolve().as_uri()]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=True)
    pixels = np.asarray(Image.open(directory / "page.png").convert("RGB"))
    messages = re.findall(r":CONSOLE[:(]\d+[^\n]*", done.stderr)
    urls = set(re.findall(r'"url":"([^"]+)"', (directory / "net.json").read_text()))
    asked = sorted(url for url in urls if url.startswith("http") and url.split("/")[2] not in OWN_HOSTS)
    return Shot(pixels, messages, asked)
