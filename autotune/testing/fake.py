"""`FakeTrainer`: the plant with a trainer's outside, and the adapter to it, in one object.

It obeys its knobs from the next rollout on, keeps a ring of checkpoints and the weights from
before the last updates, and can be broken on purpose with the objects of `autotune.testing.faults`.
Knobs, records and the adapter are the real trainer's own (`trainer.live`, `trainer.records`,
`hooks.native`); only what happens inside a rollout is the plant's.

    trainer = FakeTrainer({"actor_learning_rate": 3e-3}, seed=1, rollouts=60)
    loop = ControlLoop(trainer, Controller(settings, trainer.facts()), journal)
    trainer.run(loop.on_rollout)

Determinism: the noise of rollout t depends on (seed, t) alone. It moves on after a restore, as
the data of a real run does, so the same collapse is not repeated.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterable, Mapping, Sequence

import numpy as np

from autotune.decisions import RunFacts
from autotune.errors import AdapterError, CheckpointError, InputError
from autotune.hooks.native import NativeAdapter
from autotune.knobs import Capability, Liveness, batch_problems, expand, fit_micro_batch
from autotune.metrics import METRICS, Validity
from autotune.testing.faults import Fault
from autotune.testing.plant import HEALTHY, NOISES, Constants, State, advance
from autotune.trainer.live import LiveKnobs
from autotune.trainer.records import RolloutRecord

_BLOCK = 256
"""Rollouts whose noise is drawn at once."""


class FakeLive(LiveKnobs):
    """The trainer's own knobs, with faults between the caller and them."""

    def __init__(self, knobs: Mapping[str, float], faults: Sequence[Fault] = ()) -> None:
        super().__init__(knobs, has_reference=knobs["kl_coef"] != 0.0)
        self._faults = tuple(f for f in faults if type(f).on_set is not Fault.on_set)

    def set_many(self, values: Mapping[str, float]) -> dict[str, float]:
        """Set several knobs: one transaction, unless a fault breaks it into single steps.

        Raises:
            AdapterError: if a value is illegal, or a fault refuses.
        """
        if not self._faults:
            return super().set_many(values)
        for name, value in values.items():
            kept = self._through(name, value)
            if kept is not None:
                super().set_many({name: kept})
        return {name: self[name] for name in values}

    def force(self, name: str, value: float) -> None:
        """Write past all checks and faults: what an outsider would do."""
        self._values[name] = value

    def _through(self, name: str, value: float) -> float | None:
        wanted: float | None = value
        for fault in self._faults:
            wanted = None if wanted is None else fault.on_set(name, wanted)
        return wanted


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

    def advance(self) -> RolloutRecord:
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
        scalars: dict[str, float | None] = dict(seen.scalars)
        record = RolloutRecord(
            t, knobs, self.live.epoch, scalars, seen.per_update, seen.histograms, seen.times
        )
        for fault in self.faults:
            record = fault.on_record(record)
        return record

    def run(self, on_rollout: Callable[[RolloutRecord], object]) -> None:
        """All rollouts that are left, each answered by `on_rollout` before the next begins."""
        while self.rollout < self.rollouts:
            on_rollout(self.advance())

    def schedule(self, rollout: int) -> float:
        """Factor on the peak learning rate: linear warm-up, then constant."""
        return min((rollout + 1) / (self.lr_warmup + 1), 1.0)

    def undo_rollout(self) -> None:
        """Weights and moments from before the last rollout's updates."""
        if self._undo is None:
            raise AdapterError("nothing to undo: the last rollout was already undone, or none ran")
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
        facts = RunFacts(
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
        for fault in self.faults:
            facts = fault.on_facts(facts)
        return facts


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
