"""A headless Chromium for tests, led over a pair of pipes by its DevTools protocol.

    with Browser(1280, 800) as browser:
        browser.open(page.as_uri())
        browser.wait("document.querySelector('h1')")
        assert browser.script("document.title") == "…"
        assert browser.problems() == []          # console errors, exceptions, requests that failed
        browser.picture(Path("page.png"), whole=True)

The protocol needs no library over pipes: JSON messages that end with a zero byte. The browser may
reach the loopback interface and files only, so a page that fetches from elsewhere shows up as a
failed request. Where Chromium is missing, a test is skipped on a laptop and fails in CI:

    from tests.browser import Browser, needs_chromium
    pytestmark = needs_chromium()

Debian: `scripts/services.sh` installs it. `CHROMIUM=/path` names another build of it.
"""

from __future__ import annotations

import base64
import fcntl
import json
import os
import select
import shlex
import shutil
import subprocess
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

NAMES = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable", "chrome")
OPTIONS = (
    "--headless", "--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run",
    "--disable-dev-shm-usage", "--disable-background-networking", "--disable-component-update",
    "--disable-sync", "--disable-extensions", "--hide-scrollbars", "--mute-audio",
    "--host-resolver-rules=MAP * ~NOTFOUND, EXCLUDE 127.0.0.1, EXCLUDE localhost",
    # A headless machine has no mouse; without these a page believes that nobody can hover.
    "--blink-settings=primaryHoverType=2,availableHoverTypes=2,primaryPointerType=4,availablePointerTypes=4",
)  # fmt: skip

KEYS = {
    "Tab": 9, "Enter": 13, "Escape": 27, "Space": 32, "End": 35, "Home": 36, "ArrowLeft": 37,
    "ArrowUp": 38, "ArrowRight": 39, "ArrowDown": 40,
}  # fmt: skip
"""Key -> its virtual key code, which handlers and default actions both look at."""
TEXT = {"Enter": "\r", "Space": " "}
SHIFT = 8


def chromium() -> str | None:
    """The command of an installed Chromium, or None."""
    named = os.environ.get("CHROMIUM", "")
    return named or next((found for name in NAMES if (found := shutil.which(name))), None)


def needs_chromium() -> pytest.MarkDecorator:
    """Skip where there is no Chromium, but never in CI: there the test must run, and fails."""
    missing = chromium() is None and os.environ.get("CI", "").lower() != "true"
    return pytest.mark.skipif(missing, reason="no Chromium; on Debian: scripts/services.sh")


class Browser:
    """One page of a fresh browser with a profile of its own.

    Raises:
        RuntimeError: Chromium is missing, ended, or refused a command.
        TimeoutError: it does not answer, or a page does not come to what was waited for.
    """

    def __init__(self, width: int, height: int, scale: float = 1.0) -> None:
        """`width` and `height` in CSS pixels; `scale` device pixels each."""
        self.size = (width, height, scale)
        self._count, self._session, self._pending = 0, "", b""
        self._events: list[dict[str, Any]] = []
        self._profile = tempfile.TemporaryDirectory(prefix="chromium-", ignore_cleanup_errors=True)
        self._process = self._start()
        try:
            self._attach()
        except BaseException:
            self.close()
            raise

    def _start(self) -> subprocess.Popen[bytes]:
        command = chromium()
        if command is None:
            raise RuntimeError("Chromium is not installed; on Debian: scripts/services.sh")
        there, self._out = os.pipe()
        self._in, back = os.pipe()
        ends = [fcntl.fcntl(end, fcntl.F_DUPFD, 10) for end in (there, back)]  # clear of 3 and 4
        places = (f"--user-data-dir={self._profile.name}", "--remote-debugging-pipe", "about:blank")
        words = shlex.join([command, *OPTIONS, *places])
        process = subprocess.Popen(
            ["bash", "-c", f"exec {words} 3<&{ends[0]} 4>&{ends[1]}"], pass_fds=ends,
            stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, start_new_session=True,
        )  # fmt: skip
        for end in (there, back, *ends):
            os.close(end)
        return process

    def _attach(self) -> None:
        pages = self.call("Target.getTargets")["targetInfos"]
        page = next(p["targetId"] for p in pages if p["type"] == "page")
        self._session = self.call("Target.attachToTarget", targetId=page, flatten=True)["sessionId"]
        for domain in ("Page", "Runtime", "Log", "Network"):
            self.call(f"{domain}.enable")
        self.resize(*self.size)

    # -- the protocol ------------------------------------------------------------------------------

    def call(self, method: str, **params: Any) -> dict[str, Any]:
        """One command of the protocol, and its result; events that arrive meanwhile are kept."""
        self._count += 1
        message = {"id": self._count, "method": method, "params": params}
        if self._session:
            message["sessionId"] = self._session
        os.write(self._out, json.dumps(message).encode() + b"\0")
        while (answer := self._receive()).get("id") != self._count:
            self._events.append(answer)
        if "error" in answer:
            raise RuntimeError(f"{method}: {answer['error']}")
        return dict(answer["result"])

    def _receive(self, seconds: float = 120.0) -> dict[str, Any]:
        until = time.monotonic() + seconds
        while b"\0" not in self._pending:
            ready, _, _ = select.select([self._in], [], [], max(until - time.monotonic(), 0.0))
            if not ready:
                raise TimeoutError(f"Chromium has not answered for {seconds:g} s")
            data = os.read(self._in, 1 << 20)
            if not data:
                raise RuntimeError(f"Chromium has ended with {self._process.wait(10)}")
            self._pending += data
        raw, _, self._pending = self._pending.partition(b"\0")
        return dict(json.loads(raw))

    def events(self, *methods: str) -> list[dict[str, Any]]:
        """The parameters of every event of these names since the page was opened, oldest first."""
        self.call("Runtime.evaluate", expression="0")  # takes in what has arrived
        return [e["params"] for e in self._events if e.get("method") in methods]

    # -- the page ----------------------------------------------------------------------------------

    def resize(self, width: int, height: int, scale: float = 1.0, mobile: bool = False) -> None:
        """`mobile`: a touch screen that obeys the page's viewport."""
        self.size = (width, height, scale)
        metrics = {"width": width, "height": height, "deviceScaleFactor": scale, "mobile": mobile}
        self.call("Emulation.setDeviceMetricsOverride", **metrics)

    def media(self, **features: str) -> None:
        """Media features such as `prefers_color_scheme="dark"` or `prefers_reduced_motion="reduce"`."""
        named = [{"name": n.replace("_", "-"), "value": v} for n, v in features.items()]
        self.call("Emulation.setEmulatedMedia", features=named)

    def open(self, address: str, seconds: float = 120.0) -> None:
        """Go to an address (`Path.as_uri()` for a file) and wait until everything is loaded."""
        self._events.clear()
        answer = self.call("Page.navigate", url=address)
        if "errorText" in answer:
            raise RuntimeError(f"{address}: {answer['errorText']}")
        loaded = "document.readyState == 'complete' && location.href != 'about:blank'"
        self.wait(loaded, seconds)

    def script(self, text: str) -> Any:
        """The value of a JavaScript expression, promises awaited; JSON types only.

        Raises:
            RuntimeError: the expression throws, with what it threw.
        """
        options = {"returnByValue": True, "awaitPromise": True}
        answer = self.call("Runtime.evaluate", expression=text, **options)
        if "exceptionDetails" in answer:
            raise RuntimeError(f"{text[:200]}: {_thrown(answer['exceptionDetails'])}")
        return answer["result"].get("value")

    def wait(self, condition: str, seconds: float = 60.0) -> Any:
        """Until a JavaScript expression holds; its value."""
        until = time.monotonic() + seconds
        while not (found := self.script(condition)):
            if time.monotonic() > until:
                raise TimeoutError(f"the page does not come to: {condition}")
            time.sleep(0.05)
        return found

    def problems(self) -> list[str]:
        """Console errors and warnings, exceptions and failed requests since the page was opened."""
        self.call("Runtime.evaluate", expression="0")
        return [text for event in self._events if (text := _problem(event))]

    def picture(self, target: Path, whole: bool = False) -> None:
        """A PNG of the window, or of the `whole` page."""
        params: dict[str, Any] = {"format": "png"}
        if whole:
            box = self.call("Page.getLayoutMetrics")["cssContentSize"]
            clip = {"x": 0, "y": 0, "width": box["width"], "height": box["height"], "scale": 1}
            params |= {"captureBeyondViewport": True, "clip": clip}
        target.write_bytes(base64.b64decode(self.call("Page.captureScreenshot", **params)["data"]))

    # -- hands -------------------------------------------------------------------------------------

    def key(self, name: str, shift: bool = False) -> None:
        """Press and release a key of KEYS, as a user would: focus moves, buttons are pressed."""
        common = {"key": " " if name == "Space" else name, "code": name, "modifiers": SHIFT * shift}
        common |= {"windowsVirtualKeyCode": KEYS[name]}
        down = {"type": "keyDown", "text": TEXT[name]} if name in TEXT else {"type": "rawKeyDown"}
        self.call("Input.dispatchKeyEvent", **common, **down)
        self.call("Input.dispatchKeyEvent", **common, type="keyUp")

    def hover(self, selector: str) -> None:
        """Move the mouse onto the middle of the first element that matches."""
        x, y = self._middle(selector)
        self.call("Input.dispatchMouseEvent", type="mouseMoved", x=x, y=y)

    def hover_at(self, selector: str) -> None:
        """The same without scrolling: the element is in the window."""
        x, y = self._middle(selector, scroll=False)
        self.call("Input.dispatchMouseEvent", type="mouseMoved", x=x, y=y)

    def move(self, x: float, y: float) -> None:
        """Move the mouse to a place of the window, in CSS pixels."""
        self.call("Input.dispatchMouseEvent", type="mouseMoved", x=x, y=y)

    def click(self, selector: str) -> None:
        x, y = self._middle(selector)
        button = {"x": x, "y": y, "button": "left", "clickCount": 1}
        for kind in ("mousePressed", "mouseReleased"):
            self.call("Input.dispatchMouseEvent", type=kind, **button)

    def write(self, text: str) -> None:
        """Type text into what has the focus."""
        self.call("Input.insertText", text=text)

    def _middle(self, selector: str, scroll: bool = True) -> tuple[float, float]:
        found = self.script(
            f"(() => {{ const e = document.querySelector({json.dumps(selector)}); if (!e) return null;"
            + "e.scrollIntoView({block: 'center', inline: 'center', behavior: 'instant'});" * scroll
            + "const r = e.getBoundingClientRect();"
            "return [r.x + r.width / 2, r.y + r.height / 2] })()"
        )
        if found is None:
            raise RuntimeError(f"nothing on the page matches {selector}")
        return float(found[0]), float(found[1])

    # -- what others perceive ----------------------------------------------------------------------

    def focused(self) -> str:
        """What a screen reader says of the element that has the focus: `role: name`."""
        for node in self.accessible():
            if node.get("focused") and node["role"] != "RootWebArea":
                return f"{node['role']}: {node['name']}"
        return ""

    def accessible(self) -> list[dict[str, Any]]:
        """The accessibility tree as a list of {role, name, description, focused}; ignored nodes left out."""
        nodes = self.call("Accessibility.getFullAXTree")["nodes"]
        return [_spoken(node) for node in nodes if not node.get("ignored")]

    # -- the end -----------------------------------------------------------------------------------

    def close(self) -> None:
        self._process.terminate()
        try:
            self._process.wait(10)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        for end in (self._out, self._in):
            os.close(end)
        self._profile.cleanup()

    def __enter__(self) -> Browser:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()


def _spoken(node: dict[str, Any]) -> dict[str, Any]:
    text = {name: str(node.get(name, {}).get("value", "")) for name in ("role", "name", "description")}
    states = {p["name"]: p["value"].get("value") for p in node.get("properties", ())}
    return {**text, "focused": bool(states.get("focused"))}


def _thrown(details: dict[str, Any]) -> str:
    exception = details.get("exception", {})
    return str(exception.get("description") or exception.get("value") or details.get("text"))


def _console(params: dict[str, Any]) -> str:
    if params["type"] not in ("error", "warning", "assert"):
        return ""
    words = (str(a.get("value", a.get("description", ""))) for a in params["args"])
    return f"console.{params['type']}: {' '.join(words)}"


def _logged(params: dict[str, Any]) -> str:
    entry = params["entry"]
    quiet = entry["level"] not in ("error", "warning")
    return "" if quiet else f"{entry['level']}: {entry['text']} {entry.get('url', '')}".strip()


_PROBLEMS: dict[str, Callable[[dict[str, Any]], str]] = {
    "Runtime.consoleAPICalled": _console,
    "Runtime.exceptionThrown": lambda p: f"exception: {_thrown(p['exceptionDetails'])}",
    "Log.entryAdded": _logged,
    "Network.loadingFailed": lambda p: "" if p.get("canceled") else f"request failed: {p['errorText']}",
}


def _problem(event: dict[str, Any]) -> str:
    """What is wrong, in words; empty for an event that is no problem."""
    told = _PROBLEMS.get(str(event.get("method")))
    return told(event["params"]) if told else ""
