"""What a finished run says in its journal: seconds by phase, rewards, and whether its ranks agreed."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from autotune.journal import read_journal
from experiments.scaling.cost import Point

WARM_UP = 3
"""Rollouts whose time is not counted: compilers and engines start in them."""
TRAINING = ("old_log_prob", "reference", "update", "kl_step_forward")


def read(journal: Path) -> dict[str, Any]:
    """A row's numbers.

    Raises:
        ValueError: there are no rollouts beyond the warm-up.
    """
    lines = list(read_journal(journal))
    rollouts = [line for line in lines if line["type"] == "rollout"]
    steady = rollouts[WARM_UP:]
    if not steady:
        raise ValueError(f"{journal}: {len(rollouts)} rollouts; expected more than {WARM_UP}")
    times = [line["times"] for line in steady]
    return {
        "rollouts": len(rollouts),
        "seconds": {name: _median(times, name) for name in ("total", "rollout", "weight_sync")},
        "training": sum(_median(times, name) for name in TRAINING),
        "tokens_per_second": _median([line["snapshot"]["metrics"] for line in steady], "tokens_per_second"),
        "rewards": [line["snapshot"]["metrics"]["reward_mean"] for line in rollouts],
        "kl_mismatch": [line["snapshot"]["metrics"].get("kl_mismatch") for line in rollouts],
        "applied": (applied := _applied(lines)),
        "restores": [line["rollout"] for line in rollouts if line["decision"].get("restore")],
        "disagreed": [item for item in applied if item["error"]],
        "status": lines[-1].get("status", ""),
    }


def _applied(lines: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """Every knob that a rule or a hand moved, with what all ranks read back; an error where they differed."""
    moving = [line for line in lines if line["type"] in ("rollout", "command")]
    return [{"rollout": line["rollout"], **item} for line in moving for item in line.get("applied") or ()]


def _median(metrics: Sequence[dict[str, Any]], name: str) -> float:
    values = [m[name] for m in metrics if m.get(name) is not None]
    return statistics.median(values) if values else 0.0


def point(row: dict[str, Any]) -> Point:
    """For the cost model; ranks are its GPUs."""
    seconds = row["seconds"]
    return Point(row["ranks"], seconds["rollout"], row["training"], seconds["weight_sync"], seconds["total"])


def table(rows: Sequence[dict[str, Any]]) -> str:
    """Seconds, tokens and memory of every run."""
    heads = ("shape", "run", "s a rollout", "sampling", "training", "weight sync")
    heads += ("tokens/s a GPU", "peak GiB a GPU", "end")
    lines = ["| " + " | ".join(heads) + " |", "|" + "---|" * len(heads)]
    for row in rows:
        if "failed" in row:
            lines.append(f"| {row['shape']} | {row['arm']} |" + " |" * 6 + f" {row['failed'][:60]} |")
            continue
        seconds = row["seconds"]
        memory = ", ".join(f"{m:.1f}" for m in row["peak_gib"]) or "unknown"
        cells = [
            *(f"{v:.2f}" for v in (seconds["total"], seconds["rollout"], row["training"])),
            f"{seconds['weight_sync']:.3f}",
            f"{row['tokens_per_second'] / row['gpus']:,.0f}",
            memory,
            row["status"],
        ]
        lines.append(f"| {row['shape']} | {row['arm']} | " + " | ".join(cells) + " |")
    return "\n".join(lines) + "\n"
