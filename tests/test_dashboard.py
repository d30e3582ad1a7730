"""`autotune dashboard`: what it compares, and its page as a browser shows it inside MLflow."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from autotune.dashboard import Wanted, answers, browse, free_port, select, storage_beside, study_page
from autotune.errors import InputError
from autotune.journal import Journal
from autotune.recipe.schema import Recipe
from tests import journal_lines as j
from tests.browser import Browser, needs_chromium

ROLLOUTS = 12
MLFLOWS_OWN = ("/mlflow/users/current", "ResizeObserver loop")
"""What MLflow's pages complain of without any page of ours: an address that is not there, and its charts."""


def write_run(folder: Path, name: str, gain: float, changed_at: int) -> Path:
    """A finished run whose series are all different from another one's; one knob changes after a rollout."""
    folder.mkdir(parents=True)
    recipe = Recipe(name=name).model_dump(mode="json")
    (folder / "recipe.resolved.json").write_text(json.dumps(recipe))
    change = j.change("X1", "actor_learning_rate", 3e-5, 3e-4)
    lines = [j.header(**recipe), j.evaluation(0, 0.1, 0.1)]
    for t in range(ROLLOUTS):
        metrics = {"reward_mean": 0.1 + gain * t, "kl_ref": gain * t, "clip_ratio": gain / 5, "entropy": 1.0}
        knobs = {"actor_learning_rate": 3e-4 if t > changed_at else 3e-5}
        lines.append(j.rollout(t, metrics, knobs, changes=[change] if t == changed_at else []))
    with Journal(folder / "journal.jsonl") as journal:
        for line in [*lines, j.evaluation(ROLLOUTS, 0.1 + gain, 0.1 + gain), j.end()]:
            rest = {k: v for k, v in line.items() if k not in ("v", "type", "rollout")}
            journal.append(line["type"], line["rollout"], rest)
    return folder


@pytest.fixture
def runs(tmp_path: Path) -> Path:
    write_run(tmp_path / "runs" / "tuned-1", "tuned", 0.05, changed_at=4)
    write_run(tmp_path / "runs" / "plain-1", "plain", 0.01, changed_at=8)
    return tmp_path / "runs"


def test_folders_stand_for_the_runs_in_them_and_uploaded_copies_are_none(runs: Path) -> None:
    copy = runs / "mlflow-artifacts" / "autotune" / "x" / "artifacts"
    write_run(copy, "copy", 0.0, changed_at=1)
    chosen = select([runs / "tuned-1", runs])
    assert [run.name for run in chosen.runs] == ["tuned-1", "plain-1"]
    assert chosen.uri == f"sqlite:///{runs / 'mlflow.db'}"
    assert chosen.experiment == "autotune"


def test_growing_journal_is_noticed_once(runs: Path) -> None:
    chosen = select([runs])
    assert chosen.grown()
    assert not chosen.grown()
    with (runs / "plain-1" / "journal.jsonl").open("a") as file:
        file.write("\n")
    assert chosen.grown()
    assert not chosen.grown()


def test_folder_without_runs_is_bad_input(tmp_path: Path) -> None:
    with pytest.raises(InputError, match=r"no run in .* expected folders with a journal.jsonl"):
        select([tmp_path, tmp_path / "none"])


def test_taken_port_leads_to_the_next() -> None:
    import socket

    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        assert free_port(port) > port


def test_study_beside_its_trials_is_found_and_passwords_come_from_the_environment(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    trial = tmp_path / "sweep" / "trial-1"
    trial.mkdir(parents=True)
    assert storage_beside([trial]) is None
    (tmp_path / "sweep" / "study.json").write_text(json.dumps({"storage": "sqlite:////x/study.db"}))
    assert storage_beside([trial]) == storage_beside([tmp_path / "sweep"]) == "sqlite:////x/study.db"
    (tmp_path / "sweep" / "study.json").write_text(json.dumps({"storage": "postgresql://me:***@h/db"}))
    monkeypatch.setenv("AUTOTUNE_STORAGE", "postgresql://me:secret@h/db")
    assert storage_beside([trial]) == "postgresql://me:secret@h/db"


def test_study_without_its_program_is_told_the_next_move(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("shutil.which", lambda *_, **__: None)
    with study_page(Wanted([tmp_path], study="sqlite:///x.db"), Console()) as address:
        assert address == ""
    assert "pip install optuna-dashboard" in capsys.readouterr().out


@pytest.mark.slow
def test_study_has_pages_of_its_own_beside(tmp_path: Path) -> None:
    pytest.importorskip("optuna_dashboard")
    optuna = pytest.importorskip("optuna")
    storage = f"sqlite:///{tmp_path / 'study.db'}"
    optuna.create_study(storage=storage, study_name="gains", direction="maximize")
    (tmp_path / "study.json").write_text(json.dumps({"storage": storage}))
    with study_page(Wanted([tmp_path]), Console()) as address:
        assert "<title>Optuna Dashboard</title>" in fetched(address)
        assert '"gains"' in fetched(address.replace("/dashboard/", "/api/studies"))
    assert not answers(address)


def fetched(address: str) -> str:
    with urllib.request.urlopen(address, timeout=20) as answer:
        return str(answer.read().decode())


def test_no_browser_is_opened_without_a_screen(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sys.platform", "linux")
    monkeypatch.setattr("webbrowser.open", lambda page: pytest.fail("a browser was opened"))
    for name in ("DISPLAY", "WAYLAND_DISPLAY"):
        monkeypatch.delenv(name, raising=False)
    assert not browse("http://127.0.0.1:1")


# In a browser.


class Served:
    """`autotune dashboard` as a process of its own."""

    def __init__(self, folder: Path, *options: str) -> None:
        command = [sys.executable, "-m", "autotune", "dashboard", str(folder), "--no-browser", "--port", "0"]
        env = {**os.environ, "PYTHONUNBUFFERED": "1"}
        self.process = subprocess.Popen([*command, *options], stdout=subprocess.PIPE, text=True, env=env)
        self.links: dict[str, str] = {}
        self.said: list[str] = []

    def listen(self) -> None:
        """Take in what it says until it is ready."""
        assert self.process.stdout is not None
        for line in self.process.stdout:
            self.said.append(line)
            name, _, link = line.partition("http")
            if link:
                self.links[name.strip()] = "http" + link.strip()
            if line.startswith("Ctrl-C"):
                return
        pytest.fail(f"the dashboard ended: {self.said}")

    def end(self) -> int:
        self.process.send_signal(signal.SIGTERM)  # as Ctrl-C
        return self.process.wait(30)


@pytest.mark.slow
def test_killed_dashboard_leaves_no_server_behind(served: Served) -> None:
    address = served.links["all runs"].partition("#")[0]
    assert answers(address)
    served.process.kill()
    until = time.monotonic() + 30
    while answers(address):
        assert time.monotonic() < until
        time.sleep(0.2)


@pytest.fixture
def served(runs: Path) -> Iterator[Served]:
    pytest.importorskip("mlflow")
    served = Served(runs)
    try:
        served.listen()
        yield served
    finally:
        if served.process.poll() is None:
            served.process.kill()
        served.process.communicate()


class Frame:
    """The document in MLflow's frame: shut off from the page around it, in a process of its own."""

    def __init__(self, browser: Browser) -> None:
        self.browser = browser
        browser.wait("!!document.querySelector('iframe.mlflow-html-iframe')")
        browser.call("Target.setAutoAttach", autoAttach=True, waitForDebuggerOnStart=False, flatten=True)
        until = time.monotonic() + 60
        while not (attached := browser.events("Target.attachedToTarget")):
            assert time.monotonic() < until, "MLflow's frame has no document"
            time.sleep(0.1)
        self.session = str(attached[-1]["sessionId"])
        for domain in ("Runtime", "Log"):  # what the frame complains of reaches `problems` too
            self.call(f"{domain}.enable")
        self.wait("document.readyState == 'complete' && !!document.querySelector('figure')")

    def call(self, method: str, **params: Any) -> dict[str, Any]:
        outer, self.browser._session = self.browser._session, self.session
        try:
            return self.browser.call(method, **params)
        finally:
            self.browser._session = outer

    def script(self, text: str) -> Any:
        answer = self.call("Runtime.evaluate", expression=text, returnByValue=True)
        assert "exceptionDetails" not in answer, answer
        return answer["result"].get("value")

    def wait(self, condition: str, seconds: float = 60.0) -> None:
        until = time.monotonic() + seconds
        while not self.script(condition):
            assert time.monotonic() < until, condition
            time.sleep(0.1)

    def numbers(self, part: str, chart: str) -> dict[str, Any]:
        """What a chart says it draws: positions `x` and curves `s`, each with a name `n` and values `y`."""
        box = f"document.querySelector('{part} figure[data-key=\"{chart}\"]')"
        return dict(json.loads(self.script(f"document.getElementById({box}.id + '-d').textContent")))


def drawn(frame: Frame, chart: str, part: str = "#compared") -> dict[str, list[float]]:
    return {curve["n"]: curve["y"] for curve in frame.numbers(part, chart)["s"]}


@pytest.mark.slow
@needs_chromium()
def test_comparison_shows_both_runs_in_mlflow_without_complaints(served: Served, tmp_path: Path) -> None:
    with Browser(1500, 1000) as browser:
        browser.open(served.links["2 runs compared"])
        frame = Frame(browser)
        for chart, first in (("reward_mean", 0.1), ("kl_ref", 0.0)):
            curves = drawn(frame, chart)
            assert curves["tuned"] == pytest.approx([first + 0.05 * t for t in range(ROLLOUTS)], rel=1e-3)
            assert curves["plain"] == pytest.approx([first + 0.01 * t for t in range(ROLLOUTS)], rel=1e-3)
        assert {n: len(y) for n, y in drawn(frame, "clip_ratio").items()} == {"tuned": 12, "plain": 12}
        assert drawn(frame, "eval_score") == {"tuned": [0.1, 0.15], "plain": [0.1, 0.11]}
        for group, changed_at in (("#group-0", 8), ("#group-1", 4)):
            (rates,) = drawn(frame, "knob/actor_learning_rate", group).values()
            assert rates == [3e-4 if t > changed_at else 3e-5 for t in range(ROLLOUTS)]
        words = frame.script("document.body.innerText")
        assert "0.03 to 0.08" in words
        assert {"1 %", "15 %"} <= set(words.split("\n"))
        browser.picture(tmp_path / "dashboard.png")
        ours = [text for text in browser.problems() if not any(known in text for known in MLFLOWS_OWN)]
        assert ours == []
    assert served.end() == 0
    assert not answers(served.links["all runs"].partition("#")[0])  # and nothing is left running
