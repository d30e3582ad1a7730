"""One control.yaml in our trainer, in TRL and in anyone's loop: equal raw numbers, equal decisions.

The numbers are those of a run on the plant, replayed open-loop to all three; TRL gets them in its own
spelling, as logs of single updates. What is compared is everything but the words for rules that are silent.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from autotune.hooks.generic import Autotune
from autotune.hooks.guest import JOURNAL
from autotune.hooks.loop import ControlLoop
from autotune.hooks.trl import AutotuneCallback
from autotune.hooks.trl.adapter import GENERATION, UPDATE
from autotune.hooks.trl.declared import METRICS
from autotune.journal import Journal, read_journal
from autotune.recipe import load_control
from autotune.testing.fake import FakeTrainer
from autotune.trainer.records import RolloutRecord
from tests.hooks.trl_runs import GROUP, LENGTH, PROMPTS, make_trainer
from tests.tiny_model import tiny_folder

pytestmark = pytest.mark.slow
ROLLOUTS = 40
CONTROL = """\
mode: act
profile: recommended
pin: [ppo_mini_batch_size, ppo_epochs, temperature, entropy_coef, max_response_length]
policies: {B1: off, B2: off, A2: off}
"""
START = {
    **{"train_batch_size": PROMPTS, "rollout_n": GROUP, "ppo_mini_batch_size": 4, "micro_batch_size": 8},
    **{"actor_learning_rate": 2e-3, "kl_coef": 0.02, "max_response_length": LENGTH},
}
SEEN = {row.name for row in METRICS} - {"kl_mismatch", "eval_score", "tokens_per_second"}


@pytest.fixture(scope="module")
def raw() -> list[RolloutRecord]:
    """A run that starts timid, then a wild step and a NaN: many rules have something to say."""
    fake = FakeTrainer({**START, "actor_learning_rate": 1e-4}, seed=4, rollouts=ROLLOUTS)
    records = [fake.advance() for _ in range(ROLLOUTS)]
    for t in range(24, 30):
        records[t].scalars["kl_step"] = 0.09
    records[33].scalars["kl_step"] = 0.7
    records[36].scalars["grad_norm"] = float("nan")
    return records


def seen(record: RolloutRecord) -> dict[str, float]:
    return {k: v for k, v in record.scalars.items() if k in SEEN and v is not None}


def decisions(path: Path) -> list[dict[str, Any]]:
    lines = [line for line in read_journal(path) if line["type"] == "rollout"]
    return [{k: v for k, v in line["decision"].items() if k != "silent"} for line in lines]


def in_our_trainer(raw: list[RolloutRecord], control: Path, out: Path) -> Path:
    from autotune.controller import Controller, ControlSettings

    fake = FakeTrainer(START, rollouts=ROLLOUTS)
    section = load_control(control)
    controller = Controller(ControlSettings(**section.model_dump()), fake.facts())
    out.mkdir()
    fake.advance()
    with Journal(out / JOURNAL) as journal:
        loop = ControlLoop(fake, controller, journal)
        for record in raw:
            fake._undo = fake.state
            knobs, epoch = fake.live.vector(), fake.live.epoch
            loop.on_rollout(RolloutRecord(record.rollout, knobs, epoch, seen(record)))
    return out / JOURNAL


def in_a_loop(raw: list[RolloutRecord], control: Path, out: Path) -> Path:
    fake = FakeTrainer(START, rollouts=ROLLOUTS)

    def knob(name: str) -> Any:
        return (lambda: fake.live[name], lambda value: fake.live.set_many({name: value}))

    knobs = {name: knob(name) for name in fake.live.vector()}
    tuner = Autotune(
        control, knobs, rollouts=ROLLOUTS, folder=out, reward_maximum=1.0, undo=lambda: None, critic=False
    )
    for record in raw:
        tuner.step(seen(record))
    tuner.close()
    assert not tuner.broken
    return out / JOURNAL


def in_trl(raw: list[RolloutRecord], control: Path, out: Path, model: Path) -> Path:
    """A real trainer that has begun; its logs are ours, in its spelling, and go the way of its logs."""
    trainer = make_trainer(model, out, ROLLOUTS)
    callback = AutotuneCallback(trainer, control, reward_maximum=1.0)
    trainer.add_callback(callback)
    keys = {ours: key for key, ours in {**GENERATION, **UPDATE}.items()}
    hooked: dict[str, float] = {}

    def feed(data: Any) -> None:
        begin(data)
        adapter, guest = callback.adapter, callback.guest
        assert adapter is not None and guest is not None and adapter.hook is not None
        adapter.hook.finish = lambda: (dict(hooked), {}, {})  # type: ignore[method-assign]
        for record in raw:
            numbers = seen(record)
            log = {keys[name]: value for name, value in numbers.items() if name in keys}
            log |= {"learning_rate": numbers["learning_rate"], "loss": 0.0}
            rest = {key: value for key, value in log.items() if key not in GENERATION}
            hooked.clear()
            hooked.update({name: value for name, value in numbers.items() if name not in keys})
            for update in (log, rest):
                callback._count(2)
                callback.on_log(trainer.args, trainer.state, trainer.control, dict(update))
        assert not callback.failed and not guest.broken, callback.failed or guest.broken
        guest.end()
        raise KeyboardInterrupt

    begin = callback._begin
    callback._begin = feed  # type: ignore[method-assign]
    with pytest.raises(KeyboardInterrupt):
        trainer.train()
    return out / JOURNAL


@pytest.fixture(scope="module", autouse=True)
def _offline() -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("HF_HUB_OFFLINE", "1")
        patch.setenv("HF_HUB_DISABLE_TELEMETRY", "1")
        yield


def test_equal_numbers_make_equal_decisions_everywhere(raw: list[RolloutRecord], tmp_path: Path) -> None:
    control = tmp_path / "control.yaml"
    control.write_text(CONTROL, "utf-8")
    ours = decisions(in_our_trainer(raw, control, tmp_path / "ours"))
    loops = decisions(in_a_loop(raw, control, tmp_path / "loop"))
    trls = decisions(in_trl(raw, control, tmp_path / "trl", tiny_folder(tmp_path / "model")))
    assert len(ours) == len(loops) == len(trls) == ROLLOUTS
    for mine, generic, trl in zip(ours, loops, trls, strict=True):
        assert mine == generic, f"rollout {mine['rollout']}: our trainer and a loop differ"
        assert mine == trl, f"rollout {mine['rollout']}: our trainer and TRL differ"
    told = [(d["rollout"], c["rule"]) for d in ours for c in d["changes"]]
    assert len(told) >= 3, told
    assert any(d["restore"] for d in ours) and any(d["state"] == "hold" for d in ours)
