"""OpenRLHF's trainer behind the seam: its arguments, its model actors and its status by our names.

Where each knob lives, and what goes wrong when only one of its places is set:

    mini-batch      `train.batch_size` in samples. DeepSpeed steps by its own count and the strategy
                    normalises the loss by another: both, in every actor (`workers.set_batch`)
    epochs          actor and critic separately
    clip, entropy   every policy actor, each of which holds a copy of the arguments
    KL              `kl_ctl.value` alone; an adaptive controller would overwrite it
    learning rates  schedule and optimizer: the schedule writes the optimizer's rate at every update
    temperature     the sampler's, and what policy and reference divide their logits by
    train batch     `rollout.batch_size`, and `vllm_generate_batch_size`, which was filled in at the start

Reading back asks every actor for the objects that its next `fit` uses; ranks that differ read as NaN.
"""

from __future__ import annotations

import functools
import math
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
from autotune.hooks.openrlhf import workers
from autotune.hooks.openrlhf.declared import DECLARED, MISSING
from autotune.hooks.remote import length_view, rate_capability, same_on_all, unavailable, zero_std_view
from autotune.knobs import Capability, Liveness
from autotune.logs.tables import OPENRLHF, find
from autotune.metrics import METRICS, Snapshot, Validity
from autotune.trainer.records import RolloutRecord

LOSS_KINDS = {"ppo": "token", "gspo": "sequence"}


class OpenRLHFAdapter(SingleProcess):
    """`Adapter` of an OpenRLHF `PPOTrainer` whose models have been initialised, in the trainer's own process.

    Args:
        trainer: OpenRLHF's trainer.
        wait: turns a list of Ray's references into their values.
    """

    def __init__(self, trainer: Any, wait: Callable[[Any], Any] | None = None) -> None:
        self.trainer, self.args = trainer, trainer.args
        self._wait = wait or _ray_get
        self._frozen = FrozenDetector()
        self._rollout, self._epoch = -1, 0
        copies = self.args.ds.ring_attn_size * self.args.ds.tensor_parallel_size
        self.world_size = max(len(trainer.actor_model_group._actor_handlers) // copies, 1)
        self._rate = self._policy()["rate"]
        self._knobs = self.knobs()
        self._facts = self._make_facts()

    # -- what is true of the run -------------------------------------------------------------------

    def facts(self) -> RunFacts:
        return self._facts

    def _make_facts(self) -> RunFacts:
        prompts = len(self.trainer.prompts_dataloader)
        rollouts = self.args.train.num_episodes * -(-prompts // int(self.args.rollout.batch_size))
        return RunFacts(
            rollouts=rollouts,
            world_size=self.world_size,
            algorithm=str(self.args.algo.advantage.estimator),
            loss_kind=LOSS_KINDS.get(self.args.actor.policy_loss_type, "none"),
            has_reference=self._has_reference,
            has_critic=self._has_critic,
            knobs=dict(self._knobs),
            knob_capability=self._knob_table(),
            metric_capability=self._metric_table(),
            lr_warmup=int(self.args.actor.lr_warmup_ratio * rollouts),
            fixed_micro_batch=self._micro_batch,
        )

    @property
    def _has_reference(self) -> bool:
        return self.trainer.reference_model_group is not None

    @property
    def _has_critic(self) -> bool:
        return self.trainer.critic_model_group is not None

    @property
    def _dynamic(self) -> bool:
        return bool(self.args.train.dynamic_batch_enable)

    @property
    def _micro_batch(self) -> int:
        """Samples of a backward pass; 1 where a token budget cuts the passes."""
        return 1 if self._dynamic else int(self.args.train.micro_batch_size)

    def _knob_table(self) -> dict[str, Capability]:
        table = {row.name: Capability(row.liveness, row.note) for row in DECLARED.knobs}
        table["kl_coef"] = self._kl_capability()
        table["train_batch_size"] = self._batch_capability()
        policy = self._policy()
        table["actor_learning_rate"] = rate_capability("actor", policy["peak"])
        if math.isnan(policy["entropy_coef"]):
            table["entropy_coef"] = unavailable("it started as None: start with --actor.entropy_coef 0")
        if self.trainer.generate_kwargs.get("max_new_tokens") is None:
            why = "--rollout.max_new_tokens is not set: answers fill up to data.max_len"
            table["max_response_length"] = unavailable(why)
        if self.args.train.batch_size % self.args.rollout.n_samples_per_prompt:
            why = "train.batch_size is no whole number of prompts"
            table["ppo_mini_batch_size"] = unavailable(why)
        if self._has_critic:
            table["critic_learning_rate"] = rate_capability("critic", self._critic()["peak"])
        else:
            table.pop("critic_learning_rate")
        return table

    def _kl_capability(self) -> Capability:
        if not self._has_reference:
            return unavailable("--algo.kl.init_coef is 0: no reference model was made at the start")
        if self.args.algo.kl.target:
            return unavailable("--algo.kl.target is set: OpenRLHF moves the coefficient itself")
        return Capability(Liveness.NEXT_ROLLOUT)

    def _batch_capability(self) -> Capability:
        ahead = getattr(self.args.rollout, "vllm_generate_batch_size", None)
        if ahead not in (None, self.args.rollout.batch_size):
            return Capability(Liveness.RESTART, "one generation feeds several rollouts: samples are waiting")
        return Capability(Liveness.NEXT_ROLLOUT)

    def _metric_table(self) -> dict[str, Capability]:
        table = {row.name: Capability(Validity.VALID) for row in DECLARED.metrics if "…" not in row.name}
        table |= {name: Capability(Validity.NOT_LOGGED, why) for name, why in MISSING.items()}
        if not self._has_critic:
            table["value_loss"] = Capability(Validity.NOT_LOGGED, "there is no critic")
        if not self._has_reference:
            why = "--algo.kl.init_coef is 0: there is no reference model, and `kl` is 0 by construction"
            table["kl_ref"] = Capability(Validity.NOT_LOGGED, why)
        if math.isnan(self._policy()["entropy_coef"]):
            why = "--actor.entropy_coef is not set; 0 logs the entropy without a bonus"
            table["entropy"] = Capability(Validity.NOT_LOGGED, why)
        return table

    # -- sensing -----------------------------------------------------------------------------------

    def record(
        self, status: Mapping[str, Any], rollout: int, seen: Mapping[str, float], tokens: float = 0.0
    ) -> RolloutRecord:
        """One step of OpenRLHF, in canonical names.

        Args:
            status: what its trainer logs.
            rollout: index of this rollout.
            seen: what `rollout_view` measured on the samples themselves.
            tokens: prompt and response tokens of all samples.
        """
        seconds = status.get("timing/step_total")
        pace = {"tokens_per_second": tokens / seconds} if tokens and seconds else {}
        scalars = {**canonical(status), **seen, **pace, "learning_rate": self._rate}
        return RolloutRecord(rollout, dict(self._knobs), self._epoch, scalars)

    def read(self, raw: RolloutRecord, rollout: int) -> Snapshot:
        self._rollout = raw.rollout
        return snapshot_of(raw, self._facts, self._frozen)

    def settle(self) -> None:
        """The rollout was handled: remember what the next one is made with."""
        self._rate = self._policy()["rate"]
        self._knobs = self.knobs()

    # -- acting ------------------------------------------------------------------------------------

    def knobs(self) -> dict[str, float]:
        """Real knob -> value, from the trainer's process and from every model actor."""
        policy, args = self._policy(), self.args
        train, n = float(args.rollout.batch_size), float(args.rollout.n_samples_per_prompt)
        longest = self.trainer.generate_kwargs.get("max_new_tokens")
        found = {
            "train_batch_size": train,
            "rollout_n": n,
            "ppo_mini_batch_size": min(policy["samples"] / n, train),
            "ppo_epochs": policy["ppo_epochs"],
            "micro_batch_size": float(self._micro_batch),
            "rollout_micro_batch_size": float(train * n // self.world_size),
            "num_rollout_batches": 1.0,
            "kl_coef": float(self.trainer.kl_ctl.value) if self._has_reference else 0.0,
            "clip_range_low": policy["clip_range_low"],
            "clip_range_high": policy["clip_range_high"],
            "actor_learning_rate": policy["peak"],
            "max_response_length": float(longest if longest is not None else args.data.max_len),
            "temperature": self._temperature(policy["temperature"]),
        }
        if args.actor.entropy_coef is not None:
            found["entropy_coef"] = policy["entropy_coef"]
        if self._has_critic:
            found["critic_learning_rate"] = self._critic()["peak"]
        return found

    def apply(self, values: Mapping[str, float], epoch: int) -> list[Applied]:
        applied = set_all_or_none(values, self.knobs, one_by_one(self._set), self._rollout + 1)
        self._epoch = epoch
        return applied

    def _set(self, knob: str, value: float) -> None:
        setters: dict[str, Callable[[float], None]] = {
            "train_batch_size": self._set_train_batch,
            "ppo_mini_batch_size": self._set_mini_batch,
            "ppo_epochs": self._set_epochs,
            "kl_coef": lambda v: setattr(self.trainer.kl_ctl, "value", v),
            "clip_range_low": functools.partial(self._set_clip, "low"),
            "clip_range_high": functools.partial(self._set_clip, "high"),
            "entropy_coef": self._set_entropy,
            "actor_learning_rate": functools.partial(self._set_rate, "actor"),
            "critic_learning_rate": functools.partial(self._set_rate, "critic"),
            "max_response_length": self._set_length,
            "temperature": self._set_temperature,
        }
        move(setters, knob, value, self._facts, self.knobs)

    def _set_train_batch(self, value: float) -> None:
        self.args.rollout.batch_size = int(value)
        if getattr(self.args.rollout, "vllm_generate_batch_size", None) is not None:
            self.args.rollout.vllm_generate_batch_size = int(value)

    def _set_mini_batch(self, value: float) -> None:
        train, n = int(self.args.rollout.batch_size), int(self.args.rollout.n_samples_per_prompt)
        if value < 1 or train % value or value * n % (self.world_size * self._micro_batch):
            raise AdapterError(
                f"ppo_mini_batch_size {value:g} prompts x {n} responses must divide"
                f" rollout.batch_size {train}"
                f" and be whole micro batches on {self.world_size} rank(s)"
            )
        samples = int(value) * n
        self._policies(workers.set_batch, "actor", samples, self._dynamic)
        self._critics(workers.set_batch, "critic", samples, self._dynamic)
        self.args.train.batch_size = samples

    def _set_epochs(self, value: float) -> None:
        self._policies(workers.set_epochs, int(value))
        self._critics(workers.set_epochs, int(value))

    def _set_clip(self, side: str, value: float) -> None:
        self._policies(workers.set_clip, side, value)

    def _set_entropy(self, value: float) -> None:
        self._policies(workers.set_entropy, value)

    def _set_rate(self, role: str, value: float) -> None:
        if value <= 0:
            raise AdapterError(
                f"{role}_learning_rate = {value:g} must be above 0: a schedule at 0 cannot be rescaled"
            )
        group = self._policies if role == "actor" else self._critics
        group(workers.set_rate, role, value)

    def _set_length(self, value: float) -> None:
        if value > self.args.data.max_len:
            raise AdapterError(
                f"max_response_length {value:g} is above data.max_len {self.args.data.max_len}"
            )
        self.trainer.generate_kwargs["max_new_tokens"] = int(value)

    def _set_temperature(self, value: float) -> None:
        self._policies(workers.set_temperature, value)
        self._references(workers.set_reference_temperature, value)
        self.trainer.generate_kwargs["temperature"] = value

    def restore(self, restore: Restore) -> int:
        raise AdapterError(
            "OpenRLHF cannot bring weights back while it runs; stop it and start again with"
            " --ckpt.load_enable"
            f" from a checkpoint in {self.args.ckpt.path}"
        )

    # -- keeping -----------------------------------------------------------------------------------

    def state_dict(self) -> dict[str, Any]:
        return {"frozen": self._frozen.state()}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self._frozen.load(state["frozen"])

    # -- OpenRLHF's places -------------------------------------------------------------------------

    def _policy(self) -> dict[str, float]:
        return same_on_all(self._policies(workers.read_policy))

    def _critic(self) -> dict[str, float]:
        return same_on_all(self._critics(workers.read_critic))

    def _policies(self, fn: Callable[..., Any], *arguments: Any) -> list[Any]:
        return self._call(self.trainer.actor_model_group, fn, *arguments)

    def _critics(self, fn: Callable[..., Any], *arguments: Any) -> list[Any]:
        return self._call(self.trainer.critic_model_group, fn, *arguments)

    def _references(self, fn: Callable[..., Any], *arguments: Any) -> list[Any]:
        return self._call(self.trainer.reference_model_group, fn, *arguments)

    def _call(self, group: Any, fn: Callable[..., Any], *arguments: Any) -> list[Any]:
        """Run `fn(actor, …)` in every actor of a group; nothing where there is none."""
        if group is None:
            return []
        answers: list[Any] = self._wait(group.async_run_method("__ray_call__", fn, *arguments))
        return answers

    def _temperature(self, policy: float) -> float:
        """NaN where the sampler, the policy and the reference differ."""
        sampler = float(self.trainer.generate_kwargs.get("temperature", 1.0))
        others = [policy, *self._references(workers.read_reference)]
        return sampler if all(value == sampler for value in others) else math.nan


def canonical(status: Mapping[str, Any]) -> dict[str, float | None]:
    """OpenRLHF's status of one step by our names; where several keys give one metric the best of them."""
    scalars: dict[str, float | None] = {}
    ranks: dict[str, int] = {}
    for key, value in status.items():
        column = find(OPENRLHF, key)
        if column is None or isinstance(value, bool) or not isinstance(value, (int, float)):
            continue
        known = column.ours in METRICS or column.ours.startswith(("reward/", "time/"))
        if known and column.rank >= ranks.get(column.ours, -99):
            scalars[column.ours], ranks[column.ours] = float(value) * column.scale, column.rank
    return scalars


def rollout_view(
    prompts: list[str], rewards: list[float], lengths: list[float], totals: list[float]
) -> dict[str, float]:
    """What OpenRLHF does not log, from the samples of one rollout.

    Args:
        prompts: prompt of each sample: the same text is the same group.
        rewards: reward of each sample.
        lengths: response tokens of each sample.
        totals: prompt and response tokens of each sample.
    """
    if not rewards or not len(prompts) == len(rewards) == len(lengths) == len(totals):
        return {}
    before = [total - length for total, length in zip(totals, lengths, strict=True)]
    groups: dict[str, list[float]] = {}
    for prompt, reward in zip(prompts, rewards, strict=True):
        groups.setdefault(prompt, []).append(reward)
    view = {
        **length_view(lengths),
        "prompt_length_mean": sum(before) / len(before),
        "prompt_length_max": max(before),
    }
    return view | zero_std_view(groups)


def _ray_get(references: Any) -> Any:
    import ray

    return ray.get(references)
