"""A guest on several ranks: one decides, the others follow, and whoever fails takes all of them out."""

from __future__ import annotations

import json
import threading
from pathlib import Path
from typing import Any

import pytest

from autotune.hooks.generic import DECLARED
from autotune.hooks.guest import JOURNAL, Guest, read_control
from autotune.journal import read_journal
from autotune.testing.fake import FakeTrainer

LR = "actor_learning_rate"


class Threads:
    """Two ranks as two threads: what the first says, and what all say."""

    def __init__(self) -> None:
        self.barrier = threading.Barrier(2, timeout=20)
        self.said: dict[int, Any] = {}

    def of(self, rank: int) -> Any:
        shared = self

        class Peer:
            first = rank == 0

            def from_first(self, value: Any) -> Any:
                return json.loads(shared.exchange(rank, json.dumps(value))[0])

            def from_all(self, text: str) -> list[str]:
                return shared.exchange(rank, text)

        return Peer()

    def exchange(self, rank: int, text: str) -> list[str]:
        self.said[rank] = text
        self.barrier.wait()
        found = [self.said[r] for r in (0, 1)]
        self.barrier.wait()
        return found


def run(tmp_path: Path, rollouts: int, break_rank: int = -1, method: str = "apply") -> list[Any]:
    """Two ranks of one run on the plant, ten times too fast; both guests and their trainers."""
    threads = Threads()
    made: list[Any] = [None, None]

    def rank(number: int) -> None:
        fake = FakeTrainer({LR: 3e-2}, seed=1, rollouts=rollouts)
        control = read_control({"mode": "act"})
        guest = Guest(fake, control, tmp_path, DECLARED, peers=threads.of(number))
        made[number] = (guest, fake)
        guest.begin()
        for t in range(rollouts):
            record = fake.advance()
            if t == 4 and number == break_rank:
                setattr(fake, method, broken)
            guest.on_rollout(record)
        guest.end()

    def broken(*arguments: Any, **named: Any) -> Any:
        raise RuntimeError("planted")

    workers = [threading.Thread(target=rank, args=(number,)) for number in (0, 1)]
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join(timeout=60)
        assert not worker.is_alive(), "a rank hangs"
    return made


def test_the_others_follow_the_first(tmp_path: Path) -> None:
    (first, fake), (second, other) = run(tmp_path, 20)
    assert not first.broken and not second.broken
    assert fake.live.vector() == other.live.vector() and fake.live[LR] < 3e-2
    assert fake.live.epoch == other.live.epoch and fake.state == other.state
    lines = read_journal(tmp_path / JOURNAL)
    assert sum(line["type"] == "rollout" for line in lines) == 20
    assert any(line.get("restored") is not None for line in lines), "weights must come back on both"


@pytest.mark.parametrize("method", ["apply", "knobs", "read"])
@pytest.mark.parametrize("rank", [0, 1])
def test_a_rank_that_fails_takes_all_out_and_nobody_hangs(rank: int, method: str, tmp_path: Path) -> None:
    (first, _), (second, _) = run(tmp_path, 12, rank, method)
    if (rank, method) == (1, "read"):
        assert not first.broken and not second.broken, "only the first rank reads"
        return
    assert first.broken and second.broken
    text = " ".join(line.get("text", "") for line in read_journal(tmp_path / JOURNAL))
    assert "stood down" in text
