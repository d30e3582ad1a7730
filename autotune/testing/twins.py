"""Synthetic twins of public training logs: the same stories under other names, scales and shifts.

    write(Twin("healthy", seed=3), folder)  -> Path of a log that a trainer could have printed

A twin is a story (curves of success, length, entropy, KL and so on over training), a batch that samples
rewards from it (prompts of unequal difficulty, G responses each) and a style: the format, the reward's
name, scale and shift, trainer steps a row. All of it follows from (kind, seed), so that nothing is fitted
to one file and every number can be made again. Nothing in here is taken from a real log.
"""

from __future__ import annotations

import csv
import io
import json
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

Curve = Callable[[float], float]
"""Share of the run that is over, from 0 to 1 -> value."""


def _ease(a: float, b: float, start: float, end: float) -> Curve:
    """From a to b between two shares of the run."""

    def curve(x: float) -> float:
        t = min(max((x - start) / (end - start), 0.0), 1.0)
        return a + (b - a) * t * t * (3 - 2 * t)

    return curve


def _flat(value: float) -> Curve:
    return lambda x: value


@dataclass(frozen=True, slots=True)
class Story:
    """Curves of one kind of run."""

    success: Curve
    """Share of right answers, which the reward is made of."""
    length: Curve
    """Mean answer as a share of the cap."""
    cut: Curve
    entropy: Curve
    kl: Curve
    clip: Curve
    rows: int = 48
    saw: float = 0.0
    """Amplitude of a see-saw on the success, from half of the run on."""


def _healthy(**changed: Any) -> Story:
    curves: dict[str, Any] = {
        "success": _ease(0.25, 0.75, 0.05, 0.8),
        "length": _ease(0.55, 0.5, 0.0, 1.0),
        "cut": _flat(0.01),
        "entropy": _ease(0.5, 0.15, 0.0, 1.0),
        "kl": _ease(0.001, 0.12, 0.0, 0.8),
        "clip": _flat(0.0008),
    }
    return Story(**{**curves, **changed})


STORIES: dict[str, Story] = {
    "healthy": _healthy(),
    "healthy_high": _healthy(success=_ease(0.86, 0.93, 0.0, 1.0), kl=_ease(0.001, 0.05, 0.0, 0.8)),
    "timid": _healthy(
        success=_flat(0.3), kl=_ease(0.0005, 0.002, 0.0, 1.0), entropy=_flat(0.5), clip=_flat(0.0), rows=80
    ),
    "collapse_entropy_up": _healthy(
        success=_ease(0.85, 0.0, 0.25, 0.32),
        entropy=_ease(0.2, 7.0, 0.22, 0.4),
        length=_ease(0.5, 1.0, 0.25, 0.35),
        cut=_ease(0.03, 1.0, 0.25, 0.35),
        clip=_ease(0.0005, 0.01, 0.2, 0.3),
    ),
    "collapse_entropy_zero": _healthy(
        success=_ease(0.85, 0.01, 0.2, 0.26),
        entropy=lambda x: 3.0 * math.exp(-60 * max(x - 0.3, 0.0)) if x > 0.25 else 0.2,
        length=_ease(0.5, 1.0, 0.2, 0.3),
        cut=_ease(0.03, 1.0, 0.2, 0.3),
    ),
    "collapse_short": _healthy(
        success=_ease(0.85, 0.01, 0.3, 0.36),
        length=_ease(0.5, 0.01, 0.28, 0.36),
        cut=_flat(0.0),
        clip=_flat(0.003),
    ),
    "heals": _healthy(
        success=lambda x: _ease(0.85, 0.05, 0.25, 0.3)(x) if x < 0.4 else _ease(0.05, 0.88, 0.42, 0.55)(x),
        length=lambda x: 0.01 if 0.28 < x < 0.42 else 0.5,
    ),
    "saturates": _healthy(
        success=_ease(0.86, 0.9, 0.0, 1.0), length=_ease(0.55, 1.0, 0.6, 0.8), cut=_ease(0.02, 1.0, 0.6, 0.8)
    ),
    "all_truncated": _healthy(success=_ease(0.15, 0.85, 0.0, 0.4), length=_flat(1.0), cut=_flat(1.0)),
    "no_signal": _healthy(success=_flat(0.0), kl=_flat(0.0002), entropy=_flat(0.4), clip=_flat(0.0)),
    "sawtooth": _healthy(success=_ease(0.85, 0.35, 0.4, 0.5), clip=_ease(0.0008, 0.02, 0.38, 0.45), saw=0.15),
    "ppo_healthy": _healthy(success=_ease(0.01, 0.65, 0.05, 0.6), kl=_ease(0.0, 0.25, 0.0, 0.9), rows=100),
}
"""Kind -> its story."""

HEALTHY = ("healthy", "healthy_high", "ppo_healthy")
"""Kinds on which a controller has nothing to do."""
COLLAPSING = ("collapse_entropy_up", "collapse_entropy_zero", "collapse_short", "heals")
"""Kinds on which it must see the fall at once; a sawtooth comes back up between its drops."""
FORMATS = ("printed", "quoted", "trainer_state", "verl", "verl_jsonl", "csv")


@dataclass(frozen=True, slots=True)
class Style:
    """How a twin is written down."""

    format: str
    reward: str
    scale: float
    shift: float
    every: int
    """Trainer steps a row averages."""
    prompts: int
    group: int
    cap: int


@dataclass(frozen=True, slots=True)
class Twin:
    """One synthetic log."""

    kind: str
    seed: int
    format: str = ""
    """One of `FORMATS`; by seed when empty."""

    @property
    def style(self) -> Style:
        rng = np.random.default_rng([self.seed, len(self.kind), 1])
        fmt = self.format or FORMATS[int(rng.integers(len(FORMATS)))]
        cluster = fmt.startswith("verl") or self.kind == "ppo_healthy"
        scale = float(rng.choice([1.0, 2.0, 10.0, 0.5]))
        return Style(
            format=fmt,
            reward=str(rng.choice(["accuracy", "judge_fn", "solve", "exact_answer"])),
            scale=scale,
            shift=float(rng.choice([0.0, 0.0, 0.5])) * scale,
            every=1 if cluster else int(rng.choice([4, 5, 10])),
            prompts=int(rng.choice([32, 64])) if cluster else int(rng.choice([2, 4, 8])),
            group=int(rng.choice([4, 8])) if cluster else 8,
            cap=int(rng.choice([256, 512, 1024])),
        )


def rows(twin: Twin) -> list[dict[str, float]]:
    """The numbers of a twin by our names; `success` is the reward before scale and shift."""
    story, style = STORIES[twin.kind], twin.style
    rng = np.random.default_rng([twin.seed, len(twin.kind), 2])
    return [_row(story, style, k, rng) for k in range(story.rows)]


def _row(story: Story, style: Style, k: int, rng: np.random.Generator) -> dict[str, float]:
    x = k / (story.rows - 1)
    p = story.success(x) + (story.saw * (-1) ** (k // 2) if x > 0.5 else 0.0)
    right = _answers(min(max(p, 0.0), 1.0), style, rng)  # [prompts of the row, G]
    noise = float(np.exp(rng.normal(0, 0.05)))
    equal = float(np.mean(right.min(axis=1) == right.max(axis=1)))
    cut = min(max(story.cut(x), 0.0), 1.0)
    length = max(story.length(x) * style.cap * (noise if cut < 0.99 else 1.0), 1.0)
    spread = float(right.std())
    return {
        "success": float(right.mean()),
        "reward": float(right.mean()) * style.scale + style.shift,
        "reward_std": spread * style.scale,
        "top": (1.0 if right.any() else 0.0) * style.scale + style.shift,
        "bottom": (0.0 if not right.all() else 1.0) * style.scale + style.shift,
        "zero_std": equal,
        "length": min(length, style.cap),
        "longest": style.cap if cut > 0 else min(1.6 * length, style.cap),
        "cut": cut,
        "entropy": max(story.entropy(x) * noise, 1e-12),
        "kl": max(story.kl(x), 0.0) * float(np.exp(rng.normal(0, 0.1))),
        "clip": max(story.clip(x), 0.0) * float(np.exp(rng.normal(0, 0.3))),
        "grad_norm": 0.25 * float(np.exp(rng.normal(0, 0.3))) if spread else 0.0,
        "loss": float(rng.normal(0, 0.01)),
        "lr": 2e-6 * (1 - x) + 1e-9,
    }


def _answers(p: float, style: Style, rng: np.random.Generator) -> np.ndarray:
    """0/1 answers; a third of the variance lies between prompts (Beta with a + b = 2)."""
    prompts = style.prompts * style.every
    chance = rng.beta(2 * p, 2 * (1 - p), size=prompts) if 0 < p < 1 else np.full(prompts, p)
    return (rng.random((prompts, style.group)) < chance[:, None]).astype(np.float64)


# ------------------------------------------------------------------------------------- writing


def write(twin: Twin, folder: Path) -> Path:
    """Write a twin as the log that its style says."""
    style = twin.style
    text, suffix = _WRITERS[style.format](rows(twin), style)
    path = folder / f"{twin.kind}-{twin.seed}-{style.format}{suffix}"
    path.write_text(text, encoding="utf-8")
    return path


def _trl(row: Mapping[str, float], style: Style) -> dict[str, float]:
    return {
        "loss": round(row["loss"], 4),
        "grad_norm": row["grad_norm"],
        "learning_rate": row["lr"],
        "completions/mean_length": row["length"],
        "completions/max_length": row["longest"],
        "completions/clipped_ratio": row["cut"],
        f"rewards/{style.reward}/mean": row["reward"],
        f"rewards/{style.reward}/std": row["reward_std"],
        "reward": row["reward"],
        "reward_std": row["reward_std"],
        "frac_reward_zero_std": row["zero_std"],
        "kl": row["kl"],
        "entropy": row["entropy"],
        "clip_ratio/region_mean": row["clip"],
    }


def _header(count: int, style: Style) -> str:
    total = style.prompts * style.group
    return (
        "INFO starting\n"
        f"  Total train batch size (w. parallel, distributed & accumulation) = {total}\n"
        f"  Total optimization steps = {count * style.every:,}\n"
    )


def _printed(data: list[dict[str, float]], style: Style) -> tuple[str, str]:
    lines = [str(_trl(row, style)) for row in data]
    return _header(len(data), style) + "\n".join(
        [*lines, "{'train_runtime': 12.5, 'epoch': 1.0}", ""]
    ), ".log"


def _quoted(data: list[dict[str, float]], style: Style) -> tuple[str, str]:
    lines = [str({k: f"{v:.4g}" for k, v in _trl(row, style).items()}) for row in data]
    return _header(len(data), style) + "\n".join(
        [*lines, "{'train_runtime': '12.5', 'epoch': '1'}", ""]
    ), ".log"


def _trainer_state(data: list[dict[str, float]], style: Style) -> tuple[str, str]:
    history = [{**_trl(row, style), "step": (k + 1) * style.every} for k, row in enumerate(data)]
    state = {"max_steps": len(data) * style.every, "logging_steps": style.every, "log_history": history}
    return json.dumps(state, indent=1), ".json"


def _verl(row: Mapping[str, float], step: int) -> dict[str, float]:
    return {
        "actor/kl_loss": row["kl"],
        "actor/kl_coef": 0.001,
        "actor/entropy": row["entropy"],
        "actor/pg_loss": row["loss"],
        "actor/pg_clipfrac": row["clip"],
        "actor/ppo_kl": 0.0,
        "actor/grad_norm": row["grad_norm"],
        "actor/lr": row["lr"],
        "critic/score/mean": row["reward"],
        "critic/score/max": row["top"],
        "critic/score/min": row["bottom"],
        "response_length/mean": row["length"],
        "response_length/max": row["longest"],
        "response_length/clip_ratio": row["cut"],
        "training/global_step": step,
    }


def _verl_console(data: list[dict[str, float]], style: Style) -> tuple[str, str]:
    lines = []
    for step, row in enumerate(data, start=1):
        pairs = [f"{k}:{v:.3f}" for k, v in _verl(row, step).items()]
        lines.append(f"(TaskRunner pid=77) step:{step} - " + " - ".join(pairs))
    return "\n".join([*lines, ""]), ".log"


def _verl_jsonl(data: list[dict[str, float]], style: Style) -> tuple[str, str]:
    lines = [json.dumps({"step": k, "data": None} | _verl(row, k)) for k, row in enumerate(data, start=1)]
    return "\n".join([*lines, ""]), ".jsonl"


def _csv(data: list[dict[str, float]], style: Style) -> tuple[str, str]:
    table = [{"step": (k + 1) * style.every, **_trl(row, style)} for k, row in enumerate(data)]
    out = io.StringIO()
    writer = csv.DictWriter(out, fieldnames=list(table[0]), lineterminator="\n")
    writer.writeheader()
    writer.writerows(table)
    return out.getvalue(), ".csv"


_WRITERS: dict[str, Callable[[list[dict[str, float]], Style], tuple[str, str]]] = {
    "printed": _printed,
    "quoted": _quoted,
    "trainer_state": _trainer_state,
    "verl": _verl_console,
    "verl_jsonl": _verl_jsonl,
    "csv": _csv,
}
