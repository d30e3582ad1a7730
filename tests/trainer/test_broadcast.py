"""Weights by broadcast: the buckets, two sides that meet, and the ends of a transfer that fails."""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Callable, Iterator
from datetime import timedelta
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from autotune.errors import InputError, TrainingError
from autotune.recipe.schema import ServerSection
from autotune.trainer.rollout import broadcast, client
from autotune.trainer.rollout.broadcast import ALIGN, Meta, buckets, bytes_of, describe
from autotune.trainer.rollout.client import ServerEngine
from autotune.trainer.rollout.server import Server
from tests.trainer.served import connected, serving

SIZES = {"bfloat16": 2, "float32": 4, "float64": 8, "int64": 8, "uint8": 1}
SHAPES = st.lists(st.integers(0, 9), max_size=3).map(tuple)
METAS = st.lists(
    st.tuples(st.just("w"), st.sampled_from(sorted(SIZES)), SHAPES), min_size=1, max_size=12
)


# -- buckets -------------------------------------------------------------------------------------


@given(METAS, st.integers(1, 2000))
@settings(max_examples=200, deadline=None)
def test_buckets_hold_every_tensor_once_and_aligned(metas: list[Meta], limit: int) -> None:
    found = list(buckets(metas, limit))
    assert [piece.meta for pieces in found for piece in pieces] == metas
    for pieces in found:
        ends = [piece.offset + piece.size for piece in pieces]
        starts = [piece.offset for piece in pieces]
        assert starts[0] == 0 and all(start % ALIGN == 0 for start in starts)
        assert all(start >= end for start, end in zip(starts[1:], ends, strict=False))
        assert len(pieces) == 1 or bytes_of(pieces) <= limit
    for one, after in pairwise(found):  # none could have taken the next one's first
        assert -(-bytes_of(one) // ALIGN) * ALIGN + after[0].size > limit


# -- two sides -----------------------------------------------------------------------------------


class Keeps:
    """An engine that keeps its weights, copied as they come."""

    max_model_len = 32

    def __init__(self) -> None:
        self.weights: dict[str, torch.Tensor] = {}
        self.during: Callable[[str], None] = lambda name: None

    def load(self, weights: Any) -> None:
        self.weights = {}
        for name, tensor in weights:
            self.during(name)
            self.weights[name] = tensor.clone()


@pytest.fixture
def engine() -> Keeps:
    return Keeps()


@pytest.fixture
def server(engine: Keeps, tmp_path: Path) -> Iterator[Server]:
    with serving(engine, tmp_path) as server:
        yield server


@pytest.fixture
def sender(server: Server, tmp_path: Path) -> Iterator[ServerEngine]:
    with connected(server, tmp_path, transfer="broadcast") as engine:
        yield engine


def weights(seed: int = 0) -> dict[str, torch.Tensor]:
    noise = torch.Generator().manual_seed(seed)
    return {
        "a.weight": torch.randn(3, 5, generator=noise),
        "b": torch.randn(7, generator=noise).to(torch.bfloat16),
        "c": torch.randn(4, 6, generator=noise).T,  # not contiguous
        "empty": torch.zeros(0, 3),
        "number": torch.tensor(4.5, dtype=torch.float64),
    }


def assert_equal(found: dict[str, torch.Tensor], expected: dict[str, torch.Tensor]) -> None:
    assert found.keys() == expected.keys()
    for name, tensor in expected.items():
        assert found[name].dtype == tensor.dtype and torch.equal(found[name], tensor)


@pytest.mark.parametrize("limit", [1, 64, broadcast.BUCKET])
def test_weights_arrive_bit_for_bit_rollout_after_rollout(
    sender: ServerEngine, engine: Keeps, monkeypatch: pytest.MonkeyPatch, limit: int
) -> None:
    monkeypatch.setattr(client, "BUCKET", limit)
    for seed in (1, 2, 3):
        sender.load(weights(seed).items())
        assert_equal(engine.weights, weights(seed))


def test_what_goes_wrong_there_is_told_and_the_next_transfer_works(
    sender: ServerEngine, engine: Keeps
) -> None:
    sender.load(weights().items())

    def refuse(name: str) -> None:
        raise ValueError(f"{name} does not fit")

    engine.during = refuse
    began = time.monotonic()
    with pytest.raises(TrainingError, match=r"a\.weight does not fit"):
        sender.load(weights().items())
    assert time.monotonic() - began < 20
    engine.during = lambda name: None
    sender.load(weights(5).items())
    assert_equal(engine.weights, weights(5))


def test_a_server_that_dies_in_the_middle_does_not_leave_the_trainer_waiting(
    sender: ServerEngine, engine: Keeps, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its call breaks off while more buckets are due."""
    monkeypatch.setattr(client, "BUCKET", 16)
    broken = threading.Event()
    ask = sender._ask

    def breaks(path: str, body: bytes | None = None) -> bytes:
        if path != "/load":
            return ask(path, body)

        def call() -> None:
            with contextlib.suppress(TrainingError):
                ask(path, body)

        threading.Thread(target=call, daemon=True).start()
        broken.wait(20)
        raise TrainingError("the sampling server does not answer: connection reset")

    def die(name: str) -> None:
        broken.set()
        time.sleep(0.5)
        raise RuntimeError("killed")

    monkeypatch.setattr(sender, "_ask", breaks)
    engine.during = die
    with pytest.raises(TrainingError, match="does not answer"):
        sender.load(weights().items())


def test_a_server_that_never_comes_ends_the_wait_with_its_call(
    sender: ServerEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its process is gone before the two have met: the broken call is the only news of it."""

    def gone(path: str, body: bytes | None = None) -> bytes:
        time.sleep(0.2)
        raise TrainingError("the sampling server does not answer: connection reset")

    monkeypatch.setattr(sender, "_ask", gone)
    began = time.monotonic()
    with pytest.raises(TrainingError, match="does not answer"):
        sender.load(weights().items())
    assert time.monotonic() - began < 5


def test_nobody_waits_for_ever_at_the_meeting(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(broadcast, "MEETING", timedelta(seconds=0.2))
    with pytest.raises(TrainingError, match=r"trainer did not come within 0 s"):
        broadcast.Pair(tmp_path / "meeting", 1, torch.device("cpu"))


def test_only_a_name_in_the_folder_is_met_at(server: Server, engine: Keeps) -> None:
    with pytest.raises(ValueError, match="expected the name of a file"):
        server._receive("../elsewhere", 64, describe(weights()))
    assert engine.weights == {}


# -- which way -----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("transfer", "devices", "own", "expected"),
    [
        ("auto", [], None, "file"),
        ("auto", [], 0, "ipc"),
        ("auto", [1], 0, "broadcast"),
        ("auto", [0], 0, "ipc"),  # named, and the trainer's own all the same
        ("auto", [0], 1, "broadcast"),  # where the weights are, not where a new thread would put some
        ("file", [1], 0, "file"),
        ("broadcast", [], None, "broadcast"),
        ("broadcast", [1], 0, "broadcast"),
        ("broadcast", [], 0, InputError),
        ("broadcast", [0], 0, InputError),
        ("ipc", [], None, InputError),
    ],
)
def test_the_way_follows_from_devices(
    sender: ServerEngine,
    monkeypatch: pytest.MonkeyPatch,
    transfer: str,
    devices: list[int],
    own: int | None,
    expected: Any,
) -> None:
    fields = {"start": False, "port": 9, "transfer": transfer, "devices": devices}
    section = ServerSection.model_validate(fields)
    monkeypatch.setattr(sender, "_section", section)

    class Tensor:
        is_cuda = own is not None
        device = torch.device("cpu" if own is None else f"cuda:{own}")

    if expected is InputError:
        with pytest.raises(InputError, match=r"rollout\.server\.transfer"):
            sender._way({"w": Tensor()})  # type: ignore[dict-item]
    else:
        assert sender._way({"w": Tensor()}) == expected  # type: ignore[dict-item]


@pytest.mark.parametrize("transfer", ["auto", "broadcast"])
def test_a_way_that_fails_gives_way_to_a_file_unless_it_was_asked_for(
    sender: ServerEngine, engine: Keeps, monkeypatch: pytest.MonkeyPatch, transfer: str
) -> None:
    monkeypatch.setattr(sender, "_section", sender._section.model_copy(update={"transfer": transfer}))
    monkeypatch.setattr(sender, "_way", lambda tensors: "broadcast" if sender._fast_way_works else "file")

    def fail(tensors: Any) -> None:
        raise RuntimeError("no route between these devices")

    monkeypatch.setattr(sender, "_load_by_broadcast", fail)
    if transfer == "broadcast":
        with pytest.raises(RuntimeError, match="no route"):
            sender.load(weights().items())
        return
    for seed in (1, 2):
        sender.load(weights(seed).items())
        assert_equal(engine.weights, weights(seed))
    assert not sender._fast_way_works
