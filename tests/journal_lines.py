"""Hand-made journal lines of one small run, for tests of whatever retells a journal."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

Line = dict[str, Any]

KNOBS = {
    "actor_learning_rate": 3e-5, "kl_coef": 0.005, "clip_range_low": 0.2, "clip_range_high": 0.2,
    "train_batch_size": 64, "rollout_n": 8, "ppo_mini_batch_size": 16, "ppo_epochs": 1,
}  # fmt: skip


def header(**recipe: Any) -> Line:
    known = {"name": "small", "seed": 7, "control": {"mode": "act", "profile": "recommended"}}
    return {"v": 1, "type": "header", "rollout": 0, "recipe": {**known, **recipe},
            "environment": {"git_commit": "c0ffee"}}  # fmt: skip


def change(rule: str, knob: str, before: float, after: float, kind: str = "intervention") -> Line:
    return {"rule": rule, "knob": knob, "before": before, "after": after, "kind": kind,
            "reason": f"{rule} had its reason", "values": {knob: after}, "evidence": {}}  # fmt: skip


def verdict(rule: str, knob: str, outcome: str, since: int) -> Line:
    return {"rule": rule, "knob": knob, "outcome": outcome, "reason": f"judged {outcome}",
            "since_rollout": since, "statistics": {}}  # fmt: skip


def veto(rule: str, knob: str, value: float, guard: str) -> Line:
    proposal = {"rule": rule, "knob": knob, "value": value, "reason": "r", "kind": "intervention",
                "evidence": {}}  # fmt: skip
    return {"proposal": proposal, "guard": guard, "reason": f"{guard} says no"}


def rollout(
    t: int, metrics: Mapping[str, float] | None = None, knobs: Mapping[str, float] | None = None,
    invalid: Mapping[str, list[str]] | None = None, controlled: bool = True, **decision: Any,
) -> Line:  # fmt: skip
    """The line of rollout `t`; granted changes are applied as asked."""
    decided = {
        "rollout": t, "state": "observe", "epoch": 0, "proposals": [], "vetoes": [], "changes": [],
        "verdicts": [], "restore": None, "alarms": [], "stop": "", "silent": {}, "act": True,
        **decision,
    }  # fmt: skip
    applied = [
        {"knob": k, "requested": v, "read_back": v, "effective_from": t + 1, "error": ""}
        for c in decided["changes"] if decided["act"] for k, v in c["values"].items()
    ]  # fmt: skip
    snapshot = {
        "rollout": t, "epoch": 0, "knobs": {**KNOBS, **(knobs or {})},
        "metrics": {"reward_mean": 0.2 + 0.01 * t, **(metrics or {})}, "invalid": dict(invalid or {}),
        "per_update": {}, "histograms": {},
    }  # fmt: skip
    return {
        "v": 1, "type": "rollout", "rollout": t, "snapshot": snapshot,
        "decision": decided if controlled else None, "applied": applied, "restored": None,
        "times": {"rollout": 0.5, "update": 0.3, "total": 1.0},
    }  # fmt: skip


def evaluation(t: int, greedy: float, sampled: float) -> Line:
    return {"v": 1, "type": "eval", "rollout": t, "greedy": greedy, "sampled": sampled}


def end(status: str = "done") -> Line:
    return {"v": 1, "type": "end", "rollout": 0, "status": status}


def write(folder: Path, lines: Iterable[Line], mode: str = "w") -> Path:
    """Append or write lines to a run folder's journal."""
    folder.mkdir(parents=True, exist_ok=True)
    with (folder / "journal.jsonl").open(mode, encoding="utf-8") as file:
        file.writelines(json.dumps(line) + "\n" for line in lines)
    return folder
