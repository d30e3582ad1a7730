"""Packed passes as CUDA graphs: recorded once per shape, then started with one call to the device.

A model of a hundred million parameters computes a micro batch faster than the host can name its two
thousand kernels. A graph names them once. For that every shape must stay, so a packed micro batch is laid
into buffers of a fixed size (`Shape`):

    tokens      the last ones are padding, cut into sequences of their own, no longer than any other
    kept        the last ones look at some token and write into a row that is in no mask
    samples     the last rows have no token; the one after them is the row that nobody reads

Padding takes part in the forward pass and gets a gradient of exactly 0. What a number in the loss would
be recorded as (clip ranges, coefficients, temperature) is part of a graph's name: when the controller moves
one, another graph is recorded. Counts are buffers, as they differ every time.

The first pass of a name runs as it is (kernels are compiled and loaded there), the second is recorded. If
recording fails, everything goes on without graphs, and `failure` says why.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from autotune.trainer.flat import FlatAdamW
from autotune.trainer.forward import TokenBatch
from autotune.trainer.losses import Counts, LossKnobs, policy_loss
from autotune.trainer.packing import Layout, packed_log_probs

if TYPE_CHECKING:
    from autotune.trainer.update import Experience, MicroBatch

Body = Callable[[], tuple[Tensor, ...]]
Record = Callable[[Body], Body]
"""Turns a pass over fixed buffers into one that repeats it; its outputs are the same tensors every time."""

STEP = 256
"""Tokens and kept positions of a shape are rounded up to this."""
ROOM = 8
"""A new shape has this part of its size as room, so that the next micro batch finds it fitting."""
WASTE = 4
"""A shape is used for a micro batch that leaves no more than this part of it unused."""
MOST = 24
"""Graphs that are kept; with one more, all are dropped."""
PAYS = 4
"""Passes per kept graph, recording included, below which a run is told that its graphs do not pay."""


@dataclass(frozen=True, slots=True)
class Shape:
    """Sizes of the buffers of one micro batch."""

    tokens: int
    kept: int
    samples: int
    width: int
    longest: int
    chunk: int
    compile: bool
    compile_head: bool

    def holds(self, other: Shape) -> bool:
        """Whether `other` fits in, without much of this left over."""
        sizes_of_other = replace(self, tokens=other.tokens, kept=other.kept, samples=other.samples)
        sizes = ((self.tokens, other.tokens), (self.kept, other.kept))
        fits = all(need <= size <= need * WASTE // (WASTE - 1) + STEP for size, need in sizes)
        return sizes_of_other == other and fits and other.samples <= self.samples

    def roomier(self) -> Shape:
        """The shape that is made where none holds this one."""
        tokens, kept = (_round_up(size + size // ROOM, STEP) for size in (self.tokens, self.kept))
        return replace(self, tokens=tokens, kept=kept, samples=_round_up(self.samples, 8))


def _round_up(size: int, step: int) -> int:
    return -(-size // step) * step


class Slots:
    """The buffers of one shape: what a packed forward pass reads."""

    def __init__(self, shape: Shape, device: torch.device) -> None:
        def made(size: int, dtype: torch.dtype = torch.int64) -> Tensor:
            return torch.zeros(size, dtype=dtype, device=device)

        self.shape = shape
        self._ids, self._targets = made(shape.tokens), made(shape.kept)
        sequences = shape.samples + -(-shape.tokens // shape.longest)  # of padding: as many as could be
        self._offsets = torch.arange(1, sequences + 1, device=device) * shape.longest  # [S]
        self.layout = Layout(
            fed=torch.arange(shape.tokens, device=device),
            positions=made(shape.tokens),
            starts=made(sequences + 1, torch.int32),
            kept=made(shape.kept),
            targets=torch.arange(shape.tokens, shape.tokens + shape.kept, device=device),
            places=made(shape.kept),
            shape=(shape.samples + 1, shape.width),
            longest=shape.longest,
            chunk=shape.chunk,
            compile=shape.compile,
            compile_head=shape.compile_head,
        )
        self.batch = TokenBatch(self._ids[None], None, self._targets[None], made(1, torch.bool)[None])

    def fill(self, batch: TokenBatch, layout: Layout) -> None:
        """Lay a micro batch into the buffers; ids and positions of padding may be any that were there."""
        tokens, kept, samples = len(layout.fed), len(layout.kept), layout.shape[0]
        flat = torch.cat([batch.prompt_ids.flatten(), batch.response_ids.flatten()])
        self._ids[:tokens] = flat[layout.fed]
        self._targets[:kept] = flat[layout.targets]
        mine = self.layout
        mine.positions[:tokens] = layout.positions
        mine.kept[:kept] = layout.kept
        mine.places[:kept] = layout.places
        mine.places[kept:] = self.shape.samples * self.shape.width  # the row that nobody reads
        mine.starts[: samples + 1] = layout.starts
        more = self._offsets[: len(mine.starts) - samples - 1]
        mine.starts[samples + 1 :] = (more + tokens).clamp(max=self.shape.tokens)


class LossSlots(Slots):
    """Buffers for training: what the loss reads as well, rows beyond the samples' all zero."""

    def __init__(self, shape: Shape, device: torch.device, like: Experience) -> None:
        super().__init__(shape, device)

        def rows(whole: Tensor | None) -> Tensor | None:
            if whole is None:
                return None
            tail = () if whole.dim() == 1 else (shape.width,)
            return torch.zeros((shape.samples + 1, *tail), dtype=whole.dtype, device=device)

        self._rows = [rows(whole) for whole in _wholes(like)]
        self._tokens = torch.ones((), device=device)
        self._responses = torch.ones((), device=device)
        self.counts = Counts(self._tokens, self._responses)

    @property
    def rows(self) -> list[Tensor | None]:
        """Old and reference log-probs, advantages, mask and importance, [samples + 1] or with width."""
        return self._rows

    def fill_loss(self, data: Experience, micro: MicroBatch, counts: Counts) -> None:
        self._tokens.fill_(counts.tokens)
        self._responses.fill_(counts.responses)
        used = len(micro.index)
        for slot, whole in zip(self._rows, _wholes(data), strict=True):
            if slot is not None and whole is not None:
                chosen = whole[micro.index]
                slot[:used] = chosen if slot.dim() == 1 else chosen[:, : micro.width]
                slot[used:] = 0


def _wholes(data: Experience) -> tuple[Tensor | None, ...]:
    mask = data.batch.response_mask
    return data.old_log_probs, data.ref_log_probs, data.advantages, mask, data.importance


def hindrance(optimizer: FlatAdamW | None, packed: bool, device: torch.device) -> str:
    """Why a run cannot record its passes; empty where it can.

    Args:
        optimizer: of the engine, where that is alone with its weights at ZeRO 0 in bfloat16.
        packed: whether passes have no padding.
        device: where they run.
    """
    if device.type != "cuda":
        return "there is no CUDA device"
    if not packed:
        return "layers of this model cannot be packed"
    return "" if optimizer is not None else "it needs one rank at ZeRO 0 in bfloat16"


def record_cuda(pool: Any) -> Record:
    """Recording by CUDA, all graphs in one memory pool: they never run at the same time."""

    def record(body: Body) -> Body:
        graph, stream = torch.cuda.CUDAGraph(), torch.cuda.current_stream()
        try:
            with torch.cuda.graph(graph, pool=pool):
                outputs = body()
        finally:
            torch.cuda.set_stream(stream)  # a recording that fails leaves its own one current

        def repeat() -> tuple[Tensor, ...]:
            graph.replay()
            return outputs

        return repeat

    return record


@dataclass(slots=True)
class _Pass:
    """One name's buffers and, from its second time on, its graph."""

    slots: Slots
    body: Body
    graph: Body | None = None


class Graphs:
    """All packed passes of a run."""

    def __init__(self, optimizer: FlatAdamW, record: Record | None = None) -> None:
        """For the weights that `optimizer` steps, whose gradients are added to its flat one.

        Args:
            optimizer: of the engine that is alone with its weights.
            record: how passes are recorded; CUDA's way by itself.
        """
        self._optimizer = optimizer
        self._weights: Sequence[Tensor] = optimizer.weights
        self._given, self._record = record, record
        self._passes: dict[tuple[Any, ...], _Pass] = {}
        self._shapes: list[Shape] = []
        self.failure = ""
        """Why nothing is recorded any more."""
        self._untold = ""
        self._count = 0  # passes since all graphs were dropped
        self._wasteful = False

    def news(self) -> str:
        """Why nothing is recorded any more, or why that does not pay; once."""
        told, self._untold = self._untold, ""
        return told

    def train(
        self,
        model: nn.Module,
        data: Experience,
        micro: MicroBatch,
        counts: Counts,
        knobs: LossKnobs,
        temperature: float,
    ) -> tuple[Tensor, Tensor]:
        """Forward and backward of one micro batch; its gradients are added to the optimizer's.

        Returns:
            Log-probs [b, width] and the loss, a scalar; both are overwritten by the next pass.
        """
        assert micro.layout is not None
        shape = self._fitting(micro.layout)
        kinds = tuple(None if w is None else (w.dim(), w.dtype) for w in _wholes(data))
        name = (shape, id(model), self._places(), model.training, knobs, temperature, kinds)

        def make() -> _Pass:
            slots = LossSlots(shape, micro.index.device, data)
            return _Pass(slots, lambda: self._loss(model, slots, knobs, temperature))

        found = self._pass(name, make)
        assert isinstance(found.slots, LossSlots)
        found.slots.fill(data.batch, micro.layout)
        found.slots.fill_loss(data, micro, counts)
        self._optimizer.open()
        log_probs, loss = self._run(found)
        return log_probs[: len(micro.index)], loss

    @torch.no_grad()
    def score(
        self, model: nn.Module, batch: TokenBatch, micro: MicroBatch, temperature: float, with_entropy: bool
    ) -> tuple[Tensor, Tensor | None]:
        """Log-probs and, if asked for, entropies, [b, width]; overwritten by the next pass."""
        assert micro.layout is not None
        shape = self._fitting(micro.layout)
        name = (shape, id(model), self._places(), model.training, temperature, with_entropy)

        def make() -> _Pass:
            slots = Slots(shape, micro.index.device)

            def body() -> tuple[Tensor, ...]:
                found = packed_log_probs(model, slots.batch, slots.layout, temperature, with_entropy)
                return tuple(part for part in found if part is not None)

            return _Pass(slots, body)

        found = self._pass(name, make)
        found.slots.fill(batch, micro.layout)
        outputs = [part[: len(micro.index)] for part in self._run(found)]
        return outputs[0], outputs[1] if with_entropy else None

    def _loss(
        self, model: nn.Module, slots: LossSlots, knobs: LossKnobs, temperature: float
    ) -> tuple[Tensor, ...]:
        log_probs, entropy = packed_log_probs(
            model, slots.batch, slots.layout, temperature, knobs.entropy_coef > 0
        )
        old, ref, advantages, mask, importance = slots.rows
        assert old is not None and advantages is not None and mask is not None
        loss = policy_loss(log_probs, old, ref, entropy, advantages, mask, slots.counts, knobs, importance)
        # Not backward(): a weight's own accumulation node may live on another stream than the recording.
        self._optimizer.add(torch.autograd.grad(loss, list(self._weights), allow_unused=True))
        return log_probs.detach(), loss.detach()

    def _fitting(self, layout: Layout) -> Shape:
        """The smallest known shape that holds this layout, or a new one."""
        samples, width = layout.shape
        exact = Shape(
            *(len(layout.fed), len(layout.kept), samples, width, layout.longest),
            *(layout.chunk, layout.compile, layout.compile_head),
        )
        known = [shape for shape in self._shapes if shape.holds(exact)]
        if not known:
            known = [exact.roomier()]
            self._shapes += known
        return min(known, key=lambda shape: (shape.tokens, shape.kept))

    def _places(self) -> int:
        """Changes when a weight has moved to another address: graphs read the old one."""
        return hash(tuple(weight.data_ptr() for weight in self._weights))

    def _pass(self, name: tuple[Any, ...], make: Callable[[], _Pass]) -> _Pass:
        self._count += 1
        if name not in self._passes:
            if len(self._passes) >= MOST:
                self._drop()
            self._passes[name] = make()
            return self._passes[name]
        found = self._passes[name]
        if found.graph is None and not self.failure:
            try:
                found.graph = self._recorder()(found.body)
            except RuntimeError as error:
                cause = error.__context__ or error  # ending a broken recording fails too, and says less
                self.failure = f"recording a CUDA graph failed: {cause}; passes go on without"
                self._untold = self.failure
        return found

    def _drop(self) -> None:
        """Give all graphs back, and their pool: torch takes no pool again whose last graph is gone."""
        if self._count < PAYS * MOST and not self._wasteful:
            self._wasteful = True
            self._untold = (
                f"{MOST} CUDA graphs were dropped after {self._count} passes: micro batches differ too much;"
                " give trainer.packing.tokens, which makes them alike, or set trainer.packing.graphs to false"
            )
        self._passes.clear()
        self._record, self._count = self._given, 0

    def _recorder(self) -> Record:
        if self._record is None:
            self._record = record_cuda(torch.cuda.graph_pool_handle())
        return self._record

    @staticmethod
    def _run(found: _Pass) -> tuple[Tensor, ...]:
        return (found.graph or found.body)()
