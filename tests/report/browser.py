"""A headless Chromium, driven over its pipe: pages at any width, in light or dark, and what they say of themselves."""

from __future__ import annotations

import base64
import json
import os
import select
import shutil
import signal
import subprocess
import time
from pathlib import Path
from typing import Any

__all__ = ["Browser", "find_chromium"]

_FLAGS = (
    *("--headless", "--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run", "--disable-sync"),
    *("--disable-background-networking", "--disable-component-update", "--hide-scrollbars", "--remote-debugging-pipe"),
)
_PATIENCE_S = 60


def find_chromium() -> str | None:
    """The browser's program, where there is one."""
    names = ("chromium", "chromium-browser", "google-chrome")
    return next((path for name in names if (path := shutil.which(name))), None)


class Browser:
    """One tab. Commands and events are JSON objects that end with a null byte, on file descriptors 3 and 4."""

    def __init__(self, program: str, folder: Path) -> None:
        read_end, self._out = os.pipe()
        self._in, write_end = os.pipe()

        def give_pipes() -> None:
            ends = os.dup(read_end), os.dup(write_end)  # above 4, whatever their numbers were
            os.dup2(ends[0], 3)
            os.dup2(ends[1], 4)

        self._process = subprocess.Popen(
            [program, *_FLAGS, f"--user-data-dir={folder}", "about:blank"],
            preexec_fn=give_pipes,
            close_fds=False,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            start_new_session=True,
        )
        os.close(read_end)
        os.close(write_end)
        self._rest, self._count, self._session = b"", 0, ""
        self.requests: list[str] = []
        self.complaints: list[str] = []
        page = next(t for t in self._call("Target.getTargets")["targetInfos"] if t["type"] == "page")
        self._session = self._call("Target.attachToTarget", targetId=page["targetId"], flatten=True)["sessionId"]
        for domain in ("Page", "Network", "Runtime", "Log"):
            self._call(f"{domain}.enable")

    def close(self) -> None:
        """End the browser and all its processes."""
        os.close(self._out)
        os.close(self._in)
        try:
            self._process.wait(timeout=5)
        except subprocess.TimeoutExpired:
            os.killpg(self._process.pid, signal.SIGKILL)
            self._process.wait()

    def open(self, page: Path, *, width: int, dark: bool = False) -> None:
        """Load a page and wait until it has drawn all its figures."""
        self.requests.clear()
        self.complaints.clear()
        self._call("Emulation.setDeviceMetricsOverride", width=width, height=900, deviceScaleFactor=1, mobile=False)
        self.prefer(dark=dark)
        self._call("Page.navigate", url=page.resolve().as_uri())
        end = time.monotonic() + _PATIENCE_S
        while not self.value("document.readyState === 'complete' && document.body?.dataset.drawn === 'yes'"):
            assert time.monotonic() < end, f"{page} was not drawn in time: {self.complaints}"
            time.sleep(0.05)

    def prefer(self, *, dark: bool) -> None:
        """Say what the user likes."""
        scheme = {"name": "prefers-color-scheme", "value": "dark" if dark else "light"}
        self._call("Emulation.setEmulatedMedia", features=[scheme])

    def value(self, expression: str) -> Any:
        """What an expression, or the promise it gives, comes to in the page."""
        told = self._call("Runtime.evaluate", expression=expression, returnByValue=True, awaitPromise=True)
        assert "exceptionDetails" not in told, told["exceptionDetails"]
        return told["result"].get("value")

    def screenshot(self, path: Path) -> None:
        """The whole page as a picture."""
        data = self._call("Page.captureScreenshot", captureBeyondViewport=True, format="png")["data"]
        path.write_bytes(base64.b64decode(data))

    def _call(self, method: str, **params: Any) -> dict[str, Any]:
        self._count += 1
        message = {"id": self._count, "method": method, "params": params}
        if self._session:
            message["sessionId"] = self._session
        os.write(self._out, json.dumps(message).encode() + b"\0")
        while True:
            told = self._next()
            if told.get("id") == self._count:
                assert "error" not in told, told["error"]
                result: dict[str, Any] = told["result"]
                return result
            self._note(told)

    def _next(self) -> dict[str, Any]:
        pieces = [self._rest]
        while b"\0" not in pieces[-1]:
            ready, _, _ = select.select([self._in], [], [], _PATIENCE_S)
            assert ready, "the browser does not answer"
            pieces.append(os.read(self._in, 2**16))
            assert pieces[-1], "the browser is gone"
        message, _, self._rest = b"".join(pieces).partition(b"\0")
        told: dict[str, Any] = json.loads(message)
        return told

    def _note(self, told: dict[str, Any]) -> None:
        method, params = told.get("method"), told.get("params", {})
        if method == "Network.requestWillBeSent":
            self.requests.append(params["request"]["url"])
        elif method == "Runtime.exceptionThrown":
            self.complaints.append(json.dumps(params["exceptionDetails"])[:500])
        elif method == "Log.entryAdded" and params["entry"]["level"] in ("error", "warning"):
            self.complaints.append(params["entry"]["text"])
