"""Debian's chromium, headless, driven through its DevTools protocol over two pipes."""

from __future__ import annotations

import base64
import itertools
import json
import os
import select
import shutil
import subprocess
import time
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

__all__ = ["CHROMIUM", "Browser", "open_browser"]

CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser")
_PATIENCE = 120.0  # seconds for one answer, on a busy machine


class Browser:
    """One tab: pages are opened, looked at by expressions, and handled by pointer and keys."""

    def __init__(self, to_browser: int, from_browser: int) -> None:
        self._to, self._from = to_browser, from_browser
        self._numbers = itertools.count(1)
        self._read = b""
        self._session: str | None = None
        self.requests: list[str] = []  # every address that was asked for
        self.complaints: list[str] = []  # errors of scripts and of the console
        target = self._call("Target.createTarget", url="about:blank")["targetId"]
        attached = self._call("Target.attachToTarget", targetId=target, flatten=True)
        self._session = attached["sessionId"]
        for domain in ("Page", "Runtime", "Network", "Log"):
            self._call(f"{domain}.enable")
        self.resize(1280, 1000)

    def _call(self, method: str, **params: Any) -> dict[str, Any]:
        number = next(self._numbers)
        message: dict[str, Any] = {"id": number, "method": method, "params": params}
        if self._session is not None:
            message["sessionId"] = self._session
        os.write(self._to, json.dumps(message).encode() + b"\0")
        while True:
            answer = self._receive()
            if answer.get("id") == number:
                assert "error" not in answer, (method, answer)
                result: dict[str, Any] = answer["result"]
                return result
            self._notice(answer)

    def _receive(self) -> dict[str, Any]:
        deadline = time.monotonic() + _PATIENCE
        while b"\0" not in self._read:
            ready, _, _ = select.select([self._from], [], [], max(0, deadline - time.monotonic()))
            assert ready, "the browser does not answer"
            part = os.read(self._from, 1 << 16)
            assert part, "the browser is gone"
            self._read += part
        message, _, self._read = self._read.partition(b"\0")
        answer: dict[str, Any] = json.loads(message)
        return answer

    def _notice(self, event: dict[str, Any]) -> None:
        params = event.get("params", {})
        if event.get("method") == "Network.requestWillBeSent":
            self.requests.append(params["request"]["url"])
        elif event.get("method") == "Runtime.exceptionThrown":
            self.complaints.append(str(params["exceptionDetails"]))
        elif event.get("method") == "Log.entryAdded" and params["entry"]["level"] == "error":
            self.complaints.append(params["entry"]["text"])

    def resize(self, width: int, height: int) -> None:
        self._call(
            "Emulation.setDeviceMetricsOverride",
            width=width,
            height=height,
            deviceScaleFactor=1,
            mobile=False,
        )

    def scheme(self, name: str) -> None:
        """`dark` or `light`, as the reader's system would say."""
        feature = {"name": "prefers-color-scheme", "value": name}
        self._call("Emulation.setEmulatedMedia", features=[feature])

    def open(self, path: Path) -> None:
        """Loads a page, and waits until it has drawn."""
        self.requests.clear()
        self.complaints.clear()
        self._call("Page.navigate", url=path.as_uri())
        deadline = time.monotonic() + _PATIENCE
        while self.read("document.body && document.body.dataset.ready") != "yes":
            assert not self.complaints, self.complaints
            assert time.monotonic() < deadline, "the page did not draw"

    def read(self, expression: str) -> Any:
        """Value of an expression in the page."""
        answer = self._call("Runtime.evaluate", expression=expression, returnByValue=True)
        assert "exceptionDetails" not in answer, answer["exceptionDetails"]
        return answer["result"].get("value")

    def _pointer(self, kind: str, x: float, y: float, **more: Any) -> None:
        self._call("Input.dispatchMouseEvent", type=kind, x=x, y=y, **more)

    def place(self, selector: str) -> tuple[float, float]:
        """Middle of an element, which is brought into view."""
        box = self.read(
            f"(() => {{ const e = document.querySelector({selector!r}); "
            "e.scrollIntoView({block: 'center'}); const b = e.getBoundingClientRect(); "
            "return [b.left + b.width / 2, b.top + b.height / 2]; })()"
        )
        return box[0], box[1]

    def hover(self, x: float, y: float) -> None:
        self._pointer("mouseMoved", x, y)

    def click(self, x: float, y: float) -> None:
        self._pointer("mousePressed", x, y, button="left", clickCount=1)
        self._pointer("mouseReleased", x, y, button="left", clickCount=1)

    def press(self, key: str) -> None:
        """One key: a character, or a name such as `Tab` or `ArrowRight`."""
        codes = {"Tab": 9, "Enter": 13, "Escape": 27}
        codes |= {"ArrowLeft": 37, "ArrowUp": 38, "ArrowRight": 39, "ArrowDown": 40}
        more: dict[str, Any] = {"key": key, "windowsVirtualKeyCode": codes.get(key, ord(key[0]))}
        if len(key) == 1:
            more["text"] = key
        elif key == "Enter":
            more["text"] = "\r"
        self._call("Input.dispatchKeyEvent", type="keyDown", **more)
        self._call("Input.dispatchKeyEvent", type="keyUp", **more)

    def screenshot(self) -> bytes:
        shot = self._call("Page.captureScreenshot", format="png")
        return base64.b64decode(shot["data"])


@contextmanager
def open_browser(profile: Path) -> Iterator[Browser]:
    """A browser with a fresh profile in the given folder."""
    assert CHROMIUM is not None
    their_input, to_browser = os.pipe()
    from_browser, their_output = os.pipe()
    # The protocol's pipes are descriptors 3 and 4 of the browser: bash puts them there.
    script = f'exec "$@" 3<&{their_input} 4>&{their_output}'
    words = ["--headless", "--remote-debugging-pipe", "--disable-gpu", "--no-first-run"]
    words += [f"--user-data-dir={profile}", "--disable-dev-shm-usage", "about:blank"]
    if os.geteuid() == 0:
        words.insert(0, "--no-sandbox")  # which chromium refuses to have as root
    process = subprocess.Popen(
        ["bash", "-c", script, "bash", CHROMIUM, *words],
        pass_fds=(their_input, their_output),
        stdin=subprocess.DEVNULL,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    )
    os.close(their_input)
    os.close(their_output)
    try:
        yield Browser(to_browser, from_browser)
    finally:
        process.terminate()
        try:
            process.wait(timeout=30)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()
        os.close(to_browser)
        os.close(from_browser)
