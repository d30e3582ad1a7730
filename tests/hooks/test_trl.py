"""TRL for real, on CPU: the contract, rescues from both bad starts, resuming, a shadow without a trace."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest

from autotune.commands import drop
from autotune.ctl import status
from autotune.decisions import Restore
from autotune.hooks.guest import JOURNAL, Guest
from autotune.hooks.trl import AutotuneCallback
from autotune.hooks.trl.adapter import TrlAdapter
from autotune.hooks.trl.declared import DECLARED
from autotune.journal import read_journal, winning_lines
from autotune.replay import export, replay
from autotune.story import Story
from autotune.testing.contracts import GuestContract
from tests.hooks.trl_runs import GROUP, PROMPTS, make_trainer, weights
from tests.tiny_model import tiny_folder

pytestmark = pytest.mark.slow
LR = "actor_learning_rate"
STORE = [{"prompt": f"{i}>"} for i in range(60 * PROMPTS)]


@pytest.fixture(scope="module", autouse=True)
def _offline() -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("HF_HUB_OFFLINE", "1")
        patch.setenv("HF_HUB_DISABLE_TELEMETRY", "1")
        yield


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_folder(tmp_path_factory.mktemp("model"))


NAMES = {"actor_learning_rate": "learning_rate", "kl_coef": "beta", "ppo_epochs": "num_iterations"}


def trls(knobs: Mapping[str, float]) -> dict[str, Any]:
    """Canonical knobs as TRL's configuration spells them."""
    config: dict[str, Any] = {NAMES[k]: v for k, v in knobs.items() if k in NAMES}
    if "ppo_mini_batch_size" in knobs:
        config["gradient_accumulation_steps"] = int(knobs["ppo_mini_batch_size"]) // 2
    if "num_iterations" in config:
        config["num_iterations"] = int(config["num_iterations"])
    return config


class TestTrlKeepsTheContract(GuestContract):
    declared = DECLARED
    changing_metrics = ("tokens_per_second", "time/")

    @pytest.fixture(autouse=True)
    def _prepare(self, folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        self.folder, self.out, self.made, self.patch = folder, tmp_path, 0, monkeypatch

    def plugged(
        self, rollouts: int, knobs: Mapping[str, float], control: Mapping[str, Any]
    ) -> tuple[Any, AutotuneCallback]:
        self.made += 1
        trainer = make_trainer(
            self.folder, self.out / str(self.made), rollouts, prompts=STORE, **trls(knobs)
        )
        callback = AutotuneCallback(trainer, control)
        trainer.add_callback(callback)
        return trainer, callback

    def make(self, rollouts: int, knobs: Mapping[str, float]) -> TrlAdapter:
        """A trainer that has begun: the adapter is made when training begins, and the run waits there."""
        trainer, callback = self.plugged(rollouts, knobs, {"mode": "act"})
        begun: list[TrlAdapter] = []
        begin = callback._begin

        def begin_and_stop(data: Any) -> None:
            begin(data)
            callback._begin = begin
            assert callback.adapter is not None
            begun.append(callback.adapter)
            raise _Begun

        callback._begin = begin_and_stop  # type: ignore[method-assign]
        with pytest.raises(_Begun):
            trainer.train()
        begun[0].plug = callback  # type: ignore[attr-defined]
        return begun[0]

    def run(self, adapter: TrlAdapter, on_rollout: Callable[[Any], object]) -> None:
        """The trainer's own loop, with the test in the guest's place."""
        callback, trainer = adapter.plug, adapter.trainer  # type: ignore[attr-defined]

        def go_on(data: Any) -> None:
            callback._begun = True
            adapter.live.trainer = trainer
            adapter.live.micro_steps = 0
            adapter.start_rollout()
            adapter.kept.keep(0)

        failures: list[BaseException] = []

        def instead(record: Any) -> None:
            try:
                if not failures:
                    on_rollout(record)
            except BaseException as failure:
                failures.append(failure)
            callback.guest.rollout += 1

        callback._begin, callback.guest.on_rollout = go_on, instead
        trainer.train()
        if failures:
            raise failures[0]

    def weights(self, adapter: TrlAdapter) -> Any:
        return weights(adapter.trainer)

    def host(
        self, rollouts: int, knobs: Mapping[str, float], control: Mapping[str, Any], version: str = ""
    ) -> tuple[Guest, Callable[[], object]]:
        adapter = self.make(rollouts, knobs)
        callback = adapter.plug  # type: ignore[attr-defined]
        callback.control = type(callback.control)(**control)
        callback.version = version or callback.version
        callback.guest.end()
        (callback.guest.folder / JOURNAL).unlink()
        callback.guest = callback._make_guest()

        def go_on(data: Any) -> None:
            callback._begun = True
            callback.guest.begin()
            adapter.start_rollout()

        def train() -> None:
            callback._begin = go_on
            adapter.trainer.train()

        return callback.guest, train


class _Begun(BaseException):
    """Training has begun; a test takes over."""


# -- whole runs -----------------------------------------------------------------------------------


def go(
    folder: Path, out: Path, rollouts: int, control: Any, resume: str = "", **config: Any
) -> tuple[Any, AutotuneCallback]:
    trainer = make_trainer(folder, out, rollouts, prompts=STORE, **config)
    callback = AutotuneCallback(trainer, control)
    trainer.add_callback(callback)
    trainer.train(resume_from_checkpoint=resume or None)
    return trainer, callback


def rows(out: Path) -> list[Any]:
    return [line for line in winning_lines(read_journal(out / JOURNAL)) if line["type"] == "rollout"]


def check_read_back(trainer: Any, callback: AutotuneCallback, out: Path) -> None:
    """What the journal says was set is what the live trainer has, in its own places."""
    told: dict[str, float] = dict(callback.adapter.facts().knobs)
    for line in rows(out):
        told |= {item["knob"]: item["read_back"] for item in line["applied"] if not item["error"]}
    assert callback.adapter.knobs() == told
    assert trainer.lr_scheduler.base_lrs[0] == told[LR] == trainer.optimizer.param_groups[0]["lr"]
    assert trainer.beta == told["kl_coef"] and trainer.epsilon_low == told["clip_range_low"]
    assert trainer.args.gradient_accumulation_steps * 2 == told["ppo_mini_batch_size"]


def test_a_timid_start_is_sped_up(folder: Path, tmp_path: Path) -> None:
    """A fiftieth of a good rate, one update per rollout, TRL's default batches."""
    config = {"learning_rate": 4e-5, "gradient_accumulation_steps": 4}
    off, _ = go(folder, tmp_path / "off", 36, {"mode": "off"}, **config)
    trainer, callback = go(folder, tmp_path / "act", 36, {"mode": "act"}, **config)
    assert not callback.failed and not callback.guest.broken
    lines = rows(tmp_path / "act")
    assert len(lines) == 36 and trainer.lr_scheduler.base_lrs[0] > 4e-4
    check_read_back(trainer, callback, tmp_path / "act")
    last = [sum(line["snapshot"]["metrics"]["reward_mean"] for line in rows(tmp_path / d)[-6:]) / 6
            for d in ("off", "act")]  # fmt: skip
    assert last[1] > last[0] + 0.1, last
    del off


def test_an_aggressive_start_is_reined_in(folder: Path, tmp_path: Path) -> None:
    """A rate that ruins the model within a few rollouts, 8 updates each; a veto brings weights back."""
    config = {"learning_rate": 6e-2, "gradient_accumulation_steps": 1, "num_iterations": 2}
    trainer, callback = go(folder, tmp_path, 32, {"mode": "act"}, **config)
    assert not callback.failed and not callback.guest.broken
    lines = rows(tmp_path)
    assert len(lines) >= 30 or callback.guest.stop
    assert any(line["restored"] is not None for line in lines), "no weights came back"
    assert trainer.lr_scheduler.base_lrs[0] < 2e-2
    check_read_back(trainer, callback, tmp_path)
    drift = [line["snapshot"]["metrics"]["kl_step"] for line in lines]
    assert max(drift[:3]) > 0.3 > max(drift[-5:]), drift


def test_the_journal_is_one_of_ours(folder: Path, tmp_path: Path) -> None:
    """Replay, export, story and ctl read it; a human's hand works on it."""
    trainer = make_trainer(folder, tmp_path, 12, prompts=STORE, learning_rate=1e-4)
    callback = AutotuneCallback(trainer, {"mode": "act", "pin": ["clip_range"]}, name="mine")
    trainer.add_callback(callback)
    begin = callback._begin

    def begin_with_a_command(data: Any) -> None:
        begin(data)
        drop(tmp_path, "set", values={"kl_coef": 0.05})

    callback._begin = begin_with_a_command  # type: ignore[method-assign]
    trainer.train()
    result = replay(tmp_path)
    assert result.equal and len(result.pairs) == 12 and not result.warnings
    found = status(tmp_path)
    assert (found.run, found.state, found.rollout, found.rollouts) == ("mine", "done", 12, 12)
    (order,) = [line for line in read_journal(tmp_path / JOURNAL) if line["type"] == "command"]
    assert order["outcome"] == "done" and order["applied"][0]["read_back"] == 0.05
    assert found.knobs["kl_coef"].now == trainer.beta != 0.02
    assert "clip_range_low" in found.pinned
    assert export(tmp_path).vector(1)["kl_coef"] == 0.05
    story = Story()
    for line in read_journal(tmp_path / JOURNAL):
        story.add(line)
    assert len(story.series("kl_step")) == 12 and None not in story.series("kl_step")


def test_a_shadow_leaves_no_trace(folder: Path, tmp_path: Path) -> None:
    plain = make_trainer(folder, tmp_path / "plain", 30, prompts=STORE, learning_rate=1e-2)
    plain.train()
    trainer, callback = go(folder, tmp_path / "shadow", 30, {"mode": "shadow"}, learning_rate=1e-2)
    lines = rows(tmp_path / "shadow")
    assert any(line["decision"]["changes"] for line in lines), "it would have done nothing: no test"
    assert weights(trainer) == weights(plain)
    assert trainer.state.global_step == plain.state.global_step
    kinds = [{k: v.tobytes() if hasattr(v, "tobytes") else v.numpy().tobytes() for k, v in s.items()}
             for t in (trainer, plain) for s in t.optimizer.state_dict()["state"].values()]  # fmt: skip
    assert kinds[: len(kinds) // 2] == kinds[len(kinds) // 2 :]
    del callback


@pytest.mark.parametrize("case", ["rate", "mini_batch"])
def test_a_resumed_run_decides_the_same(case: str, folder: Path, tmp_path: Path) -> None:
    """From a checkpoint at a rollout boundary, in a new trainer: decisions, weights and knobs are equal."""
    config: dict[str, Any] = {"learning_rate": 2e-4, "save_strategy": "steps", "save_steps": 10}
    control: Any = {"mode": "act", "pin": ["ppo_mini_batch_size", "ppo_epochs"]}
    out = tmp_path / "run"
    if case == "mini_batch":  # other updates per rollout before the checkpoint: the data must not slip
        config |= {"gradient_accumulation_steps": 4, "save_steps": 11}
        drop_at = {"ppo_mini_batch_size": 4}
        out.mkdir()
        drop(out, "set", values=drop_at)
    whole, first = go(folder, out, 20, control, **config)
    assert not first.failed and not first.guest.broken
    step = config["save_steps"]
    then = json.loads((out / f"checkpoint-{step}" / "trainer_state.json").read_text())
    saved = then["stateful_callbacks"]["AutotuneCallback"]["attributes"]["saved"]
    start = saved["guest"]["rollout"]
    straight = rows(out)
    assert saved["position"]["moved"] == (case == "mini_batch") and 3 < start < 12
    assert any(line["applied"] for line in straight[:start]) and len(straight) == 20

    again, second = go(folder, out, 20, control, resume=str(out / f"checkpoint-{step}"), **config)
    assert not second.failed and not second.guest.broken
    resumed = rows(out)
    assert [line["rollout"] for line in resumed] == list(range(20))
    assert any(line["type"] == "resumed" for line in read_journal(out / JOURNAL))
    for old, new in zip(straight, resumed, strict=True):
        assert new["decision"] == old["decision"], f"rollout {old['rollout']}"
    assert weights(again) == weights(whole) and second.adapter.knobs() == first.adapter.knobs()
    assert again.state.global_step == whole.state.global_step
    assert replay(out).equal


def test_saved_callbacks_may_be_restored_by_transformers_too(folder: Path, tmp_path: Path) -> None:
    """`restore_callback_states_from_checkpoint` makes callbacks anew, without a trainer."""
    config = {"save_strategy": "steps", "save_steps": 4, "restore_callback_states_from_checkpoint": True}
    go(folder, tmp_path, 4, {"mode": "act"}, **config)
    trainer, callback = go(
        folder, tmp_path, 4, {"mode": "act"}, resume=str(tmp_path / "checkpoint-4"), **config
    )
    assert trainer.state.global_step == 8 and not callback.guest.broken
    assert [line["rollout"] for line in rows(tmp_path)] == [0, 1, 2, 3]


def test_a_checkpoint_from_before_the_callback_can_be_resumed(folder: Path, tmp_path: Path) -> None:
    """Saving would fail for a callback that the checkpoint has no place for."""
    config = {"save_strategy": "steps", "save_steps": 4}
    plain = make_trainer(folder, tmp_path, 4, prompts=STORE, **config)
    plain.train()
    trainer, callback = go(
        folder, tmp_path, 4, {"mode": "act"}, resume=str(tmp_path / "checkpoint-4"), **config
    )
    assert trainer.state.global_step == 8 and not callback.failed
    assert (tmp_path / "checkpoint-8").is_dir() and len(rows(tmp_path)) == 2


def test_a_full_disk_ends_the_controller_and_not_the_run(folder: Path, tmp_path: Path) -> None:
    trainer = make_trainer(folder, tmp_path, 5, prompts=STORE)
    callback = AutotuneCallback(trainer, {"mode": "act"})
    trainer.add_callback(callback)
    begin = callback._begin

    def begin_on_a_full_disk(data: Any) -> None:
        begin(data)
        append = callback.guest._journal.append

        def full(type: str, rollout: int, payload: Mapping[str, Any]) -> Any:
            if rollout >= 2:
                raise OSError(28, "No space left on device")
            return append(type, rollout, payload)

        callback.guest._journal.append = full

    callback._begin = begin_on_a_full_disk  # type: ignore[method-assign]
    trainer.train()
    assert trainer.state.global_step == 10 and "No space left" in callback.guest.broken


def test_undo_brings_moments_back_too(folder: Path, tmp_path: Path) -> None:
    trainer, callback = go(folder, tmp_path, 3, {"mode": "act", "profile": "fixed"})
    adapter = callback.adapter
    adapter.kept.keep(3)
    before = {k: v.clone() for k, v in trainer.model.state_dict().items()}
    moments = [s["exp_avg"].clone() for s in adapter.kept.optimizer.state.values()]
    for parameter in trainer.model.parameters():
        parameter.data.add_(1.0)
    for state in adapter.kept.optimizer.state.values():
        state["exp_avg"].zero_()
    adapter.restore(Restore("undo", 3, "test"))
    assert all((before[k] == v).all() for k, v in trainer.model.state_dict().items())
    back = [s["exp_avg"] for s in adapter.kept.optimizer.state.values()]
    assert all((a == b).all() for a, b in zip(moments, back, strict=True))
    assert GROUP * PROMPTS == 32
