"""Fits the constants of `autotune.testing.plant` to `scan.csv`, stage by stage.

    python experiments/plant/fit.py          # prints the constants and the table of residuals

Each stage fits the few constants of one mechanism to the columns that it explains, with everything
before it fixed and the noise at zero: drift, clipping, learning, reference KL, entropy and gradient.
Every error is relative (a difference of logarithms) except the reward's, which is absolute.
Copy what it prints into `Constants`; `tests/testing/test_plant.py` holds the plant to the same table.
"""

from __future__ import annotations

import csv
import dataclasses
import math
import statistics
from collections.abc import Callable, Sequence
from pathlib import Path

from scipy.optimize import minimize

from autotune.knobs import updates_per_rollout
from autotune.testing import FakeTrainer
from autotune.testing.plant import (
    HEALTHY,
    Constants,
    State,
    drift,
    flat_group_share,
    grad_norm,
    learn,
    outside_share,
)

Row = dict[str, float]
SCAN = Path(__file__).with_name("scan.csv")

EARLY = (("base", 0, 0.06), ("base", 1, 0.035), ("lr1e-3", 0, 0.34), ("u32", 0, 0.15))
"""(row, rollout, kl_step) seen in the first two rollouts, where Adam's second moment fills up."""

REACHED = (("base", 0.5, 22), ("base", 0.7, 33), ("ep4", 0.5, 10), ("ep4", 0.7, 20))
"""(row, training reward, rollouts until it was reached)."""


def read_scan() -> dict[str, Row]:
    """Name -> the row's numbers."""
    with SCAN.open(encoding="utf-8") as file:
        return {
            row["name"]: {k: float(v) for k, v in row.items() if k != "name"} for row in csv.DictReader(file)
        }


def changed(row: Row) -> dict[str, float]:
    """The row's own knobs: its updates and epochs fix the mini-batch."""
    prompts, per_epoch = int(row["prompts"]), int(row["updates"] / row["epochs"])
    return {
        "train_batch_size": prompts,
        "ppo_mini_batch_size": prompts // per_epoch,
        "ppo_epochs": int(row["epochs"]),
        "kl_coef": row["kl_coef"],
        "clip_range": row["clip_range"],
        "actor_learning_rate": row["learning_rate"],
    }


def knobs_of(row: Row) -> dict[str, float]:
    """The row's whole knob vector."""
    sides = {"clip_range_low": row["clip_range"], "clip_range_high": row["clip_range"]}
    return HEALTHY | changed(row) | sides


def simulate(c: Constants, row: Row) -> list[State]:
    """States of the noiseless run, one after each rollout's updates."""
    knobs, state, states = knobs_of(row), State.initial(c), []
    updates = updates_per_rollout(knobs)
    for _ in range(int(row["rollouts"])):
        kl_step = drift(c, knobs, row["learning_rate"], updates, state)
        state = learn(c, knobs, state, kl_step, updates, 0.0)
        states.append(state)
    return states


# ------------------------------------------------------------------------------------ the stages


def drift_error(c: Constants, scan: dict[str, Row]) -> float:
    """Steady drift of every living row, and the first rollouts' boost."""
    old = State(skill=0.5, steps=1e9)
    error = 0.0
    for row in living(scan):
        knobs = knobs_of(row)
        steady = drift(c, knobs, row["learning_rate"], updates_per_rollout(knobs), old)
        error += math.log(steady / row["kl_step"]) ** 2
    for name, rollout, seen in EARLY:
        knobs = knobs_of(scan[name])
        u = updates_per_rollout(knobs)
        first = drift(c, knobs, scan[name]["learning_rate"], u, State(skill=0.5, steps=rollout * u))
        error += math.log(first / seen) ** 2
    return error


def clipping_error(c: Constants, scan: dict[str, Row]) -> float:
    """Shares outside the range from the drift that was measured, not the one that is modelled."""
    error = 0.0
    for row in living(scan):
        u = int(row["updates"])
        last = outside_share(c, row["kl_step"], row["clip_range"])
        before = [row["kl_step"] * (i / u) ** c.drift_updates for i in range(u)]
        mean = sum(outside_share(c, k, row["clip_range"]) for k in before) / u
        error += share_error(last, row["outside_last_pct"]) + share_error(mean, row["outside_pct"])
        error += share_error(c.active * mean, row["clip_active_pct"])
    return error


def share_error(share: float, percent: float) -> float:
    """Relative error, forgiving below a quarter of a percent."""
    return math.log((share + 0.0025) / (percent / 100 + 0.0025)) ** 2


def learning_error(c: Constants, scan: dict[str, Row]) -> float:
    """Mean reward of the last ten rollouts, and rollouts until 0.5 and 0.7."""
    error = 0.0
    for row in living(scan):
        runs = simulate(c, row)
        error += ((sum(r.skill for r in runs[-10:]) / 10 - row["reward"]) / 0.03) ** 2
    for name, level, seen in REACHED:
        error += ((reached(simulate(c, scan[name]), level) - seen) / 4) ** 2
    return error + guards(c)


def guards(c: Constants) -> float:
    """Keeps the search where the equations mean what their names say."""
    inside = 0.05 < c.rise < 1.5 and 0.0 < c.fall < 3 and c.early > 0 and c.late >= 0.3
    inside = inside and 0.7 < c.ceiling <= 1.0 and c.speed > 0 and c.signal >= 0 and c.hold > 0.05
    return 0.0 if inside and c.ceiling_drift >= 0 else 1e6


def reference_error(c: Constants, scan: dict[str, Row]) -> float:
    """Median and final KL to the reference."""
    if not (0.01 < c.reference_rate < 1 and c.pull > 0.01 and c.reference_drift > 0):
        return 1e6
    error = 0.0
    for row in living(scan):
        runs = simulate(c, row)
        error += math.log(statistics.median(r.kl_ref for r in runs) / row["kl_ref_median"]) ** 2
        error += math.log(runs[-1].kl_ref / row["kl_ref_final"]) ** 2
    return error


def entropy_error(c: Constants, scan: dict[str, Row]) -> float:
    """Final entropy and median gradient norm."""
    if not (0.02 < c.entropy_rate < 1 and c.entropy_drift >= 0 and 0.36 < c.entropy_start < 0.5):
        return 1e6
    error = 0.0
    for row in living(scan):
        runs = simulate(c, row)
        error += math.log(runs[-1].entropy / row["entropy"]) ** 2
        error += math.log(grad_norm(c, knobs_of(row), runs[-1]) / row["grad_norm"]) ** 2
    return error


def flatness_error(c: Constants, scan: dict[str, Row]) -> float:
    """Median share of groups without a spread."""
    rows = [row for row in living(scan) if row["prompts"] == 64]
    error = 0.0
    for row in rows:
        flat = [flat_group_share(r.skill, 8, c.concentration) for r in simulate(c, row)]
        error += (statistics.median(flat) - row["zero_std"]) ** 2
    return error


Stage = tuple[Callable[[Constants, dict[str, Row]], float], str]

STAGES: tuple[Stage, ...] = (
    (
        drift_error,
        "drift drift_lr drift_updates updates_soft drift_batch drift_clip boost boost_steps",
    ),
    (clipping_error, "tail tail_power tail_onset active"),
    (
        learning_error,
        "speed rise fall early late ceiling ceiling_drift signal reuse hold hold_power",
    ),
    (
        reference_error,
        "reference_progress reference_drift reference_drift_power reference_rate pull pull_power",
    ),
    (
        entropy_error,
        "entropy_start entropy_progress entropy_drift entropy_rate grad grad_batch grad_epochs",
    ),
    (flatness_error, "concentration"),
)
"""What each stage minimises, and the constants that it may move."""


def fit(c: Constants, scan: dict[str, Row]) -> Constants:
    """All stages, each from where the one before left the constants."""
    for error, names in STAGES:
        c = fit_stage(c, scan, error, names.split())
        print(f"{error.__name__:16s} {error(c, scan):9.4f}")
    return c


def fit_stage(
    c: Constants,
    scan: dict[str, Row],
    error: Callable[[Constants, dict[str, Row]], float],
    names: Sequence[str],
) -> Constants:
    """Nelder-Mead on the logarithms of `names`, restarted once: all of them are positive or flip sign."""
    start = [getattr(c, name) for name in names]

    def at(x: Sequence[float]) -> Constants:
        values = {n: s * math.exp(v) for n, s, v in zip(names, start, x, strict=True)}
        return dataclasses.replace(c, **values)

    def loss(x: Sequence[float]) -> float:
        if max(abs(v) for v in x) > 4:
            return 1e9
        try:
            return error(at(x), scan)
        except (OverflowError, ValueError, ZeroDivisionError):
            return 1e9

    x = [0.0] * len(names)
    for step in (0.2, 0.05):
        simplex = [x, *([v + (step if i == j else 0.0) for j, v in enumerate(x)] for i in range(len(x)))]
        options = {"maxiter": 120 * len(names), "xatol": 1e-3, "fatol": 1e-4, "initial_simplex": simplex}
        x = list(minimize(loss, x, method="Nelder-Mead", options=options).x)
    return at(x)


# ------------------------------------------------------------------------------------- helpers


def living(scan: dict[str, Row]) -> list[Row]:
    return [row for row in scan.values() if not row["dead"]]


def reached(runs: Sequence[State], level: float) -> int:
    """First rollout at or above `level`; twice the run's length when it never is."""
    return next((i for i, r in enumerate(runs) if r.skill >= level), 2 * len(runs))


SHOWN = ("reward", "kl_step", "clip_active_pct", "outside_last_pct", "kl_ref_median", "kl_ref_final")
SHOWN += ("entropy", "grad_norm", "zero_std")


def summarize(row: Row, seeds: int = 5) -> Row:
    """The scan's columns from noisy runs of the fake trainer: medians over seeds."""
    runs = [one_seed(row, seed) for seed in range(seeds)]
    return {name: statistics.median(run[name] for run in runs) for name in SHOWN}


def one_seed(row: Row, seed: int) -> Row:
    trainer, records, kl = FakeTrainer(changed(row), seed, int(row["rollouts"])), [], []
    trainer.run(lambda record: (records.append(record), kl.append(trainer.state.kl_ref)))

    def middle(name: str) -> float:
        return statistics.median(r.scalars[name] or 0.0 for r in records)

    outside = outside_share(trainer.constants, middle("kl_step"), row["clip_range"])
    return {
        "reward": sum(r.scalars["reward_mean"] or 0.0 for r in records[-10:]) / 10,
        "kl_step": middle("kl_step"),
        "clip_active_pct": 100 * middle("clip_ratio"),
        "outside_last_pct": 100 * outside,
        "kl_ref_median": statistics.median(kl),
        "kl_ref_final": kl[-1],
        "entropy": records[-1].scalars["entropy"] or 0.0,
        "grad_norm": middle("grad_norm"),
        "zero_std": middle("zero_std_fraction"),
    }


def residual_table(scan: dict[str, Row]) -> str:
    """Markdown: plant / scan for every row and column."""
    lines = [f"| row | {' | '.join(SHOWN)} |", "|---" * (len(SHOWN) + 1) + "|"]
    for name, row in scan.items():
        plant = summarize(row)
        cells = [f"{plant[k]:.3g} / {row[k]:.3g}" for k in SHOWN]
        lines.append(f"| {name} | {' | '.join(cells)} |")
    return "\n".join(lines)


def main() -> None:
    scan = read_scan()
    fitted = fit(Constants(), scan)
    for item in dataclasses.fields(Constants):
        print(f"    {item.name}: float = {getattr(fitted, item.name):.4g}")
    print("\nplant / scan, with the constants now in autotune.testing.plant:\n")
    print(residual_table(scan))


if __name__ == "__main__":
    main()
