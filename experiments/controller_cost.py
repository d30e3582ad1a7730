"""What a decision costs: one controller step with every rule on, after 100 and after 1,000,000 rollouts.

    python experiments/controller_cost.py              100, 10,000 and 1,000,000 rollouts (a few minutes)
    python experiments/controller_cost.py 100 10000    only these

The run is a healthy one on the plant with its noise; its snapshots are made beforehand and told again with
a running index, so that only `Controller.step` and `confirm` are timed. All rules are on, the optional ones
too, at the widest windows there are (pace 1). A run's length must not matter: history, ledger and windows
are bounded, and the size of the saved state says whether they are.
"""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

from autotune.controller import Controller, ControlSettings
from autotune.decisions import Applied, RunFacts
from autotune.metrics import Snapshot
from autotune.policies import BASELINES, POLICIES
from autotune.testing.fake import FakeTrainer

LENGTHS = (100, 10_000, 1_000_000)
CYCLE = 2_000
"""Rollouts of the plant that are told over and over."""
SAMPLE = 400
"""Newest steps that the percentiles are taken from, at most."""


@dataclass(frozen=True, slots=True)
class Cost:
    """Of one controller step, in milliseconds."""

    rollouts: int
    median: float
    """Wall time."""
    p99: float
    cpu: float
    """Median of the CPU time, which does not mind busy neighbours."""
    state_bytes: int
    """Saved state as JSON."""

    def __str__(self) -> str:
        return f"{self.rollouts:>9,} {self.median:8.3f} {self.p99:8.3f} {self.cpu:8.3f} {self.state_bytes:9,}"


def every_rule() -> ControlSettings:
    """All rules at their widest windows; baselines are no rules."""
    on = {rule: "on" for rule in POLICIES if rule not in BASELINES}
    return ControlSettings(mode="act", pace=1.0, policies=on)


def healthy_run(rollouts: int, seed: int = 1) -> tuple[RunFacts, list[Snapshot]]:
    """Facts and snapshots of an undisturbed run on the plant."""
    trainer = FakeTrainer({}, seed=seed, rollouts=1000)
    return trainer.facts(), [trainer.read(trainer.advance(), t) for t in range(rollouts)]


def told_again(snapshots: Sequence[Snapshot], rollouts: int, controller: Controller) -> Iterator[Snapshot]:
    """The same rollouts over and over, with a running index and under the controller's own knobs."""
    knobs = dict(snapshots[0].knobs)
    for t in range(rollouts):
        snapshot = replace(snapshots[t % len(snapshots)], rollout=t, knobs=knobs, epoch=controller.epoch)
        changed = yield snapshot
        knobs = {**knobs, **(changed or {})}


def measure(rollouts: int, facts: RunFacts, snapshots: Sequence[Snapshot]) -> Cost:
    """Run the controller for so many rollouts and time its newest steps."""
    controller = Controller(every_rule(), facts)
    times: list[tuple[float, float]] = []
    story = told_again(snapshots, rollouts, controller)
    snapshot = next(story, None)
    while snapshot is not None:
        begin = time.perf_counter(), time.thread_time()
        decision = controller.step(snapshot)
        applied = [Applied(k, v, v, snapshot.rollout + 1) for k, v in decision.values.items()]
        controller.confirm(applied, snapshot.rollout if decision.restore else None)
        elapsed = (time.perf_counter() - begin[0]) * 1e3, (time.thread_time() - begin[1]) * 1e3
        times = [*times[1 - SAMPLE :], elapsed]
        try:
            snapshot = story.send(decision.values)
        except StopIteration:
            snapshot = None
    newest = times[len(times) // 2 :]
    wall, cpu = (sorted(column) for column in zip(*newest, strict=True))
    state = len(json.dumps(controller.state_dict()))
    middle = len(newest) // 2
    return Cost(rollouts, wall[middle], wall[int(len(newest) * 0.99)], cpu[middle], state)


def main(lengths: Sequence[int]) -> None:
    facts, snapshots = healthy_run(CYCLE)
    print(f"{'rollouts':>9} {'median':>8} {'p99':>8} {'cpu':>8} {'state':>9}")
    print(f"{'':>9} {'ms':>8} {'ms':>8} {'ms':>8} {'bytes':>9}")
    for rollouts in lengths:
        print(measure(rollouts, facts, snapshots), flush=True)


if __name__ == "__main__":
    main([int(a) for a in sys.argv[1:]] or LENGTHS)
