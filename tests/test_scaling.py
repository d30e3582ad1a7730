"""The scaling experiment: its runs, what it reads of them, and the cost model."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from autotune.recipe import Recipe
from experiments.scaling import __main__ as scaling
from experiments.scaling import cost, rows
from experiments.scaling.arms import arms, fields

POINT = {"sample": 4.0, "train": 2.0, "sync": 0.1, "total": 6.5}
RUN = cost.Run(parameters=1e9, updates=4, micro_batches=8, stage=2)


# -- runs ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("tiny", [True, False])
def test_every_run_is_a_valid_recipe_with_the_same_global_batch(tiny: bool) -> None:
    sizes = set()
    for arm in arms(tiny):
        data: dict[str, Any] = {}
        for name, value in fields(arm, "builtin:digits", tiny).items():
            *sections, last = name.split(".")
            place = data
            for section in sections:
                place = place.setdefault(section, {})
            place[last] = value
        trainer = Recipe.model_validate(data).trainer
        sizes.add((trainer.train_batch_size, trainer.rollout_n, trainer.ppo_mini_batch_size))
    assert len(sizes) == 1


def test_both_launchers_and_both_uses_of_a_second_gpu_are_run(tmp_path: Path) -> None:
    lines = [(arm.name, scaling.command(arm, tmp_path / "run", "m", False)) for arm in arms(False)]
    assert sum("torch.distributed.run" in line for _, line in lines) == 1
    assert sum("--nproc" in line for _, line in lines) == 5
    served = [line for name, line in lines if "serves" in name]
    assert len(served) == 2 and all("--nproc" not in line for line in served)
    assert sum("rollout.one_step_off=true" in line for line in served) == 1


# -- rows ----------------------------------------------------------------------------------------


def journal(path: Path, rollouts: int, **more: Any) -> Path:
    lines: list[dict[str, Any]] = [{"v": 1, "type": "header", "prev": ""}]
    for t in range(rollouts):
        slow = 10.0 if t < rows.WARM_UP else 1.0
        times = {"total": 4.0 * slow, "rollout": 2.0 * slow, "update": slow, "old_log_prob": 0.5 * slow}
        metrics = {"reward_mean": t / 10, "tokens_per_second": 100.0 / slow}
        line = {"v": 1, "type": "rollout", "rollout": t, "prev": "", "snapshot": {"metrics": metrics}}
        lines.append({**line, "decision": {"restore": None}, "applied": [], "times": times, **more})
    moved = {"knob": "clip_range_low", "requested": 0.1, "read_back": 0.1, "error": ""}
    lines.append({"v": 1, "type": "command", "rollout": 2, "prev": "", "applied": [moved]})
    lines.append({"v": 1, "type": "end", "rollout": rollouts, "prev": "", "status": "done"})
    path.write_text("".join(json.dumps(line) + "\n" for line in lines), "utf-8")
    return path


def test_times_are_medians_without_the_warm_up(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = journal(tmp_path / "journal.jsonl", 6)
    monkeypatch.setattr(rows, "read_journal", lambda p: map(json.loads, p.read_text("utf-8").splitlines()))
    row = rows.read(path)
    assert row["seconds"] == {"total": 4.0, "rollout": 2.0, "weight_sync": 0.0} and row["training"] == 1.5
    assert row["tokens_per_second"] == 100.0 and row["status"] == "done" and not row["disagreed"]
    assert [(item["knob"], item["rollout"]) for item in row["applied"]] == [("clip_range_low", 2)]
    whole = row | {"shape": "135m", "arm": "two", "ranks": 2, "gpus": 2, "peak_gib": [1.5, 2.0]}
    assert "| 135m | two | 4.00 | 2.00 | 1.50 | 0.000 | 50 | 1.5, 2.0 | done |" in rows.table([whole])
    with pytest.raises(ValueError, match="expected more than 3"):
        rows.read(journal(tmp_path / "journal.jsonl", 3))


def test_what_was_not_run_is_named() -> None:
    failed = {"shape": "135m", "arm": "one GPU, ZeRO 2", "ranks": 1, "gpus": 1, "failed": "exit code 1: x"}
    text = scaling.show([failed], tiny=False)
    assert "exit code 1: x" in text and "Not run, or failed: 135m, one GPU, ZeRO 2; 135m, two GPUs" in text


@pytest.mark.parametrize(("code", "failed"), [(0, False), (3, False), (1, True), (-9, True)])
def test_a_run_that_broke_off_is_a_failure_however_far_it_came(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, code: int, failed: bool
) -> None:
    program = f"import os; os._exit({code})" if code >= 0 else f"import os; os.kill(os.getpid(), {-code})"
    monkeypatch.setattr(scaling, "command", lambda *given: [sys.executable, "-c", program])
    monkeypatch.setattr(rows, "read", lambda path: {"rollouts": 9, "status": ""})
    (tmp_path / "runs").mkdir()
    row = scaling.make(arms(True)[0], tmp_path, "m", True)
    assert ("failed" in row) == failed and row["exit_code"] == code


def test_the_table_tells_how_far_the_samplers_weights_were_off() -> None:
    told = list(scaling._mismatch([{"shape": "135m", "arm": "served", "kl_mismatch": [None, 2e-4, 1e-3]}]))
    assert told == ["- 135m, served: kl_mismatch at most 0.001 nats/token\n"]
    assert list(scaling._mismatch([{"shape": "s", "arm": "a", "kl_mismatch": [None]}, {"arm": "b"}])) == []


# -- the model -----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("stage", "gpus", "expected"),
    [
        (2, 1, 0.0),
        (2, 2, 4 * 0.5 * 2e9 * 2),  # updates x (N - 1) / N x bytes x (reduce-scatter, all-gather)
        (3, 2, 4 * 0.5 * 2e9 * 3 * 4),  # and three of them for each of the four micro batches of a rank
        (3, 64, 4 * (63 / 64) * 2e9 * 3),
    ],
)
def test_traffic_is_zeros(stage: int, gpus: int, expected: float) -> None:
    run = cost.Run(parameters=1e9, updates=4, micro_batches=8, stage=stage)
    assert cost.traffic(run, gpus) == pytest.approx(expected)


def test_between_machines_the_network_is_the_slowest_link() -> None:
    assert cost.bandwidth(8) == cost.NVLINK and cost.bandwidth(16) == cost.NETWORK


def test_one_point_takes_sampling_for_fixed_and_two_tell_what_is_shared() -> None:
    one = cost.Point(gpus=1, **POINT)
    alone = cost.fit([one])
    assert (alone.sample_fixed, alone.sample_shared, alone.compute) == (4.0, 0.0, 2.0)
    assert alone.rest == pytest.approx(0.4)
    both = cost.fit([one, cost.Point(gpus=2, **{**POINT, "sample": 3.0})])
    assert (both.sample_fixed, both.sample_shared) == (2.0, 2.0)
    assert cost.rollout(both, RUN, 1) == pytest.approx(one.total)
    with pytest.raises(ValueError, match="expected one of them to be 1"):
        cost.fit([cost.Point(gpus=2, **POINT)])


@given(st.integers(1, 3), st.sampled_from([1, 2, 4, 8]))
def test_without_communication_only_computing_is_divided(stage: int, gpus: int) -> None:
    run = cost.Run(parameters=1e9, updates=4, micro_batches=64, stage=stage)
    costs = cost.fit([cost.Point(gpus=1, **POINT)])
    fixed = costs.sample_fixed + costs.sync + costs.rest
    assert cost.rollout(costs, run, gpus) - cost.communication(run, gpus) == pytest.approx(fixed + 2.0 / gpus)


def test_one_step_off_takes_the_longer_of_the_two() -> None:
    costs = cost.fit([cost.Point(gpus=1, **POINT)])
    assert cost.overlapped(costs, RUN, 1, 1) == pytest.approx(4.0 + 0.1 + 0.4)
    slow = cost.fit([cost.Point(gpus=1, **{**POINT, "sample": 1.0, "total": 3.5})])
    assert cost.overlapped(slow, RUN, 1, 1) == pytest.approx(2.0 + 0.1 + 0.4)


@pytest.mark.parametrize(("shape", "micro_batches"), [("135m", 4), ("1.5b", 16)])
def test_the_models_sizes_are_the_recipes(shape: str, micro_batches: int) -> None:
    run = scaling._traffic(shape, 3)
    assert (run.updates, run.micro_batches, run.stage) == (4, micro_batches, 3)
    assert run.parameters == pytest.approx({"135m": 135e6, "1.5b": 1.54e9}[shape], rel=0.02)


def test_the_model_stands_beside_what_was_measured() -> None:
    def measured(arm: str, ranks: int, total: float) -> dict[str, Any]:
        seconds = {"total": total, "rollout": 4.0, "weight_sync": 0.1}
        more = {"kl_mismatch": [], "rewards": [0.5], "applied": [], "restores": [], "disagreed": []}
        sizes = {"gpus": 2, "peak_gib": [], "tokens_per_second": 1.0, "status": "done"}
        names = {"shape": "135m", "arm": arm, "ranks": ranks}
        return names | {"seconds": seconds, "training": 2.0, **more, **sizes}

    one = measured("one GPU, ZeRO 2", 1, 6.5)
    ahead = measured("one trains, one serves, one step off", 1, 5.0)
    text = "\n".join(scaling._model([one, measured("two GPUs, ZeRO 3", 2, 5.5), ahead]))
    assert "- one trains, one serves, one step off: predicted 4.50, measured 5.00 (-10%)" in text
    assert "- two GPUs, ZeRO 3: predicted 5.5" in text and "ZeRO 2: predicted" not in text
    assert "From one GPU and two" not in text
