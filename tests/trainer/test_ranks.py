"""Two ranks train what one rank trains: the same prompts, tokens, losses and meters."""

from __future__ import annotations

import io
import json
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from rich.console import Console
from safetensors.torch import load_file

from autotune.journal import read_journal
from autotune.recipe import Recipe
from autotune.run import run
from autotune.trainer.checkpoint import find_checkpoints
from autotune.trainer.ranks import Ranks

ROOT = Path(__file__).resolve().parents[2]

PROGRAM = """
import json, sys
from pathlib import Path
from autotune.recipe import Recipe
from autotune.trainer.loop import Trainer

folder = Path(sys.argv[1])
trainer = Trainer(Recipe.model_validate_json((folder / "recipe.json").read_text()), folder)
records = []
trainer.run(records.append)
weights = {k: v.tolist() for k, v in trainer.parts.engine.state_tensors().items()}
told = [{"scalars": r.scalars, "histograms": r.histograms} for r in records]
path = folder / f"rank-{trainer.parts.ranks.rank}.json"
path.write_text(json.dumps({"told": told, "weights": weights}))
from autotune.trainer.group import leave_now
leave_now(0)
"""


def train(folder: Path, recipe: Recipe, ranks: int) -> list[dict[str, Any]]:
    """Run the program on so many ranks; what each of them has at the end."""
    folder.mkdir()
    (folder / "recipe.json").write_text(recipe.model_dump_json())
    (folder / "program.py").write_text(PROGRAM)
    launcher = ["-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={ranks}"]
    subprocess.run(
        [sys.executable, *launcher, str(folder / "program.py"), str(folder)],
        check=True,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        timeout=300,
    )
    return [json.loads((folder / f"rank-{rank}.json").read_text()) for rank in range(ranks)]


@pytest.mark.slow
def test_two_ranks_are_one(make_recipe: Callable[..., Recipe], tmp_path: Path) -> None:
    """Groups of one prompt per update are cut between the ranks, which the algebra allows."""
    recipe = make_recipe(
        rollouts=2,
        ppo_mini_batch_size=1,
        micro_batch_size=2,
        rollout_micro_batch_size=16,
        actor_learning_rate=0.003,
    )
    alone = train(tmp_path / "one", recipe, 1)[0]
    first, second = train(tmp_path / "two", recipe, 2)
    assert first["weights"] == second["weights"]
    assert first["told"][0]["histograms"] == second["told"][0]["histograms"]
    for name, value in alone["weights"].items():
        assert np.allclose(value, first["weights"][name], atol=1e-5), name
    for one, two in zip(alone["told"], first["told"], strict=True):
        for name in ("reward_mean", "response_length_mean", "clip_ratio", "zero_std_fraction"):
            assert one["scalars"][name] == two["scalars"][name]
        for name in ("kl_ref", "kl_step", "entropy", "loss", "grad_norm"):
            assert one["scalars"][name] == pytest.approx(two["scalars"][name], rel=1e-3, abs=1e-6)


def test_parts_cover_everything_once() -> None:
    rows = np.arange(10)
    parts = [Ranks(rank, 4).share(rows) for rank in range(4)]
    assert np.concatenate(parts).tolist() == rows.tolist()


def test_whole_puts_rows_in_their_places() -> None:
    part = torch.tensor([[1.0, 2.0], [3.0, 4.0]])
    got = Ranks().whole(np.array([2, 0]), part, 3)
    assert got.tolist() == [[3.0, 4.0], [0.0, 0.0], [1.0, 2.0]]


# -- real runs on two ranks ------------------------------------------------------------------------


@dataclass(frozen=True)
class TwoRanks:
    """What `two_ranks.py` left behind."""

    folder: Path
    recipe: Recipe

    def told(self, job: str) -> list[dict[str, Any]]:
        return [json.loads((self.folder / f"{job}-{rank}.json").read_text()) for rank in range(2)]

    def rollouts(self, job: str) -> list[dict[str, Any]]:
        return [ln for ln in read_journal(self.folder / job / "journal.jsonl") if ln["type"] == "rollout"]


@pytest.fixture(scope="module")
def two(make_recipe: Callable[..., Recipe], tmp_path_factory: pytest.TempPathFactory) -> TwoRanks:
    """All jobs of `two_ranks.py`, done once."""
    folder = tmp_path_factory.mktemp("two")
    sections = {
        "control": {"mode": "act", "pace": 0.1},
        "tracking": {"mlflow": {"enabled": False}},
        "eval": {"every": 3, "prompts": 4},
        "checkpoint": {"every": 1, "keep": 2},
    }
    recipe = make_recipe(sections, rollouts=3, actor_learning_rate=0.1, rollout_micro_batch_size=16)
    (folder / "recipe.json").write_text(recipe.model_dump_json())
    launch_two(["-m", "tests.trainer.two_ranks", str(folder)])
    return TwoRanks(folder, recipe)


def launch_two(program: list[str]) -> None:
    """Under torchrun, as a user would."""
    subprocess.run(
        [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2", *program],
        check=True,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        cwd=ROOT,
        timeout=300,
    )


@pytest.mark.slow
@pytest.mark.parametrize("job", ["zero1", "zero3"])
def test_a_knob_change_and_a_veto_happen_on_both_ranks(two: TwoRanks, job: str) -> None:
    first, second = two.told(job)
    line = next(ln for ln in two.rollouts(job) if ln["restored"] is not None)
    rollout = line["rollout"]
    assert line["decision"]["restore"]["kind"] == "undo"
    assert any(item["knob"] == "actor_learning_rate" and not item["error"] for item in line["applied"])
    # The weights are those from before the rollout's updates, moments and all, and the same on both.
    assert first["undone"][0] == first["snapshots"][rollout] and len(first["undone"]) >= 1
    assert first["undone"] == second["undone"]
    assert first["weights"] == second["weights"] and len(first["weights"]) == 3
    # Both read back the same vector after every decision, the changed learning rate among it.
    assert first["digests"] == second["digests"] and len(first["digests"]) >= 3
    changed = {item["knob"]: item["read_back"] for item in line["applied"]}
    for told in (first, second):
        after = told["vectors"][1 + rollout]  # 0 is the start
        assert {knob: after[knob] for knob in changed} == changed


@pytest.mark.slow
@pytest.mark.parametrize("job", ["zero1", "zero3"])
def test_ratios_of_two_ranks_are_counted_like_plain_ones(two: TwoRanks, job: str) -> None:
    """Shares and histograms in the journal against numpy over every token that either rank saw."""
    ranks = [told["ratios"] for told in two.told(job)]
    for line in two.rollouts(job):
        updates = [a + b for a, b in zip(*(rank[line["rollout"]] for rank in ranks), strict=True)]
        snapshot = line["snapshot"]
        low, high = (snapshot["knobs"][f"clip_range_{side}"] for side in ("low", "high"))
        for update, log_ratios in enumerate(updates):
            ratio = np.exp(np.array(log_ratios, dtype=np.float32))
            shares = {
                "ratio_low": float(np.mean(ratio < 1 - low)),
                "ratio_in": float(np.mean((ratio >= 1 - low) & (ratio <= 1 + high))),
                "ratio_high": float(np.mean(ratio > 1 + high)),
            }
            for name, share in shares.items():
                assert snapshot["per_update"][name][update] == pytest.approx(share, abs=1e-9)
        edges = np.concatenate([[-np.inf], np.linspace(-np.log(8), np.log(8), 65), [np.inf]])
        for name, parts in {"policy_ratio": updates, "policy_ratio_last": updates[-1:]}.items():
            counted = np.histogram(np.concatenate([np.array(p) for p in parts]), edges)[0]
            got = np.array(snapshot["histograms"][name])
            assert got.sum() == counted.sum()
            # A float32 log-ratio on an edge may fall to either side of it in float64.
            assert np.abs(got - counted).sum() <= 0.02 * counted.sum()


@pytest.mark.slow
def test_when_one_rank_does_not_obey_both_keep_the_old_vector(two: TwoRanks) -> None:
    first, second = two.told("stubborn")
    line = next(ln for ln in two.rollouts("stubborn") if ln["applied"])
    assert all("different vectors; the previous one was put" in item["error"] for item in line["applied"])
    assert first["vectors"][1 + line["rollout"]]["actor_learning_rate"] == pytest.approx(0.1 / 3)
    assert second["vectors"][1 + line["rollout"]]["actor_learning_rate"] == pytest.approx(0.1)
    for ln in two.rollouts("stubborn"):
        assert ln["snapshot"]["knobs"]["actor_learning_rate"] == pytest.approx(0.1)
    later = [ln for ln in two.rollouts("stubborn") if ln["rollout"] > line["rollout"]]
    assert all("actor_learning_rate" not in {i["knob"] for i in ln["applied"]} for ln in later)
    assert first["weights"] == second["weights"]


@pytest.mark.slow
def test_a_full_disk_ends_both_ranks_and_leaves_the_last_checkpoint(two: TwoRanks) -> None:
    first, second = two.told("full")
    assert first["problem"] == second["problem"]
    assert "rollout-00001 not written: No space left on device" in first["problem"]
    assert "rollout-00000 is the last whole checkpoint" in first["problem"]
    root = two.folder / "full" / "checkpoints"
    assert sorted(path.name for path in root.iterdir()) == ["latest", "rollout-00000"]
    assert [path.name for path in find_checkpoints(root)] == ["rollout-00000"]
    end = read_journal(two.folder / "full" / "journal.jsonl")[-1]
    assert end["status"] == "failed" and "No space left" in end["reason"]


@pytest.mark.slow
@pytest.mark.parametrize("job", ["zero1", "zero3"])
def test_a_run_of_two_ranks_goes_on_alone(two: TwoRanks, job: str, tmp_path: Path) -> None:
    """Killed after two of three rollouts: the third is the same, but for the order of its sums."""
    folder = tmp_path / job
    shutil.copytree(two.folder / job, folder)
    shutil.rmtree(folder / "checkpoints" / "rollout-00003")
    journal = folder / "journal.jsonl"
    kinds = [(line["type"], line["rollout"]) for line in read_journal(journal)]
    kept = journal.read_text().splitlines(keepends=True)[: kinds.index(("rollout", 2))]
    journal.write_text("".join(kept))
    stage = {"zero_stage": int(job[-1])}
    recipe = Recipe.model_validate({**two.recipe.model_dump(), "run_dir": str(folder), "deepspeed": stage})
    run(recipe, resume=True, console=Console(file=io.StringIO()))
    lines = read_journal(journal)
    assert [ln["from"] for ln in lines if ln["type"] == "resumed"] == [2]
    alone, before = [ln for ln in lines if ln["type"] == "rollout"][-1], two.rollouts(job)[-1]
    assert alone["rollout"] == before["rollout"] == 2
    batches = [ln["snapshot"]["knobs"]["num_rollout_batches"] for ln in (before, alone)]
    assert batches == [1, 2], "of 16 samples each: two ranks draw one each, one draws two"
    for name in ("reward_mean", "response_length_mean", "zero_std_fraction"):
        assert alone["snapshot"]["metrics"][name] == before["snapshot"]["metrics"][name]
    for name in ("kl_ref", "entropy", "loss", "grad_norm", "kl_step"):
        mine, theirs = (ln["snapshot"]["metrics"][name] for ln in (alone, before))
        assert value(mine) == pytest.approx(value(theirs), rel=2e-3, abs=1e-5), name
    mine, theirs = (
        load_file(root / job / "checkpoints/rollout-00003/optimizer.safetensors")
        for root in (tmp_path, two.folder)
    )
    for name, tensor in mine.items():
        torch.testing.assert_close(tensor, theirs[name], rtol=1e-3, atol=2e-4, msg=name)


def value(reading: Any) -> float:
    return float(reading["value"] if isinstance(reading, dict) else reading)


@pytest.mark.slow
def test_ctrl_c_on_the_command_line_saves_on_both_ranks(
    make_recipe: Callable[..., Recipe], tmp_path: Path
) -> None:
    """And starting it again as if it were new fails once, not once per rank."""
    recipe = make_recipe(
        {"run_dir": "run", "tracking": {"mlflow": {"enabled": False}}, "deepspeed": {"zero_stage": 2}},
        rollouts=500,
        rollout_micro_batch_size=16,
    )
    (tmp_path / "r.json").write_text(recipe.model_dump_json())
    command = [sys.executable, "-m", "autotune", "run", "r.json", "--nproc", "2"]
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "CI": "1"}
    journal = tmp_path / "run" / "journal.jsonl"
    with subprocess.Popen(command, cwd=tmp_path, env=environment, text=True,
                          stdout=subprocess.PIPE, stderr=subprocess.PIPE) as process:  # fmt: skip
        deadline = time.monotonic() + 200
        while not (journal.exists() and '"type":"rollout"' in journal.read_text()):
            assert process.poll() is None and time.monotonic() < deadline
            time.sleep(0.1)
        process.send_signal(signal.SIGINT)
        out, err = process.communicate(timeout=200)
    assert process.returncode == 130, err
    assert "resume with: autotune run --resume run --nproc 2" in out
    last = find_checkpoints(tmp_path / "run" / "checkpoints")[0]
    lines = read_journal(journal)
    assert (lines[-1]["type"], lines[-1]["status"]) == ("end", "interrupted")
    assert last.name == f"rollout-{max(ln['rollout'] for ln in lines if ln['type'] == 'rollout') + 1:05d}"
    more = {"text": True, "capture_output": True, "timeout": 200}
    again = subprocess.run(command, cwd=tmp_path, env=environment, **more)
    assert again.returncode == 2
    assert again.stderr.count("the run folder run exists already") == 1
