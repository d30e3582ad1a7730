"""`autotune dashboard`: MLflow's user interface on the loopback interface, open at a comparison of runs.

    run folders -> deliver what is missing -> page from the journals -> artifact in MLflow -> browser

The page is the one of `autotune report`: reward, KL with its band, clip ratio with its lines, knobs
with their decisions, held-out scores. It is drawn again while a run's journal grows; reload to see.
A study that lies beside the runs is shown by optuna-dashboard, where that is installed.
"""

from __future__ import annotations

import contextlib
import importlib.util
import io
import json
import os
import shutil
import socket
import subprocess
import sys
import tempfile
import time
import urllib.parse
import urllib.request
import webbrowser
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

from rich.console import Console

from autotune.children import sigterm_as_ctrl_c
from autotune.errors import EnvironmentProblem, InputError, RunError
from autotune.launch import ends_with_parent

if TYPE_CHECKING:
    from autotune.tracking.receipt import Receipt

JOURNAL, STUDY = "journal.jsonl", "study.json"
HOST = "127.0.0.1"
START_SECONDS = 90.0
MOST_SIDE_BY_SIDE = 40
"""Runs in one address; more make it longer than browsers like."""
LOOK_SECONDS = 5.0
"""Between two looks at whether a journal has grown."""
STORAGE_VARIABLE = "AUTOTUNE_STORAGE"
"""Where the URL of a study's storage stands when it holds a password."""
QUIET = {
    "MLFLOW_DISABLE_TELEMETRY": "true", "DO_NOT_TRACK": "true", "OMP_NUM_THREADS": "1",
    "MLFLOW_SERVER_ENABLE_JOB_EXECUTION": "false",  # evaluates nothing here, and starts processes for it
}  # fmt: skip


@dataclass(frozen=True, slots=True)
class Wanted:
    """What the command line asks for."""

    folders: Sequence[Path]
    uri: str | None = None
    """Another store than the runs' own."""
    port: int = 5000
    """Of MLflow's interface; the next free one is taken when it is in use. 0 is any."""
    study: str | None = None
    """URL of an Optuna storage, when no study lies beside the runs."""
    browse: bool = True


@dataclass
class Selection:
    """The runs to compare, and where they are tracked."""

    runs: list[Path]
    uri: str
    experiment: str
    stamps: dict[Path, int] = field(default_factory=dict)
    """Journal -> its length when it was last drawn."""

    def grown(self) -> bool:
        """Whether a journal is longer than when this was last asked."""
        now = {run: (run / JOURNAL).stat().st_size for run in self.runs}
        grown, self.stamps = now != self.stamps, now
        return grown


def dashboard(wanted: Wanted, console: Console) -> None:
    """Serve until Ctrl-C, or a polite kill.

    Raises:
        InputError: there is no run in the folders.
        EnvironmentProblem: MLflow is not installed.
        RunError: MLflow did not start, or refused the page.
    """
    if importlib.util.find_spec("mlflow") is None:
        raise EnvironmentProblem("MLflow is not installed: pip install 'autotune-rl[track]'")
    chosen = select(wanted.folders, wanted.uri)
    with sigterm_as_ctrl_c(), contextlib.ExitStack() as stack:
        with console.status("delivering what MLflow misses …") if console.is_terminal else stack:
            missing = deliver(chosen)
        for text in missing:
            console.print(f"• {text}", style="yellow", markup=False, soft_wrap=True)
        address = stack.enter_context(interface(chosen.uri, wanted.port))
        study = stack.enter_context(study_page(wanted, console))
        page = address + show(chosen, address)
        _tell(console, chosen, page, address, study)
        if wanted.browse:
            browse(page)
        with contextlib.suppress(KeyboardInterrupt):
            follow(chosen, address)


# -- what is compared --------------------------------------------------------------------------------


def select(folders: Sequence[Path], uri: str | None = None) -> Selection:
    """Run folders, and those below a folder that is none itself; the first one says where they are tracked.

    Raises:
        InputError: none of them holds a run.
    """
    from autotune.tracking.feeder import resolve_uri

    runs = list(dict.fromkeys(run for folder in folders for run in _runs_in(folder)))
    if not runs:
        named = ", ".join(map(str, folders))
        raise InputError(f"no run in {named}: expected folders with a {JOURNAL}; make one with: autotune run")
    experiment = _mlflow_settings(runs[0]).get("experiment") or "autotune"
    return Selection(runs, resolve_uri(runs[0], uri), str(experiment))


def _runs_in(folder: Path) -> Iterator[Path]:
    from autotune.tracking.spawn import runs_below

    if (folder / JOURNAL).is_file():
        yield folder
    elif folder.is_dir():
        yield from runs_below(folder)


def _mlflow_settings(run: Path) -> Mapping[str, object]:
    with contextlib.suppress(OSError, ValueError, KeyError):
        recipe = json.loads((run / "recipe.resolved.json").read_text("utf-8"))
        return dict(recipe["tracking"]["mlflow"])
    return {}


# -- into MLflow -------------------------------------------------------------------------------------


def deliver(chosen: Selection) -> list[str]:
    """Bring what is missing of the runs tracked there; what could not be brought, in words."""
    from autotune.tracking import feeder
    from autotune.tracking.receipt import read_receipt

    problems = []
    for run in chosen.runs:
        receipt = read_receipt(run)
        if (receipt and receipt.finished) or feeder.resolve_uri(run, None) != chosen.uri or feeder.busy(run):
            continue  # delivered, tracked elsewhere, or being delivered at this moment
        said = io.StringIO()
        with contextlib.redirect_stderr(said), contextlib.redirect_stdout(said):
            code = feeder.main([str(run), "--patience", "0"])
        if code:
            problems.append(f"{run}: {(said.getvalue().strip().splitlines() or ['not delivered'])[-1]}")
    return problems


def show(chosen: Selection, address: str) -> str:
    """Draw the page and put it into MLflow; its path behind the server's address."""
    from autotune.report import render
    from autotune.report.command import read_all
    from autotune.tracking.comparison import publish
    from autotune.tracking.patience import brief

    chosen.grown()
    html = render(*read_all(chosen.runs))
    try:
        place = publish(chosen.uri, chosen.experiment, chosen.runs, html, note(chosen, address))
    except Exception as error:  # the store's own errors are of many kinds
        raise RunError(f"MLflow did not take the comparison: {brief(error, chosen.uri)}") from error
    return place.path


def note(chosen: Selection, address: str) -> str:
    """The description of the comparison in MLflow: which runs, with links to their own pages."""
    lines = ["Drawn from the journals of these runs; the page is under **Artifacts**.", ""]
    there = tracked(chosen)
    for run in chosen.runs:
        receipt = there.get(run)
        page = f"{address}/#/experiments/{receipt.experiment_id}/runs/{receipt.run_id}" if receipt else ""
        lines.append(f"- [{run.name}]({page})" if page else f"- {run.name}")
    return "\n".join(lines)


def side_by_side(chosen: Selection, address: str) -> str:
    """MLflow's own page that compares params and last metrics; empty with less than two runs there."""
    there = list(tracked(chosen).values())[:MOST_SIDE_BY_SIDE]
    if len(there) < 2:
        return ""
    runs, places = [r.run_id for r in there], sorted({r.experiment_id for r in there})
    fields = {"runs": _compact(runs), "experiments": _compact(places)}
    return f"{address}/#/compare-runs?{urllib.parse.urlencode(fields)}"


def _compact(names: list[str]) -> str:
    return json.dumps(names, separators=(",", ":"))  # a space would become a plus, and stay one in MLflow


def tracked(chosen: Selection) -> dict[Path, Receipt]:
    """The runs that are in this store, each with where it is there."""
    from autotune.tracking.receipt import read_receipt
    from autotune.tracking.store import safe_uri

    known = {run: read_receipt(run) for run in chosen.runs}
    store = safe_uri(chosen.uri)
    return {run: r for run, r in known.items() if r and r.run_id and r.store == store}


def follow(chosen: Selection, address: str) -> None:
    """Draw the page anew whenever a journal has grown; until Ctrl-C."""
    while True:
        time.sleep(LOOK_SECONDS)
        if chosen.grown():
            with contextlib.suppress(RunError):  # a store that is down now; the next look tries again
                show(chosen, address)


# -- servers -----------------------------------------------------------------------------------------


@contextlib.contextmanager
def interface(uri: str, port: int) -> Iterator[str]:
    """The address of MLflow's pages on this store: a server's own, or one that is started here.

    Raises:
        RunError: it did not start, with the last thing it said.
    """
    if uri.startswith(("http://", "https://")):
        yield uri.rstrip("/")
        return
    port = free_port(port)
    command = [
        sys.executable, "-m", "mlflow", "ui", "--host", HOST, "--port", str(port), "--workers", "1",
    ]  # fmt: skip
    address = f"http://{HOST}:{port}"
    with served(command, f"{address}/health", {"MLFLOW_BACKEND_STORE_URI": uri}, "MLflow's interface"):
        yield address


@contextlib.contextmanager
def served(command: Sequence[str], probe: str, settings: Mapping[str, str], what: str) -> Iterator[None]:
    """A server of this command while the block lasts, from when `probe` answers."""
    with tempfile.TemporaryFile() as log:
        process = subprocess.Popen(
            command, stdin=subprocess.DEVNULL, stdout=log, stderr=log, start_new_session=True,
            env={**os.environ, **QUIET, **settings}, preexec_fn=ends_with_parent(),
        )  # fmt: skip
        try:
            _await(process, probe, what, log)
            yield
        finally:
            _end(process)


def _await(process: subprocess.Popen[bytes], probe: str, what: str, log: io.BufferedRandom) -> None:
    until = time.monotonic() + START_SECONDS
    while not answers(probe):
        if process.poll() is not None or time.monotonic() > until:
            log.seek(0)
            said = (log.read().decode(errors="replace").strip().splitlines() or ["nothing"])[-1]
            raise RunError(f"{what} did not start; it said: {said}")
        time.sleep(0.2)


def answers(address: str) -> bool:
    """Whether a page on the loopback interface is there."""
    opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))  # a proxy would ask elsewhere
    with contextlib.suppress(OSError), opener.open(address, timeout=5) as answer:
        return int(answer.status) == 200
    return False


def _end(process: subprocess.Popen[bytes]) -> None:
    """End a server with the workers in its session."""
    for number in (15, 9):
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, number)
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(10)
            return


def free_port(wanted: int) -> int:
    """This port of the loopback interface, or the next one that is free; 0 is any."""
    for port in range(wanted, wanted + 50) if wanted else (0,):
        with socket.socket() as probe:
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            with contextlib.suppress(OSError):
                probe.bind((HOST, port))
                return int(probe.getsockname()[1])
    raise InputError(f"ports {wanted} to {wanted + 49} are all in use; give another one with --port")


# -- the study ---------------------------------------------------------------------------------------


@contextlib.contextmanager
def study_page(wanted: Wanted, console: Console) -> Iterator[str]:
    """The address of the study's own pages; empty when there is none, or nothing to show it with."""
    storage = wanted.study or storage_beside(wanted.folders)
    if storage is None:
        yield ""
        return
    program = shutil.which("optuna-dashboard", path=_search_path())
    if program is None:
        console.print(
            "• the study's own pages need optuna-dashboard: pip install optuna-dashboard",
            style="yellow", markup=False,
        )  # fmt: skip
        yield ""
        return
    port = free_port(8080)
    command = [program, storage.removeprefix("journal:"), "--host", HOST, "--port", str(port)]
    address = f"http://{HOST}:{port}/dashboard/"
    with served(command, address, {}, "optuna-dashboard"):
        yield address


def _search_path() -> str:
    """Programs of this Python's environment come first: it may not be activated."""
    return os.pathsep.join([str(Path(sys.executable).parent), os.environ.get("PATH", "")])


def storage_beside(folders: Sequence[Path]) -> str | None:
    """The storage of the first study that lies in one of the folders or around a run of it."""
    for folder in folders:
        for place in (folder, *folder.resolve().parents[:2]):
            with contextlib.suppress(OSError, ValueError, KeyError):
                storage = str(json.loads((place / STUDY).read_text("utf-8"))["storage"])
                return os.environ.get(STORAGE_VARIABLE) if "***" in storage else storage
    return None


# -- the person --------------------------------------------------------------------------------------


def _tell(console: Console, chosen: Selection, page: str, address: str, study: str) -> None:
    count = len(chosen.runs)
    rows = {
        f"{count} run{'s' * (count != 1)} compared": page,
        "params side by side": side_by_side(chosen, address),
        "all runs": f"{address}/#/experiments",
        "study": study,
    }
    for name, link in rows.items():
        if link:
            console.print(f"{name:<20} {link}", markup=False, highlight=False, soft_wrap=True)
    console.print("Ctrl-C ends it.", style="dim")


def browse(page: str) -> bool:
    """Open a browser where there is a screen for one; a text browser would take over the terminal."""
    screens = ("DISPLAY", "WAYLAND_DISPLAY")
    if sys.platform.startswith("linux") and not any(os.environ.get(name) for name in screens):
        return False
    with contextlib.suppress(webbrowser.Error):
        return webbrowser.open(page)
    return False
