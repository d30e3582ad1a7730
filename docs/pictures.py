"""Make the pictures of the documentation from a run folder: `python docs/pictures.py RUN`.

    terminal.svg, terminal.png   the live panel as it was at two thirds of the run
    mlflow.png                   the run's page of metrics in MLflow's own user interface
    report*.png                  with `--report RUN…`: the first run's page, all of them compared, on a phone
    dashboard.png                with `--compare RUN…`: the runs on the page that `autotune dashboard` opens

Everything is drawn from the run's journal and its MLflow store by the code that a user sees at
work; nothing is retouched. Needs Chromium (Debian: `apt-get install chromium`); it reaches
files and the loopback interface only.
"""

from __future__ import annotations

import argparse
import contextlib
import io
import json
import os
import re
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

from rich.console import Console
from rich.terminal_theme import TerminalTheme

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from autotune.dashboard import deliver, interface, select, show
from autotune.journal import read_journal
from autotune.report import render
from autotune.screen.panel import Clock, Run, Size, draw
from autotune.story import Story
from autotune.tracking.receipt import read_receipt
from tests.browser import Browser, chromium

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


def report_pngs(runs: Sequence[Path], out: Path) -> None:
    """The page of the first run with a decision under the mouse, all runs compared, and a phone's view."""
    with tempfile.TemporaryDirectory() as place, Browser(1240, 1130) as browser:
        one, many = Path(place) / "one.html", Path(place) / "many.html"
        one.write_text(render(runs[:1]), "utf-8")
        many.write_text(render(runs), "utf-8")
        browser.open(one.as_uri())
        browser.hover('[data-key="knob/actor_learning_rate"] .mark')
        browser.script("scrollTo({top: 0, behavior: 'instant'})")
        browser.hover_at('[data-key="knob/actor_learning_rate"] .mark')
        browser.picture(out / "report.png")
        browser.media(prefers_color_scheme="dark")
        browser.resize(1240, 1130)
        browser.open(many.as_uri())
        browser.picture(out / "report-compared.png")
        browser.resize(390, 844, 2, mobile=True)
        browser.open(one.as_uri())
        browser.picture(out / "report-phone.png")


def mlflow_png(page: str, target: Path) -> None:
    """The run's metrics, narrowed to the ones that the controller lives by."""
    with Browser(1600, 1870) as browser:
        browser.call("Page.navigate", url=page)
        browser.wait(f"!!{TRAINING_PAGES}")
        browser.script(f"{TRAINING_PAGES}.click()")
        time.sleep(1.0)
        browser.call("Page.navigate", url=page)
        browser.wait(f"!!document.querySelector({SEARCH_BOX!r})")
        browser.script(f"document.querySelector({CLOSE_ASSISTANT!r})?.click()")
        browser.script(f"document.querySelector({SEARCH_BOX!r}).focus()")
        browser.call("Input.insertText", text=CHARTS)
        browser.wait(f"document.querySelectorAll('.js-plotly-plot').length >= {CHART_COUNT}")
        browser.script("document.activeElement.blur()")
        time.sleep(2.0)
        browser.picture(target)


def dashboard_png(runs: list[Path], target: Path) -> None:
    """The comparison inside MLflow, as far as a window shows it."""
    chosen = select(runs)
    problems = deliver(chosen)
    if problems:
        sys.exit("\n".join(problems))
    with interface(chosen.uri, 0) as address, Browser(1500, 1660) as browser:
        browser.call("Page.navigate", url=address + show(chosen, address))
        browser.wait("document.querySelector('iframe.mlflow-html-iframe')?.src")
        time.sleep(3.0)
        browser.script(f"document.querySelector({CLOSE_ASSISTANT!r})?.click()")
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
    parser.add_argument("run", type=Path, nargs="?", help="folder of a finished run")
    parser.add_argument("--report", type=Path, nargs="+", default=[], help="runs for the report's pictures")
    parser.add_argument("--out", type=Path, default=Path(__file__).parent)
    parser.add_argument("--share", type=float, default=2 / 3, help="how far the pictured run has come")
    parser.add_argument("--compare", type=Path, nargs="+", default=[], help="runs for dashboard.png")
    options = parser.parse_args()
    if chromium() is None:
        sys.exit("chromium is not installed; on Debian: apt-get install chromium")
    if options.report:
        report_pngs(options.report, options.out)
    if options.compare:
        dashboard_png(options.compare, options.out / "dashboard.png")
    if options.run is None:
        return
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
