"""The running trainer's knobs: the only place where they live.

The loop reads them at the top of every rollout and keeps no copy, so a value set here is the value
used next. A change is a transaction: the whole vector is legal afterwards or nothing has changed.

Three numbers follow from others and are re-derived whenever those move, because they never change
the training result: `micro_batch_size` (largest divisor of a rank's mini-batch up to the recipe's
value), `rollout_micro_batch_size` (the same for a rank's share of the rollout) and
`num_rollout_batches`. An explicit value for the first two replaces the recipe's from then on.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping
from typing import Any

from autotune.errors import AdapterError
from autotune.knobs import KNOBS, batch_problems, divisors, fit_micro_batch

Vector = dict[str, float]

_AMOUNT = ("train_batch_size", "rollout_n")
_RATES = ("actor_learning_rate", "critic_learning_rate")
_STRICTLY_POSITIVE = (*_RATES, "temperature", "clip_range_low", "clip_range_high")

UseRate = Callable[[float], float]
"""Puts a peak learning rate into an optimizer; the one found there afterwards."""


class LiveKnobs:
    """Knobs of a running trainer, by their canonical names."""

    def __init__(
        self,
        values: Mapping[str, float],
        *,
        world_size: int = 1,
        context: int | None = None,
        has_reference: bool = True,
        use_learning_rate: UseRate | None = None,
        use_critic_learning_rate: UseRate | None = None,
        smallest_group: int = 2,
        shortest_prompts: tuple[int, str] = (1, ""),
        highest_temperature: float = math.inf,
    ) -> None:
        """Start from the recipe's vector.

        Args:
            values: every knob that exists here.
            world_size: number of ranks.
            context: longest sequence of the model in tokens, where it has one.
            has_reference: whether a reference model was built; without one `kl_coef` stays 0.
            use_learning_rate: puts a peak learning rate into the actor's optimizer and returns the
                one found there afterwards.
            use_critic_learning_rate: the same for the critic.
            smallest_group: lowest `rollout_n`: 1 where a critic needs no siblings.
            shortest_prompts: lowest `max_prompt_length`, and why it is that.
            highest_temperature: that the engine which samples accepts.
        """
        self.epoch = 0
        self._values = dict(values)
        self._world_size = world_size
        self._context = context
        self._has_reference = has_reference
        self._use_rate = {"actor_learning_rate": use_learning_rate}
        self._use_rate["critic_learning_rate"] = use_critic_learning_rate
        self._smallest_group = smallest_group
        self._shortest_prompts = shortest_prompts
        self._highest_temperature = highest_temperature
        self._wanted = {k: values[k] for k in ("micro_batch_size", "rollout_micro_batch_size")}

    def __getitem__(self, name: str) -> float:
        return self._values[name]

    def count(self, name: str) -> int:
        """A knob that counts something, as an int."""
        return int(self._values[name])

    def vector(self) -> Vector:
        """All knobs that exist here, as the next rollout will use them."""
        return dict(self._values)

    def set(self, name: str, value: float) -> float:
        """Set one knob and return the value now in use.

        Raises:
            AdapterError: if the value is illegal here; nothing has changed then.
        """
        return self.set_many({name: value})[name]

    def set_many(self, values: Mapping[str, float]) -> Vector:
        """Set several knobs at once, legal together, and return the values now in use.

        Raises:
            AdapterError: if one is illegal here; nothing has changed then.
        """
        for name, value in values.items():
            self._check(name, value)
        values = {name: _whole(name, value) for name, value in values.items()}
        trial = self._derived({**self._values, **values}, values)
        self._check_algebra(trial, values)
        self._check_context(trial)
        self._into_optimizers({name: trial[name] for name in _RATES if name in values})
        self._wanted |= _explicit(values, self._values)
        self._values = trial
        return {name: self._values[name] for name in values}

    def state_dict(self) -> dict[str, Any]:
        """JSON state for a checkpoint."""
        return {"values": dict(self._values), "wanted": dict(self._wanted), "epoch": self.epoch}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Inverse of `state_dict`.

        Raises:
            AdapterError: if the saved vector has other knobs than this trainer.
        """
        if set(state["values"]) != set(self._values):
            found, expected = sorted(state["values"]), sorted(self._values)
            raise AdapterError(f"the saved knobs are {found}, this trainer has {expected}")
        self._wanted = dict(state["wanted"])
        self._values = self._fitted(dict(state["values"]))
        self.epoch = int(state["epoch"])

    def _fitted(self, saved: Vector) -> Vector:
        """The saved vector on this number of ranks: what only says how work is cut is cut anew."""
        if not batch_problems(saved, self._world_size):
            return saved
        n, w = int(saved["rollout_n"]), self._world_size
        share = int(saved["train_batch_size"]) * n // w  # samples of one rank
        mini, wanted = int(saved["ppo_mini_batch_size"]), {k: int(v) for k, v in self._wanted.items()}
        at_once = max(_up_to(divisors(share), wanted["rollout_micro_batch_size"]))
        saved["micro_batch_size"] = fit_micro_batch(mini, n, w, wanted["micro_batch_size"])
        saved |= {"rollout_micro_batch_size": at_once, "num_rollout_batches": share // at_once}
        self._check_algebra(saved, {})
        return saved

    def _check(self, name: str, value: float) -> None:
        """One value on its own."""
        if name not in self._values:
            raise AdapterError(f"{name} is not a knob of this trainer; it has {sorted(self._values)}")
        floor = self._smallest_group if name == "rollout_n" else 1
        if not math.isfinite(value) or value < 0:
            raise AdapterError(f"{name} = {value:g}: expected a finite number, not below 0")
        if KNOBS[name].integer and (value != int(value) or value < floor):
            raise AdapterError(f"{name} = {value:g}: expected a whole number from {floor} up")
        if name == "max_prompt_length" and value < self._shortest_prompts[0]:
            raise AdapterError(f"max_prompt_length = {value:g}: {self._shortest_prompts[1]}")
        if name == "temperature" and value > self._highest_temperature:
            raise AdapterError(
                f"temperature = {value:g}: the engine samples at {self._highest_temperature:g} at most"
            )
        if name in _STRICTLY_POSITIVE and value == 0:
            raise AdapterError(f"{name} = 0: expected a number above 0")
        if name == "clip_range_low" and value >= 1:
            raise AdapterError(f"clip_range_low = {value:g}: expected below 1, a ratio is positive")
        if name == "kl_coef" and value > 0 and not self._has_reference:
            raise AdapterError(
                "kl_coef: there is no reference model because the recipe's kl_coef is 0;"
                " start with kl_coef > 0 to be able to move it"
            )

    def _derived(self, trial: Vector, asked: Mapping[str, float]) -> Vector:
        """Re-derive what follows from the knobs that were asked for."""
        n, w = int(trial["rollout_n"]), self._world_size
        share = int(trial["train_batch_size"]) * n // w  # samples of one rank
        moved = {name for name in asked if asked[name] != self._values[name]}
        if moved & {*_AMOUNT, "ppo_mini_batch_size"} and "micro_batch_size" not in asked:
            mini, wanted = int(trial["ppo_mini_batch_size"]), int(self._wanted["micro_batch_size"])
            trial["micro_batch_size"] = fit_micro_batch(mini, n, w, wanted)
        if "num_rollout_batches" in moved and "rollout_micro_batch_size" not in asked:
            trial["rollout_micro_batch_size"] = max(share // int(trial["num_rollout_batches"]), 1)
        elif moved & {*_AMOUNT} and "rollout_micro_batch_size" not in asked:
            wanted = int(self._wanted["rollout_micro_batch_size"])
            trial["rollout_micro_batch_size"] = max(_up_to(divisors(share), wanted))
        trial["num_rollout_batches"] = max(share // int(trial["rollout_micro_batch_size"]), 1)
        return trial

    def _check_algebra(self, trial: Vector, asked: Mapping[str, float]) -> None:
        problems = [message for _, message in batch_problems(trial, self._world_size)]
        batches = asked.get("num_rollout_batches", trial["num_rollout_batches"])
        if batches != trial["num_rollout_batches"]:
            samples = trial["train_batch_size"] * trial["rollout_n"]
            problems.append(f"num_rollout_batches = {batches:g} does not divide {samples:g} samples")
        if problems:
            raise AdapterError("; ".join(problems))

    def _check_context(self, trial: Vector) -> None:
        longest = trial["max_prompt_length"] + trial["max_response_length"]
        if self._context is not None and longest > self._context:
            raise AdapterError(
                f"max_prompt_length + max_response_length = {longest:g} tokens, but the model's"
                f" context is {self._context}; lower one of them"
            )

    def _into_optimizers(self, peaks: Vector) -> None:
        """Both rates or none: one that is not found there puts the other back."""
        for name, peak in peaks.items():
            use = self._use_rate[name]
            if use is None:
                continue
            found = use(peak)
            if abs(found - peak) > 1e-9 * peak:
                self._back_into_optimizers(peaks)
                raise AdapterError(f"{name}: set {peak:g}, the optimizer has {found:g}")

    def _back_into_optimizers(self, names: Iterable[str]) -> None:
        for name in names:
            use = self._use_rate[name]
            if use is not None:
                use(self._values[name])


def _whole(name: str, value: float) -> float:
    """Counts are ints here, however they were written, so that a journal shows them as such."""
    return int(value) if KNOBS[name].integer else float(value)


def _up_to(values: tuple[int, ...], limit: int) -> tuple[int, ...]:
    return tuple(v for v in values if v <= max(limit, 1))


def _explicit(asked: Mapping[str, float], before: Mapping[str, float]) -> Vector:
    """Micro batches asked for by themselves; beside a moved mini-batch they are only re-derived."""
    if {"ppo_mini_batch_size", *_AMOUNT} & asked.keys():
        return {}
    names = ("micro_batch_size", "rollout_micro_batch_size")
    return {k: asked[k] for k in names if k in asked and asked[k] != before[k]}
