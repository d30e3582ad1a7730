"""The policy-ratio histogram over time as a heat map: one column per rollout, one row per bin.

The picture is a PNG of one hue whose opacity is the share of a rollout's tokens in a bin, on a logarithmic
scale from one in ten thousand: so it stands on light and dark ground alike, and weighs a few kilobytes for
any number of rollouts. Long runs are thinned by adding up neighbouring rollouts' counts.
"""

from __future__ import annotations

import base64
import math
import struct
import zlib
from collections.abc import Sequence

from autotune.metrics import RATIO_BINS, RATIO_LIMIT
from autotune.report.groups import Group

ROWS = RATIO_BINS + 2
MOST_COLUMNS = 480
FAINTEST = 1e-4
"""The share that is just visible."""
HUE = (0x2A, 0x7F, 0xC9)
QUANTILES = (0.05, 0.5, 0.95)

Counts = list[list[float] | None]


def pooled(group: Group) -> tuple[list[int], Counts]:
    """(rollouts, counts of all seeds together); None where no seed has a histogram."""
    found: dict[int, list[float]] = {}
    seen: set[int] = set()
    for run in group.runs:
        seen.update(run.rollouts)
        for rollout, counts in zip(run.rollouts, run.histograms, strict=True):
            if counts and len(counts) == ROWS:
                old = found.get(rollout)
                found[rollout] = [a + b for a, b in zip(old, counts, strict=True)] if old else list(counts)
    x = sorted(seen)
    return x, [found.get(t) for t in x]


def columns(counts: Sequence[list[float] | None], most: int = MOST_COLUMNS) -> Counts:
    """Neighbouring rollouts added up until there are at most `most` columns."""
    each = math.ceil(len(counts) / most)
    return [_sum(counts[i : i + each]) for i in range(0, len(counts), each)]


def _sum(some: Sequence[list[float] | None]) -> list[float] | None:
    known = [c for c in some if c is not None]
    return [sum(values) for values in zip(*known, strict=True)] if known else None


def opacity(share: float) -> int:
    """0 to 255: 0 below the faintest, and the same step for every factor of ten."""
    if share < FAINTEST:
        return 0
    return round(255 * (0.12 + 0.88 * (1 - math.log(share) / math.log(FAINTEST))))


def png(counts: Sequence[list[float] | None]) -> bytes:
    """A grey-less PNG with one palette entry per opacity; the highest ratio is the top row."""
    shares = [_shares(c) for c in counts]
    rows = bytearray()
    for row in range(ROWS - 1, -1, -1):
        rows += b"\0" + bytes(opacity(column[row]) if column and column[row] else 0 for column in shares)
    header = struct.pack(">IIBBBBB", len(counts), ROWS, 8, 3, 0, 0, 0)
    chunks = (
        (b"IHDR", header),
        (b"PLTE", bytes(HUE) * 256),
        (b"tRNS", bytes(range(256))),
        (b"IDAT", zlib.compress(bytes(rows), 9)),
        (b"IEND", b""),
    )
    return b"\x89PNG\r\n\x1a\n" + b"".join(chunk(name, body) for name, body in chunks)


def chunk(name: bytes, body: bytes) -> bytes:
    """One chunk of a PNG: its length, name, body and checksum."""
    return struct.pack(">I", len(body)) + name + body + struct.pack(">I", zlib.crc32(name + body))


def _shares(counts: list[float] | None) -> list[float] | None:
    total = sum(counts) if counts else 0.0
    return [c / total for c in counts] if counts and total > 0 else None


def data_uri(counts: Sequence[list[float] | None]) -> str:
    return "data:image/png;base64," + base64.b64encode(png(columns(counts))).decode("ascii")


def edges() -> list[float]:
    """Lower edge of every bin as log2 of the ratio, and the upper edge of the last.

    The two overflow bins are drawn as wide as the others.
    """
    limit = math.log2(RATIO_LIMIT)
    width = 2 * limit / RATIO_BINS
    return [-limit - width + width * i for i in range(ROWS + 1)]


EDGES = edges()


def quantile(counts: list[float] | None, share: float) -> float | None:
    """The ratio below which `share` of the tokens lie, to the width of a bin; None without counts."""
    total = sum(counts) if counts else 0.0
    if not counts or total <= 0:
        return None
    below, places = 0.0, EDGES
    for i, count in enumerate(counts):
        if below + count >= share * total and count:
            inside = (share * total - below) / count
            return float(2 ** (places[i] + inside * (places[i + 1] - places[i])))
        below += count
    return float(2 ** places[-1])
