"""The command line: exit codes, readable errors, nothing heavy, nothing left behind."""

from __future__ import annotations

import json
import subprocess
import sys
import types
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

import autotune
import autotune.run as run_module
from autotune.cli import app
from autotune.errors import ControlStop, RunError

QUICKSTART = Path(__file__).parent.parent / "experiments" / "quickstart" / "timid.yaml"

runner = CliRunner()


@pytest.fixture(autouse=True)
def elsewhere(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("NO_COLOR", "1")


def call(*arguments: str) -> Any:
    return runner.invoke(app, list(arguments))


def file(text: str, name: str = "r.yaml") -> str:
    Path(name).write_text(text)
    return name


def test_version_and_help() -> None:
    assert call("--version").output == f"autotune {autotune.__version__}\n"
    for command in ("run", "check", "replay", "doctor", "sync"):
        assert command in call("--help").output
        assert call(command, "--help").exit_code == 0


def test_check_of_a_good_recipe() -> None:
    done = call("check", str(QUICKSTART), "trainer.rollouts=7")
    assert done.exit_code == 0 and "7 rollouts" in done.output and "X1" in done.output
    data = json.loads(call("check", str(QUICKSTART), "--json").output)
    assert data["valid"] and data["recipe"]["name"] == "timid"


BAD = {
    "typo": ("trainer: {klcoef: 1}", "r.yaml:1: trainer.klcoef: ", "did you mean kl_coef?"),
    "wrong type": ('seed: "1"', "r.yaml:1: seed: ", "remove the quotes"),
    "off the lattice": (
        "trainer:\n  ppo_mini_batch_size: 24",
        "r.yaml:2: trainer.ppo_mini_batch_size: ",
        "use 1, 2, 4, 8, 16, 32, 64",
    ),
    "duplicate key": ("seed: 1\nseed: 2", "r.yaml:2: seed: ", "already set in line 1"),
    "unknown rule": (
        "control: {policies: {b4b: off}}",
        "r.yaml:1: control.policies.b4b: ",
        "did you mean B4b?",
    ),
    "missing model folder": ("model: {path: ./m}", "r.yaml:1: model.path: ", "no folder './m'"),
    "missing reward column": (
        "task: {type: jsonl, path: d.jsonl}",
        "r.yaml:1: task.answer_column: ",
        "missing reward column 'answer'",
    ),
}


@pytest.mark.parametrize("command", ["check", "run"])
@pytest.mark.parametrize("kind", BAD)
def test_bad_recipes_exit_2_with_line_and_suggestion_and_start_nothing(
    kind: str, command: str
) -> None:
    text, place, hint = BAD[kind]
    file('{"prompt": "p", "label": "a"}\n', "d.jsonl")
    done = call(command, file(text))
    assert done.exit_code == 2, done.output
    assert place in done.stderr and hint in done.stderr
    assert "1 problem, nothing was started" in done.stderr
    assert sorted(p.name for p in Path().iterdir()) == ["d.jsonl", "r.yaml"]


def test_problems_as_json_for_programs() -> None:
    done = call("check", file("trainer: {klcoef: 1}\nseed: x"), "--json")
    data = json.loads(done.stdout)
    assert done.exit_code == 2 and not data["valid"]
    assert [p["path"] for p in data["problems"]] == ["trainer.klcoef", "seed"]
    assert data["problems"][1]["where"] == "r.yaml:2"


def test_problems_of_overrides_are_placed_on_the_command_line() -> None:
    done = call("check", str(QUICKSTART), "trainer.klcoef=3", "nonsense")
    assert done.exit_code == 2
    assert "command line: trainer.klcoef: unknown field; received 3" in done.stderr


@pytest.fixture
def fake_run(monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    """`autotune run` without training: what it was called with, and an error to raise."""
    seen: dict[str, Any] = {}

    def run(recipe: Any, *, resume: Any) -> None:
        seen.update(recipe=recipe, resume=resume)
        if seen.get("raise"):
            raise seen["raise"]

    monkeypatch.setattr(run_module, "run", run)
    return seen


def test_run_takes_overrides_and_resume(fake_run: dict[str, Any]) -> None:
    assert call("run", str(QUICKSTART), "seed=3").exit_code == 0
    assert fake_run["recipe"].folder() == "runs/timid-3" and fake_run["resume"] is False
    Path("old").mkdir()
    file(fake_run["recipe"].model_dump_json(), "old/recipe.resolved.json")
    for arguments in (("--resume", "old"), ("--resume", "old", "tracking.mlflow.enabled=false")):
        assert call("run", *arguments).exit_code == 0
        assert fake_run["recipe"].seed == 3 and fake_run["resume"] == Path("old")
    assert not fake_run["recipe"].tracking.mlflow.enabled
    assert call("run", str(QUICKSTART), "--resume", "old").exit_code == 0
    assert fake_run["recipe"].seed == 1


@pytest.mark.parametrize(
    ("error", "code", "word"),
    [
        (ControlStop("third collapse"), 3, "stopped by the controller: third collapse"),
        (RunError("out of disk"), 1, "failed: out of disk"),
        (KeyboardInterrupt(), 130, ""),
    ],
)
def test_exit_codes(fake_run: dict[str, Any], error: BaseException, code: int, word: str) -> None:
    fake_run["raise"] = error
    done = call("run", str(QUICKSTART))
    assert done.exit_code == code and word in done.stderr


@pytest.mark.parametrize(
    ("arguments", "word"),
    [
        (("run",), "which recipe?"),
        (("run", "--resume", "none"), "there is no run in none"),
        (("run", "none.yaml"), "no such file"),
        (("check", "none.yaml"), "no such file"),
        (("doctor", "tlr"), "expected one of native, trl, verl, openrlhf"),
    ],
)
def test_bad_arguments_exit_2(arguments: tuple[str, ...], word: str) -> None:
    done = call(*arguments)
    assert done.exit_code == 2 and word in done.stderr


def test_replay_of_nothing_and_of_a_control_file() -> None:
    done = call("replay", "none.jsonl")
    assert done.exit_code == 1 and "cannot be read" in done.stderr
    done = call("replay", "none.jsonl", "--control", file("mode: acts"))
    assert done.exit_code == 2 and "r.yaml:1: control.mode: " in done.stderr
    done = call("replay", "none.jsonl", "--control", file("control: {mode: act}\nseed: 1"))
    assert done.exit_code == 1, "a whole recipe is good for its control section"


def test_sync_of_no_run_exits_2() -> None:
    assert call("sync", "none").exit_code == 2


def test_doctor_as_json() -> None:
    done = call("doctor", "--json")
    names = [item["what"] for item in json.loads(done.stdout)["findings"]]
    assert "python" in names and done.exit_code in (0, 1)


HEAVY = ("torch", "transformers", "deepspeed", "mlflow", "optuna", "pandas", "scipy")


LIGHT = [["doctor"], ["replay", "none"], ["run", "none.yaml"], ["ctl", "none", "status"]]


@pytest.mark.parametrize("arguments", LIGHT)
def test_other_commands_load_nothing_heavy_either(arguments: list[str]) -> None:
    program = (
        "import sys, runpy\n"
        f"sys.argv = ['autotune', *{arguments!r}]\n"
        "try:\n    runpy.run_module('autotune', run_name='__main__')\n"
        "except SystemExit:\n    pass\n"
        f"print([m for m in {HEAVY!r} if m in sys.modules])\n"
    )
    root = str(Path(autotune.__file__).parent.parent)
    done = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, env={"PYTHONPATH": root}
    )
    assert done.stdout.splitlines()[-1] == "[]", done.stderr


def test_the_module_is_the_command(monkeypatch: pytest.MonkeyPatch) -> None:
    called = types.SimpleNamespace(times=0)
    monkeypatch.setattr("autotune.cli.main", lambda: setattr(called, "times", 1))
    import runpy

    runpy.run_module("autotune", run_name="__main__")
    assert called.times == 1


def test_a_sweep_without_a_space_and_a_worker_without_a_storage_exit_2() -> None:
    """Optuna is not asked for before these are known."""
    recipe = file("seed: 1\n")
    needs = ((["sweep", recipe], "no `sweep` section"), (["sweep", "--worker"], "--storage URL"))
    for arguments, word in needs:
        done = call(*arguments)
        assert done.exit_code == 2 and word in done.output.replace("\n", " ")
