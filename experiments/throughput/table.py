"""The results as a table: medians with bootstrap intervals, tokens a second, share of the floor."""

from __future__ import annotations

from collections import defaultdict
from typing import Any

import numpy as np

from experiments.throughput.work import SHAPES, Work, decoding_floor, training_floor

DRAWS = 4000
Row = dict[str, Any]


def interval(values: list[float], rng: np.random.Generator) -> tuple[float, float, float]:
    """Median and its 95 % percentile bootstrap interval."""
    data = np.array(values)
    medians = np.median(rng.choice(data, (DRAWS, len(data))), axis=1)
    low, high = np.quantile(medians, (0.025, 0.975))
    return float(np.median(data)), float(low), float(high)


def ratio(slow: list[float], fast: list[float], rng: np.random.Generator) -> tuple[float, float, float]:
    """Ratio of two medians and its 95 % interval; both sides are resampled."""
    sides = [np.median(rng.choice(np.array(s), (DRAWS, len(s))), axis=1) for s in (slow, fast)]
    low, high = np.quantile(sides[0] / sides[1], (0.025, 0.975))
    return float(np.median(slow) / np.median(fast)), float(low), float(high)


def floor(group: str, shape: str, rows: list[Row], work: Work) -> float:
    """Seconds that no implementation on this chip can go below, for the tokens of these rollouts."""
    length = float(np.mean([row["length"] for row in rows]))
    tokens = float(np.mean([row["tokens"] for row in rows]))
    train = training_floor(SHAPES[shape], tokens, length * work.samples, tokens / work.samples / 2)
    if group != "end to end":
        return train
    return train + decoding_floor(SHAPES[shape], work, work.longest, tokens / work.samples / 2)


def collect(results: list[Row]) -> dict[tuple[str, str], dict[str, list[Row]]]:
    """(group, shape) -> arm -> its turns."""
    found: dict[tuple[str, str], dict[str, list[Row]]] = defaultdict(lambda: defaultdict(list))
    for row in results:
        if "turn" in row:
            found[row["group"], row["shape"]][row["arm"]].append(row)
    return found


def render(results: list[Row], work: Work | None = None) -> str:
    """Markdown: one table per group, its first arm is what the others are compared with."""
    rng, work = np.random.default_rng(0), work or Work()
    blocks = [_gate(row) for row in results if row.get("group") == "gate"]
    for (group, shape), arms in collect(results).items():
        blocks.append(_group(group, shape, arms, work, rng))
    if any(row.get("ungated") for row in results):
        blocks.insert(0, "**The parity gate had not passed when this was measured.**")
    blocks += [
        f"{row['group']} {row['shape']} {row.get('arm', '')} failed: {row['failed'].splitlines()[0]}"
        for row in results
        if "failed" in row
    ]
    return "\n\n".join(blocks)


def _gate(row: Row) -> str:
    word = "passed" if row["passed"] else "FAILED"
    versions = ", ".join(f"{name} {v}" for name, v in row["versions"].items() if v)
    return f"Parity gate {word} on {row['gpu'] or 'a CPU'} ({versions}): {'; '.join(_distances(row))}."


def _distances(row: Row) -> list[str]:
    """The farther of padded and packed in each quantity; older lines have bfloat16 alone."""
    if "relative" in row:
        off = ", ".join(f"{name} {value:.1e}" for name, value in row["relative"].items())
        return [off, f"log-probs differ by {row['log_prob_gap']:.1e} on average"]
    told = [f"in float32 {_farthest(row['float32'])} from TRL's"]
    if "bfloat16_from_trl" in row:
        own = row["bfloat16_from_float32"]
        ours = {name: side for name, side in own.items() if name != "trl"}
        told += [
            f"in bfloat16 {_farthest(row['bfloat16_from_trl'])} from TRL's",
            f"from float32 ours {_farthest(ours)}, TRL's {_farthest({'trl': own['trl']})}",
        ]
    return told


def _farthest(sides: dict[str, dict[str, float]]) -> str:
    worst = {what: max(side[what] for side in sides.values()) for what in next(iter(sides.values()))}
    return ", ".join(f"{what} {value:.1e}" for what, value in worst.items())


def _group(group: str, shape: str, arms: dict[str, list[Row]], work: Work, rng: np.random.Generator) -> str:
    head = [
        f"**{group}, {shape}**",
        "",
        "| arm | s per rollout, median (95 %) | first arm / this | non-pad tokens/s | of the floor | peak GB"
        " | tokens per rollout | loss, last |",
        "|---|---|---|---|---|---|---|---|",
    ]
    first = _seconds(next(iter(arms.values())))
    return "\n".join([*head, *(_line(group, shape, n, turns, first, work, rng) for n, turns in arms.items())])


def _seconds(turns: list[Row]) -> list[float]:
    return [row["seconds"] for turn in turns for row in turn["rows"]]


def _line(
    group: str,
    shape: str,
    name: str,
    turns: list[Row],
    first: list[float],
    work: Work,
    rng: np.random.Generator,
) -> str:
    rows, seconds = [row for turn in turns for row in turn["rows"]], _seconds(turns)
    median, low, high = interval(seconds, rng)
    gain, least, most = ratio(first, seconds, rng)
    rate = float(np.median([row["tokens"] / row["seconds"] for row in rows]))
    share = floor(group, shape, rows, work) / median
    peak = max(turn["peak_bytes"] for turn in turns) / 1e9
    tokens, loss = np.mean([row["tokens"] for row in rows]), rows[-1]["loss"]
    told = "" if loss is None else f"{loss:.4f}"
    return (
        f"| {name} | {median:.3f} ({low:.3f}–{high:.3f}) | {gain:.2f} ({least:.2f}–{most:.2f}) |"
        f" {rate:,.0f} | {share:.0%} | {peak:.1f} | {tokens:,.0f} | {told} |"
    )
