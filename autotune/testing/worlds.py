"""Worlds around the plant: what it was not fitted to, each a small object beside the faults.

The plant has no GPU, no critic, no asynchronous sampler, and its temperature changes nothing. Rules
that watch these would have nothing to see, so each object here adds one cause with the sensor that
shows it and, where the rule's knob is right, the cure. Shapes are assumed, plain and monotone; nothing
here was fitted to a run, and no figure of a gain may be read from it. What it is good for: whether a
rule notices, moves its knob in the right direction, and stops.

    GpuMemory      memory and speed of sampling follow `rollout_micro_batch_size`
    SlowCritic     the policy learns only as fast as its critic: `critic_learning_rate`
    StaleData      samples age with `num_rollout_batches`; sampler and trainer drift apart
    HotSampler     entropy runs away with a temperature above 1, and in below it
    SawTooth       a rate that is too high breaks the answers every few rollouts; they heal
    EntropySlope   entropy falls or rises by itself, whatever the reward does
    Decay          the model is lost over several rollouts, not in one

Use a fresh one for every trainer, like a fault.
"""

from __future__ import annotations

import dataclasses
import random
from dataclasses import dataclass
from typing import ClassVar

from autotune.decisions import RunFacts
from autotune.knobs import Capability, Liveness
from autotune.metrics import Validity
from autotune.testing.fake import FakeTrainer
from autotune.testing.faults import Fault
from autotune.trainer.records import RolloutRecord


@dataclass
class World(Fault):
    """A fault that remembers its trainer and may add metrics to what the run can sense."""

    metrics: ClassVar[tuple[str, ...]] = ()
    """Metrics that exist in this world and not on the bare plant."""

    def on_facts(self, facts: RunFacts) -> RunFacts:
        sensed = {name: Capability(Validity.VALID) for name in self.metrics}
        return dataclasses.replace(facts, metric_capability={**facts.metric_capability, **sensed})

    @staticmethod
    def noise(trainer: FakeTrainer, rollout: int, name: str) -> float:
        """A standard normal number of (seed, rollout, name) alone."""
        return random.Random(f"{trainer.seed}/{rollout}/{name}").gauss(0.0, 1.0)


@dataclass
class GpuMemory(World):
    """Peak memory is a constant plus a share per sample; speed saturates with the batch."""

    fixed: float = 0.30
    per_sample: float = 0.01
    """Share of the memory that one sample takes."""
    half: float = 8.0
    """Samples at which sampling runs at half of its top speed."""
    _shake: float = 0.0

    metrics: ClassVar[tuple[str, ...]] = ("gpu_memory_fraction",)

    def before_rollout(self, trainer: FakeTrainer, rollout: int) -> None:
        self._shake = 0.005 * self.noise(trainer, rollout, "memory")

    def on_record(self, record: RolloutRecord) -> RolloutRecord:
        samples = record.knobs["rollout_micro_batch_size"]
        speed = record.scalars["tokens_per_second"] or 0.0
        peak = min(self.fixed + self.per_sample * samples + self._shake, 1.0)
        speed *= samples / (samples + self.half)
        return _with(record, gpu_memory_fraction=peak, tokens_per_second=speed)


@dataclass
class SlowCritic(World):
    """Progress is scaled by how far the critic keeps up: its rate over the rate that it needs."""

    needed: float = 1e-4
    _speed: float | None = None

    metrics: ClassVar[tuple[str, ...]] = ("value_loss",)

    def on_facts(self, facts: RunFacts) -> RunFacts:
        live = {**facts.knob_capability, "critic_learning_rate": Capability(Liveness.NEXT_ROLLOUT)}
        return dataclasses.replace(super().on_facts(facts), has_critic=True, knob_capability=live)

    def before_rollout(self, trainer: FakeTrainer, rollout: int) -> None:
        self._speed = trainer.constants.speed if self._speed is None else self._speed
        speed = self._speed * self._share(trainer.live.vector()["critic_learning_rate"])
        trainer.constants = dataclasses.replace(trainer.constants, speed=speed)

    def on_record(self, record: RolloutRecord) -> RolloutRecord:
        return _with(record, value_loss=1.0 - self._share(record.knobs["critic_learning_rate"]))

    def _share(self, rate: float) -> float:
        return min(rate / self.needed, 1.0)


@dataclass
class StaleData(World):
    """An asynchronous sampler: the more batches a rollout has, the older its data at the update."""

    fresh: float = 16.0
    """Batches per rollout of age."""

    metrics: ClassVar[tuple[str, ...]] = ("kl_mismatch",)

    def on_record(self, record: RolloutRecord) -> RolloutRecord:
        age = record.knobs["num_rollout_batches"] / self.fresh
        apart = 0.002 + age * (record.scalars["kl_step"] or 0.0)
        return _with(record, data_age=age, kl_mismatch=apart)


@dataclass
class HotSampler(World):
    """Entropy is pulled toward temperature^2 x its healthy course, five times as fast as by itself."""

    power: float = 2.0
    _start: float | None = None

    def before_rollout(self, trainer: FakeTrainer, rollout: int) -> None:
        if self._start is None:
            self._start = trainer.constants.entropy_start
        wanted = self._start * trainer.live.vector()["temperature"] ** self.power
        trainer.constants = dataclasses.replace(trainer.constants, entropy_start=wanted, entropy_rate=0.1)


@dataclass
class SawTooth(World):
    """Every `period` rollouts a share of the answers breaks; it heals by the next break.

    The share follows the learning rate: (rate / at)^1.5, so a lower rate cures it.
    """

    depth: float = 0.6
    at: float = 3e-4
    period: int = 3
    _damage: float = 0.0

    def before_rollout(self, trainer: FakeTrainer, rollout: int) -> None:
        whole = trainer.state.skill / (1.0 - self._damage)
        rate = trainer.live.vector()["actor_learning_rate"]
        worst = min(self.depth * (rate / self.at) ** 1.5, 0.9)
        self._damage = worst * (1.0 - (rollout % self.period) / (self.period - 1)) if rollout >= 3 else 0.0
        skill = min(whole * (1.0 - self._damage), 0.999)  # what it learnt while broken heals with it
        trainer.state = dataclasses.replace(trainer.state, skill=skill)


@dataclass
class EntropySlope(World):
    """Entropy changes by this factor at every rollout, down to 0.01 and up to 3 nats."""

    factor: float = 0.94

    def before_rollout(self, trainer: FakeTrainer, rollout: int) -> None:
        entropy = trainer.constants.entropy_start * self.factor**rollout
        entropy = min(max(entropy, 0.01), 3.0)
        trainer.state = dataclasses.replace(trainer.state, entropy=entropy)


@dataclass
class Decay(World):
    """From rollout `at` on the model keeps `factor` of its skill at every rollout; entropy rises."""

    at: int = 20
    factor: float = 0.55

    def before_rollout(self, trainer: FakeTrainer, rollout: int) -> None:
        if rollout >= self.at:
            skill, entropy = trainer.state.skill * self.factor, trainer.state.entropy
            entropy += (1.0 - self.factor) * (trainer.constants.dead_entropy - entropy)
            trainer.state = dataclasses.replace(trainer.state, skill=skill, entropy=entropy)


def _with(record: RolloutRecord, **metrics: float) -> RolloutRecord:
    return dataclasses.replace(record, scalars={**record.scalars, **metrics})
