"""Charts as PNG files for papers: each is put on a small white page of its own, and a browser draws it.

The drawing is the page's own, so a picture shows what the report shows. What draws it is a Chromium or
Chrome, which is on nearly every desk; a library that draws SVG would be one more dependency with fonts of
its own. On a machine without one, copy the journals to one that has it: reading them needs no torch.
"""

from __future__ import annotations

import os
import re
import shutil
import struct
import subprocess
import tempfile
import zlib
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path

from autotune.errors import InputError, RunError
from autotune.report import charts, compared, timelines
from autotune.report.groups import Group, group_runs
from autotune.report.heat import chunk
from autotune.report.look import Look, span_of
from autotune.report.markup import esc, tag
from autotune.report.page import POINTS, asset
from autotune.report.panels import Panel, draw
from autotune.report.runs import RunData

NAMES = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable", "chrome", "microsoft-edge")
MACINTOSH = "/Applications/Google Chrome.app/Contents/MacOS/Google Chrome"
WIDTH = 720
"""CSS pixels; a picture has SCALE times as many."""
SCALE = 3
"""720 x 3 pixels are 300 to the inch on a text width of 18 cm."""
ABOVE, BELOW, BARE = 28, 30, 8
"""CSS pixels of a chart's caption, of the rollouts written below it, and of the gap where none are."""
SPARE = 240
"""CSS pixels: a window is taller than the page that it shows, and by how much differs; cut off again."""
SECONDS = 60

PAPER = """
:root { color-scheme: light }
body { background: #fff; margin: 0; width: %dpx; --left: 58px; --right: 58px }
.panel { margin: 0; border: 0; border-radius: 0; padding: 0; background: #fff }
figcaption { height: %dpx; margin: 0; padding: 6px 6px 0; flex-wrap: nowrap; white-space: nowrap }
.panel::after { content: ""; display: block; height: %dpx }
.panel.bare::after { height: %dpx }
.panel:not(.bare) .plot::after { content: "rollout"; position: absolute; top: 100%%; right: -52px;
  margin-top: 6px; font-size: 11px; line-height: 1; color: var(--soft) }
.totable, .note, .cursor { display: none }
.mark { pointer-events: none }
"""


def browser() -> str:
    """The command of a Chromium or Chrome.

    Raises:
        InputError: there is none, with the next move.
    """
    named = os.environ.get("CHROMIUM", "")
    found = shutil.which(named) if named else next(filter(None, map(shutil.which, NAMES)), None)
    if found is None and not named and os.access(MACINTOSH, os.X_OK):
        found = MACINTOSH
    if found is None:
        raise InputError(
            (
                f"CHROMIUM={named} is no program"
                if named
                else "--png needs Chromium or Chrome, and none is here"
            )
            + "; install one (Debian: apt-get install chromium), name it with CHROMIUM=/path, or copy the run"
            " folders to a machine that has one. The page itself can be written without: leave out --png"
        )
    return found


def write_pictures(runs: Sequence[RunData], folder: Path) -> list[Path]:
    """One PNG per figure into the folder.

    Raises:
        InputError: no browser, or the folder cannot be written.
        RunError: the browser draws nothing.
    """
    command = browser()
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise InputError(
            f"{folder} cannot be made ({error.strerror}); give another folder to --png"
        ) from error
    return [_picture(command, panels, folder / f"{name}.png") for name, panels in figures(runs)]


def figures(runs: Sequence[RunData]) -> Iterator[tuple[str, list[Panel]]]:
    """(file name, charts from top to bottom) of every figure; charts with nothing to show are left out."""
    groups = group_runs(runs)
    if len(groups) > 1:
        for panel in compared.compared(groups, Look(span_of(runs), POINTS, {})):
            if not panel.missing:
                yield f"compared-{_safe(panel.key)}", [panel]
    for group in groups:
        for name, panels in _figures(group):
            shown = [panel for panel in panels if not panel.missing]
            if shown:
                yield f"{_safe(group.label)}-{name}", shown


def _figures(group: Group) -> Iterator[tuple[str, list[Panel]]]:
    rows = {(run.folder, i): f"s{i}" for run in group.runs for i in range(len(run.steps))}
    look = Look(span_of(group.runs), POINTS, rows)
    reward = charts.reward_and_kl(group, look)
    knobs = list(timelines.knobs(group, look))
    yield "reward-kl", [reward]
    yield "decisions", [reward, *knobs]
    yield "clip-ratio", [charts.clip_ratio(group, look)]
    yield "policy-ratio", list(charts.policy_ratio(group, look))
    yield "kl-step", [charts.drift(group, look)]
    yield "speed", [charts.simple(group, look, "tokens_per_second", "Throughput"), charts.memory(group, look)]


def _safe(name: str) -> str:
    return re.sub(r"[^\w.+-]+", "-", name).strip("-") or "run"


def _picture(command: str, panels: Sequence[Panel], target: Path) -> Path:
    panels = [*panels[:-1], replace(panels[-1], numbered=True)]
    height = sum(ABOVE + panel.height + (BELOW if panel.numbered else BARE) for panel in panels)
    style = _light(asset("page.css")) + PAPER % (WIDTH, ABOVE, BELOW, BARE)
    body = "".join(draw(panel, f"p{i}") for i, panel in enumerate(panels))
    page = f'<!doctype html><html lang="en"><head><meta charset="utf-8"><title>{esc(target.stem)}</title>'
    page += tag("style", style) + f"</head><body>{body}</body></html>"
    with tempfile.TemporaryDirectory(prefix="autotune-") as place:
        source, drawn = Path(place) / "page.html", Path(place) / "page.png"
        source.write_text(page, "utf-8")
        _shoot(command, source, drawn, height + SPARE, Path(place) / "profile")
        target.write_bytes(cropped(drawn.read_bytes(), height * SCALE))
    return target


def cropped(png: bytes, rows: int) -> bytes:
    """The upper `rows` pixel rows of a PNG: what follows a row is never needed to read it."""
    width, _, depth, kind = struct.unpack(">IIBB", png[16:26])
    line = 1 + width * depth * {0: 1, 2: 3, 3: 1, 4: 2, 6: 4}[kind] // 8
    chunks = list(_chunks(png))
    pixels = zlib.decompress(b"".join(body for name, body in chunks if name == b"IDAT"))[: rows * line]
    header = png[16:20] + struct.pack(">I", len(pixels) // line) + png[24:29]
    others = [(n, b) for n, b in chunks if n not in (b"IHDR", b"IDAT", b"IEND")]
    made = [(b"IHDR", header), *others, (b"IDAT", zlib.compress(pixels, 9)), (b"IEND", b"")]
    return png[:8] + b"".join(chunk(name, body) for name, body in made)


def _chunks(png: bytes) -> Iterator[tuple[bytes, bytes]]:
    at = 8
    while at < len(png):
        size = int.from_bytes(png[at : at + 4], "big")
        yield png[at + 4 : at + 8], png[at + 8 : at + 8 + size]
        at += size + 12


def _light(style: str) -> str:
    """Without the colours for dark screens: paper is white."""
    return style.replace("prefers-color-scheme: dark", "max-width: 0")


def _shoot(command: str, source: Path, target: Path, height: int, profile: Path) -> None:
    options = [
        command, "--headless", "--disable-gpu", "--hide-scrollbars", "--no-first-run", "--disable-extensions",
        "--disable-background-networking", "--disable-component-update", "--disable-sync",
        f"--user-data-dir={profile}", f"--window-size={WIDTH},{height}",
        f"--force-device-scale-factor={SCALE}", f"--screenshot={target}", source.as_uri(),
    ]  # fmt: skip
    if os.geteuid() == 0:
        options.insert(1, "--no-sandbox")
    try:
        done = subprocess.run(options, capture_output=True, timeout=SECONDS, check=False)
        why = done.stderr.decode("utf-8", "replace").strip()[-300:]
    except (OSError, subprocess.TimeoutExpired) as error:
        why = str(error)
    if not target.is_file():
        said = why or "it said nothing"
        said = why or "it said nothing"
        raise RunError(f"{command} drew no picture: {said}; name another one with CHROMIUM=/path")
