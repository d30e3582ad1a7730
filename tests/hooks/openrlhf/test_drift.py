"""`kl_step` in OpenRLHF: which experiences, the right number, and that its failure stops nothing."""

from __future__ import annotations

import logging
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from autotune.hooks.openrlhf.drift import chosen

Start = Callable[..., Any]


@pytest.mark.parametrize(
    ("sizes", "ranks", "expected"),
    [
        ([4] * 64, 2, list(range(0, 64, 4))),  # 16 experiences of 4 are 64 responses
        ([16] * 8, 3, [0, 1, 2, 4, 5, 6]),  # 4 would do, but each of three ranks gets as many
        ([4] * 8, 2, list(range(8))),  # all there are
        ([4] * 5, 2, [0, 1, 2, 3]),
        ([128] * 4, 2, [0, 2]),
        ([4], 2, []),
    ],
)
def test_experiences_are_spread_over_the_rollout(sizes: list[int], ranks: int, expected: list[int]) -> None:
    found = chosen(sizes, ranks)
    assert found == expected and len(found) % ranks == 0


def lines(trainer: Any) -> list[dict[str, Any]]:
    from autotune.journal import read_journal

    path = Path(trainer.args.ckpt.path) / "journal.jsonl"
    return [line for line in read_journal(path) if line["type"] == "rollout"]


def shares(actor: Any) -> Any:
    """Log-probs of the words, [WORDS]."""
    return actor.model.logits.detach().clone().double().log_softmax(0)


@pytest.mark.openrlhf
def test_it_is_the_k3_between_the_weights_before_and_after(start: Start, monkeypatch: Any) -> None:
    """The eight experiences of a rollout hold 32 responses, so all of them are measured on. The toy's actors
    do not share gradients: each measures its own, against the first one's old log-probs.
    """
    import torch

    trainer = start(3, {"actor_learning_rate": 0.5}, control={"mode": "shadow"})
    expected, update = [], type(trainer).__mro__[1].ppo_train

    def watched(self: Any, step: int) -> Any:
        actors = [handle.actor for handle in self.actor_model_group._actor_handlers]
        words = [
            torch.cat([item.sequences.flatten()[-4:] for item in actor.trainer.replay_buffer.items])
            for actor in actors
        ]
        before = shares(actors[0])
        status = update(self, step)
        ratio = torch.cat([(shares(a) - before)[w] for a, w in zip(actors, words, strict=True)])
        expected.append(float((ratio.exp() - 1 - ratio).mean()))
        return status

    monkeypatch.setattr(type(trainer).__mro__[1], "ppo_train", watched)
    trainer.fit()
    found = [line["snapshot"]["metrics"]["kl_step"] for line in lines(trainer)]
    assert found == pytest.approx(expected, rel=1e-3) and min(found) > 1e-6


@pytest.mark.openrlhf
def test_a_pass_that_fails_leaves_the_run_and_the_other_sensors_alone(
    start: Start, monkeypatch: Any, caplog: pytest.LogCaptureFixture
) -> None:
    trainer = start(2, {}, control={"mode": "act"})
    for handle in trainer.actor_model_group._actor_handlers:

        def full(*given: Any, **named: Any) -> Any:
            raise RuntimeError("out of memory")

        monkeypatch.setattr(handle.actor, "forward", full)
    with caplog.at_level(logging.WARNING, logger="autotune"):
        trainer.fit()
    assert "could not measure kl_step: RuntimeError: out of memory" in caplog.text
    found = [line["snapshot"]["metrics"] for line in lines(trainer)]
    assert len(found) == 2 and all(m.get("kl_step") is None and m["clip_ratio"] is not None for m in found)


@pytest.mark.openrlhf
@pytest.mark.parametrize(("mode", "passes"), [("off", 0), ("shadow", 2)])
def test_it_costs_nothing_where_nobody_decides(
    start: Start, monkeypatch: Any, mode: str, passes: int
) -> None:
    trainer = start(2, {}, control={"mode": mode})
    made: list[int] = []
    actor = trainer.actor_model_group._actor_handlers[0].actor
    forward = actor.forward

    def counted(*given: Any, **named: Any) -> Any:
        made.append(1)
        return forward(*given, **named)

    monkeypatch.setattr(actor, "forward", counted)
    trainer.fit()
    assert len(made) == 4 * passes  # four experiences on each of the two actors


@pytest.mark.openrlhf
def test_while_only_the_critic_is_trained_there_is_no_drift(start: Start, monkeypatch: Any) -> None:
    trainer = start(2, {}, control={"mode": "shadow"})
    trainer.args.critic.freezing_steps = 0  # the first step's actor stands still
    trainer.fit()
    found = [line["snapshot"]["metrics"].get("kl_step") for line in lines(trainer)]
    assert found[0] is None and found[1] > 0


@pytest.mark.openrlhf
def test_the_sensor_lets_the_learning_rate_rule_move_a_timid_run(start: Start) -> None:
    control = {"mode": "act", "profile": "recommended", "pace": 0.1}
    trainer = start(12, {"actor_learning_rate": 0.02}, control=control)
    trainer.fit()
    moved = [
        change["values"]["actor_learning_rate"]
        for line in lines(trainer)
        for change in line["decision"]["changes"]
        if change["rule"] == "X1"
    ]
    assert moved and moved[0] > 0.02
