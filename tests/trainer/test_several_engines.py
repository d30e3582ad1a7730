"""Several servers for one rank: requests are shared, answers come back in order, failures are told once."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from typing import Any

import pytest
import torch

from autotune.errors import TrainingError
from autotune.recipe.schema import ServerSection
from autotune.trainer.rollout import build
from autotune.trainer.rollout.several import SeveralEngines, shares
from autotune.trainer.rollout.vllm_engine import EngineOptions, Generated, Request, Sampling

SAMPLING = Sampling(1.0, 4, (1,))


class Echo:
    """Repeats the prompt's first token, once for the first response of a request, twice for the next one."""

    def __init__(self, together: threading.Barrier | None = None) -> None:
        self.asked: list[int] = []
        self.weights: dict[str, torch.Tensor] = {}
        self.slept = self.closed = 0
        self.fail: Exception | None = None
        self._together = together

    def generate(self, requests: Sequence[Request], sampling: Sampling) -> Generated:
        if self._together is not None:
            self._together.wait(20)  # breaks unless the others are asked meanwhile
        if self.fail is not None:
            raise self.fail
        self.asked = [request.prompt[0] for request in requests]
        rows = [[r.prompt[0]] * (i + 1) for r in requests for i in range(r.count)]
        width = max(map(len, rows))
        ids = torch.tensor([row + [0] * (width - len(row)) for row in rows])
        log_probs = None if sampling.temperature == 0 else -ids.float()
        return Generated(ids, torch.tensor([len(row) for row in rows]), log_probs)

    def load(self, weights: Any) -> None:
        self.weights = dict(weights)

    def sleep(self) -> None:
        self.slept += 1

    def close(self) -> None:
        self.closed += 1


def requests(*counts: int) -> list[Request]:
    return [Request([10 + i], count, seed=i) for i, count in enumerate(counts)]


@pytest.mark.parametrize(
    ("counts", "parts", "expected"),
    [
        ((8, 8, 8, 8), 2, [[10, 11], [12, 13]]),
        ((8, 8, 8), 2, [[10], [11, 12]]),
        ((1, 1, 1, 9), 2, [[10, 11, 12], [13]]),  # nothing is cut within a request
        ((9, 1, 1, 1), 2, [[10], [11, 12, 13]]),
        ((4,), 3, [[10]]),
        ((1, 1, 1, 1, 1, 1), 3, [[10, 11], [12, 13], [14, 15]]),
    ],
)
def test_shares_are_runs_of_about_as_many_responses(
    counts: tuple[int, ...], parts: int, expected: list[list[int]]
) -> None:
    assert [[r.prompt[0] for r in part] for part in shares(requests(*counts), parts)] == expected


@pytest.mark.parametrize("temperature", [1.0, 0.0])
@pytest.mark.parametrize("counts", [(1, 3, 1, 1), (2, 2), (4,), (1, 1, 4, 1, 1, 2)])
def test_the_answer_is_that_of_one_engine(counts: tuple[int, ...], temperature: float) -> None:
    sampling = Sampling(temperature, 4, (1,))
    alone, shared = Echo().generate(requests(*counts), sampling), SeveralEngines([Echo(), Echo(), Echo()])
    found = shared.generate(requests(*counts), sampling)
    shared.close()
    assert torch.equal(found.ids, alone.ids) and torch.equal(found.lengths, alone.lengths)
    assert (found.log_probs is None) == (alone.log_probs is None) == (temperature == 0)
    if found.log_probs is not None and alone.log_probs is not None:
        assert torch.equal(found.log_probs, alone.log_probs)


def test_engines_work_at_the_same_time_and_all_get_the_weights() -> None:
    barrier = threading.Barrier(2)
    engines = [Echo(barrier), Echo(barrier)]
    shared = SeveralEngines(engines)
    shared.load((name, torch.ones(1)) for name in ("a", "b"))  # an iterator can be read once only
    shared.generate(requests(2, 2), SAMPLING)
    shared.sleep()
    shared.close()
    for engine, asked in zip(engines, ([10], [11]), strict=True):
        assert engine.asked == asked and set(engine.weights) == {"a", "b"}
        assert engine.slept == engine.closed == 1


@pytest.mark.parametrize("error", [torch.OutOfMemoryError("full"), TrainingError("gone")])
def test_an_error_of_one_is_told_when_the_others_are_done(error: Exception) -> None:
    engines = [Echo(), Echo()]
    engines[0].fail = error
    shared = SeveralEngines(engines)
    with pytest.raises(type(error), match=str(error)):
        shared.generate(requests(2, 2), SAMPLING)
    assert engines[1].asked == [11]
    engines[0].fail = None
    assert len(shared.generate(requests(2, 2), SAMPLING).ids) == 4  # a smaller batch may be tried next
    shared.close()


def test_every_engine_is_closed_whatever_becomes_of_another(monkeypatch: pytest.MonkeyPatch) -> None:
    engines = [Echo(), Echo(), Echo()]
    monkeypatch.setattr(engines[1], "close", lambda: (_ for _ in ()).throw(OSError("stuck")))
    with pytest.raises(OSError, match="stuck"):
        SeveralEngines(engines).close()
    assert engines[0].closed == engines[2].closed == 1


@pytest.mark.parametrize(("rank", "replicas", "indices"), [(0, 1, [0]), (1, 1, [1]), (1, 3, [3, 4, 5])])
def test_a_ranks_servers_are_counted_on(
    rank: int, replicas: int, indices: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    started: list[int] = []
    engine = Echo()

    def start(options: EngineOptions, section: ServerSection, index: int) -> Echo:
        started.append(index)
        return engine

    monkeypatch.setattr(build, "ServerEngine", start)
    options = EngineOptions(model="m", dtype="float32", seed=1, max_num_seqs=8)
    made = build._servers(options, ServerSection(replicas=replicas), rank)
    assert started == indices and (made is engine) == (replicas == 1)
    made.close()


def test_a_server_that_does_not_start_ends_those_that_did(monkeypatch: pytest.MonkeyPatch) -> None:
    first = Echo()

    def start(options: EngineOptions, section: ServerSection, index: int) -> Echo:
        if index:
            raise TrainingError("no memory left")
        return first

    monkeypatch.setattr(build, "ServerEngine", start)
    options = EngineOptions(model="m", dtype="float32", seed=1, max_num_seqs=8)
    with pytest.raises(TrainingError, match="no memory"):
        build._servers(options, ServerSection(replicas=2), 0)
    assert first.closed == 1
