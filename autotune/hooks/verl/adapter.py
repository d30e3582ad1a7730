"""verl's trainer behind the seam: its configuration, its worker processes and its metrics by our names.

Where each knob lives, and what goes wrong when only one of its places is set:

    mini-batch, epochs     driver's configuration, read at every step. The critic's own copies were resolved
                           once at the start, so they are set along with the actor's when they were equal
    clip, KL in the loss   the configuration bound to the workers' loss: replaced whole by `set_loss_fn`, the
                           call that verl's trainer itself uses. `clip_ratio` alone is read nowhere
    entropy                the same, and the driver's copy too: it decides whether entropy is computed at all
    KL in the reward       `kl_ctrl_in_reward.value`; verl's adaptive controller would overwrite it
    learning rates         schedule and optimizer of every worker (`workers.set_rate`)
    temperature            the samplers' copies and the driver's, which scales log-probs: both or none
    train batch            driver's configuration, where the dataloader hands out single prompts

Reading back asks every worker for the objects that its next update uses; ranks that differ read as NaN.
"""

from __future__ import annotations

import functools
import math
import os
from collections.abc import Callable, Mapping
from typing import Any

from autotune.decisions import Applied, Restore, RunFacts
from autotune.errors import AdapterError
from autotune.hooks.base import (
    FrozenDetector,
    SingleProcess,
    move,
    one_by_one,
    set_all_or_none,
    snapshot_of,
)
from autotune.hooks.remote import length_view, rate_capability, same_on_all, unavailable, zero_std_view
from autotune.hooks.verl import workers
from autotune.hooks.verl.declared import DECLARED, MISSING
from autotune.knobs import Capability, Liveness
from autotune.logs.tables import VERL, find
from autotune.metrics import METRICS, Snapshot, Validity
from autotune.trainer.records import RolloutRecord

ACTOR = "actor_rollout_ref.actor"
ROLLOUT = "actor_rollout_ref.rollout"
LOSS_KINDS = {
    **dict.fromkeys(("vanilla", "clip_cov", "kl_cov"), "token"),
    **dict.fromkeys(("gspo", "geo_mean"), "sequence"),
}
"""verl's `policy_loss.loss_mode` -> how its ratio is taken; every other loss has none that our rules know."""
IN_LOSS = {
    "clip_range_low": "clip_ratio_low",
    "clip_range_high": "clip_ratio_high",
    "entropy_coef": "entropy_coeff",
}
"""Our knob -> field of the configuration that is bound to the actor's loss; `kl_coef` where KL is a loss."""


class VerlAdapter(SingleProcess):
    """`Adapter` of a `PPOTrainer` of verl that has been initialised, on verl's single driver process.

    Args:
        trainer: verl's trainer.
        call: runs a function in worker processes: `call(handles, fn, *args)` gives one answer a worker.
    """

    def __init__(self, trainer: Any, call: Callable[..., list[Any]] | None = None) -> None:
        self.trainer = trainer
        self.config = trainer.config
        self._call = call or ray_call
        self._frozen = FrozenDetector()
        self._rollout, self._epoch = -1, 0
        self._critic_follows = trainer.use_critic and all(
            self._at(f"critic.{name}") == self._at(f"{ACTOR}.{name}")
            for name in ("ppo_mini_batch_size", "ppo_epochs")
        )
        self.world_size = data_parallel_size(trainer)
        self._rate = self._actor()["rate"]
        self._knobs = self.knobs()
        self._facts = self._make_facts()

    # -- what is true of the run -------------------------------------------------------------------

    def facts(self) -> RunFacts:
        return self._facts

    def _make_facts(self) -> RunFacts:
        optim = self._at(f"{ACTOR}.optim")
        total = int(self.trainer.total_training_steps)
        warmup = int(optim.get("lr_warmup_steps", -1) or -1)
        ratio = float(optim.get("lr_warmup_steps_ratio", 0.0) or 0.0)
        return RunFacts(
            rollouts=total,
            world_size=self.world_size,
            algorithm=str(self._at("algorithm.adv_estimator")),
            loss_kind=LOSS_KINDS.get(self._loss_mode, "none"),
            has_reference=self._has_reference,
            has_critic=bool(self.trainer.use_critic),
            knobs=dict(self._knobs),
            knob_capability=self._knob_table(),
            metric_capability=self._metric_table(),
            lr_warmup=warmup if warmup > 0 else int(ratio * total),
            fixed_micro_batch=self._micro_batch,
        )

    @property
    def _loss_mode(self) -> str:
        return str(self._at(f"{ACTOR}.policy_loss").get("loss_mode", "vanilla"))

    @property
    def _has_reference(self) -> bool:
        return bool(self.trainer.use_reference_policy)

    @property
    def _micro_batch(self) -> int:
        """Samples of a backward pass; 1 where a token budget cuts the passes."""
        if self._at(f"{ACTOR}.use_dynamic_bsz"):
            return 1
        return int(self._at(f"{ACTOR}.ppo_micro_batch_size_per_gpu") or 1)

    def _knob_table(self) -> dict[str, Capability]:
        live = Capability(Liveness.NEXT_ROLLOUT)
        table = {row.name: Capability(row.liveness, row.note) for row in DECLARED.knobs}
        for name in ("ppo_mini_batch_size", "ppo_epochs", "temperature"):
            table[name] = live
        loss = unavailable(self._no_loss_call()) if self._no_loss_call() else live
        table |= dict.fromkeys(IN_LOSS, loss)
        table["kl_coef"] = self._kl_capability(loss)
        table["actor_learning_rate"] = rate_capability("actor", self._actor()["peak"])
        if not self.trainer.use_critic:
            table.pop("critic_learning_rate")
        else:
            table["critic_learning_rate"] = rate_capability("critic", self._critic()["peak"])
        reason = self._no_train_batch()
        table["train_batch_size"] = Capability(Liveness.RESTART, reason) if reason else live
        return table

    def _no_loss_call(self) -> str:
        if self.trainer.distillation_config is not None:
            return "with distillation the loss is another one, which this adapter does not rebuild"
        return ""

    def _kl_capability(self, loss: Capability) -> Capability:
        in_loss, in_reward = self._kl_in_loss, bool(self._at("algorithm.use_kl_in_reward"))
        if not self._has_reference:
            return unavailable("no KL is configured, so verl built no reference model at the start")
        if in_loss and in_reward:
            return unavailable(
                "KL stands both in the loss and in the reward: one of the two should go first"
            )
        if in_reward and self._at("algorithm.kl_ctrl.type") != "fixed":
            return unavailable("algorithm.kl_ctrl.type is adaptive: verl moves the coefficient itself")
        return loss if in_loss else Capability(Liveness.NEXT_ROLLOUT)

    @property
    def _kl_in_loss(self) -> bool:
        return bool(self._at(f"{ACTOR}.use_kl_loss"))

    def _no_train_batch(self) -> str:
        if self._at("data.gen_batch_size") != 1:
            return "the dataloader hands out whole batches; it can move with data.gen_batch_size=1"
        if self._at("algorithm.filter_groups.enable"):
            return "group filtering keeps a train batch size of its own"
        return ""

    def _metric_table(self) -> dict[str, Capability]:
        table = {row.name: Capability(Validity.VALID) for row in DECLARED.metrics if "…" not in row.name}
        table |= {name: Capability(Validity.NOT_LOGGED, why) for name, why in MISSING.items()}
        if not self.trainer.use_critic:
            table["value_loss"] = Capability(Validity.NOT_LOGGED, "there is no critic")
        if not self._has_reference:
            table["kl_ref"] = Capability(
                Validity.NOT_LOGGED, "no KL is configured: there is no reference model"
            )
        if self._at("algorithm.rollout_correction.bypass_mode"):
            why = "bypass_mode takes the sampler's log-probs, so verl computes no entropy before the update"
            table["entropy"] = Capability(Validity.NOT_LOGGED, why)
            why = "bypass_mode takes the sampler's log-probs: what differs from them is not the update alone"
            table["kl_step"] = Capability(Validity.NOT_LOGGED, why)
        if not self._at(f"{ROLLOUT}.calculate_log_probs"):
            why = "actor_rollout_ref.rollout.calculate_log_probs is false: the sampler's are not kept"
            table["kl_mismatch"] = Capability(Validity.NOT_LOGGED, why)
        if LOSS_KINDS.get(self._loss_mode) is None:
            why = f"loss_mode {self._loss_mode}: its clipped share is not that of a policy ratio"
            table["clip_ratio"] = Capability(Validity.NOT_LOGGED, why)
        return table

    @property
    def measures_drift(self) -> bool:
        """Whether a forward pass after the updates tells how far they moved the policy."""
        return self._facts.metric_capability["kl_step"].state == Validity.VALID

    # -- sensing -----------------------------------------------------------------------------------

    def record(self, data: Mapping[str, Any], rollout: int, seen: Mapping[str, float]) -> RolloutRecord:
        """One step of verl, in canonical names.

        Args:
            data: what verl's logger was given.
            rollout: index of this rollout.
            seen: what `rollout_view` measured on the batch itself; it replaces verl's own numbers.
        """
        scalars = {**canonical(data), **seen, "learning_rate": self._rate}
        return RolloutRecord(rollout, dict(self._knobs), self._epoch, scalars)

    def read(self, raw: RolloutRecord, rollout: int) -> Snapshot:
        self._rollout = raw.rollout
        return snapshot_of(raw, self._facts, self._frozen)

    def settle(self) -> None:
        """The rollout was handled: remember what the next one is made with.

        verl logs the rate after its schedule's step, which is the coming update's. The one that an update
        used is the optimizer's before it.
        """
        self._rate = self._actor()["rate"]
        self._knobs = self.knobs()

    # -- acting ------------------------------------------------------------------------------------

    def knobs(self) -> dict[str, float]:
        """Real knob -> value, from the driver's configuration and from every worker."""
        actor, n = self._actor(), self._number(f"{ROLLOUT}.n")
        train = self._number("data.train_batch_size")
        mini = min(self._number(f"{ACTOR}.ppo_mini_batch_size"), train)
        found = {
            "train_batch_size": train,
            "rollout_n": n,
            "ppo_mini_batch_size": mini,
            "ppo_epochs": self._number(f"{ACTOR}.ppo_epochs"),
            "micro_batch_size": float(self._micro_batch),
            "rollout_micro_batch_size": float(train * n // self.world_size),
            "num_rollout_batches": 1.0,
            "kl_coef": self._kl(actor),
            "clip_range_low": actor["clip_range_low"],
            "clip_range_high": actor["clip_range_high"],
            "entropy_coef": actor["entropy_coef"],
            "actor_learning_rate": actor["peak"],
            "max_prompt_length": self._number("data.max_prompt_length"),
            "max_response_length": self._number(f"{ROLLOUT}.response_length"),
            "temperature": self._temperature(),
        }
        critic = {"critic_learning_rate": self._critic()["peak"]} if self.trainer.use_critic else {}
        usable = {k: v for k, v in (found | critic).items() if not math.isnan(v) or k in self._must}
        return usable

    _must = (
        "clip_range_low",
        "clip_range_high",
        "kl_coef",
        "entropy_coef",
        "temperature",
        "actor_learning_rate",
    )
    """Knobs that stay in the vector although the ranks differ: NaN then equals no request."""

    def apply(self, values: Mapping[str, float], epoch: int) -> list[Applied]:
        applied = set_all_or_none(values, self.knobs, one_by_one(self._set), self._rollout + 1)
        self._epoch = epoch
        return applied

    def _set(self, knob: str, value: float) -> None:
        setters: dict[str, Callable[[float], None]] = {
            "ppo_mini_batch_size": self._set_mini_batch,
            "ppo_epochs": lambda v: self._set_on_driver("ppo_epochs", v),
            "train_batch_size": self._set_train_batch,
            "kl_coef": self._set_kl,
            "actor_learning_rate": lambda v: self._set_rate("actor", v),
            "critic_learning_rate": lambda v: self._set_rate("critic", v),
            "temperature": self._set_temperature,
            **{name: functools.partial(self._set_in_loss, name) for name in IN_LOSS},
        }
        move(setters, knob, value, self._facts, self.knobs)

    def _set_mini_batch(self, value: float) -> None:
        train, n = self._number("data.train_batch_size"), self._number(f"{ROLLOUT}.n")
        share = self.world_size * self._micro_batch
        if value < 1 or train % value or value * n % share:
            raise AdapterError(
                f"ppo_mini_batch_size {value:g} prompts x {n:g} responses must divide"
                f" train_batch_size {train:g}"
                f" and be whole micro batches on {self.world_size} rank(s); verl would pad with dummy samples"
            )
        self._set_on_driver("ppo_mini_batch_size", value)

    def _set_on_driver(self, name: str, value: float) -> None:
        places = [f"{ACTOR}.{name}", *([f"critic.{name}"] if self._critic_follows else [])]
        for place in places:
            self._write(place, int(value))

    def _set_train_batch(self, value: float) -> None:
        self._write("data.train_batch_size", int(value))

    def _set_kl(self, value: float) -> None:
        if self._kl_in_loss:
            self._push_loss({"kl_loss_coef": value})
        elif self._has_reference:
            self.trainer.kl_ctrl_in_reward.value = value

    def _set_in_loss(self, knob: str, value: float) -> None:
        self._push_loss({IN_LOSS[knob]: value})

    def _push_loss(self, fields: Mapping[str, float]) -> None:
        """Write the driver's copy, build the actor's configuration anew and bind it to the loss of
        all workers.
        """
        from verl.utils.config import omega_conf_to_dataclass
        from verl.workers.utils.losses import ppo_loss

        for name, value in fields.items():
            self._write(f"{ACTOR}.{name}", float(value))
        config = omega_conf_to_dataclass(self.config.actor_rollout_ref.actor)
        self.trainer.actor_rollout_wg.set_loss_fn(functools.partial(ppo_loss, config=config))

    def _set_rate(self, role: str, value: float) -> None:
        if value <= 0:
            raise AdapterError(
                f"{role}_learning_rate = {value:g} must be above 0: a schedule at 0 cannot be rescaled"
            )
        group = self.trainer.actor_rollout_wg if role == "actor" else self.trainer.critic_wg
        self._call(group.workers, workers.set_rate, role, value)

    def _set_temperature(self, value: float) -> None:
        self._call(self._samplers, workers.set_temperature, value)
        self._write(f"{ROLLOUT}.temperature", value)

    def restore(self, restore: Restore) -> int:
        folder = os.path.join(str(self._at("trainer.default_local_dir")), "global_step_N")
        raise AdapterError(
            "verl cannot bring weights back while it runs; stop it and start again with"
            f" trainer.resume_mode=resume_path trainer.resume_from_path={folder}"
        )

    # -- keeping -----------------------------------------------------------------------------------

    def state_dict(self) -> dict[str, Any]:
        return {"frozen": self._frozen.state()}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self._frozen.load(state["frozen"])

    # -- verl's places -----------------------------------------------------------------------------

    @property
    def _samplers(self) -> list[Any]:
        return list(self.trainer.agent_loop_manager.agent_loop_workers)

    def _actor(self) -> dict[str, float]:
        return same_on_all(self._call(self.trainer.actor_rollout_wg.workers, workers.read_actor))

    def _critic(self) -> dict[str, float]:
        return same_on_all(self._call(self.trainer.critic_wg.workers, workers.read_critic))

    def _kl(self, actor: Mapping[str, float]) -> float:
        if self._kl_in_loss:
            return actor["kl_loss_coef"]
        return float(self.trainer.kl_ctrl_in_reward.value) if self._has_reference else 0.0

    def _temperature(self) -> float:
        """NaN where the samplers and the driver, whose copy scales the log-probs, differ."""
        drivers = self._number(f"{ROLLOUT}.temperature")
        samplers = self._call(self._samplers, workers.read_temperature)
        return drivers if all(value == drivers for value in samplers) else math.nan

    def _at(self, place: str) -> Any:
        node: Any = self.config
        for part in place.split("."):
            node = node.get(part) if node is not None else None
        return node

    def _number(self, place: str) -> float:
        return float(self._at(place))

    def _write(self, place: str, value: float) -> None:
        parent, _, name = place.rpartition(".")
        self._at(parent)[name] = value


def canonical(data: Mapping[str, Any]) -> dict[str, float | None]:
    """verl's metrics of one step by our names; where several keys give one metric the best of them."""
    scalars: dict[str, float | None] = {}
    ranks: dict[str, int] = {}
    for key, value in data.items():
        column = find(VERL, key)
        number = _scalar(value)
        if column is None or number is None or column.rank < ranks.get(column.ours, -99):
            continue
        if column.ours in METRICS or column.ours.startswith(("reward/", "time/")):
            scalars[column.ours], ranks[column.ours] = number * column.scale, column.rank
    aborted, tokens = _scalar(data.get("response/aborted_ratio")), _scalar(data.get("perf/total_num_tokens"))
    seconds = _scalar(data.get("perf/time_per_step"))
    if aborted is not None:
        scalars["rollout_success_rate"] = 1 - aborted
    if tokens is not None and seconds:
        scalars["tokens_per_second"] = tokens / seconds
    return scalars


def rollout_view(
    keys: list[str], tags: list[Mapping[str, Any]], scores: list[float], cap: int, total_cap: int | None
) -> dict[str, float]:
    """What verl does not log, from the batch itself.

    Args:
        keys: verl's names of the samples, `{uid}_{session}_{index}`: a uid is one prompt.
        tags: `prompt_len`, `response_len` in tokens and `is_padding` of each sample.
        scores: reward of each sample.
        cap: response tokens allowed.
        total_cap: prompt and response tokens allowed, or None.

    Returns:
        reward_mean, reward_std, zero_std_fraction, truncated_fraction and response lengths. verl's own
        `response_length/clip_ratio` compares with the longest answer of the batch, so it is never 0.
    """
    real = [k for k, tag in enumerate(tags) if not tag.get("is_padding", False)]
    if not real:
        return {}
    lengths = [int(tags[k]["response_len"]) for k in real]
    cut = sum(tags[k]["response_len"] >= _limit(tags[k], cap, total_cap) for k in real)
    rewards = [scores[k] for k in real]
    groups: dict[str, list[float]] = {}
    for k in real:
        groups.setdefault(keys[k].split("_")[0], []).append(scores[k])
    mean = math.fsum(rewards) / len(rewards)
    view = {
        "reward_mean": mean,
        "reward_std": math.sqrt(math.fsum((r - mean) ** 2 for r in rewards) / len(rewards)),
        "truncated_fraction": cut / len(real),
        "response_length_mean": sum(lengths) / len(lengths),
        **length_view(lengths),
    }
    return view | zero_std_view(groups)


def _limit(tag: Mapping[str, Any], cap: int, total_cap: int | None) -> int:
    """The smaller of the two caps for this sample."""
    return min(cap, total_cap - int(tag["prompt_len"])) if total_cap else cap


def _scalar(value: Any) -> float | None:
    """A number, also of numpy's kind; None for text, lists and truth values."""
    if value is None or isinstance(value, (bool, str, bytes, list, dict)):
        return None
    try:
        return float(value)
    except (TypeError, ValueError):
        return None


def ray_call(handles: list[Any], fn: Callable[..., Any], *args: Any) -> list[Any]:
    """Run `fn(worker, *args)` in each of the Ray actors and wait for all answers."""
    import ray

    answers: list[Any] = ray.get([handle.__ray_call__.remote(fn, *args) for handle in handles])
    return answers


def data_parallel_size(trainer: Any) -> int:
    """Ranks that share one mini-batch: what verl's own balancing asks the workers for."""
    mapping = trainer.actor_rollout_wg._query_dispatch_info("actor")
    return int(max(mapping)) + 1
