"""Rows as a trainer writes them -> one row for what happened together.

Two ways in which a log tells one rollout in several pieces:

    prime-rl   several rows with the same step, each with some of the keys
    slime      one event file with two clocks: `train/...` counts updates, everything else rollouts
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from autotune.logs.lines import Row
from autotune.logs.tables import best_table


def whole_document(rows: Iterable[Row]) -> list[Row]:
    """All rows of a document, with two clocks made one where its keys are those of such a trainer."""
    found = list(rows)
    table = best_table({key for row in found for key in row})
    return list(one_clock(found, table.update_keys)) if table and table.update_keys else found


def same_step(rows: Iterable[Row]) -> Iterator[Row]:
    """Neighbours with the same step become one row; a later number of a key replaces an earlier one."""
    held: Row = {}
    for row in rows:
        if held and row.get("step") != held.get("step"):
            yield held
            held = {}
        held.update(row)
    if held:
        yield held


def one_clock(rows: Iterable[Row], prefix: str) -> Iterator[Row]:
    """Updates joined to the rollout that they were made in, averaged.

    Args:
        rows: rows by step, where a step is a rollout for most keys and an update for those that
            begin with `prefix`.
        prefix: of the keys that are counted in updates.

    Every rollout is taken to have the same number of updates, the two counts' quotient: slime has no
    other. Rollouts that the updates do not reach yet are left as they are.
    """
    updates: list[Row] = []
    rollouts: list[Row] = []
    for row in rows:
        step = {"step": row["step"]} if "step" in row else {}
        ours = {key: value for key, value in row.items() if key.startswith(prefix)}
        rest = {key: value for key, value in row.items() if key not in ours and key != "step"}
        if ours:
            updates.append(ours)
        if rest:
            rollouts.append(step | rest)
    per = max(-(-len(updates) // len(rollouts)), 1) if rollouts else 1
    for index, rollout in enumerate(rollouts):
        yield rollout | _mean(updates[index * per : (index + 1) * per])


def _mean(rows: list[Row]) -> Row:
    numbers: dict[str, list[float]] = {}
    for row in rows:
        for key, value in row.items():
            if isinstance(value, (int, float)):
                numbers.setdefault(key, []).append(value)
    return {key: sum(values) / len(values) for key, values in numbers.items()}
