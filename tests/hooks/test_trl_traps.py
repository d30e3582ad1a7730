"""Every trap of TRL that the adapter must not fall into, on the real trainer; the quick ones."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from transformers.trainer_utils import IntervalStrategy

from autotune.decisions import Restore
from autotune.errors import AdapterError, InputError
from autotune.hooks.guest import JOURNAL
from autotune.hooks.trl import AutotuneCallback
from autotune.hooks.trl.knobs import TrlKnobs, find_sampler, temperature_cell
from autotune.hooks.trl.phases import Batches
from autotune.journal import read_journal
from autotune.knobs import Liveness, batch_problems, updates_per_rollout
from tests.hooks.trl_runs import GROUP, LENGTH, PROMPTS, make_trainer, weights
from tests.tiny_model import tiny_folder

LR = "actor_learning_rate"


@pytest.fixture(scope="module", autouse=True)
def _offline() -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("HF_HUB_OFFLINE", "1")
        patch.setenv("HF_HUB_DISABLE_TELEMETRY", "1")
        yield


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_folder(tmp_path_factory.mktemp("model"))


class Run:
    """A trainer with the callback, and what a test does between two of its rollouts."""

    def __init__(self, folder: Path, out: Path, rollouts: int, control: Any = None, **options: Any) -> None:
        plug = {key: options.pop(key) for key in ("hook", "keep_bytes", "accept_version") if key in options}
        self.trainer = make_trainer(folder, out, rollouts, **options)
        self.callback = AutotuneCallback(self.trainer, control or {"mode": "off"}, **plug)
        self.trainer.add_callback(self.callback)
        self.between: dict[int, Callable[[Any], object]] = {}
        self.snapshots: list[Any] = []

    @property
    def adapter(self) -> Any:
        return self.callback.adapter

    def train(self) -> Run:
        def at_begin() -> None:
            plain = self.adapter.read

            def read(raw: Any, rollout: int) -> Any:
                self.snapshots.append(plain(raw, rollout))
                if rollout in self.between:
                    self.between[rollout](self.adapter)
                return self.snapshots[-1]

            self.adapter.read = read

        begin = self.callback._begin

        def begin_and_watch(data: Any) -> None:
            begin(data)
            at_begin()

        self.callback._begin = begin_and_watch
        self.trainer.train()
        assert not self.callback.failed and not self.callback.guest.broken, self.callback.failed
        return self


def applied(adapter: Any, **values: float) -> None:
    for item in adapter.apply(values, 0):
        assert item.ok, item


def refused(adapter: Any, **values: float) -> str:
    before = adapter.knobs()
    found = adapter.apply(values, 0)
    assert all(item.error for item in found) and adapter.knobs() == before
    return str(found[0].error)


# -- arithmetic -----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("numbers", "updates", "mini", "epochs"),
    [
        # micro, ranks, steps_per_generation, group, iterations, accumulation
        ((8, 1, 4, 4, 1, 4), 1, 8, 1),  # TRL's default: on-policy
        ((8, 1, 4, 4, 1, 2), 2, 4, 1),
        ((8, 1, 4, 4, 2, 2), 4, 4, 2),
        ((8, 2, 4, 4, 1, 1), 4, 4, 1),
        ((8, 1, 4, 4, 1, 8), 1, 16, 1),  # two generations in one update
        ((2, 1, 4, 4, 1, 1), 4, 2, 4),  # an update of half a group: told by its updates alone
        ((8, 1, 2, 4, 4, 4), 2, 4, 2),  # an update that goes over the data twice
    ],
)
def test_batches_in_our_words(numbers: tuple[int, ...], updates: int, mini: int, epochs: int) -> None:
    batches = Batches(*numbers)
    knobs = batches.knobs()
    assert batches.updates == updates == updates_per_rollout(knobs)
    assert (knobs["ppo_mini_batch_size"], knobs["ppo_epochs"]) == (mini, epochs)
    assert batch_problems(knobs, batches.ranks) == [] and not batches.problem


def test_updates_that_straddle_generations_have_no_rollouts() -> None:
    batches = Batches(8, 1, 3, 4, 1, 4)  # the known trap: 4 accumulated steps, 3 a generation
    assert batches.steps == 0 and "straddle" in batches.problem


def test_a_mini_batch_must_be_whole_micro_steps_that_divide_a_generation() -> None:
    batches = Batches(8, 1, 4, 4, 1, 2)
    assert [batches.accumulation_for(m) for m in (2, 4, 8)] == [1, 2, 4]
    assert [batches.accumulation_for(m) for m in (1, 3, 6, 16, 2.5)] == [0, 0, 0, 0, 0]


# -- sensing --------------------------------------------------------------------------------------


def test_logs_are_regrouped_into_rollouts(folder: Path, tmp_path: Path) -> None:
    """Two passes: reward is in one log of four, and its absence from the others is no gap."""
    run = Run(folder, tmp_path, 3, num_iterations=2).train()
    logs = [entry for entry in run.trainer.state.log_history if "loss" in entry]
    assert [("reward" in entry) for entry in logs] == [True, False, False, False] * 3
    assert [s.rollout for s in run.snapshots] == [0, 1, 2]
    for t, snapshot in enumerate(run.snapshots):
        assert snapshot.value("reward_mean") == logs[4 * t]["reward"]
        mean = sum(entry["entropy"] for entry in logs[4 * t : 4 * t + 4]) / 4
        assert snapshot.value("entropy") == pytest.approx(mean)
        assert len(snapshot.per_update["grad_norm"]) == 4
    assert not [line for line in run.trainer.state.log_history if "autotune" in str(line)]


def test_on_policy_by_default_the_ratio_has_no_sensor_and_the_drift_is_real(
    folder: Path, tmp_path: Path
) -> None:
    run = Run(folder, tmp_path, 2, gradient_accumulation_steps=4).train()
    for snapshot in run.snapshots:
        assert snapshot.reading("clip_ratio").validity == "structural_zero"
        assert "clip_ratio" not in snapshot.per_update and not snapshot.histograms
        assert snapshot.value("kl_step") > 1e-4
    logs = [entry for entry in run.trainer.state.log_history if "loss" in entry]
    assert all(entry["clip_ratio/region_mean"] == 0 for entry in logs), "TRL logs a plain 0"


def test_without_beta_there_is_no_reference_and_beta_cannot_rise(folder: Path, tmp_path: Path) -> None:
    told: list[str] = []
    run = Run(folder, tmp_path, 2, beta=0.0)
    run.between[0] = lambda adapter: told.append(refused(adapter, kl_coef=0.01))
    run.train()
    assert "no reference model" in told[0]
    facts = run.adapter.facts()
    assert not facts.has_reference and not facts.can_move("kl_coef")
    reading = run.snapshots[0].reading("kl_ref")
    assert reading.value is None and "not a KL of 0" in reading.reason
    assert "kl" not in run.trainer.state.log_history[0]


def test_without_the_hook_b4_and_x1_are_not_logged(folder: Path, tmp_path: Path) -> None:
    run = Run(folder, tmp_path, 2, {"mode": "shadow"}, hook=False).train()
    for metric in ("ratio_low", "ratio_high", "kl_step"):
        reading = run.snapshots[0].reading(metric)
        assert reading.validity == "not_logged" and "hook on the loss is off" in reading.reason
    assert run.snapshots[1].value("clip_ratio") == pytest.approx(
        sum(e["clip_ratio/region_mean"] for e in run.trainer.state.log_history[2:4]) / 2
    )
    silent = read_journal(tmp_path / JOURNAL)[1]["decision"]["silent"]
    assert all("not logged" in silent[rule] for rule in ("B4a", "B4b", "X1")), silent
    assert run.snapshots[0].reading("loss").validity == "not_logged", "the log's loss hides NaN"


def test_dropout_hides_the_drift(folder: Path, tmp_path: Path) -> None:
    trainer = make_trainer(folder, tmp_path, 1)
    trainer.model.config.attention_dropout = 0.1
    callback = AutotuneCallback(trainer, {"mode": "off"})
    trainer.add_callback(callback)
    trainer.train()
    assert "dropout" in callback.adapter.facts().metric_capability["kl_step"].reason


def test_a_loss_that_is_not_a_number_is_seen_though_trl_hides_it(folder: Path, tmp_path: Path) -> None:
    run = Run(folder, tmp_path, 3, {"mode": "shadow"})
    compute = run.trainer._compute_loss

    def poisoned(model: Any, inputs: Any) -> Any:
        loss = compute(model, inputs)
        return loss + math.nan if run.trainer.state.global_step == 3 else loss  # the gradient stays whole

    run.trainer._compute_loss = poisoned
    run.train()
    assert run.trainer.args.logging_nan_inf_filter
    logs = [entry for entry in run.trainer.state.log_history if "loss" in entry]
    assert math.isfinite(logs[3]["loss"]), "transformers replaced it"
    assert run.snapshots[1].reading("loss").validity == "non_finite"


def test_micro_batches_are_weighed_by_their_tokens(folder: Path, tmp_path: Path) -> None:
    """TRL averages micro-batch means unweighted; the hook counts tokens, histogram and shares agree."""
    run = Run(folder, tmp_path, 3, learning_rate=2e-2).train()
    snapshot = run.snapshots[2]
    counts = snapshot.histograms["policy_ratio"]
    shares = [snapshot.value(f"ratio_{side}") for side in ("low", "in", "high")]
    assert sum(shares) == pytest.approx(1.0) and 0 < shares[1] < 1
    tokens = sum(counts)
    assert tokens == snapshot.value("response_length_mean") * PROMPTS * GROUP


def test_none_is_trls_word_for_nan_and_not_a_gap(folder: Path, tmp_path: Path) -> None:
    def nothing(completions: Any, **kwargs: Any) -> list[Any]:
        return [None] * len(completions)

    run = Run(folder, tmp_path, 1, reward=nothing).train()
    assert run.trainer.state.log_history[0]["reward"] is None
    assert run.snapshots[0].reading("reward_mean").validity == "non_finite"


def test_straddling_updates_stand_the_controller_down_and_training_goes_on(
    folder: Path, tmp_path: Path
) -> None:
    trainer = make_trainer(
        folder, tmp_path, 2, steps_per_generation=2, gradient_accumulation_steps=3, max_steps=2,
        per_device_train_batch_size=16,
    )  # fmt: skip
    callback = AutotuneCallback(trainer, {"mode": "act"})
    trainer.add_callback(callback)
    trainer.train()
    assert "straddle" in callback.guest.broken and trainer.state.global_step == 2


def test_another_trainer_is_refused_with_the_way_to_go() -> None:
    with pytest.raises(InputError, match=r"expected a trl\.GRPOTrainer.*generic"):
        AutotuneCallback(object(), {"mode": "off"})


def test_a_second_callback_is_refused(folder: Path, tmp_path: Path) -> None:
    """transformers would warn and call both."""
    run = Run(folder, tmp_path, 1)
    with pytest.raises(InputError, match="already"):
        AutotuneCallback(run.trainer, {"mode": "off"})


# -- acting ---------------------------------------------------------------------------------------


def test_the_rate_lasts_and_the_log_shows_it(folder: Path, tmp_path: Path) -> None:
    """Writing the groups alone would last one update; so base, groups and last rate move together."""
    run = Run(folder, tmp_path, 4, lr_scheduler_type="linear", learning_rate=1e-3)
    run.between[1] = lambda adapter: applied(adapter, **{LR: 2e-3})
    run.train()
    rates = [entry["learning_rate"] for entry in run.trainer.state.log_history if "loss" in entry]
    shape = [1 - i / 8 for i in range(8)]
    assert rates == pytest.approx([1e-3 * s for s in shape[:4]] + [2e-3 * s for s in shape[4:]])
    assert run.trainer.lr_scheduler.base_lrs == [2e-3] * len(run.trainer.optimizer.param_groups)


def test_only_the_groups_would_last_one_update(folder: Path, tmp_path: Path) -> None:
    """The trap itself: what the test above guards against does happen."""
    run = Run(folder, tmp_path, 3)

    def groups_alone(adapter: Any) -> None:
        for group in run.trainer.optimizer.param_groups:
            group["lr"] = 9.0e-3

    run.between[0] = groups_alone
    run.train()
    assert run.trainer.optimizer.param_groups[0]["lr"] == 2e-3


def test_under_deepspeed_rate_and_batches_stay_with_the_reason(folder: Path, tmp_path: Path) -> None:
    """Its engine keeps the accumulation, and steps a schedule of its own inside `backward`."""
    run = Run(folder, tmp_path, 1).train()
    run.trainer.is_deepspeed_enabled = True
    table = TrlKnobs(run.trainer, run.trainer.get_train_dataloader()).capability()
    assert "DeepSpeed" in table["ppo_mini_batch_size"].reason and "DeepSpeed" in table["ppo_epochs"].reason
    assert table[LR].reason and not table[LR].acts and table["clip_range_high"].acts


def test_a_schedule_without_base_rates_is_left_alone(folder: Path, tmp_path: Path) -> None:
    run = Run(folder, tmp_path, 1).train()
    run.trainer.lr_scheduler = SimpleNamespace()
    assert "no base rates" in run.adapter.live.capability()[LR].reason


def test_parameter_groups_keep_their_proportions(folder: Path, tmp_path: Path) -> None:
    run = Run(folder, tmp_path, 2)

    def one_slower(adapter: Any) -> None:
        run.trainer.lr_scheduler.base_lrs[-1] = 5e-4
        applied(adapter, **{LR: 4e-3})

    run.between[0] = one_slower
    run.train()
    assert run.trainer.lr_scheduler.base_lrs[0] == 4e-3
    assert run.trainer.lr_scheduler.base_lrs[-1] == pytest.approx(1e-3)


def test_clip_and_beta_move_in_the_trainer_and_not_in_dead_arguments(folder: Path, tmp_path: Path) -> None:
    told: list[str] = []
    run = Run(folder, tmp_path, 3)

    def move(adapter: Any) -> None:
        applied(adapter, clip_range_low=0.1, clip_range_high=0.25, kl_coef=0.05)
        told.append(refused(adapter, kl_coef=0.0))

    run.between[0] = move
    run.train()
    t = run.trainer
    assert (t.epsilon_low, t.epsilon_high, t.beta) == (0.1, 0.25, 0.05)
    assert t.args.epsilon == 0.2 and "no reference log-probs" in told[0]
    assert run.snapshots[1].knobs["clip_range_low"] == 0.1


def test_a_mini_batch_moves_at_a_boundary_and_every_update_is_whole(folder: Path, tmp_path: Path) -> None:
    """Down from on-policy, then up: old log-probs appear, no update is cut, the rollouts stay as many."""
    store = [{"prompt": f"{i}>"} for i in range(40 * PROMPTS)]
    run = Run(folder, tmp_path, 6, prompts=store, gradient_accumulation_steps=4)
    sizes: list[tuple[int, int, bool]] = []
    compute = run.trainer._compute_loss

    def watching(model: Any, inputs: Any) -> Any:
        t = run.trainer
        known = "old_per_token_logps" in inputs
        sizes.append((t.state.global_step, t.current_gradient_accumulation_steps, known))
        return compute(model, inputs)

    run.trainer._compute_loss = watching
    run.between[1] = lambda adapter: applied(adapter, ppo_mini_batch_size=2)
    run.between[3] = lambda adapter: applied(adapter, ppo_mini_batch_size=4)
    run.train()
    per_rollout = [updates_per_rollout(s.knobs) for s in run.snapshots]
    assert per_rollout == [1, 1, 4, 4, 2, 2] and run.trainer.state.global_step == 14
    steps = [step for step, _, _ in sizes]
    assert [steps.count(u) for u in range(14)] == [4, 4] + [1] * 8 + [2] * 4
    assert [a for _, a, _ in sizes] == [4] * 8 + [1] * 8 + [2] * 8
    assert [known for _, _, known in sizes] == [False] * 8 + [True] * 16
    assert run.snapshots[2].value("ratio_in") < 1, "the ratio has a sensor now"


def test_a_second_pass_has_old_log_probs_and_new_prompts_come_each_rollout(
    folder: Path, tmp_path: Path
) -> None:
    """The trap: num_iterations moved in mid-phase re-uses a buffer without old log-probs, silently."""
    run = Run(folder, tmp_path, 6, gradient_accumulation_steps=4)
    seen: list[bool] = []
    asked: list[tuple[str, ...]] = []
    compute, generate = run.trainer._compute_loss, run.trainer._generate_and_score_completions

    def watching(model: Any, inputs: Any) -> Any:
        seen.append("old_per_token_logps" in inputs)
        return compute(model, inputs)

    def generating(inputs: Any) -> Any:
        asked.append(tuple(sorted({row["prompt"] for row in inputs})))
        return generate(inputs)

    run.trainer._compute_loss, run.trainer._generate_and_score_completions = watching, generating
    run.between[1] = lambda adapter: applied(adapter, ppo_epochs=2)
    run.train()
    assert [updates_per_rollout(s.knobs) for s in run.snapshots] == [1, 1, 2, 2, 2, 2]
    assert seen == [False] * 8 + [True] * 32
    assert len(asked) == 6 == len(set(asked)), "one generation a rollout, none for the same prompts"
    assert find_sampler(run.trainer.callback_handler.train_dataloader).repeat_count == 8


def test_batches_stay_under_a_schedule_with_a_horizon(folder: Path, tmp_path: Path) -> None:
    told: list[str] = []
    run = Run(folder, tmp_path, 2, lr_scheduler_type="cosine")
    run.between[0] = lambda adapter: told.append(refused(adapter, ppo_mini_batch_size=8))
    run.train()
    assert "counts updates to a horizon" in told[0]


def test_more_updates_than_the_epochs_hold_are_refused(folder: Path, tmp_path: Path) -> None:
    few = [{"prompt": f"{i}>"} for i in range(3 * PROMPTS)]  # three rollouts of prompts and no more
    told: list[str] = []
    run = Run(folder, tmp_path, 3, prompts=few, gradient_accumulation_steps=4)
    run.between[0] = lambda adapter: told.append(refused(adapter, ppo_mini_batch_size=2))
    run.train()
    assert "more prompts" in told[0] and run.trainer.state.global_step == 3


def test_the_length_moves_in_all_its_places(folder: Path, tmp_path: Path) -> None:
    told: list[str] = []
    run = Run(folder, tmp_path, 3)

    def move(adapter: Any) -> None:
        applied(adapter, max_response_length=4)
        told.append(refused(adapter, max_response_length=32))

    run.between[0] = move
    run.train()
    t = run.trainer
    sampler = (t.generation_config.max_new_tokens, t.generation_kwargs["max_new_tokens"])
    assert (t.max_completion_length, *sampler) == (4, 4, 4) and "from 1 to 31 tokens" in told[0]
    assert run.snapshots[0].value("response_length_max") == LENGTH
    assert run.snapshots[1].value("response_length_max") == 4


def test_the_length_is_a_divisor_in_dr_grpo_and_stays(folder: Path, tmp_path: Path) -> None:
    run = Run(folder, tmp_path, 1, loss_type="dr_grpo").train()
    assert "would scale the loss" in run.adapter.facts().knob_capability["max_response_length"].reason


def test_losses_without_a_clip_have_no_clip_knob(folder: Path, tmp_path: Path) -> None:
    run = Run(folder, tmp_path, 1, loss_type="cispo", epsilon_high=5.0).train()
    facts = run.adapter.facts()
    assert not facts.can_move("clip_range_low") and run.snapshots[0].reading("clip_ratio").value is None


def test_the_temperature_moves_in_sampler_and_log_probs_together(folder: Path, tmp_path: Path) -> None:
    """The trap: entropy and ratios at the old temperature. Old log-probs and new must agree at no drift."""
    run = Run(folder, tmp_path, 4, learning_rate=1e-7)
    run.between[1] = lambda adapter: applied(adapter, temperature=0.5)
    run.train()
    t = run.trainer
    assert t.generation_config.temperature == t.generation_kwargs["temperature"] == 0.5
    assert temperature_cell(t.model).cell_contents == temperature_cell(t.ref_model).cell_contents == 0.5
    before, after = run.snapshots[1].value("entropy"), run.snapshots[2].value("entropy")
    assert after < 0.8 * before, "the entropy is that of the colder distribution"
    assert run.snapshots[3].value("kl_step") < 1e-6 and run.snapshots[3].value("kl_ref") < 1e-6


def test_a_temperature_that_reaches_only_the_sampler_reads_as_broken(folder: Path, tmp_path: Path) -> None:
    run = Run(folder, tmp_path, 1).train()
    run.trainer.generation_config.temperature = 0.7
    assert math.isnan(run.adapter.live.temperature())


def test_the_entropy_bonus_must_have_been_on(folder: Path, tmp_path: Path) -> None:
    off = Run(folder, tmp_path / "off", 1).train()
    assert not off.adapter.facts().can_move("entropy_coef")
    on = Run(folder, tmp_path / "on", 2, entropy_coef=0.01)
    on.between[0] = lambda adapter: applied(adapter, entropy_coef=0.02)
    on.train()
    assert on.trainer.entropy_coef == 0.02


def test_one_refusal_takes_the_whole_vector_back(folder: Path, tmp_path: Path) -> None:
    told: list[str] = []
    run = Run(folder, tmp_path, 2)
    run.between[0] = lambda adapter: told.append(
        refused(adapter, **{LR: 1e-3, "clip_range_low": 0.1, "max_response_length": 99})
    )
    run.train()
    assert run.snapshots[1].knobs == run.snapshots[0].knobs and told


def test_what_needs_a_restart_says_so(folder: Path, tmp_path: Path) -> None:
    run = Run(folder, tmp_path, 1).train()
    table = run.adapter.facts().knob_capability
    for knob in ("train_batch_size", "rollout_n", "micro_batch_size"):
        assert table[knob].state == Liveness.RESTART and table[knob].reason


# -- weights --------------------------------------------------------------------------------------


def test_weights_are_not_kept_beyond_the_budget(folder: Path, tmp_path: Path) -> None:
    run = Run(folder, tmp_path, 1, {"mode": "act"}, keep_bytes=1000).train()
    notes = [line["text"] for line in read_journal(tmp_path / JOURNAL) if line["type"] == "note"]
    assert any("keep_bytes" in text for text in notes)
    with pytest.raises(AdapterError, match="keep_bytes"):
        run.adapter.restore(Restore("undo", 0, "test"))


# -- the hook -------------------------------------------------------------------------------------


def test_the_hook_leaves_loss_gradient_and_random_numbers_bit_for_bit(folder: Path, tmp_path: Path) -> None:
    def trace(out: Path, plug: bool) -> list[Any]:
        trainer = make_trainer(folder, out, 3, num_iterations=2)
        seen: list[Any] = []
        compute, clip = trainer._compute_loss, trainer._clip_grad_norm

        def watching(model: Any, inputs: Any) -> Any:
            loss = compute(model, inputs)
            seen.append((loss.detach().numpy().tobytes(), torch.random.get_rng_state().numpy().tobytes()))
            return loss

        def clipping(model: Any) -> Any:
            seen.append([p.grad.numpy().tobytes() for p in model.parameters() if p.grad is not None])
            return clip(model)

        trainer._compute_loss, trainer._clip_grad_norm = watching, clipping
        if plug:
            trainer.add_callback(AutotuneCallback(trainer, {"mode": "shadow"}))
        trainer.train()
        return [*seen, weights(trainer)]

    plain, hooked = trace(tmp_path / "plain", False), trace(tmp_path / "hooked", True)
    assert len(plain) == 3 * (8 + 4) + 1
    assert plain == hooked


def test_a_failing_hook_is_taken_out_and_training_goes_on(folder: Path, tmp_path: Path) -> None:
    run = Run(folder, tmp_path, 3, {"mode": "shadow"})
    plain = run.trainer._compute_loss
    run.between[0] = lambda adapter: setattr(adapter.hook, "_measure", None)
    run.train()
    notes = [line["text"] for line in read_journal(tmp_path / JOURNAL) if line["type"] == "note"]
    assert any("taken out" in text for text in notes)
    assert run.trainer._compute_loss == plain and run.trainer.state.global_step == 6


# -- what only a GPU has, and other trainers -------------------------------------------------------


def test_vllm_is_told_length_and_temperature_in_its_own_places(folder: Path, tmp_path: Path) -> None:
    """Its engine is not here; where TRL's generation reads both at every call is."""
    run = Run(folder, tmp_path, 1).train()
    t = run.trainer
    t.vllm_generation = SimpleNamespace(temperature=1.0, max_completion_length=LENGTH)
    t.use_vllm, t.args.vllm_max_model_length = True, 24
    applied(run.adapter, max_response_length=20, temperature=0.8)
    assert (t.vllm_generation.max_completion_length, t.max_completion_length) == (20, 20)
    assert t.vllm_generation.temperature == temperature_cell(t.model).cell_contents == 0.8
    assert "from 1 to 23 tokens" in refused(run.adapter, max_response_length=24)
    t.args.vllm_max_model_length = None
    assert f"from 1 to {LENGTH} tokens" in refused(run.adapter, max_response_length=30)


def test_importance_sampled_log_probs_are_no_clip_sensor(folder: Path, tmp_path: Path) -> None:
    """With vLLM old log-probs are always there, and on the first update the ratio is 1 all the same."""
    run = Run(folder, tmp_path, 2, gradient_accumulation_steps=4)
    compute = run.trainer._compute_loss

    def with_sampler(model: Any, inputs: Any) -> Any:
        with torch.no_grad():
            ids = torch.cat([inputs["prompt_ids"], inputs["completion_ids"]], dim=1)
            mask = torch.cat([inputs["prompt_mask"], inputs["completion_mask"]], dim=1)
            width = inputs["completion_ids"].size(1)
            old = run.adapter.hook._plain["_get_per_token_logps_and_entropies"](model, ids, mask, width)[0]
        unscored = torch.where(torch.arange(width) == 0, torch.nan, old + 0.1)
        inputs |= {"old_per_token_logps": old, "sampling_per_token_logps": unscored}
        return compute(model, inputs)

    run.trainer._compute_loss = with_sampler
    plain = run.callback._begin

    def begin(data: Any) -> None:
        plain(data)
        seen = run.adapter._facts.metric_capability
        seen["kl_mismatch"] = seen["kl_step"]

    run.callback._begin = begin
    run.train()
    assert run.snapshots[0].reading("clip_ratio").validity == "structural_zero"


def test_evaluations_are_no_rollouts_and_give_the_held_out_score(folder: Path, tmp_path: Path) -> None:
    run = Run(folder, tmp_path, 3, eval_steps=2, per_device_eval_batch_size=GROUP)
    run.trainer.args.eval_strategy = IntervalStrategy.STEPS
    run.trainer.eval_dataset = run.trainer.train_dataset.select(range(2))
    run.train()
    assert [s.rollout for s in run.snapshots] == [0, 1, 2]
    assert run.snapshots[1].value("eval_score") is not None
    assert run.adapter.facts().metric_capability["eval_score"].state == "valid"


def test_an_asynchronous_trainer_is_refused(tmp_path: Path) -> None:
    """Its `kl` is to the old policy and not to a reference, and its sampler lives in another process."""
    from trl.experimental.async_grpo import AsyncGRPOTrainer

    with pytest.raises(InputError, match="AsyncGRPOTrainer"):
        AutotuneCallback(AsyncGRPOTrainer.__new__(AsyncGRPOTrainer), {"mode": "off"})
