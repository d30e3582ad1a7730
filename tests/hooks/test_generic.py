"""A loop of one's own: getters and setters, metrics by name, and nothing that reaches the loop."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from autotune.errors import InputError
from autotune.hooks.generic import DECLARED, Autotune, GenericAdapter
from autotune.hooks.guest import JOURNAL, Guest, read_control
from autotune.journal import read_journal
from autotune.replay import replay
from autotune.testing.contracts import GuestContract
from autotune.testing.fake import FakeTrainer
from autotune.trainer.records import RolloutRecord

LR = "actor_learning_rate"
STAY = (
    *("num_rollout_batches", "rollout_micro_batch_size"),
    *("train_batch_size", "rollout_n", "max_prompt_length"),
)
"""Knobs that this loop gives as numbers."""


def pair(fake: FakeTrainer, name: str) -> tuple[Callable[[], float], Callable[[float], object]]:
    return lambda: fake.live[name], lambda value: fake.live.set_many({name: value})


def loop_of(fake: FakeTrainer) -> dict[str, Any]:
    """The plant as somebody's loop: most knobs behind getters and setters."""
    return {name: fake.live[name] if name in STAY else pair(fake, name) for name in fake.live.vector()}


def told(record: RolloutRecord) -> dict[str, Any]:
    """What a user's loop has at hand of one rollout."""
    return dict(record.scalars)


def tuner_on(
    fake: FakeTrainer, folder: Path, control: Any, rollouts: int = 40, **options: Any
) -> Autotune:
    return Autotune(
        control, loop_of(fake), rollouts=rollouts, folder=folder, reward_maximum=1.0,
        undo=fake.undo_rollout, **options,
    )  # fmt: skip


def drive(fake: FakeTrainer, tuner: Autotune, rollouts: int) -> list[dict[str, float]]:
    changed = []
    for _ in range(rollouts):
        record = fake.advance()
        changed.append(
            tuner.step(told(record), per_update=record.per_update, histograms=record.histograms)
        )
    return changed


class TestALoopKeepsTheContract(GuestContract):
    declared = DECLARED
    restores = frozenset({"undo"})
    sparse_metrics = frozenset({"eval_score"})

    @pytest.fixture(autouse=True)
    def _prepare(self, tmp_path: Path) -> None:
        self.folder, self.made = tmp_path, 0
        self.fakes: dict[int, FakeTrainer] = {}

    def make(self, rollouts: int, knobs: Mapping[str, float]) -> GenericAdapter:
        fake = FakeTrainer(knobs, 3, rollouts)
        tuner = tuner_on(fake, self.folder / "unused", {"mode": "off"}, rollouts)
        adapter = tuner._adapter
        adapter.promise([n for n, v in FakeTrainer(knobs, 3, 2).advance().scalars.items() if v is not None])
        self.fakes[id(adapter)] = fake
        return adapter

    def run(self, adapter: GenericAdapter, on_rollout: Callable[[Any], object]) -> None:
        fake = self.fakes[id(adapter)]
        while fake.rollout < fake.rollouts:
            record = fake.advance()
            row = (record.rollout, told(record), record.per_update, record.histograms)
            on_rollout(adapter.record(*row))

    def weights(self, adapter: GenericAdapter) -> Any:
        return self.fakes[id(adapter)].state

    def host(
        self, rollouts: int, knobs: Mapping[str, float], control: Mapping[str, Any], version: str = ""
    ) -> tuple[Guest, Callable[[], object]]:
        self.made += 1
        adapter = self.make(rollouts, knobs)
        folder = self.folder / str(self.made)
        guest = Guest(adapter, read_control(control), folder, DECLARED, version=version)

        def train() -> None:
            fake = self.fakes[id(adapter)]
            guest.begin()
            for rollout in range(rollouts):
                seen = told(fake.advance())
                guest.on_rollout(partial(adapter.record, rollout, seen, {}, {}))
            guest.end()

        return guest, train


def test_three_lines_in_a_loop_rescue_a_run(tmp_path: Path) -> None:
    """Ten times the learning rate: the controller brings it down, through the user's own setter."""
    fake = FakeTrainer({LR: 3e-2}, seed=1, rollouts=40)
    tuner = tuner_on(fake, tmp_path, {"mode": "act"})
    changed = drive(fake, tuner, 40)
    tuner.close()
    assert any(LR in change for change in changed) and fake.live[LR] < 1e-2 and not tuner.broken
    result = replay(tmp_path)
    assert result.equal and len(result.pairs) == 40


def test_state_goes_into_a_checkpoint_and_decisions_go_on(tmp_path: Path) -> None:
    def start() -> FakeTrainer:
        return FakeTrainer({LR: 3e-5}, seed=2, rollouts=40)

    whole = start()
    first = tuner_on(whole, tmp_path / "whole", {"mode": "act"})
    drive(whole, first, 6)
    state, weights, knobs = first.state_dict(), whole.state, whole.live.vector()
    rest = drive(whole, first, 34)

    again = start()
    second = tuner_on(again, tmp_path / "again", {"mode": "act"})
    assert again.live[LR] != knobs[LR], "the changed knobs are not in a new process"
    second.load_state_dict(state)
    again.rollout, again.state = 6, weights
    assert drive(again, second, 34) == rest and any(rest)
    assert again.live.vector() == whole.live.vector()
    with pytest.raises(InputError, match="after the first step"):
        second.load_state_dict(state)


def test_dpo_lets_clip_and_kl_rules_stand_down_with_the_reason(tmp_path: Path) -> None:
    fake = FakeTrainer(seed=1, rollouts=10)
    knobs = {"actor_learning_rate": pair(fake, LR), "kl_coef": 0.1, "train_batch_size": 64}
    tuner = Autotune({"mode": "act"}, knobs, rollouts=10, folder=tmp_path, loss="none")
    for _ in range(4):
        tuner.step({"reward_mean": 0.5, "loss": 0.6, "grad_norm": 1.0, "kl_ref": 0.3})
    silent = next(line for line in read_journal(tmp_path / JOURNAL) if line["type"] == "rollout")
    silent = silent["decision"]["silent"]
    for rule in ("A3", "B4a", "B4b"):
        assert "DPO" in silent[rule] and "no policy ratio" in silent[rule], silent
    for rule in ("B3a", "B3b", "B3c", "X5"):
        assert "DPO" in silent[rule] and "KL penalty" in silent[rule], silent
    assert not tuner.broken


def test_a_knob_that_was_not_told_switches_its_rules_off_and_says_so(tmp_path: Path) -> None:
    fake = FakeTrainer(seed=1, rollouts=10)
    tuner = Autotune({"mode": "act"}, {LR: pair(fake, LR)}, rollouts=10, folder=tmp_path)
    tuner.step({"reward_mean": 0.5, "kl_step": 0.01})
    lines = read_journal(tmp_path / JOURNAL)
    notes = " ".join(line["text"] for line in lines if line["type"] == "note")
    assert "A3" in notes and "train_batch_size" in notes and "not given to Autotune" in notes
    assert lines[0]["recipe"]["control"]["policies"]["A3"] == "off"
    assert "X1" not in lines[0]["recipe"]["control"]["policies"], "the learning rate was told"


def test_a_setter_that_fails_takes_everything_back(tmp_path: Path) -> None:
    fake = FakeTrainer(seed=1, rollouts=10)

    def refuses(value: float) -> None:
        raise ValueError("not today")

    knobs = loop_of(fake) | {"kl_coef": (lambda: 0.01, refuses)}
    adapter = Autotune({"mode": "off"}, knobs, rollouts=10, folder=tmp_path)._adapter
    before = adapter.knobs()
    found = adapter.apply({LR: 1e-4, "kl_coef": 0.02}, 1)
    assert all("not today" in item.error for item in found) and adapter.knobs() == before


def test_a_constant_is_known_and_does_not_move(tmp_path: Path) -> None:
    adapter = Autotune({"mode": "off"}, {LR: 1e-4}, rollouts=10, folder=tmp_path)._adapter
    assert adapter.knobs()[LR] == 1e-4 and not adapter.facts().can_move(LR)
    assert "no setter" in adapter.apply({LR: 2e-4}, 1)[0].error


def test_wrong_input_is_refused_before_anything_starts(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="learning_rat"):
        Autotune({"mode": "off"}, {"learning_rat": 1.0}, rollouts=10, folder=tmp_path)
    with pytest.raises(InputError, match="loss is 'dpo'"):
        Autotune({"mode": "off"}, {LR: 1.0}, rollouts=10, folder=tmp_path, loss="dpo")
    with pytest.raises(InputError, match="does not divide"):
        Autotune({}, {"train_batch_size": 10, "ppo_mini_batch_size": 4}, rollouts=10, folder=tmp_path)
    with pytest.raises(InputError, match="Z9"):
        Autotune({"policies": {"Z9": "off"}}, {LR: 1.0}, rollouts=10, folder=tmp_path)
    with pytest.raises(InputError, match="autotune run"):
        Autotune({"schedule": "x.yaml"}, {LR: 1.0}, rollouts=10, folder=tmp_path)
    assert not any(tmp_path.iterdir())


def test_a_misspelt_metric_is_named_once(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    tuner = Autotune({"mode": "act"}, {LR: 1e-4}, rollouts=10, folder=tmp_path)
    for _ in range(2):
        tuner.step({"reward": 0.5, "reward_mean": 0.5})
    assert caplog.text.count("'reward' is no canonical metric") == 1


def test_an_earlier_journal_in_the_folder_is_set_aside(tmp_path: Path) -> None:
    for _ in range(2):
        tuner = Autotune({"mode": "act"}, {LR: 1e-4}, rollouts=10, folder=tmp_path)
        tuner.step({"reward_mean": 0.5})
        tuner.close()
    assert len(read_journal(tmp_path / "journal-1.jsonl")) == len(read_journal(tmp_path / JOURNAL))
