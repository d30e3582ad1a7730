"""What goes wrong in verl when a knob is set in only one of its places, and the state beside its
checkpoints.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

pytestmark = pytest.mark.verl
pytest.importorskip("verl")

Start = Callable[..., Any]
LOSS = ("clip_range_low", "clip_range_high", "kl_coef", "entropy_coef")


def adapter_of(trainer: Any) -> Any:
    from autotune.hooks.verl.adapter import VerlAdapter

    return VerlAdapter(trainer)


def journal(trainer: Any) -> list[dict[str, Any]]:
    from autotune.journal import read_journal

    return read_journal(Path(trainer.config.trainer.default_local_dir) / "journal.jsonl")


def bound(trainer: Any) -> list[Any]:
    """The configurations that are bound to the loss in the workers."""
    import ray

    def look(worker: Any) -> dict[str, float]:
        config = worker.worker_dict["actor_rollout_ref"].actor.loss_fn.keywords["config"]
        names = ("clip_ratio", "clip_ratio_low", "clip_ratio_high", "kl_loss_coef", "entropy_coeff")
        return {name: getattr(config, name) for name in names}

    return ray.get([h.__ray_call__.remote(look) for h in trainer.actor_rollout_wg.workers])


def test_the_loss_of_every_worker_is_bound_anew_by_verls_own_call(start: Start) -> None:
    trainer = start()
    adapter = adapter_of(trainer)
    applied = adapter.apply({"clip_range_low": 0.1, "clip_range_high": 0.15, "kl_coef": 0.02}, 1)
    assert all(item.ok for item in applied)
    for config in bound(trainer):
        assert (config["clip_ratio_low"], config["clip_ratio_high"]) == (0.1, 0.15)
        assert config["kl_loss_coef"] == 0.02
    assert bound(trainer)[0]["clip_ratio"] == 0.2, "clip_ratio alone is read nowhere, so it is left"


def test_a_narrower_clip_range_clips_more_in_verls_own_loss(start: Start) -> None:
    shares = []
    for clip in (0.2, 0.02):
        trainer = start(1, {"clip_range_low": clip, "clip_range_high": clip, "actor_learning_rate": 2.0})
        heard: list[Any] = []
        trainer.autotune = ear(heard)
        trainer.fit(trainer.agent_loop_manager)
        shares.append(heard[0]["actor/pg_clipfrac"])
    assert shares[1] > shares[0] >= 0


def ear(heard: list[Any]) -> Any:
    """In the attachment's place: keeps what verl logs."""
    nothing = lambda *a, **k: None  # noqa: E731
    return SimpleNamespace(
        begin=nothing,
        measure=nothing,
        look=nothing,
        saved=nothing,
        end=nothing,
        on_log=lambda data, step: heard.append(dict(data)),
    )


def test_the_rate_survives_verls_schedule(start: Start) -> None:
    """A rate that is set in the optimizer alone lasts until the schedule's next step."""
    trainer = start(3, {"actor_learning_rate": 0.04})
    adapter = adapter_of(trainer)
    heard: list[Any] = []
    trainer.autotune = ear(heard)
    assert adapter.apply({"actor_learning_rate": 0.01}, 1)[0].ok
    trainer.fit(trainer.agent_loop_manager)
    assert [row["actor/lr"] for row in heard] == [0.01, 0.01, 0.01]
    assert adapter.knobs()["actor_learning_rate"] == 0.01


def test_during_warmup_the_peak_moves_and_the_logged_rate_is_the_coming_one(start: Start) -> None:
    trainer = start(3, {"actor_learning_rate": 0.04}, ("actor_rollout_ref.actor.optim.lr_warmup_steps=4",))
    adapter = adapter_of(trainer)
    facts = adapter.facts()
    assert facts.lr_warmup == 4 and adapter.knobs()["actor_learning_rate"] == 0.04
    used: list[Any] = []
    logged: list[Any] = []

    def on_log(data: Any, step: int) -> None:
        used.append(adapter.record(data, step - 1, {}).scalars["learning_rate"])
        logged.append(data["actor/lr"])
        adapter.settle()

    trainer.autotune = ear([])
    trainer.autotune.on_log = on_log
    trainer.fit(trainer.agent_loop_manager)
    assert used[0] == 0.0 and used[1] == logged[0], "verl logs the rate after its schedule's step"


def test_a_worker_that_differs_makes_the_knob_unreadable(start: Start) -> None:
    """Remote workers hold copies: every rank must read the same."""
    import ray

    from autotune.hooks.verl import workers

    trainer = start()
    adapter = adapter_of(trainer)
    one = trainer.actor_rollout_wg.workers[1]
    ray.get(one.__ray_call__.remote(workers.set_rate, "actor", 0.001))
    assert math.isnan(adapter.knobs()["actor_learning_rate"])
    applied = adapter.apply({"actor_learning_rate": 0.02}, 1)
    assert applied[0].ok, "setting it on all of them repairs it"


def test_temperature_is_moved_for_samplers_and_log_probs_or_not_at_all(start: Start) -> None:
    trainer = start()
    adapter = adapter_of(trainer)
    assert adapter.apply({"temperature": 0.5}, 1)[0].ok
    assert trainer.config.actor_rollout_ref.rollout.temperature == 0.5 and trainer.sample_temperature() == 0.5
    trainer.config.actor_rollout_ref.rollout.temperature = 0.9
    assert math.isnan(adapter.knobs()["temperature"]), "log-probs would be scaled by another temperature"


def test_an_entropy_bonus_needs_the_drivers_copy_too(start: Start) -> None:
    """The driver's `entropy_coeff` decides whether the entropy is computed; without it the bonus is
    silently 0.
    """
    trainer = start(1)
    adapter = adapter_of(trainer)
    assert adapter.apply({"entropy_coef": 0.01}, 1)[0].ok
    heard: list[Any] = []
    trainer.autotune = ear(heard)
    trainer.fit(trainer.agent_loop_manager)
    assert "actor/entropy_loss" in heard[0] and trainer.config.actor_rollout_ref.actor.entropy_coeff == 0.01


def with_critic(trainer: Any, mini: int = 4) -> Any:
    """The same trainer as if it had a critic: verl resolved its copies of the actor's numbers at
    the start.
    """
    trainer.use_critic = True
    trainer.critic_wg = trainer.actor_rollout_wg
    trainer.config.critic.ppo_mini_batch_size = mini
    return trainer


def test_the_critics_frozen_copies_go_with_the_actors(start: Start, monkeypatch: pytest.MonkeyPatch) -> None:
    from autotune.hooks.verl import workers

    monkeypatch.setattr(workers, "read_critic", lambda worker: {"peak": 0.1, "rate": 0.1})
    for own, expected in ((4, 2), (8, 8)):
        trainer = with_critic(start(), own)
        adapter = adapter_of(trainer)
        assert adapter.apply({"ppo_mini_batch_size": 2, "micro_batch_size": 2, "ppo_epochs": 2}, 1)[0].ok
        assert trainer.config.critic.ppo_mini_batch_size == expected, "only a copy follows, not an own choice"
        assert trainer.config.actor_rollout_ref.actor.ppo_mini_batch_size == 2


def test_a_mini_batch_that_verl_would_fill_with_dummies_is_refused(start: Start) -> None:
    adapter = adapter_of(start())
    (item,) = adapter.apply({"ppo_mini_batch_size": 3}, 1)
    assert "dummy" in item.error and adapter.knobs()["ppo_mini_batch_size"] == 4


def test_in_reward_kl_moves_on_the_driver_and_an_adaptive_one_does_not(start: Start) -> None:
    reward = ("algorithm.use_kl_in_reward=true", "actor_rollout_ref.actor.use_kl_loss=false")
    trainer = start(2, {}, reward)
    adapter = adapter_of(trainer)
    assert adapter.facts().can_move("kl_coef") and adapter.apply({"kl_coef": 0.05}, 1)[0].ok
    assert trainer.kl_ctrl_in_reward.value == 0.05
    moving = (*reward, "algorithm.kl_ctrl.type=adaptive", "algorithm.kl_ctrl.horizon=100")
    facts = adapter_of(start(2, {}, moving)).facts()
    assert not facts.can_move("kl_coef") and "itself" in facts.knob_capability["kl_coef"].reason


def test_kl_in_loss_and_reward_at_once_is_nobodys_knob(start: Start) -> None:
    facts = adapter_of(start(2, {}, ("algorithm.use_kl_in_reward=true",))).facts()
    assert "both" in facts.knob_capability["kl_coef"].reason and facts.has_reference


def test_the_train_batch_moves_only_where_single_prompts_are_handed_out(start: Start) -> None:
    assert adapter_of(start()).facts().can_move("train_batch_size")
    facts = adapter_of(start(2, {}, ("data.gen_batch_size=8",))).facts()
    assert not facts.can_move("train_batch_size")
    assert "gen_batch_size" in facts.knob_capability["train_batch_size"].reason


def test_a_loss_without_our_ratio_stands_the_clip_rules_down(start: Start) -> None:
    for mode, kind in (("gspo", "sequence"), ("cispo", "none"), ("vanilla", "token")):
        adapter = adapter_of(start(2, {}, (f"actor_rollout_ref.actor.policy_loss.loss_mode={mode}",)))
        assert adapter.facts().loss_kind == kind
        assert (adapter.facts().metric_capability["clip_ratio"].state == "valid") == (kind != "none")


def test_a_k1_estimate_below_zero_is_no_kl(start: Start) -> None:
    adapter = adapter_of(start())
    snapshot = adapter.read(adapter.record({"actor/reward_kl_penalty": -0.2}, 0, {}), 0)
    assert snapshot.value("kl_ref") is None and snapshot.reading("kl_ref").validity == "out_of_range"


def test_a_missing_rate_is_not_a_zero(start: Start) -> None:
    """During critic warm-up verl skips the actor and its keys."""
    adapter = adapter_of(start())
    snapshot = adapter.read(adapter.record({"critic/score/mean": 0.5}, 0, {}), 0)
    assert snapshot.value("grad_norm") is None and snapshot.reading("grad_norm").validity == "missing"
    assert snapshot.value("learning_rate") == 0.05


def test_under_megatron_the_rate_is_advice_and_all_else_moves(start: Start) -> None:
    """Megatron's schedule computes the rate from its own peak at every step: what is set would not last."""
    import ray

    def megatrons(worker: Any) -> None:
        fields = {"max_lr": 0.05, "min_lr": 0.0, "num_steps": 0}  # and no `base_lrs`
        worker.worker_dict["actor_rollout_ref"].actor.engine.lr_scheduler = SimpleNamespace(**fields)

    trainer = start()
    ray.get([h.__ray_call__.remote(megatrons) for h in trainer.actor_rollout_wg.workers])
    adapter = adapter_of(trainer)
    facts = adapter.facts()
    assert facts.knob_capability["actor_learning_rate"].state == "restart"
    assert "not one that can be rescaled" in facts.knob_capability["actor_learning_rate"].reason
    line = adapter_declared().restart_line("actor_learning_rate", 2e-6, adapter.knobs())
    assert line == "actor_rollout_ref.actor.optim.lr=2e-06"
    (item,) = adapter.apply({"actor_learning_rate": 0.01}, 1)
    assert item.error and not adapter.apply({"clip_range_high": 0.25}, 1)[0].error


def adapter_declared() -> Any:
    from autotune.hooks.verl.declared import DECLARED

    return DECLARED


def test_megatrons_own_configuration_is_read(start: Start) -> None:
    """`model_engine=megatron` is another tree of verl's configuration; its places are the same."""
    trainer = start(2, {}, ("model_engine=megatron",))
    assert trainer.config.actor_rollout_ref.actor.strategy == "megatron"
    adapter = adapter_of(trainer)
    assert adapter.apply({"clip_range_high": 0.3, "ppo_epochs": 2}, 1)[0].ok
    assert bound(trainer)[0]["clip_ratio_high"] == 0.3
    assert adapter.knobs()["actor_learning_rate"] == 0.05


def test_both_asynchronous_modes_are_left_alone_with_the_way_to_go(
    start: Start, caplog: pytest.LogCaptureFixture
) -> None:
    from autotune.hooks.verl.trainer import attach

    for mode in ("colocate_async", "separate_async"):
        trainer = start(2, {}, (), control={"mode": "act"})
        trainer.trainer_mode = mode
        caplog.clear()
        assert attach(trainer) is None
        assert mode in caplog.text and "in flight" in caplog.text and "autotune advise" in caplog.text


def test_with_distillation_the_loss_is_not_rebuilt(start: Start) -> None:
    trainer = start()
    trainer.distillation_config = object()
    facts = adapter_of(trainer).facts()
    for knob in LOSS:
        assert not facts.can_move(knob) and "distillation" in facts.knob_capability[knob].reason


def test_what_verl_captures_at_the_start_needs_a_restart(start: Start) -> None:
    adapter = adapter_of(start())
    for knob in ("rollout_n", "max_prompt_length", "max_response_length", "micro_batch_size"):
        assert adapter.facts().knob_capability[knob].state == "restart"
        assert adapter_declared().restart_line(knob, 16.0, adapter.knobs())


def test_without_entropy_before_the_update_there_is_none(start: Start) -> None:
    bypass = ("algorithm.rollout_correction.bypass_mode=true",)
    facts = adapter_of(start(2, {}, bypass)).facts()
    assert facts.metric_capability["entropy"].state == "not_logged"
    assert "bypass_mode" in facts.metric_capability["entropy"].reason


def test_one_update_a_rollout_makes_the_clipped_share_structural(start: Start) -> None:
    """0 by construction is no sign that the clip range is too wide."""
    trainer = start(2, {"ppo_mini_batch_size": 8})
    adapter = adapter_of(trainer)
    snapshot = adapter.read(adapter.record({"actor/pg_clipfrac": 0.0}, 0, {}), 0)
    assert (
        snapshot.value("clip_ratio") is None and snapshot.reading("clip_ratio").validity == "structural_zero"
    )


# --------------------------------------------------------------------------------- a run as a whole


def controlled(start: Start, rollouts: int = 12, more: tuple[str, ...] = (), **control: Any) -> Any:
    control = {"mode": "act", "profile": "random", "pace": 0.1, **control}
    return start(rollouts, {}, more, control=control)


def train(trainer: Any) -> None:
    trainer.fit(trainer.agent_loop_manager)
    trainer.logger.finish(exit_code=0)


def test_a_run_is_journalled_and_replays(start: Start) -> None:
    from autotune.replay import replay

    trainer = controlled(start)
    train(trainer)
    lines = journal(trainer)
    rollouts = [line for line in lines if line["type"] == "rollout"]
    assert [line["rollout"] for line in rollouts] == list(range(12)) and lines[-1]["status"] == "done"
    applied = [item for line in rollouts for item in line["applied"]]
    assert applied and not any(item["error"] for item in applied), (
        "the coin moves something in twelve rollouts"
    )
    assert trainer.autotune.guest.broken == ""
    found = replay(Path(trainer.config.trainer.default_local_dir) / "journal.jsonl")
    assert found.equal


def test_shadow_ends_with_the_same_weights_as_no_autotune(start: Start) -> None:
    ends = []
    for options in ({}, {"control": {"mode": "shadow", "profile": "random", "pace": 0.1}}):
        trainer = start(6, {}, (), **options)
        trainer.fit(trainer.agent_loop_manager)
        ends.append(trainer.actor_rollout_wg.weights()[0])
    assert ends[0] == ends[1]


def test_the_state_lies_beside_verls_checkpoint_and_a_resumed_run_goes_on_from_it(
    start: Start, monkeypatch: pytest.MonkeyPatch
) -> None:
    """verl saves inside a step and logs at its end: the state is that after the decision of that
    very step.
    """
    trainer = controlled(start, 8, ("trainer.save_freq=4",))
    save_as_verl_does(trainer, monkeypatch)
    train(trainer)
    folder = Path(trainer.config.trainer.default_local_dir)
    state = json.loads((folder / "global_step_4" / "autotune.json").read_text())
    assert state["rollout"] == 4 and state["step"] == 4 and state["controller"] is not None
    decisions = [line["decision"] for line in journal(trainer) if line["type"] == "rollout"]

    again = controlled(start, 8, (f"trainer.default_local_dir={folder}", "trainer.save_freq=4"))
    save_as_verl_does(again, monkeypatch)
    again.global_steps = 4
    train(again)
    lines = journal(again)
    assert any(line["type"] == "resumed" and line["from"] == 4 for line in lines)
    second = [line for line in lines if line["type"] == "rollout"][8:]
    assert [line["rollout"] for line in second] == [4, 5, 6, 7]
    assert second[0]["decision"]["epoch"] == decisions[4]["epoch"]
    assert second[0]["snapshot"]["knobs"] == pytest.approx(
        [line for line in lines if line["type"] == "rollout"][4]["snapshot"]["knobs"]
    )


def save_as_verl_does(trainer: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Only the folder of verl's checkpoint: its engines are not here."""
    from tests.hooks.verl import toy

    def save(self: Any) -> None:
        folder = Path(self.config.trainer.default_local_dir) / f"global_step_{self.global_steps}"
        folder.mkdir(parents=True, exist_ok=True)

    monkeypatch.setattr(toy.PPOTrainerSync, "_save_checkpoint", save)


def test_a_stop_ends_verls_own_loop_after_a_checkpoint(start: Start, monkeypatch: pytest.MonkeyPatch) -> None:
    trainer = controlled(start, 6, ("trainer.save_freq=100",))
    save_as_verl_does(trainer, monkeypatch)
    attached = []

    def begin(self: Any) -> None:
        whole(self)
        attached.append(self)

        def decide(record: Any) -> None:
            self.guest.stop = "the test wants it" if self.guest.rollout == 1 else ""
            self.guest.rollout += 1

        self.guest.on_rollout = decide

    from autotune.hooks.verl.trainer import Attachment

    whole = Attachment.begin
    monkeypatch.setattr(Attachment, "begin", begin)
    train(trainer)
    folder = Path(trainer.config.trainer.default_local_dir)
    assert trainer.global_steps == 3, "two steps were made"
    assert (folder / "global_step_2").is_dir() and journal(trainer)[-1]["status"] == "stopped"


def test_an_accepted_version_is_acted_on(start: Start, monkeypatch: pytest.MonkeyPatch) -> None:
    from autotune.hooks.verl import trainer as hook

    monkeypatch.setattr(hook, "_version", lambda: "0.9.7")
    watched = start(2, {}, (), control={"mode": "act"})
    accepted = start(2, {}, (), control={"mode": "act"}, accept_version="0.9.7")
    assert hook.attach(watched).guest.control.mode == "shadow"
    assert hook.attach(accepted).guest.control.mode == "act"


def test_a_failing_logger_of_verl_is_verls_own_affair(start: Start) -> None:
    """What verl raises is not swallowed by the tap."""
    from autotune.hooks.verl.trainer import Tap

    class Broken:
        def log(self, data: Any, step: int) -> None:
            raise OSError("disk full")

    with pytest.raises(OSError, match="disk full"):
        Tap(Broken(), SimpleNamespace(on_log=lambda d, s: None)).log({}, 1)
