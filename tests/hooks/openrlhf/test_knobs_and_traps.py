"""What goes wrong in OpenRLHF when a knob is set in only one of its places; the launcher; the state
in its checkpoint.
"""

from __future__ import annotations

import importlib
import json
import math
import runpy
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

pytestmark = pytest.mark.openrlhf
pytest.importorskip("openrlhf")

Start = Callable[..., Any]


def adapter_of(trainer: Any) -> Any:
    from autotune.hooks.openrlhf.adapter import OpenRLHFAdapter

    return OpenRLHFAdapter(trainer)


def actors(trainer: Any) -> list[Any]:
    return [handle.actor for handle in trainer.actor_model_group._actor_handlers]


def journal(trainer: Any) -> list[dict[str, Any]]:
    from autotune.journal import read_journal

    return read_journal(Path(trainer.args.ckpt.path) / "journal.jsonl")


# ------------------------------------------------------------------------------------------ knobs


def test_a_mini_batch_is_set_where_deepspeed_steps_and_where_the_loss_is_normalised(start: Start) -> None:
    trainer = start(2)
    adapter = adapter_of(trainer)
    assert all(i.ok for i in adapter.apply({"ppo_mini_batch_size": 2, "micro_batch_size": 2}, 1))
    for actor in actors(trainer):
        assert actor.model.model.accumulate == actor.strategy.accumulated_gradient == 2
        assert actor.strategy.args.train.batch_size == 8
    trainer.fit()
    for actor in actors(trainer):
        assert actor.model.model.updates == [2] * 8, "four whole updates a rollout, two micro batches each"
    assert trainer.args.train.batch_size == 8


def test_deepspeeds_running_count_does_not_shift_the_first_update(start: Start) -> None:
    """Its boundary is a count over the whole run: two micro batches and then fours would give a
    half update.
    """
    trainer = start(2, {"ppo_mini_batch_size": 2})
    adapter = adapter_of(trainer)
    for actor in actors(trainer):
        actor.model.model.micro_steps = 2  # an odd number of the coming windows has passed
    assert all(i.ok for i in adapter.apply({"ppo_mini_batch_size": 8, "micro_batch_size": 2}, 1))
    trainer.fit()
    assert {n for actor in actors(trainer) for n in actor.model.model.updates} == {8}


def test_with_dynamic_batches_the_arguments_of_every_actor_are_set(start: Start) -> None:
    trainer = start(2)
    trainer.args.train.dynamic_batch_enable = True
    adapter = adapter_of(trainer)
    assert adapter.knobs()["micro_batch_size"] == 1.0
    assert adapter.apply({"ppo_mini_batch_size": 2}, 1)[0].ok
    assert [a.strategy.args.train.batch_size for a in actors(trainer)] == [8, 8]
    assert [a.model.model.accumulate for a in actors(trainer)] == [4, 4], "DeepSpeed steps every time there"


def test_clip_and_epochs_reach_the_loss_of_every_actor(start: Start) -> None:
    trainer = start(1, {"actor_learning_rate": 2.0})
    adapter = adapter_of(trainer)
    values = {"clip_range_low": 0.05, "clip_range_high": 0.1, "ppo_epochs": 2}
    assert all(item.ok for item in adapter.apply(values, 1))
    trainer.fit()
    for actor in actors(trainer):
        loss = actor.trainer.actor_loss_fn
        assert (loss.clip_eps_low, loss.clip_eps_high) == (0.05, 0.1)
        assert len(actor.model.model.updates) == 4, "two updates an epoch, two epochs"


def test_the_rate_survives_the_schedule(start: Start) -> None:
    trainer = start(2)
    adapter = adapter_of(trainer)
    assert adapter.apply({"actor_learning_rate": 0.01}, 1)[0].ok
    trainer.fit()
    assert {a.trainer.actor_scheduler.get_last_lr()[0] for a in actors(trainer)} == {0.01}
    assert {a.trainer.actor_optim.param_groups[0]["lr"] for a in actors(trainer)} == {0.01}


def test_an_actor_that_differs_makes_the_knob_unreadable(start: Start) -> None:
    trainer = start()
    adapter = adapter_of(trainer)
    actors(trainer)[1].trainer.actor_loss_fn.clip_eps_low = 0.11
    assert math.isnan(adapter.knobs()["clip_range_low"])


def test_temperature_is_moved_in_sampler_policy_and_reference(start: Start) -> None:
    trainer = start(1)
    adapter = adapter_of(trainer)
    assert adapter.apply({"temperature": 0.5}, 1)[0].ok
    reference = trainer.reference_model_group._actor_handlers[0].actor.model
    assert reference.temperature == 0.5 and {a.model.temperature for a in actors(trainer)} == {0.5}
    trainer.fit()
    assert trainer.samples_generator.seen[0]["temperature"] == 0.5
    reference.temperature = 1.0
    assert math.isnan(adapter.knobs()["temperature"]), "log-probs would be divided by different numbers"


def test_the_answers_cap_moves_up_to_the_context_and_the_batch_in_both_places(start: Start) -> None:
    trainer = start(1)
    adapter = adapter_of(trainer)
    assert adapter.apply({"max_response_length": 8}, 1)[0].ok
    assert "max_len" in adapter.apply({"max_response_length": 65}, 1)[0].error
    batch = {"train_batch_size": 16, "rollout_micro_batch_size": 32}
    assert all(item.ok for item in adapter.apply(batch, 2))
    assert trainer.args.rollout.vllm_generate_batch_size == trainer.args.rollout.batch_size == 16
    trainer.args.rollout.vllm_generate_batch_size = 32
    assert not adapter_of(trainer).facts().can_move("train_batch_size"), "samples would be waiting"


def test_what_started_as_nothing_cannot_be_raised(start: Start) -> None:
    trainer = start(1, {"kl_coef": 0.0})
    for actor in actors(trainer):
        actor.trainer.args.actor.entropy_coef = None
    trainer.args.actor.entropy_coef = None
    trainer.generate_kwargs["max_new_tokens"] = None
    facts = adapter_of(trainer).facts()
    table = facts.knob_capability
    assert not facts.has_reference and "init_coef" in table["kl_coef"].reason
    assert "entropy_coef 0" in table["entropy_coef"].reason and "entropy_coef" not in facts.knobs
    assert facts.metric_capability["entropy"].state == "not_logged"
    assert "max_new_tokens" in table["max_response_length"].reason


def test_an_adaptive_kl_controller_keeps_its_coefficient(start: Start) -> None:
    trainer = start()
    trainer.args.algo.kl.target = 0.1
    capability = adapter_of(trainer).facts().knob_capability["kl_coef"]
    assert not capability.acts and "itself" in capability.reason


def test_a_k1_estimate_below_zero_is_no_kl(start: Start) -> None:
    adapter = adapter_of(start())
    snapshot = adapter.read(adapter.record({"kl": -0.2, "ppo_kl": -0.1}, 0, {}), 0)
    assert snapshot.value("kl_ref") is None and snapshot.reading("kl_ref").validity == "out_of_range"


def test_gspo_is_a_ratio_per_sequence(start: Start) -> None:
    trainer = start()
    trainer.args.actor.policy_loss_type = "gspo"
    assert adapter_of(trainer).facts().loss_kind == "sequence"


# -------------------------------------------------------------------------------------- whole runs

COIN = {"mode": "act", "profile": "random", "pace": 0.1}


def test_a_run_is_journalled_and_replays(start: Start) -> None:
    from autotune.replay import replay

    trainer = start(12, {}, COIN)
    trainer.fit()
    lines = journal(trainer)
    rollouts = [line for line in lines if line["type"] == "rollout"]
    assert [line["rollout"] for line in rollouts] == list(range(12)) and lines[-1]["status"] == "done"
    applied = [item for line in rollouts for item in line["applied"]]
    assert applied and not any(item["error"] for item in applied)
    assert replay(Path(trainer.args.ckpt.path) / "journal.jsonl").equal


def test_shadow_ends_with_the_same_weights_as_no_autotune(start: Start) -> None:
    ends = []
    for control in (None, {**COIN, "mode": "shadow"}):
        trainer = start(6, {}, control)
        trainer.fit()
        ends.append(actors(trainer)[0].model.logits.tolist())
    assert ends[0] == ends[1]


def test_the_state_travels_in_openrlhfs_own_checkpoint(start: Start, monkeypatch: pytest.MonkeyPatch) -> None:
    trainer = start(8, {}, COIN)
    trainer.args.ckpt.save_steps = 4
    trainer.fit()
    saved = actors(trainer)[0].saved
    assert saved["tag"] == "global_step8" and saved["autotune"]["rollout"] == 8
    json.dumps(saved["autotune"], allow_nan=False)

    again = start(2, {}, COIN)
    again.args.ckpt.path = trainer.args.ckpt.path
    monkeypatch.setattr(type(again).__mro__[1], "init_checkpoint_states", lambda self: saved)
    again.vllm_engines, again.broadcast_to_vllm = None, lambda: None
    again.fit()
    lines = journal(again)
    assert any(line["type"] == "resumed" and line["from"] == 8 for line in lines)
    rollouts = [line for line in lines if line["type"] == "rollout"]
    assert [line["rollout"] for line in rollouts] == list(range(10))
    assert rollouts[8]["snapshot"]["knobs"] == pytest.approx(saved["autotune"]["knobs"])


def test_a_stop_saves_a_checkpoint_and_leaves_openrlhfs_loop(start: Start) -> None:
    from autotune.hooks.openrlhf.trainer import attach

    trainer = start(6, {}, {"mode": "act"})
    trainer.autotune = attach(trainer, {"mode": "act"})
    guest, whole = trainer.autotune.guest, trainer.autotune.guest.on_rollout

    def decide(record: Any) -> None:
        whole(record)
        guest.stop = "the test wants it" if guest.rollout == 2 else ""

    guest.on_rollout = decide
    trainer.fit()
    assert actors(trainer)[0].saved["tag"] == "global_step2"
    assert journal(trainer)[-1]["status"] == "stopped"


def test_a_failure_of_openrlhf_is_its_own_and_the_books_are_closed(start: Start) -> None:
    trainer = start(3, {}, {"mode": "act"})
    trainer.broadcast_to_vllm = lambda: (_ for _ in ()).throw(OSError("no engine"))
    trainer.vllm_engines = [object()]
    with pytest.raises(OSError, match="no engine"):
        trainer.fit()
    assert journal(trainer)[-1]["status"] == "failed"


def test_what_cannot_begin_stays_out_and_openrlhf_trains(
    start: Start, caplog: pytest.LogCaptureFixture
) -> None:
    trainer = start(2, {}, "/nowhere/control.yaml")
    trainer.fit()
    assert trainer.autotune is None and "control.yaml" in caplog.text
    assert sum(len(a.model.model.updates) for a in actors(trainer)) == 8


# -------------------------------------------------------------------------------- the launcher


def test_every_symbol_that_is_reached_into_exists(toy: Any) -> None:
    from autotune.hooks.openrlhf.trainer import missing_symbols

    assert missing_symbols() == []


def symbols() -> list[tuple[str, str]]:
    from autotune.hooks.openrlhf.trainer import SYMBOLS

    return [(module, name) for module, names in SYMBOLS.items() for name in names]


@pytest.mark.parametrize(("module", "name"), symbols())
def test_a_symbol_that_is_gone_is_noticed(
    module: str, name: str, toy: Any, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    from autotune.errors import InputError
    from autotune.hooks.openrlhf.trainer import install, missing_symbols, plain

    home, *rest = name.split(".")
    target = importlib.import_module(module)
    holder = plain(getattr(target, home)) if rest else target
    for owner in getattr(holder, "__mro__", (holder,)):
        if (rest or [home])[0] in vars(owner) and owner is not object:
            monkeypatch.delattr(owner, (rest or [home])[0])
    assert missing_symbols() == [f"{module}:{name}"]
    with pytest.raises(InputError, match=name):
        install({"mode": "act"})


@pytest.fixture
def launched(toy: Any, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Any:
    """What OpenRLHF's launcher would find at its start."""
    from openrlhf.trainer import ppo_trainer

    monkeypatch.setattr(ppo_trainer, "PPOTrainer", ppo_trainer.PPOTrainer)
    seen: dict[str, Any] = {}

    def run_module(name: str, **options: Any) -> None:
        seen.update(name=name, trainer=ppo_trainer.PPOTrainer, argv=list(sys.argv), **options)

    monkeypatch.setattr(runpy, "run_module", run_module)
    monkeypatch.setattr(sys, "argv", ["x"])
    (tmp_path / "control.yaml").write_text("mode: shadow\n")
    seen["control"] = str(tmp_path / "control.yaml")
    return seen


def test_the_launcher_swaps_the_trainer_in_and_becomes_openrlhfs(launched: Any) -> None:
    from autotune.hooks.openrlhf.__main__ import main
    from autotune.hooks.openrlhf.trainer import plain

    main([launched["control"], "--train.batch_size", "16"])
    assert launched["name"] == "openrlhf.cli.train_ppo_ray" and launched["run_name"] == "__main__"
    assert launched["argv"] == ["openrlhf.cli.train_ppo_ray", "--train.batch_size", "16"]
    ours = plain(launched["trainer"])
    assert hasattr(launched["trainer"], "remote"), "still a class of Ray"
    assert any(kind.__name__ == "AutotunedTrainer" for kind in ours.__mro__)


def test_the_asynchronous_trainer_is_run_as_it_is(launched: Any, capsys: pytest.CaptureFixture[str]) -> None:
    from autotune.hooks.openrlhf.__main__ import main
    from autotune.hooks.openrlhf.trainer import plain

    main([launched["control"], "--train.async_enable"])
    assert "in flight" in capsys.readouterr().out
    assert not any(kind.__name__ == "AutotunedTrainer" for kind in plain(launched["trainer"]).__mro__)


@pytest.mark.parametrize("arguments", [[], ["--train.batch_size", "16"], ["/nowhere/control.yaml"]])
def test_a_launcher_without_its_control_file_starts_nothing(
    arguments: list[str], launched: Any, capsys: pytest.CaptureFixture[str]
) -> None:
    from autotune.hooks.openrlhf.__main__ import main

    with pytest.raises(SystemExit) as end:
        main(arguments)
    assert "control" in str(end.value) + capsys.readouterr().err and "name" not in launched
    assert end.value.code == 2


def test_the_subclass_can_be_sent_to_another_process(launched: Any) -> None:
    """Ray sends the trainer's class by value: it must not drag this process along."""
    from ray import cloudpickle

    from autotune.hooks.openrlhf.trainer import install

    assert len(cloudpickle.dumps(install({"mode": "act"}))) < 100_000


def test_a_held_out_score_is_the_next_rollouts(start: Start) -> None:
    trainer = start(3, {}, {"mode": "shadow"})
    trainer.args.eval.steps = 1
    trainer.eval_dataloader = [(["d"], ["p"], [""], [None])]
    trainer.samples_generator.generate_eval_samples = lambda **options: []
    kind = type(trainer).__mro__[1]
    scores = iter([{"eval_x_pass1": 0.25}, {"eval_x_pass1": 0.5}, {}])
    whole, kind.evaluate = kind.evaluate, lambda self, step, **options: next(scores)
    try:
        trainer.fit()
    finally:
        kind.evaluate = whole
    rollouts = [line for line in journal(trainer) if line["type"] == "rollout"]
    assert [line["snapshot"]["metrics"].get("eval_score") for line in rollouts] == [None, 0.25, 0.5]


def test_the_critic_goes_along_and_has_a_rate_of_its_own(start: Start, toy: Any) -> None:
    """Its epochs and batches are its own copies; its engine is the model itself, not one inside it."""
    from types import SimpleNamespace

    trainer = start()
    policy = actors(trainer)[0]
    optimizer = toy.torch.optim.SGD([toy.torch.nn.Parameter(toy.torch.zeros(1))], lr=0.1)
    schedule = toy.get_scheduler("constant_with_warmup", optimizer, num_warmup_steps=0, num_training_steps=9)
    engine = toy.Engine(2, 4, optimizer, schedule)
    critic = SimpleNamespace(
        trainer=SimpleNamespace(
            max_epochs=1,
            critic=engine,
            critic_scheduler=schedule,
            strategy=toy.Strategy(policy.strategy.args),
        )
    )
    trainer.critic_model_group = toy.group([critic])
    adapter = adapter_of(trainer)
    assert adapter.facts().has_critic and adapter.knobs()["critic_learning_rate"] == 0.1
    values = {"ppo_mini_batch_size": 2, "ppo_epochs": 2, "micro_batch_size": 2, "critic_learning_rate": 0.05}
    assert all(item.ok for item in adapter.apply(values, 1))
    assert (
        critic.trainer.max_epochs == 2
        and engine.accumulate == critic.trainer.strategy.accumulated_gradient == 2
    )
    assert schedule.base_lrs == [0.05] and optimizer.param_groups[0]["lr"] == 0.05
    assert policy.trainer.actor_optim.param_groups[0]["lr"] == 0.05, "the actor's stays as it was"
    assert {a.trainer.max_epochs for a in actors(trainer)} == {2}


def test_a_number_that_is_not_finite_is_a_fault_of_its_own(start: Start) -> None:
    adapter = adapter_of(start())
    snapshot = adapter.read(adapter.record({"actor_grad_norm": math.nan, "policy_loss": math.inf}, 0, {}), 0)
    assert snapshot.reading("grad_norm").validity == snapshot.reading("loss").validity == "non_finite"
    assert snapshot.reading("clip_ratio").validity == "missing"
