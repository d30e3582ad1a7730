"""Weights to a sampling server on another device: a process group of two, and flat buckets of bytes.

    trainer   POST /load {broadcast: {group, bucket, tensors: [[name, dtype, shape], ...]}}
    both      meet in a file of the server's folder, once: NCCL between GPUs, gloo between processes on a CPU
    trainer   a bucket after the other, broadcast by rank 0; the server reads tensors out of it

What the two say of the tensors goes through the authenticated call, so no pickle travels, and both cut the
same buckets from it. They meet in a file and not at a port: only who may read the folder (mode 0700) can
join. The trainer watches the call while it waits, so that a server that failed or died ends the wait.
"""

from __future__ import annotations

import math
import os
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from autotune.errors import TrainingError

BUCKET = 256 << 20
"""Bytes of a bucket: large enough that its start costs nothing, small beside the weights."""
ALIGN = 16
"""Every tensor begins at a multiple of so many bytes, so that its bytes can be seen as its numbers."""
PATIENCE = timedelta(seconds=300)
"""For a collective call; a failed call of the server ends a wait much earlier."""

MEETING = timedelta(seconds=60)
"""For the other one to come to the file."""

Meta = tuple[str, str, tuple[int, ...]]
"""Name, dtype without `torch.`, shape."""


@dataclass(frozen=True, slots=True)
class Piece:
    """One tensor's place in a bucket."""

    meta: Meta
    offset: int
    size: int
    """Bytes."""


def describe(tensors: Mapping[str, Tensor]) -> list[Meta]:
    """What the other side must know of the tensors."""
    return [(n, str(t.dtype).removeprefix("torch."), tuple(t.shape)) for n, t in tensors.items()]


def buckets(metas: Sequence[Meta], limit: int) -> Iterator[list[Piece]]:
    """Tensors in their order, as many to a bucket as fit into `limit` bytes, at least one."""
    pieces: list[Piece] = []
    end = 0
    for meta in metas:
        size = math.prod(meta[2]) * getattr(torch, meta[1]).itemsize
        if pieces and end + size > limit:
            yield pieces
            pieces, end = [], 0
        pieces.append(Piece(meta, end, size))
        end += -(-size // ALIGN) * ALIGN
    if pieces:
        yield pieces


def bytes_of(pieces: Sequence[Piece]) -> int:
    """Size of a bucket."""
    return pieces[-1].offset + pieces[-1].size


class Pair:
    """A process group of a trainer's rank (0) and its server (1), apart from every other group."""

    def __init__(
        self, meeting: Path, rank: int, device: torch.device, check: Callable[[], None] = lambda: None
    ) -> None:
        """Wait for the other one at a file.

        Args:
            meeting: in a folder that both may write to; used for this group alone.
            rank: 0 sends.
            device: where the weights are, or shall be.
            check: called while waiting; raises once it is known that the other side will not come.

        Raises:
            TrainingError: it did not come.
        """
        import torch.distributed as dist

        self.device = device
        store = dist.FileStore(str(meeting), 2)
        store.set_timeout(MEETING)
        _meet(store, rank, check)
        if device.type == "cuda":
            os.environ.setdefault("NCCL_NVLS_ENABLE", "0")  # multicast needs a driver set up for it
            options: Any = dist.ProcessGroupNCCL.Options()
            options._timeout = 2 * PATIENCE  # NCCL ends the process then: ours shall come first
            self._group: Any = dist.ProcessGroupNCCL(store, rank, 2, options)
        else:
            options = dist.ProcessGroupGloo._Options()
            options._timeout = PATIENCE
            options._devices = [dist.ProcessGroupGloo.create_device(hostname="127.0.0.1")]
            self._group = dist.ProcessGroupGloo(store, rank, 2, options)

    def begin(self, bucket: Tensor) -> Any:
        """Start broadcasting a bucket from rank 0; the work to wait for."""
        import torch.distributed as dist

        options = dist.BroadcastOptions()
        options.rootRank = options.rootTensor = 0
        return self._group.broadcast([bucket], options)

    def send(self, tensors: Mapping[str, Tensor], limit: int, check: Callable[[], None]) -> None:
        """Broadcast all tensors.

        Args:
            limit: bytes of a bucket, the same on both sides.
            check: called while waiting; raises once it is known that the other side does not listen.
        """
        for pieces in buckets(describe(tensors), limit):
            flat = torch.zeros(bytes_of(pieces), dtype=torch.uint8, device=self.device)
            for piece in pieces:
                raw = tensors[piece.meta[0]].detach().contiguous().flatten().view(torch.uint8)
                flat[piece.offset : piece.offset + piece.size].copy_(raw)
            _finish(self.begin(flat), check)

    def receive(self, metas: Sequence[Meta], limit: int) -> Iterator[tuple[str, Tensor]]:
        """Names and tensors as they arrive, each a view of its bucket."""
        for pieces in buckets(metas, limit):
            flat = torch.empty(bytes_of(pieces), dtype=torch.uint8, device=self.device)
            self.begin(flat).wait()
            for piece in pieces:
                name, dtype, shape = piece.meta
                raw = flat[piece.offset : piece.offset + piece.size]
                yield name, raw.view(getattr(torch, dtype)).view(shape)

    def leave(self) -> None:
        """What is under way ends, on the other side too: gloo knows no other way than closed connections."""
        group, self._group = self._group, None
        if self.device.type == "cuda":
            group.abort()


def _meet(store: Any, rank: int, check: Callable[[], None]) -> None:
    """Come to the store and see the other one there: a group's own way in waits without a look aside."""
    store.set(f"here/{rank}", "1")
    deadline = time.monotonic() + MEETING.total_seconds()
    while not store.check([f"here/{1 - rank}"]):
        check()
        if time.monotonic() > deadline:
            who, seconds = "sampling server" if rank == 0 else "trainer", MEETING.total_seconds()
            raise TrainingError(
                f"the {who} did not come within {seconds:.0f} s to hand weights over; expected both sides on"
                " this machine with the same folder. Check that it runs, or use rollout.server.transfer: file"
            )
        time.sleep(0.002)


def _finish(work: Any, check: Callable[[], None]) -> None:
    """Wait for a broadcast, or for the news that it will not come to an end."""
    deadline = time.monotonic() + PATIENCE.total_seconds()
    while not work.is_completed():
        check()
        if time.monotonic() > deadline:
            raise TrainingError(f"the sampling server took no weights for {PATIENCE.total_seconds():.0f} s")
        time.sleep(0.0005)
    work.wait()
