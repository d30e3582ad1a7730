"""Make the pictures of the documentation from a run folder: `python docs/pictures.py RUN`.

    terminal.svg, terminal.png   the live panel as it was at two thirds of the run
    mlflow.png                   the run's page of metrics in MLflow's own user interface

Everything is drawn from the run's journal and its MLflow store by the code that a user sees at
work; nothing is retouched. Needs Chromium (Debian: `apt-get install chromium`); it may reach the
loopback interface only.
"""

from __future__ import annotations

import argparse
import base64
import contextlib
import io
import json
import os
import re
import shlex
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.terminal_theme import TerminalTheme

from autotune.journal import read_journal
from autotune.screen.panel import Clock, Run, Size, draw
from autotune.story import Story
from autotune.tracking.receipt import read_receipt

WIDTH, HEIGHT = 112, 34
"""Columns and lines of the pictured terminal."""
THEME = TerminalTheme(
    (13, 17, 23),
    (201, 209, 217),
    [(72, 79, 88), (255, 123, 114), (63, 185, 80), (210, 153, 34), (88, 166, 255), (188, 140, 255),
     (57, 197, 207), (177, 186, 196)],
    [(125, 133, 144), (255, 161, 152), (86, 211, 100), (227, 179, 65), (121, 192, 255), (210, 168, 255),
     (86, 212, 221), (240, 246, 252)],
)  # fmt: skip
CHROMIUM = (
    "chromium", "--headless", "--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run",
    "--disable-background-networking", "--disable-component-update", "--disable-sync",
    "--hide-scrollbars", "--disable-extensions",
    "--blink-settings=primaryHoverType=2,availableHoverTypes=2,primaryPointerType=4,availablePointerTypes=4",
     "--host-resolver-rules=MAP * ~NOTFOUND, EXCLUDE 127.0.0.1",
)  # fmt: skip


SEARCH_BOX = 'input[placeholder="Search metric charts"]'
CLOSE_ASSISTANT = '[data-component-id="mlflow.assistant.chat_panel.close"]'
TRAINING_PAGES = (
    "[...document.querySelectorAll('label, button, span')].find(e => e.textContent == 'Model training')"
)
CHARTS = (
    "^(reward_mean|kl_ref|kl_step|clip_ratio|entropy|grad_norm)$|"
    "^eval/|^knob/(actor_learning_rate|ppo_mini_batch_size)$"
)
"""What is typed into the page's search box, which takes a regular expression."""
CHART_COUNT = 10


def terminal_svg(folder: Path, share: float) -> str:
    """The live panel after `share` of the run's rollouts."""
    story, recipe = Story(), json.loads((folder / "recipe.resolved.json").read_text("utf-8"))
    rollouts = recipe["trainer"]["rollouts"]
    elapsed = 0.0
    for line in read_journal(folder / "journal.jsonl"):
        if line["type"] == "rollout" and line["rollout"] >= share * rollouts:
            break
        story.add(line)
        elapsed += line.get("times", {}).get("total", 0.0)
    done = len(story.rows)
    run = Run(
        recipe["name"], recipe["seed"], f"runs/{recipe['name']}-{recipe['seed']}", rollouts,
        recipe["control"]["mode"], recipe["control"]["profile"], 1.0,
    )  # fmt: skip
    console = Console(
        record=True,
        width=WIDTH,
        height=HEIGHT,
        file=io.StringIO(),
        force_terminal=True,
        color_system="truecolor",
    )
    console.print(draw(run, story, Clock(elapsed, elapsed / done * (rollouts - done)), Size(WIDTH, HEIGHT)))
    svg = console.export_svg(title=f"autotune run {recipe['name']}.yaml", theme=THEME)
    return own_fonts(svg)


def own_fonts(svg: str) -> str:
    """Without the web fonts that rich refers to: a picture must not fetch anything."""
    svg = re.sub(r"@font-face\s*{.*?}\s*", "", svg, flags=re.DOTALL)
    svg = svg.replace("font-size: 20px", "font-size: 20.9px")  # box lines then meet from line to line
    return svg.replace("Fira Code, monospace", "'DejaVu Sans Mono', Menlo, Consolas, monospace")


class Browser:
    """A fresh headless Chromium, led over a pair of pipes by its DevTools protocol."""

    def __init__(self, width: int, height: int, scale: float = 1.0) -> None:
        self._profile = tempfile.TemporaryDirectory(ignore_cleanup_errors=True)
        there, self._out = os.pipe()
        self._in, back = os.pipe()
        options = (f"--user-data-dir={self._profile.name}", f"--window-size={width},{height}")
        command = shlex.join([*CHROMIUM, "--remote-debugging-pipe", *options, "about:blank"])
        self._process = subprocess.Popen(
            ["sh", "-c", f"exec {command} 3<&{there} 4>&{back}"], pass_fds=(there, back),
            stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL,
        )  # fmt: skip
        os.close(there)
        os.close(back)
        self._count, self._session, self._pending = 0, "", b""
        self._attach(width, height, scale)

    def _attach(self, width: int, height: int, scale: float) -> None:
        pages = self.call("Target.getTargets")["targetInfos"]
        page = next(p["targetId"] for p in pages if p["type"] == "page")
        self._session = self.call("Target.attachToTarget", targetId=page, flatten=True)["sessionId"]
        self.call(
            "Emulation.setDeviceMetricsOverride",
            width=width, height=height, deviceScaleFactor=scale, mobile=False,
        )  # fmt: skip

    def call(self, method: str, **params: Any) -> dict[str, Any]:
        """One command; events that arrive meanwhile are passed over."""
        self._count += 1
        message = {"id": self._count, "method": method, "params": params}
        if self._session:
            message["sessionId"] = self._session
        os.write(self._out, json.dumps(message).encode() + b"\0")
        while (answer := self._receive()).get("id") != self._count:
            pass
        if "error" in answer:
            raise RuntimeError(f"{method}: {answer['error']}")
        return dict(answer["result"])

    def _receive(self) -> dict[str, Any]:
        while b"\0" not in self._pending:
            data = os.read(self._in, 1 << 20)
            if not data:
                raise RuntimeError("chromium has ended")
            self._pending += data
        raw, _, self._pending = self._pending.partition(b"\0")
        return dict(json.loads(raw))

    def script(self, text: str) -> Any:
        return self.call("Runtime.evaluate", expression=text, returnByValue=True)["result"].get("value")

    def wait(self, condition: str, seconds: float = 120.0) -> None:
        """Until a JavaScript expression holds."""
        until = time.monotonic() + seconds
        while not self.script(f"!!({condition})"):
            if time.monotonic() > until:
                raise TimeoutError(f"the page does not come to: {condition}")
            time.sleep(0.3)

    def picture(self, target: Path) -> None:
        data = self.call("Page.captureScreenshot", format="png")["data"]
        target.write_bytes(base64.b64decode(data))

    def __enter__(self) -> Browser:
        return self

    def __exit__(self, *exc: object) -> None:
        self._process.terminate()
        self._process.wait(30)
        os.close(self._out)
        os.close(self._in)
        self._profile.cleanup()


def svg_to_png(svg: Path, target: Path) -> None:
    """Exactly as large as the drawing."""
    width, height = (
        float(n) for n in re.findall(r'viewBox="0 0 ([\d.]+) ([\d.]+)"', svg.read_text("utf-8"))[0]
    )
    with tempfile.TemporaryDirectory() as place, Browser(round(width), round(height), 1.5) as browser:
        page = Path(place) / "page.html"
        page.write_text(
            f'<body style="margin:0"><img src="{svg.resolve().as_uri()}" width="{width}">', "utf-8"
        )
        browser.call("Page.navigate", url=page.as_uri())
        browser.wait("document.images.length && document.images[0].complete")
        browser.picture(target)


def mlflow_png(page: str, target: Path) -> None:
    """The run's metrics, narrowed to the ones that the controller lives by."""
    with Browser(1600, 1870) as browser:
        browser.call("Page.navigate", url=page)
        browser.wait(TRAINING_PAGES)
        browser.script(f"{TRAINING_PAGES}.click()")
        time.sleep(1.0)
        browser.call("Page.navigate", url=page)
        browser.wait(f"document.querySelector({SEARCH_BOX!r})")
        browser.script(f"document.querySelector({CLOSE_ASSISTANT!r})?.click()")
        browser.script(f"document.querySelector({SEARCH_BOX!r}).focus()")
        browser.call("Input.insertText", text=CHARTS)
        browser.wait(f"document.querySelectorAll('.js-plotly-plot').length >= {CHART_COUNT}")
        browser.script("document.activeElement.blur()")
        time.sleep(2.0)
        browser.picture(target)


@contextlib.contextmanager
def mlflow_ui(store: str) -> Iterator[str]:
    """MLflow's user interface on a free port of the loopback interface."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    command = [
        sys.executable, "-m", "mlflow", "ui", "--host", "127.0.0.1", "--port", str(port),
        "--workers", "1", "--backend-store-uri", store,
    ]  # fmt: skip
    quiet = {**os.environ, "MLFLOW_DISABLE_TELEMETRY": "true", "DO_NOT_TRACK": "true"}
    server = subprocess.Popen(
        command, env=quiet, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, start_new_session=True
    )
    try:
        wait_for_port(port)
        yield f"http://127.0.0.1:{port}"
    finally:
        os.killpg(server.pid, signal.SIGKILL)  # it only reads
        server.wait()


def wait_for_port(port: int) -> None:
    for _ in range(300):
        with socket.socket() as probe:
            if probe.connect_ex(("127.0.0.1", port)) == 0:
                return
        time.sleep(0.3)
    raise TimeoutError(f"MLflow does not listen on port {port}")


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("run", type=Path, help="folder of a finished run")
    parser.add_argument("--out", type=Path, default=Path(__file__).parent)
    parser.add_argument("--share", type=float, default=2 / 3, help="how far the pictured run has come")
    options = parser.parse_args()
    if shutil.which(CHROMIUM[0]) is None:
        sys.exit("chromium is not installed; on Debian: apt-get install chromium")
    svg = options.out / "terminal.svg"
    svg.write_text(terminal_svg(options.run, options.share), "utf-8")
    svg_to_png(svg, options.out / "terminal.png")
    receipt = read_receipt(options.run)
    if receipt is None or not receipt.finished:
        sys.exit(f"{options.run} is not in MLflow yet; deliver it with: autotune sync {options.run}")
    with mlflow_ui(receipt.store) as address:
        page = f"{address}/#/experiments/{receipt.experiment_id}/runs/{receipt.run_id}/model-metrics"
        mlflow_png(page, options.out / "mlflow.png")


if __name__ == "__main__":
    main()
