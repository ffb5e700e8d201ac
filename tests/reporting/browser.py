"""A headless Chromium, driven over its DevTools protocol: what a reader's browser makes of a page, light and dark."""

from __future__ import annotations

import asyncio
import base64
import io
import shutil
import subprocess
import time
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any

import aiohttp
import numpy as np
from PIL import Image


INSTALL_CHROMIUM = "Install it with `apt-get install chromium`."
TIMEOUT_S = 60.0
FLAGS = (
    "--headless",
    "--no-sandbox",  # containers run tests as root
    "--disable-gpu",
    "--disable-dev-shm-usage",
    "--disable-quic",
    "--no-first-run",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
    "--hide-scrollbars",
    "--force-color-profile=srgb",
    "--host-resolver-rules=MAP * ~NOTFOUND",  # a page that asks for anything gets nothing
    "--remote-debugging-port=0",
)


def find_chromium() -> str | None:
    """The browser's path, if it is there."""
    return next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)


@dataclass(frozen=True)
class Shot:
    """
    A page as it was shown.

    Args:
        pixels (`np.ndarray` of shape `(H, W, 3)`):
            The whole page, 8 bits per channel.
        messages (`list[str]`):
            What it wrote to the console, and its errors.
        requests (`list[str]`):
            What it asked for, itself excluded.
        facts (`Any`):
            What the script that was given said.
    """

    pixels: np.ndarray
    messages: list[str]
    requests: list[str]
    facts: Any


class Browser:
    """
    One Chromium process. Use it as a context manager.

    Args:
        user_data_dir (`Path`):
            An empty directory for its profile.
    """

    def __init__(self, user_data_dir: Path) -> None:
        self._directory = user_data_dir
        self._log = (user_data_dir / "stderr.log").open("w")
        command = [find_chromium() or "chromium", *FLAGS, f"--user-data-dir={user_data_dir}", "about:blank"]
        self._process = subprocess.Popen(command, stderr=self._log, stdout=subprocess.DEVNULL)
        self._port: int | None = None

    def __enter__(self) -> Browser:
        deadline = time.monotonic() + TIMEOUT_S
        port_file = self._directory / "DevToolsActivePort"
        while not (port_file.exists() and "\n" in port_file.read_text()):
            if self._process.poll() is not None or time.monotonic() > deadline:
                self.__exit__(None, None, None)
                raise RuntimeError(f"Chromium did not start: {(self._directory / 'stderr.log').read_text()[-2000:]}")
            time.sleep(0.05)
        self._port = int(port_file.read_text().splitlines()[0])
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._process.terminate()
        try:
            self._process.wait(10)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        self._log.close()

    def show(
        self, page: Path, *, dark: bool = False, width: int = 1280, script: str = "null", media: str = "screen"
    ) -> Shot:
        """
        Opens a page in a fresh tab.

        Args:
            page (`Path`):
                An HTML file.
            dark (`bool`, *optional*, defaults to `False`):
                Whether the reader prefers dark.
            width (`int`, *optional*, defaults to `1280`):
                Of the window, in CSS pixels.
            script (`str`, *optional*, defaults to `"null"`):
                A JavaScript expression to evaluate in it.
            media (`str`, *optional*, defaults to `"screen"`):
                `"print"` for how it looks on paper.

        Returns:
            [`Shot`]: What was seen.
        """
        return asyncio.run(asyncio.wait_for(self._show(page, media, dark, width, script), TIMEOUT_S))

    async def _show(self, page: Path, media: str, dark: bool, width: int, script: str) -> Shot:
        base = f"http://127.0.0.1:{self._port}"
        async with aiohttp.ClientSession() as session:
            async with session.put(f"{base}/json/new?about:blank") as response:
                target = await response.json()
            try:
                async with session.ws_connect(target["webSocketDebuggerUrl"], max_msg_size=0) as socket:
                    return await _Tab(socket).show(page.resolve().as_uri(), media, dark, width, script)
            finally:
                async with session.get(f"{base}/json/close/{target['id']}"):
                    pass


class _Tab:
    """A tab's end of the DevTools protocol: numbered calls, and events between the answers."""

    def __init__(self, socket: aiohttp.ClientWebSocketResponse) -> None:
        self._socket = socket
        self._last_id = 0
        self._events: list[dict[str, Any]] = []

    async def show(self, url: str, media: str, dark: bool, width: int, script: str) -> Shot:
        for domain in ("Page", "Runtime", "Log", "Network"):
            await self._call(f"{domain}.enable")
        scheme = {"name": "prefers-color-scheme", "value": "dark" if dark else "light"}
        await self._call("Emulation.setEmulatedMedia", media=media, features=[scheme])
        metrics = {"width": width, "height": 900, "deviceScaleFactor": 1, "mobile": False}
        await self._call("Emulation.setDeviceMetricsOverride", **metrics)
        await self._call("Page.navigate", url=url)
        await self._until("Page.loadEventFired")
        facts = await self._call("Runtime.evaluate", expression=script, returnByValue=True)
        size = (await self._call("Page.getLayoutMetrics"))["cssContentSize"]
        clip = {"x": 0, "y": 0, "width": width, "height": size["height"], "scale": 1}
        shot = await self._call("Page.captureScreenshot", format="png", captureBeyondViewport=True, clip=clip)
        pixels = np.asarray(Image.open(io.BytesIO(base64.b64decode(shot["data"]))).convert("RGB"))
        if "exceptionDetails" in facts:
            raise RuntimeError(f"The script failed: {facts['exceptionDetails']}")
        return Shot(pixels, self._messages(), self._requests(url), facts["result"].get("value"))

    def _messages(self) -> list[str]:
        found = []
        for event in self._events:
            if event["method"] in ("Runtime.consoleAPICalled", "Runtime.exceptionThrown", "Log.entryAdded"):
                found.append(str(event["params"]))
        return found

    def _requests(self, url: str) -> list[str]:
        sent = [e["params"]["request"]["url"] for e in self._events if e["method"] == "Network.requestWillBeSent"]
        return [asked for asked in sent if asked != url and not asked.startswith("data:")]

    async def _call(self, method: str, **params: Any) -> dict[str, Any]:
        self._last_id += 1
        await self._socket.send_json({"id": self._last_id, "method": method, "params": params})
        while True:
            message = await self._socket.receive_json()
            if message.get("id") == self._last_id:
                if "error" in message:
                    raise RuntimeError(f"{method}: {message['error']}")
                return message["result"]
            self._events.append(message)

    async def _until(self, method: str) -> None:
        while not any(event["method"] == method for event in self._events):
            self._events.append(await self._socket.receive_json())
