"""Long series are thinned for drawing, and no peak is lost: of every bucket the lowest and highest stay.

All curves of one chart keep the same rollouts, so that a reader who points at one gets them all. Every
point that is kept is a real reading; nothing is averaged or made up.
"""

from __future__ import annotations

from collections.abc import Sequence


def keep(columns: Sequence[Sequence[float | None]], length: int, most: int) -> list[int]:
    """Positions to draw, ascending: all of them where `length` <= `most`.

    Otherwise the first, the last, and of each bucket where every column has its minimum and maximum. So
    about `most` positions are kept, and never a column's own extreme left out.
    """
    if length <= most:
        return list(range(length))
    buckets = max(most // (2 * max(len(columns), 1)), 2)
    kept = {0, length - 1}
    for bucket in range(buckets):
        span = range(bucket * length // buckets, (bucket + 1) * length // buckets)
        for column in columns:
            known = [i for i in span if i < len(column) and column[i] is not None]
            if known:
                kept.update((min(known, key=lambda i: column[i]), max(known, key=lambda i: column[i])))  # type: ignore[arg-type, return-value]
    return sorted(kept)
