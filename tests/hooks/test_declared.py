"""What the adapters declare is well formed, loads no trainer, and is what the page prints."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from autotune.hooks.declared import ADAPTERS, COMMAND, declaration, page
from autotune.knobs import KNOBS, Liveness
from autotune.metrics import METRICS, spec_of

ROOT = Path(__file__).parent.parent.parent
HEAVY = ("torch", "transformers", "trl", "verl", "openrlhf", "ray", "deepspeed")


def test_the_page_is_what_the_adapters_declare() -> None:
    printed = (ROOT / "docs" / "integrations.md").read_text("utf-8")
    assert printed == page(), f"run: {COMMAND}"


@pytest.mark.parametrize("trainer", ADAPTERS)
def test_a_declaration_uses_canonical_names_once(trainer: str) -> None:
    found = declaration(trainer)
    assert found.trainer == trainer and found.sensor and found.lines.strip()
    names = [row.name for row in found.metrics] + list(found.missing or {})
    assert len(names) == len(set(names))
    for name in names:
        spec_of(name)
    assert set(METRICS) == {name for name in names if "/" not in name}, "every metric has its row"
    assert len({row.name for row in found.knobs}) == len(found.knobs) > 0
    for row in found.knobs:
        assert row.name in KNOBS
        assert bool(row.config) == (row.liveness is Liveness.RESTART), row.name
        assert row.where or row.liveness not in (Liveness.LIVE, Liveness.NEXT_ROLLOUT), row.name


@pytest.mark.parametrize("trainer", ADAPTERS)
def test_declarations_load_no_trainer(trainer: str) -> None:
    code = (
        f"import sys; from autotune.hooks.declared import declaration; declaration({trainer!r})\n"
        f"print([m for m in {HEAVY!r} if m in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, cwd=ROOT)
    assert done.stdout.strip() == "[]", done.stdout + done.stderr


def test_a_knob_that_moves_in_some_runs_only_has_a_line_for_the_others() -> None:
    line = declaration("verl").restart_line("train_batch_size", 64, {"rollout_n": 8})
    assert line == "data.train_batch_size=64"
    line = declaration("openrlhf").restart_line("actor_learning_rate", 1e-6, {})
    assert line == "--actor.adam.lr 1e-06"


def test_versions_and_restart_lines() -> None:
    trl = declaration("trl")
    assert trl.untested("1.16.0") == "" and trl.untested("1.16.3") == ""
    assert "1.17.0 has not been tested" in trl.untested("1.17.0") and "1.16.x" in trl.untested("1.17.0")
    assert "1.1.0" in trl.untested("1.1.0")
    verl = declaration("verl")
    assert verl.untested("0.9.1") == "" and verl.untested("0.9.1+local") == ""
    assert "0.9.10 has not been tested" in verl.untested("0.9.10"), "a whole version is no beginning"
    line = trl.restart_line("train_batch_size", 64, {"rollout_n": 8, "train_batch_size": 32})
    assert line == "GRPOConfig(generation_batch_size=512)"
    assert trl.restart_line("kl_coef", 0.1, {}) == "" and trl.restart_line("nothing", 1, {}) == ""
