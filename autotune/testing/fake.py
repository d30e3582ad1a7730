"""`FakeTrainer`: the plant with a trainer's outside, and the adapter to it, in one object.

It obeys its knobs from the next rollout on, keeps a ring of checkpoints and the weights from
before the last updates, and can be broken on purpose with the objects of `autotune.testing.faults`.
It is judged by the very code that judges the real trainer (`hooks.native.NativeAdapter`).

    trainer = FakeTrainer({"actor_learning_rate": 3e-3}, seed=1, rollouts=60)
    loop = ControlLoop(trainer, Controller(settings, trainer.facts()), journal)
    trainer.run(loop.on_rollout)

Determinism: the noise of rollout t depends on (seed, t) alone. It moves on after a restore, as
the data of a real run does, so the same collapse is not repeated.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np

from autotune.decisions import RunFacts
from autotune.errors import AdapterError, CheckpointError, InputError, TrainingError
from autotune.hooks.native import NativeAdapter
from autotune.knobs import (
    KNOBS,
    Capability,
    Liveness,
    batch_problems,
    divisors,
    expand,
    fit_micro_batch,
)
from autotune.metrics import METRICS, Validity
from autotune.testing.faults import Fault
from autotune.testing.plant import HEALTHY, NOISES, Constants, State, advance

_BLOCK = 256
"""Rollouts whose noise is drawn at once."""


@dataclass(frozen=True, slots=True)
class FakeRecord:
    """What the trainer tells about one rollout: the native trainer's record, field by field."""

    rollout: int
    knobs: dict[str, float]
    epoch: int
    scalars: dict[str, float | None]
    per_update: dict[str, list[float]] = field(default_factory=dict)
    histograms: dict[str, list[float]] = field(default_factory=dict)
    times: dict[str, float] = field(default_factory=dict)


class FakeLive:
    """The running trainer's knobs. `force` writes past all checks: what an outsider would do."""

    def __init__(self, knobs: Mapping[str, float], faults: Sequence[Fault] = ()) -> None:
        self.epoch = 0
        self._knobs = dict(knobs)
        self._recipe = dict(knobs)
        self._faults = tuple(faults)

    def vector(self) -> dict[str, float]:
        return dict(self._knobs)

    def set(self, name: str, value: float) -> float:
        """Set one knob; the value now in use.

        Raises:
            AdapterError: the knob does not exist, or the value is not legal for it.
        """
        wanted: float | None = value
        for fault in self._faults:
            if wanted is not None:
                wanted = fault.on_set(name, wanted)
        if wanted is not None:
            self._check(name, wanted)
            self.force(name, wanted)
        return self._knobs[name]

    def force(self, name: str, value: float) -> None:
        """Set without asking. The micro batch follows the mini-batch, as in the real trainer."""
        self._knobs[name] = value
        if name in ("ppo_mini_batch_size", "rollout_n"):
            mini, n = int(self._knobs["ppo_mini_batch_size"]), int(self._knobs["rollout_n"])
            wanted = int(self._recipe["micro_batch_size"])
            self._knobs["micro_batch_size"] = fit_micro_batch(mini, n, 1, wanted)
        if name in ("train_batch_size", "rollout_n", "rollout_micro_batch_size"):
            self._fit_rollout()

    def _fit_rollout(self) -> None:
        """Sampling follows the amount of data; it never changes it."""
        samples = int(self._knobs["train_batch_size"] * self._knobs["rollout_n"])
        wanted = int(self._knobs["rollout_micro_batch_size"])
        fitted = max(d for d in divisors(samples) if d <= wanted)
        self._knobs["rollout_micro_batch_size"] = fitted
        self._knobs["num_rollout_batches"] = samples // fitted

    def _check(self, name: str, value: float) -> None:
        if name not in self._knobs:
            have = ", ".join(self._knobs)
            raise AdapterError(f"{name} does not exist here; expected one of {have}")
        spec = KNOBS[name]
        low, high = min(spec.low, self._recipe[name]), max(spec.high, self._recipe[name])
        if not math.isfinite(value) or not low <= value <= high:
            raise AdapterError(f"{name}={value:g} {spec.unit}; expected {low:g} to {high:g}")
        if spec.integer and value != int(value):
            raise AdapterError(f"{name}={value:g}; expected a whole number of {spec.unit}")
        trial = FakeLive(self._recipe)
        trial._knobs = self.vector()
        trial.force(name, value)
        problems = batch_problems(trial.vector(), world_size=1)
        if problems:
            raise AdapterError("; ".join(f"{knob}: {message}" for knob, message in problems))


class FakeTrainer(NativeAdapter):
    """A trainer and its adapter; see the module's docstring."""

    def __init__(
        self,
        recipe_knobs: Mapping[str, float] | None = None,
        seed: int = 0,
        rollouts: int = 60,
        faults: Iterable[Fault] = (),
        *,
        constants: Constants | None = None,
        lr_warmup: int = 0,
        checkpoint_every: int = 10,
        keep: int = 4,
    ) -> None:
        """
        Args:
            recipe_knobs: real or alias knob -> value; what is left out is the healthy recipe's.
            seed: of the noise.
            rollouts: length of the run, for `facts` and `run`; `advance` may go beyond it.
            faults: objects of `autotune.testing.faults`.
            constants: of the plant.
            lr_warmup: rollouts of linear learning-rate warm-up.
            checkpoint_every: rollouts between checkpoints; the first is taken before rollout 0.
            keep: newest checkpoints kept, beside the first.
        """
        self.constants = constants or Constants()
        self.recipe_knobs = _with_aliases(recipe_knobs or {})
        self.seed, self.rollouts, self.lr_warmup = seed, rollouts, lr_warmup
        self.faults = tuple(faults)
        self.live = FakeLive(self.recipe_knobs, self.faults)
        self.state = State.initial(self.constants)
        self.rollout = 0
        """Index of the next rollout."""
        self.length_factor = 1.0
        self.checkpoints: dict[int, State] = {}
        """Rollout -> the state that it started from."""
        self._every, self._keep = checkpoint_every, keep
        self._undo: State | None = None
        self._noise: tuple[int, list[list[float]]] = (-1, [])
        super().__init__(self)

    # -- the trainer -------------------------------------------------------------------------

    def advance(self) -> FakeRecord:
        """Run the next rollout and return its raw metrics, faults included."""
        t = self.rollout
        if t % self._every == 0:
            self._save(t)
        for fault in self.faults:
            fault.before_rollout(self, t)
        knobs = self.live.vector()
        self._undo = self.state
        lr = knobs["actor_learning_rate"] * self.schedule(t)
        self.state, seen = advance(
            self.constants, knobs, lr, self.state, self._noise_of(t), self.length_factor
        )
        self.rollout = t + 1
        record = FakeRecord(
            t, knobs, self.live.epoch, seen.scalars, seen.per_update, seen.histograms, seen.times
        )
        for fault in self.faults:
            record = fault.on_record(record)
        return record

    def run(self, on_rollout: Callable[[FakeRecord], object]) -> None:
        """All rollouts that are left, each answered by `on_rollout` before the next begins."""
        while self.rollout < self.rollouts:
            on_rollout(self.advance())

    def schedule(self, rollout: int) -> float:
        """Factor on the peak learning rate: linear warm-up, then constant."""
        return min((rollout + 1) / (self.lr_warmup + 1), 1.0)

    def undo_rollout(self) -> None:
        """Weights and moments from before the last rollout's updates."""
        if self._undo is None:
            raise TrainingError("nothing to undo: the last rollout was already undone, or none ran")
        self.state, self._undo = self._undo, None

    def restore_checkpoint(self, before_rollout: int) -> int:
        """The newest checkpoint that is not newer than `before_rollout`; its rollout."""
        old = [rollout for rollout in self.checkpoints if rollout <= before_rollout]
        if not old:
            have = ", ".join(map(str, self.checkpoints)) or "none"
            raise CheckpointError(f"no checkpoint up to rollout {before_rollout}; have {have}")
        self.state, self._undo = self.checkpoints[max(old)], None
        return max(old)

    def kill(self) -> None:
        """Collapse now: the next rollout samples from a dead model."""
        self.state = dataclasses.replace(self.state, skill=0.0, alive=False)

    def _save(self, rollout: int) -> None:
        self.checkpoints[rollout] = self.state
        for old in sorted(self.checkpoints)[1 : -self._keep]:
            del self.checkpoints[old]

    def _noise_of(self, rollout: int) -> list[float]:
        block, row = divmod(rollout, _BLOCK)
        if self._noise[0] != block:
            generator = np.random.default_rng((self.seed, block))
            self._noise = (block, generator.standard_normal((_BLOCK, NOISES)).tolist())
        return self._noise[1][row]

    # -- the adapter: `read`, `knobs`, `apply` and `restore` are the native trainer's ----------

    def facts(self) -> RunFacts:
        reference = self.recipe_knobs["kl_coef"] != 0.0
        return RunFacts(
            rollouts=self.rollouts,
            world_size=1,
            algorithm="grpo",
            loss_kind="token",
            has_reference=reference,
            has_critic=False,
            knobs=dict(self.recipe_knobs),
            knob_capability=_knob_capability(reference),
            metric_capability=_metric_capability(reference),
            lr_warmup=self.lr_warmup,
            reward_maximum=1.0,
        )


def _with_aliases(knobs: Mapping[str, float]) -> dict[str, float]:
    """The healthy recipe overlaid with `knobs`; `clip_range` sets both sides."""
    vector = dict(HEALTHY)
    for name, value in knobs.items():
        for real in expand(name):
            vector[real] = value
    mini, n = int(vector["ppo_mini_batch_size"]), int(vector["rollout_n"])
    if "micro_batch_size" not in knobs:
        vector["micro_batch_size"] = fit_micro_batch(mini, n, 1, int(vector["micro_batch_size"]))
    if "rollout_micro_batch_size" not in knobs:
        vector["rollout_micro_batch_size"] = vector["train_batch_size"] * n
    samples = vector["train_batch_size"] * n
    vector["num_rollout_batches"] = samples // vector["rollout_micro_batch_size"]
    problems = batch_problems(vector, world_size=1)
    if problems:
        raise InputError("; ".join(f"{knob}: {message}" for knob, message in problems))
    return vector


def _knob_capability(reference: bool) -> dict[str, Capability]:
    live = {name: Capability(Liveness.NEXT_ROLLOUT) for name in HEALTHY}
    live["max_prompt_length"] = Capability(Liveness.RESTART, "prompts are prepared once, at start")
    live["critic_learning_rate"] = Capability(Liveness.UNAVAILABLE, "grpo has no critic")
    if not reference:
        reason = "kl_coef is 0: no reference model was built"
        live["kl_coef"] = Capability(Liveness.UNAVAILABLE, reason)
    return live


def _metric_capability(reference: bool) -> dict[str, Capability]:
    absent = {
        "value_loss": "grpo has no critic",
        "gpu_memory_fraction": "no GPU",
        "gpu_utilization": "no GPU",
        "kl_mismatch": "sampler and trainer are one model",
        "eval_score": "the plant has no held-out set",
    }
    if not reference:
        absent["kl_ref"] = "kl_coef is 0: there is no reference model to measure against"
    valid = {name: Capability(Validity.VALID) for name in METRICS if name not in absent}
    return valid | {name: Capability(Validity.NOT_LOGGED, why) for name, why in absent.items()}
