"""The simulated acceptance of the controller: every check as a function of seeds, one row per case.

A row is a dict of plain numbers, so that it can be a line of `results.jsonl`. `tests/` runs the same
functions with fewer seeds. Nothing here decides what is good enough: see `TARGETS` in `run.py`.
"""

from __future__ import annotations

import itertools
import math
import random
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from time import thread_time
from typing import Any, ClassVar

from autotune.controller import Controller, ControlSettings
from autotune.decisions import Decision, Kind, Proposal, State
from autotune.errors import ControlStop
from autotune.hooks.loop import ControlLoop
from autotune.knobs import expand
from autotune.policies.base import Answer, Context, Family, Policy
from autotune.testing import Constants, FakeTrainer, Fault
from autotune.testing.faults import Collapse, Frozen, Lying, NonFinite, negative_kl
from autotune.testing.worlds import (
    Decay,
    EntropySlope,
    GpuMemory,
    HotSampler,
    SawTooth,
    SlowCritic,
    StaleData,
)

SEED = 1000
"""First seed; the seeds below it have been used to choose constants."""

STUCK = Constants(speed=0.0)
"""A task that is too hard at this point: drift as usual, no progress."""
LONG = Constants(length_median=100.0, length_sigma=0.4)
"""Answers of about 100 tokens: 99.5 % of them are shorter than 280."""

Row = dict[str, Any]


class Nowhere:
    """A journal that keeps nothing."""

    def append(self, type: str, rollout: int, payload: Mapping[str, Any]) -> dict[str, Any]:
        return {}


class Run:
    """One closed loop on the plant; iterating it advances the run."""

    def __init__(
        self,
        knobs: Mapping[str, float],
        seed: int,
        rollouts: int = 60,
        *,
        faults: Sequence[Fault] = (),
        constants: Constants | None = None,
        extra: Sequence[Policy] = (),
        **control: Any,
    ) -> None:
        self.trainer = FakeTrainer(knobs, seed=seed, rollouts=rollouts, faults=faults, constants=constants)
        self.controller = Controller(ControlSettings(**control), self.trainer.facts())
        if extra:
            self.controller.policies = (*extra, *self.controller.policies)
        self.stopped = ""

    def __iter__(self) -> Iterator[Decision]:
        loop = ControlLoop(self.trainer, self.controller, Nowhere())
        while self.trainer.rollout < self.trainer.rollouts:
            try:
                decision = loop.on_rollout(self.trainer.advance())
            except ControlStop as stop:
                self.stopped = str(stop)
                return
            assert decision is not None
            yield decision


# ------------------------------------------------------------------------------------------ power


@dataclass(frozen=True)
class Pair:
    """A start from which a rule must move `knob` in `direction`."""

    knob: str
    direction: int
    why: str
    start: Mapping[str, float] = field(default_factory=dict)
    constants: Constants | None = None
    world: Callable[[], Fault] | None = None
    control: Mapping[str, Any] = field(default_factory=dict)

    @property
    def name(self) -> str:
        return f"{self.knob} {'up' if self.direction > 0 else 'down'}: {self.why}"


def _lr(factor: float) -> dict[str, float]:
    return {"actor_learning_rate": 3e-4 * factor}


ALSO: tuple[Pair, ...] = (
    Pair(
        "ppo_mini_batch_size", -1, "one update per rollout, X1 may cure it first", {"ppo_mini_batch_size": 64}
    ),
)
"""Reported without a target: two rules are right here, and either may act alone."""

PAIRS: tuple[Pair, ...] = (
    Pair("actor_learning_rate", +1, "a tenth of the good rate, one update",
         _lr(0.1) | {"ppo_mini_batch_size": 64}),
    Pair("actor_learning_rate", +1, "a tenth of the good rate", _lr(0.1)),
    Pair("actor_learning_rate", -1, "rate x3", _lr(3)),
    Pair("actor_learning_rate", -1, "rate x10", _lr(10)),
    Pair("actor_learning_rate", -1, "reward saw-tooths", world=SawTooth),
    Pair("ppo_mini_batch_size", -1, "one update per rollout, rate x0.1",
         {"ppo_mini_batch_size": 64} | _lr(0.1)),
    Pair("ppo_mini_batch_size", -1, "one update per rollout, documented rules", {"ppo_mini_batch_size": 64},
         control={"profile": "documented"}),
    Pair("ppo_mini_batch_size", +1, "32 updates per rollout", {"ppo_mini_batch_size": 2}),
    Pair("ppo_epochs", +1, "one update, mini-batch pinned, rate x0.1", {"ppo_mini_batch_size": 64} | _lr(0.1),
         control={"pin": ["ppo_mini_batch_size"]}),
    Pair("ppo_epochs", +1, "one update, mini-batch pinned, documented rules", {"ppo_mini_batch_size": 64},
         control={"pin": ["ppo_mini_batch_size"], "profile": "documented"}),
    Pair("kl_coef", -1, "kl_coef 1 pins the model", {"kl_coef": 1.0}),
    Pair("kl_coef", -1, "KL below 0.01 and no progress", {"kl_coef": 0.03} | _lr(0.8),
         Constants(speed=0.0, reference_drift=0.002, reference_rate=0.3)),
    Pair("kl_coef", +1, "KL grows, the reward does not", {"kl_coef": 0.001}, STUCK),
    Pair("clip_range", +1, "range 0.002", {"clip_range": 0.002}),
    Pair("clip_range", -1, "range 0.3, entropy rising without progress", {"clip_range": 0.3},
         STUCK, lambda: EntropySlope(1.015)),
    Pair("clip_range_high", +1, "entropy falling without progress", constants=STUCK, world=EntropySlope,
         control={"policies": {"XE": "on"}}),
    Pair("max_response_length", -1, "cap 1024 for answers of 100", {"max_response_length": 1024}, LONG),
    Pair("max_response_length", +1, "a third of the answers cut", {"max_response_length": 120}, LONG),
    Pair("rollout_micro_batch_size", +1, "half of the memory idle", {"rollout_micro_batch_size": 16},
         world=GpuMemory),
    Pair("rollout_micro_batch_size", -1, "memory above 92 %", {"rollout_micro_batch_size": 64},
         world=GpuMemory),
    Pair("critic_learning_rate", +1, "critic far too slow",
         {"critic_learning_rate": 5e-7, "actor_learning_rate": 3e-4}, world=SlowCritic),
    Pair("train_batch_size", +1, "eight prompts a rollout",
         {"train_batch_size": 8, "ppo_mini_batch_size": 2}),
    Pair("num_rollout_batches", -1, "64 sampling batches, stale", {"rollout_micro_batch_size": 8},
         world=StaleData),
    Pair("temperature", -1, "temperature 1.6", {"temperature": 1.6}, world=HotSampler,
         control={"policies": {"XT": "on"}}),
)  # fmt: skip


def first_action(pair: Pair, seed: int, rollouts: int = 40) -> tuple[int, int, str] | None:
    """(rollout, direction, rule) of the first change of the pair's knob."""
    faults = [pair.world()] if pair.world else []
    run = Run(
        pair.start, seed, rollouts, faults=faults, constants=pair.constants, **{"pace": 0.1, **pair.control}
    )
    knobs = set(expand(pair.knob))
    for decision in run:
        for change in decision.changes:
            if knobs & set(expand(change.knob)):
                return decision.rollout, 1 if change.after > change.before else -1, change.rule
    return None


def power(pair: Pair, seeds: int) -> Row:
    found = [first_action(pair, SEED + k) for k in range(seeds)]
    right = [f for f in found if f and f[1] == pair.direction]
    wrong = [f for f in found if f and f[1] != pair.direction]
    return {
        "check": "power",
        "case": pair.name,
        "seeds": seeds,
        "right": len(right) / seeds,
        "interval": share_interval(len(right), seeds),
        "wrong": len(wrong) / seeds,
        "rollout_median": sorted(f[0] for f in right)[len(right) // 2] if right else None,
        "rules": _counts(f[2] for f in right),
        "wrong_rules": _counts(f[2] for f in wrong),
    }


def share_interval(count: int, seeds: int, z: float = 1.96) -> list[float]:
    """95 % interval of a share (Wilson 1927): it does not shrink to nothing at 0 and at 1."""
    share, spread = count / seeds, z * z / seeds
    middle = share + spread / 2
    half = z * math.sqrt(share * (1 - share) / seeds + spread / (4 * seeds))
    return [max((middle - half) / (1 + spread), 0.0), min((middle + half) / (1 + spread), 1.0)]


def _counts(names: Iterator[str] | Sequence[str]) -> dict[str, int]:
    counted: dict[str, int] = {}
    for name in names:
        counted[name] = counted.get(name, 0) + 1
    return dict(sorted(counted.items()))


# ------------------------------------------------------------------------------------------- calm

HEALTHY_SETTINGS: dict[str, dict[str, float]] = {
    "well set": {},
    "kl_coef 0.001": {"kl_coef": 0.001},
    "kl_coef 0.01": {"kl_coef": 0.01},
    "2 updates": {"ppo_mini_batch_size": 32},
    "8 updates": {"ppo_mini_batch_size": 8},
    "rate x0.8": _lr(0.8),
    "rate x1.3": _lr(1.3),
    "2 updates, rate x0.8, kl_coef 0.01": {"ppo_mini_batch_size": 32, "kl_coef": 0.01} | _lr(0.8),
    "2 updates, rate x1.3, kl_coef 0.001": {"ppo_mini_batch_size": 32, "kl_coef": 0.001} | _lr(1.3),
    "8 updates, rate x1.3, kl_coef 0.001": {"ppo_mini_batch_size": 8, "kl_coef": 0.001} | _lr(1.3),
}


def calm(setting: str, seeds: int, rollouts: int, pace: str | float = "auto") -> Row:
    """Tuning actions and emergencies on healthy rollouts; a regulator's engagement is one action."""
    actions: list[str] = []
    moves, emergencies, alarms, seen = 0, [], 0, 0
    for seed in range(SEED, SEED + seeds):
        run = Run(HEALTHY_SETTINGS[setting], seed, rollouts, pace=pace)
        engaged: set[str] = set()
        for decision in run:
            seen += 1
            alarms += any("first sign" in a for a in decision.alarms)
            if decision.state is State.EMERGENCY:
                emergencies.append(f"{seed}/{decision.rollout}: {decision.alarms[0]}")
                continue
            for change in decision.changes:
                moves += 1
                if change.rule not in engaged:
                    actions.append(f"{change.rule} {change.kind}")
            engaged = set(run.controller.ledger.engagements)
    low, high = poisson_interval(len(actions))
    return {
        "check": "calm",
        "case": f"{setting}, {rollouts} rollouts, pace {pace}",
        "rollouts": seen,
        "actions": len(actions),
        "per_500": 500 * len(actions) / seen,
        "interval": [500 * low / seen, 500 * high / seen],
        "moves": moves,
        "kinds": _counts(actions),
        "emergencies": len(emergencies),
        "which": emergencies[:5],
        "first_signs": alarms,
    }


def together(rows: Sequence[Row], case: str) -> Row:
    """The sum of several calm rows."""
    actions, seen = sum(r["actions"] for r in rows), sum(r["rollouts"] for r in rows)
    low, high = poisson_interval(actions)
    return {
        "check": "calm",
        "case": case,
        "rollouts": seen,
        "actions": actions,
        "per_500": 500 * actions / seen,
        "interval": [500 * low / seen, 500 * high / seen],
        "emergencies": sum(r["emergencies"] for r in rows),
        "first_signs": sum(r["first_signs"] for r in rows),
    }


def poisson_interval(count: int, level: float = 0.95) -> tuple[float, float]:
    """Exact (Garwood) interval of a Poisson mean."""
    tail = (1 - level) / 2

    def below(mean: float, k: int) -> float:
        """P(N <= k)."""
        return sum(math.exp(-mean + i * math.log(mean) - math.lgamma(i + 1)) for i in range(k + 1))

    def solve(k: int, target: float) -> float:
        low, high = 1e-9, 10.0 + 3.0 * k
        for _ in range(80):
            middle = 0.5 * (low + high)
            low, high = (middle, high) if below(middle, k) > target else (low, middle)
        return 0.5 * (low + high)

    return (0.0 if count == 0 else solve(count - 1, 1 - tail)), solve(count, tail)


# --------------------------------------------------------------------------------------- collapse

SEVERITIES: dict[str, Callable[[int], Fault]] = {
    "sudden death": Collapse,
    "fast decay, 5 rollouts": lambda at: Decay(at, 0.05 ** (1 / 5)),
    "slow decay, 15 rollouts": lambda at: Decay(at, 0.05 ** (1 / 15)),
}
"""Decays leave a twentieth of the model after their rollouts."""


def collapse(severity: str, seeds: int, rollouts: int = 60, earliest: int = 6) -> Row:
    """Rollouts from a random onset (the climb included) to the first emergency."""
    delays: list[int | None] = []
    early = 0
    for seed in range(SEED, SEED + seeds):
        onset = random.Random(f"onset/{severity}/{seed}").randrange(earliest, rollouts - 12)
        run = Run({}, seed, rollouts, faults=[SEVERITIES[severity](onset)])
        at = next((d.rollout for d in run if d.restore is not None), None)
        early += at is not None and at < onset
        delays.append(None if at is None or at < onset else at - onset)
    known = sorted(d for d in delays if d is not None)
    soon = sum(d <= 10 for d in known)
    return {
        "check": "collapse",
        "case": f"{severity}, {rollouts} rollouts",
        "seeds": seeds,
        "within_10": soon / seeds,
        "interval": share_interval(soon, seeds),
        "median": known[len(known) // 2] if known else None,
        "p95": known[int(0.95 * len(known))] if known else None,
        "missed": sum(d is None for d in delays) - early,
        "false": early,
    }


# ------------------------------------------------------------------------------------ oscillation

CONSTANT: dict[str, dict[str, float]] = {
    **HEALTHY_SETTINGS,
    "timid": {"ppo_mini_batch_size": 64} | _lr(0.1),
    "rate x3": _lr(3),
    "32 updates": {"ppo_mini_batch_size": 2},
    "kl_coef 1": {"kl_coef": 1.0},
    "kl_coef 0.2": {"kl_coef": 0.2},
    "16 prompts": {"train_batch_size": 16, "ppo_mini_batch_size": 4, "micro_batch_size": 32},
}


def flips(setting: str, seeds: int, rollouts: int = 400, pace: str | float = 0.1) -> Row:
    """Direction changes per knob (regulators too, emergencies too) under one plant with its noise."""
    per_run: list[int] = []
    where: list[str] = []
    seen = 0
    for seed in range(SEED, SEED + seeds):
        moves: dict[str, list[int]] = {}
        for decision in Run(CONSTANT[setting], seed, rollouts, pace=pace):
            seen += 1
            for change in decision.changes:
                direction = 1 if change.after > change.before else -1
                moves.setdefault(change.knob, []).append(direction)
        turned = {k: sum(a != b for a, b in itertools.pairwise(m)) for k, m in moves.items()}
        per_run.append(sum(turned.values()))
        where += [k for k, n in turned.items() for _ in range(n)]
    return {
        "check": "flips",
        "case": f"{setting}, {rollouts} rollouts, pace {pace}",
        "rollouts": seen,
        "per_200": 200 * sum(per_run) / seen,
        "worst_run_per_200": 200 * max(per_run) / rollouts,
        "knobs": _counts(where),
    }


@dataclass(frozen=True)
class Once(Policy):
    """A hand-made rule that makes one bad change at one rollout."""

    id: ClassVar[str] = "HAND"
    family: ClassVar[Family] = Family.MEMORY
    source: ClassVar[str] = "made by hand"
    summary: ClassVar[str] = "one harmful change"

    knob: str = "actor_learning_rate"
    factor: float = 4.0
    at: int = 20

    def propose(self, ctx: Context) -> Answer:
        if ctx.rollout < self.at or self.id in ctx.last_moves:
            return None
        return Proposal(self.id, self.knob, ctx.knob(self.knob) * self.factor, "by hand", Kind.INTERVENTION)


HARM: dict[str, tuple[str, float]] = {
    "learning rate x4": ("actor_learning_rate", 4.0),
    "learning rate x6": ("actor_learning_rate", 6.0),
    "mini-batch / 16": ("ppo_mini_batch_size", 1 / 16),
    "kl_coef x400": ("kl_coef", 400.0),
}


UNSEEN = ("kl_coef x400",)
"""Reported without a target: it stops progress and breaks nothing that a few rollouts could show."""


def harm(change: str, seeds: int, rollouts: int, pace: str | float) -> Row:
    """Whether one harmful change, at a random moment, is back within settle + evaluate rollouts."""
    knob, factor = HARM[change]
    fates: list[str] = []
    for seed in range(SEED, SEED + seeds):
        pick = random.Random(f"harm/{change}/{seed}")
        warm = Run({}, seed, rollouts, pace=pace).controller.pace.warmup
        at = pick.randrange(warm + 3, rollouts - 30)
        fates.append(
            _fate(Run({}, seed, rollouts, extra=[Once(knob=knob, factor=factor, at=at)], pace=pace), knob)
        )
    back = sum(f in ("verdict", "emergency") for f in fates)
    return {
        "check": "harm",
        "case": f"{change}, pace {pace}",
        "seeds": seeds,
        "reverted": back / seeds,
        "interval": share_interval(back, seeds),
        "fates": _counts(fates),
    }


def _fate(run: Run, knob: str) -> str:
    """How the harmful change ended: verdict, emergency, late, stays, or it was never made."""
    pace, since = run.controller.pace, None
    before = run.trainer.live.vector()[knob]
    for decision in run:
        mine = next((c for c in decision.changes if c.rule == "HAND" and c.kind is Kind.INTERVENTION), None)
        if mine is not None and since is None:
            since, before = decision.rollout, mine.before
            continue
        if since is None:
            continue
        if any(c.knob == knob and _closer(c.after, c.before, before) for c in decision.changes):
            late = decision.rollout > since + pace.settle + pace.evaluate
            return "late" if late else "emergency" if decision.restore else "verdict"
        if decision.rollout > since + pace.settle + pace.evaluate + 20:
            break
    return "never made" if since is None else "stays"


def _closer(after: float, now: float, before: float) -> bool:
    return abs(math.log(after / before)) < 0.5 * abs(math.log(now / before))


def at_bound(seeds: int, rollouts: int = 200) -> Row:
    """A drift that no rate can raise: the rule pushes to its bound, says so once and stops."""
    pushes, reports, last = [], [], []
    deaf = Constants(drift=1e-5, drift_lr=0.0, boost=0.0)
    for seed in range(SEED, SEED + seeds):
        run = Run({}, seed, rollouts, constants=deaf, pace=0.1)
        moved, said = [], 0
        for decision in run:
            moved += [decision.rollout for c in decision.changes if c.knob == "actor_learning_rate"]
            said += sum("at its bound" in alarm for alarm in decision.alarms)
        pushes.append(len(moved))
        reports.append(said)
        last.append(moved[-1] if moved else 0)
    return {
        "check": "bound",
        "case": f"a drift that no rate moves, {rollouts} rollouts",
        "seeds": seeds,
        "pushes_most": max(pushes),
        "last_push_latest": max(last),
        "reports_most": max(reports),
        "reports_least": min(reports),
    }


# ---------------------------------------------------------------------------------------- sensors


def _one_update_is_silent(seed: int) -> bool:
    """U = 1: the clip rules say once why they are silent, and nothing moves for a clip reason."""
    said: dict[str, str] = {}
    control = {"pin": ["ppo_mini_batch_size", "ppo_epochs"], "policies": {"XE": "on"}}
    for decision in Run({"ppo_mini_batch_size": 64}, seed, 40, pace=0.1, **control):
        said |= {rule: why for rule, why in decision.silent.items() if why}
        if any(c.rule in CLIP_RULES for c in decision.changes):
            return False
    return all("one update per rollout" in said.get(rule, "") for rule in CLIP_RULES)


CLIP_RULES = ("A3", "B4a", "B4b", "XE")


def _negative_kl_holds(seed: int) -> bool:
    return _holds(Run({"kl_coef": 1.0}, seed, 60, faults=[negative_kl(at=12)], pace=0.1), 12, 60)


def _nan_holds(seed: int) -> bool:
    """A KL to the reference that is NaN for ten rollouts: hold, and never a reading of 0."""
    run = Run(_lr(0.1), seed, 40, faults=[NonFinite("kl_ref", at=12, count=10)], pace=0.1)
    return _holds(run, 12, 22, unread="kl_ref")


def _holds(run: Run, start: int, end: int, unread: str = "") -> bool:
    for decision in run:
        if start <= decision.rollout < end:
            last = run.controller.history.last
            read = bool(unread) and last is not None and unread in last.values
            if decision.state is not State.HOLD or decision.changes or read:
                return False
    return True


def _wild_kl_is_no_trend(seed: int) -> bool:
    """One KL of 17.8, then normal: the same changes as without it."""

    def moves(faults: Sequence[Fault]) -> list[tuple[int, str, float]]:
        run = Run({}, seed, 60, faults=faults, pace=0.1)
        return [(d.rollout, c.knob, c.after) for d in run for c in d.changes]

    wild = Lying("kl_ref", at=30, count=1, lie=lambda honest: 17.8)
    return moves([wild]) == moves([])


def _frozen_is_noticed(seed: int) -> bool:
    """The same kl_step to the last bit: hold from the fifth repeat on."""
    return _holds(Run({}, seed, 40, faults=[Frozen("kl_step", at=12)], pace=0.1), 17, 40)


@dataclass(frozen=True)
class _Witness(Policy):
    """Looks at the windows that rules are given, and never says anything."""

    id: ClassVar[str] = "WITNESS"
    family: ClassVar[Family] = Family.INTEGRITY
    source: ClassVar[str] = "made by hand"
    summary: ClassVar[str] = "are epochs mixed?"
    mixed: list[int] = field(default_factory=list)

    def propose(self, ctx: Context) -> Answer:
        if any(s.epoch != ctx.epoch for s in ctx.recent(ctx.pace.trend)):
            self.mixed.append(ctx.rollout)
        return None


def _old_epochs_are_ignored(seed: int) -> bool:
    """Interventions open epochs; no window that a rule reads mixes two of them."""
    witness = _Witness()
    run = Run({"ppo_mini_batch_size": 2, "kl_coef": 1.0}, seed, 60, extra=[witness], pace=0.1)
    epochs = {decision.epoch for decision in run}
    return len(epochs) > 1 and not witness.mixed


SENSORS: dict[str, Callable[[int], bool]] = {
    "one update per rollout silences the clip rules": _one_update_is_silent,
    "a negative KL holds": _negative_kl_holds,
    "a NaN holds and is never 0": _nan_holds,
    "one wild KL changes nothing": _wild_kl_is_no_trend,
    "a frozen exporter holds": _frozen_is_noticed,
    "windows never mix epochs": _old_epochs_are_ignored,
}


def sensors(name: str, check: Callable[[int], bool], seeds: int) -> Row:
    held = sum(check(SEED + k) for k in range(seeds))
    return {"check": "sensors", "case": name, "seeds": seeds, "held": held}


# ------------------------------------------------------------------------------------------- cost


OPTIONAL = ("XC", "XE", "XL", "XM", "XR", "XT", "XZ")


def cost(lengths: Sequence[int] = (100, 1000, 10_000)) -> list[Row]:
    """CPU time of one controller step with all rules on, late in runs of growing length.

    The last rollouts of all runs are made in turns: a machine that slows down meanwhile slows all of them.
    """
    runs = [Run({}, SEED, n, pace=1.0, policies=dict.fromkeys(OPTIONAL, "on")) for n in lengths]
    spent = [_timed(run.controller) for run in runs]
    steps, tail = [iter(run) for run in runs], min(*lengths, 1000)
    for length, step in zip(lengths, steps, strict=True):
        deque(itertools.islice(step, length - tail), maxlen=0)
    deque(zip(*steps, strict=True), maxlen=0)
    return [_cost(*one, tail) for one in zip(lengths, runs, spent, strict=True)]


def _cost(rollouts: int, run: Run, spent: Sequence[float], tail: int) -> Row:
    late = sorted(spent[-tail:])
    return {
        "check": "cost",
        "case": f"the last {tail} of {rollouts} rollouts",
        "median_ms": 1e3 * late[tail // 2],
        "p95_ms": 1e3 * late[int(0.95 * tail)],
        "state_bytes": len(str(run.controller.state_dict())),
    }


def _timed(controller: Controller) -> list[float]:
    """Wrap `step`; seconds of CPU per call."""
    spent: list[float] = []
    step = controller.step

    def timed(snapshot: Any) -> Decision:
        started = thread_time()
        decision = step(snapshot)
        spent.append(thread_time() - started)
        return decision

    controller.step = timed  # type: ignore[method-assign]
    return spent
