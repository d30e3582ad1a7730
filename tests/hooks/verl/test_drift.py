"""`kl_step` in verl: which samples, the right number, and that its failure stops nothing."""

from __future__ import annotations

import logging
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from autotune.hooks.verl.drift import RESPONSES, chosen

Start = Callable[..., Any]


def keys(count: int) -> list[str]:
    return [f"u{i}_0_0" for i in range(count)]


@pytest.mark.parametrize(
    ("real", "padding", "at_once", "expected"),
    [
        (512, 0, 1, RESPONSES),
        (512, 0, 16, RESPONSES),
        (512, 0, 48, 96),  # whole passes, so more than asked
        (512, 8, 512, 512),
        (40, 8, 16, 32),  # what does not fill a pass stays out, and so does padding
        (15, 1, 16, 0),
        (1, 0, 1, 1),
    ],
)
def test_whole_passes_of_real_samples_are_chosen(
    real: int, padding: int, at_once: int, expected: int
) -> None:
    tags = [{"is_padding": i >= real} for i in range(real + padding)]
    found = chosen(keys(real + padding), tags, at_once)
    assert len(found) == len(set(found)) == expected
    assert set(found) <= set(keys(real))


def test_the_choice_is_spread_over_the_batch() -> None:
    found = [int(key[1:].split("_")[0]) for key in chosen(keys(512), [{}] * 512, 8)]
    assert found == list(range(0, 512, 8))


# -- in verl's own trainer -----------------------------------------------------------------------


def controlled(start: Start, rollouts: int, **control: Any) -> Any:
    pytest.importorskip("verl")
    return start(rollouts, {"actor_learning_rate": 0.5}, control=control)


def lines(trainer: Any) -> list[dict[str, Any]]:
    from autotune.journal import read_journal

    path = Path(trainer.config.trainer.default_local_dir) / "journal.jsonl"
    return [line for line in read_journal(path) if line["type"] == "rollout"]


def train(trainer: Any) -> None:
    trainer.fit(trainer.agent_loop_manager)
    trainer.logger.finish(exit_code=0)


@pytest.mark.verl
def test_it_is_the_k3_between_the_weights_before_and_after(start: Start, monkeypatch: Any) -> None:
    """All 32 samples of a step are two passes of 16, so the mean is over all of its tokens."""
    import torch

    trainer = controlled(start, 3, mode="shadow")
    expected = []
    update = type(trainer)._update_actor

    def watched(batch: Any, metrics: Any) -> Any:
        words = torch.tensor(batch.extra_info["answers"]).flatten()
        weights = trainer.actor_rollout_wg.weights
        before = torch.log_softmax(torch.tensor(weights()[0]).double(), 0)
        batch = update(trainer, batch, metrics)
        ratio = (torch.log_softmax(torch.tensor(weights()[0]).double(), 0) - before)[words]
        expected.append(float((ratio.exp() - 1 - ratio).mean()))
        return batch

    monkeypatch.setattr(trainer, "_update_actor", watched)
    train(trainer)
    found = [line["snapshot"]["metrics"]["kl_step"] for line in lines(trainer)]
    assert found == pytest.approx(expected, rel=1e-4) and min(found) > 1e-6
    assert all(line["snapshot"]["metrics"]["time/kl_step_forward"] > 0 for line in lines(trainer))


@pytest.mark.verl
def test_a_pass_that_fails_leaves_the_run_and_the_other_sensors_alone(
    start: Start, monkeypatch: Any, caplog: pytest.LogCaptureFixture
) -> None:
    trainer = controlled(start, 2, mode="act")

    def full(batch: Any) -> Any:
        raise RuntimeError("out of memory")

    monkeypatch.setattr(trainer.actor_rollout_wg, "compute_log_prob", full, raising=False)
    with caplog.at_level(logging.WARNING, logger="autotune"):
        train(trainer)
    assert "could not measure kl_step: RuntimeError: out of memory" in caplog.text
    assert len(lines(trainer)) == 2
    for line in lines(trainer):
        metrics = line["snapshot"]["metrics"]
        assert metrics.get("kl_step") is None and not math.isnan(metrics["clip_ratio"])


@pytest.mark.verl
@pytest.mark.parametrize(("mode", "passes"), [("off", 0), ("shadow", 2)])
def test_it_costs_nothing_where_nobody_decides(
    start: Start, monkeypatch: Any, mode: str, passes: int
) -> None:
    trainer = controlled(start, 2, mode=mode)
    made: list[int] = []
    forward = trainer.actor_rollout_wg.compute_log_prob

    def counted(batch: Any) -> Any:
        made.append(len(batch.keys))
        return forward(batch)

    monkeypatch.setattr(trainer.actor_rollout_wg, "compute_log_prob", counted)
    train(trainer)
    assert made == [32] * passes


@pytest.mark.verl
def test_the_sensor_lets_the_learning_rate_rule_move_a_timid_run(start: Start) -> None:
    pytest.importorskip("verl")
    control = {"mode": "act", "profile": "recommended", "pace": 0.1}
    trainer = start(12, {"actor_learning_rate": 0.02}, control=control)
    train(trainer)
    moved = [
        change["values"]["actor_learning_rate"]
        for line in lines(trainer)
        for change in line["decision"]["changes"]
        if change["rule"] == "X1"
    ]
    assert moved and moved[0] > 0.02
    last = [line["snapshot"]["metrics"]["kl_step"] for line in lines(trainer)]
    assert max(last[-3:]) > 3 * max(last[:2]), last


@pytest.mark.verl
def test_with_the_samplers_log_probs_it_is_not_offered(start: Start) -> None:
    pytest.importorskip("verl")
    from autotune.hooks.verl.adapter import VerlAdapter

    more = ("algorithm.rollout_correction.bypass_mode=true",)
    adapter = VerlAdapter(start(1, {}, more))
    assert not adapter.measures_drift
    assert "bypass_mode" in adapter.facts().metric_capability["kl_step"].reason
