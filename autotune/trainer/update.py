"""The updates of one rollout: a plan of who trains on what, then backward passes and steps.

The plan is made once per rollout, from knobs that are fixed for it. Old log-probs are computed on
exactly the micro batches that the first epoch trains on: same rows, same shapes, same numbers. So
at a rollout's first update the ratio *is* 1 and everything clip-shaped is 0, not 1e-7.

An update is skipped, on all ranks alike, only when it has nothing to say: every advantage 0 while
the KL and entropy coefficients are 0, or no response token at all. (Adam's momentum would move the
weights on zero gradients.) Its tokens are measured all the same.

Within an update, samples without signal can be left out of the backward passes on the same
condition (`make_plan(quiet=...)`): what they would add to the gradient is exactly 0. **The loss is
still divided by all tokens of the mini-batch, left-out ones included**, so the gradient is the same.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from autotune.trainer.algorithms.ppo import value_loss
from autotune.trainer.critic import Critic
from autotune.trainer.engine import Engine
from autotune.trainer.forward import (
    TokenBatch,
    log_probs_and_entropy,
    response_log_probs,
)
from autotune.trainer.graphs import Graphs
from autotune.trainer.losses import Counts, LossKnobs, policy_loss
from autotune.trainer.meters import Meters
from autotune.trainer.order import mini_batches
from autotune.trainer.packing import (
    Layout,
    Packing,
    cut,
    cut_alike,
    make_layout,
    packed_log_probs,
    token_counts,
)
from autotune.trainer.ranks import Ranks, Rows


@dataclass(frozen=True, slots=True)
class MicroBatch:
    """Samples of one forward pass on this rank."""

    index: Tensor
    """Sample indices on the device, int64 [b]."""
    width: int
    """Longest response among them: columns beyond are padding and left out."""
    layout: Layout | None = None
    """Where its tokens lie when it is packed; None when it is padded."""


@dataclass(frozen=True, slots=True)
class MiniBatch:
    """One update."""

    micro: tuple[MicroBatch, ...]
    """This rank's part of it."""
    rows: Rows
    """Sample indices of all of it, over all ranks."""
    tokens: int
    """Response tokens over all ranks: the loss's normaliser."""
    signal: bool
    """Whether some advantage of it, on any rank, is not 0."""
    left_out: tuple[MicroBatch, ...] = ()
    """This rank's samples without signal, when they are not trained on."""


@dataclass(frozen=True, slots=True)
class Experience:
    """What the updates of a rollout learn from; everything [N, ...] on the device."""

    batch: TokenBatch
    advantages: Tensor
    """[N], or [N, R] from a critic."""
    old_log_probs: Tensor
    """Of the sampling weights, [N, R]."""
    ref_log_probs: Tensor | None
    """[N, R]."""
    targets: ValueTargets | None = None
    """None without a critic."""
    importance: Tensor | None = None
    """Weight of each token's objective, trainer against sampler, [N, R]; None where none is due."""

    def of(self, micro: MicroBatch) -> tuple[Tensor, Tensor | None, Tensor, Tensor]:
        """Old and reference log-probs [b, R], advantages [b] or [b, R] and mask [b, R] of a micro batch."""
        index, width = micro.index, micro.width
        ref = None if self.ref_log_probs is None else self.ref_log_probs[index, :width]
        advantages = self.advantages[index]
        if advantages.dim() == 2:
            advantages = advantages[:, :width]
        return self.old_log_probs[index, :width], ref, advantages, self.batch.response_mask[index, :width]


@dataclass(frozen=True, slots=True)
class ValueTargets:
    """What the critic learns from; everything [N, R] on the device."""

    old_values: Tensor
    """Before this rollout's updates."""
    returns: Tensor
    mask: Tensor
    """Response tokens of the responses that could be scored."""


@dataclass(frozen=True, slots=True)
class BatchKnobs:
    """The knobs that shape a plan."""

    rollout_n: int
    ppo_mini_batch_size: int
    ppo_epochs: int
    micro_batch_size: int


def make_plan(
    lengths: Rows,
    advantages: Tensor,
    knobs: BatchKnobs,
    key: tuple[int, int],
    ranks: Ranks,
    device: torch.device,
    packing: Packing | None = None,
    quiet: NDArray[np.bool_] | None = None,
) -> list[MiniBatch]:
    """All U mini-batches of a rollout, epoch after epoch.

    Args:
        lengths: response tokens per sample, [N].
        advantages: per sample on the CPU, [N].
        knobs: group size and batch sizes.
        key: (seed, rollout), which fixes the order.
        ranks: this process among its peers.
        device: where indices are needed.
        packing: lays micro batches out without padding; None pads them.
        quiet: samples that need not be trained on, [N]; None trains on all.
    """
    n = knobs.rollout_n
    cutter = Cutter(lengths, knobs.micro_batch_size, ranks, device, packing)
    order = mini_batches(len(lengths) // n, knobs.ppo_mini_batch_size, knobs.ppo_epochs, *key)
    nonzero = advantages.numpy() != 0  # [N]
    plan = []
    for prompts in order:
        rows = (prompts[:, None] * n + np.arange(n)).ravel()  # [mini n]: whole groups
        loud, still = _without_quiet(rows, quiet, ranks)
        signal = bool(nonzero[rows].any())
        left_out = cutter.parts(still) if len(still) else ()
        plan.append(MiniBatch(cutter.parts(loud), rows, int(lengths[rows].sum()), signal, left_out))
    return plan


def _without_quiet(rows: Rows, quiet: NDArray[np.bool_] | None, ranks: Ranks) -> tuple[Rows, Rows]:
    """Samples to train on, and those left out; all of the first where not every rank would have some."""
    nothing = rows[:0]
    if quiet is None or ranks.size > 1 or quiet[rows].all():
        return rows, nothing
    return rows[~quiet[rows]], rows[quiet[rows]]


def with_signal(plan: Sequence[MiniBatch], advantages: Tensor) -> list[MiniBatch]:
    """The same plan, where each update knows whether these advantages [N] or [N, R] say something."""
    nonzero = (advantages != 0).view(len(advantages), -1).any(dim=1).cpu().numpy()  # [N]
    return [replace(mini, signal=bool(nonzero[mini.rows].any())) for mini in plan]


@dataclass(frozen=True, slots=True)
class Cutter:
    """Cuts samples into this rank's micro batches: by samples, or packed by tokens."""

    lengths: Rows
    size: int
    """Samples of a micro batch."""
    ranks: Ranks
    device: torch.device
    packing: Packing | None = None

    def parts(self, rows: Rows) -> tuple[MicroBatch, ...]:
        """This rank's part of `rows`, in micro batches of which every rank has as many."""
        if self.packing is not None and self.packing.budget is not None:
            sizes = token_counts(self.lengths, self.packing)
            return self.made(cut_alike(rows, sizes, self.packing.budget, self.ranks))
        return self.of_one_rank(self.ranks.share(rows))

    def of_one_rank(self, rows: Rows) -> tuple[MicroBatch, ...]:
        """All of `rows`, which are this rank's; other ranks may have more parts or fewer."""
        if self.packing is not None and self.packing.budget is not None:
            return self.made(cut(rows, token_counts(self.lengths, self.packing), self.packing.budget))
        parts = np.split(rows, range(self.size, len(rows), self.size))
        return self.made([part for part in parts if len(part)])

    def made(self, parts: Sequence[Rows]) -> tuple[MicroBatch, ...]:
        return tuple(self._made(part) for part in parts)

    def _made(self, rows: Rows) -> MicroBatch:
        index = torch.from_numpy(rows).to(self.device, non_blocking=True)
        if self.packing is None:
            return MicroBatch(index, int(self.lengths[rows].max()))
        layout = make_layout(rows, self.lengths, self.packing, self.device)
        return MicroBatch(index, layout.shape[1], layout)


def first_epoch(plan: Sequence[MiniBatch], epochs: int) -> list[MicroBatch]:
    """Micro batches that together hold each of this rank's samples once."""
    return [micro for mini in plan[: len(plan) // epochs] for micro in (*mini.micro, *mini.left_out)]


def micro_log_probs(
    model: nn.Module,
    batch: TokenBatch,
    micro: MicroBatch,
    temperature: float,
    with_entropy: bool,
    graphs: Graphs | None = None,
) -> tuple[Tensor, Tensor | None]:
    """Log-probs of a micro batch's response tokens and, if asked for, their entropies, [b, width].

    With `graphs` there is no gradient, and what comes out lasts until the next pass.
    """
    if micro.layout is not None and graphs is not None:
        return graphs.score(model, batch, micro, temperature, with_entropy)
    if micro.layout is not None:
        return packed_log_probs(model, batch, micro.layout, temperature, with_entropy)
    rows = batch.rows(micro.index, micro.width)
    if with_entropy:
        return log_probs_and_entropy(model, rows, temperature)
    return response_log_probs(model, rows, temperature), None


@torch.no_grad()
def score_samples(
    model: nn.Module,
    batch: TokenBatch,
    micro_batches: Sequence[MicroBatch],
    temperature: float,
    ranks: Ranks,
    with_entropy: bool = False,
    graphs: Graphs | None = None,
) -> tuple[Tensor, Tensor]:
    """Log-probs and, if asked for, entropies of all samples in eval mode, both [N, R].

    Each rank computes those of its own micro batches and all get everything; padding is 0.
    """
    model.eval()
    shape, device = batch.response_ids.shape, batch.response_ids.device
    log_probs = torch.zeros(shape, device=device)  # [N, R]
    entropy = torch.zeros(shape if with_entropy else (0, 0), device=device)  # [N, R]
    for micro in micro_batches:
        scored, spread = micro_log_probs(
            model, batch, micro, temperature, with_entropy, graphs
        )  # [b, width]
        log_probs[micro.index, : micro.width] = scored
        if spread is not None:
            entropy[micro.index, : micro.width] = spread
    return ranks.sum(log_probs), ranks.sum(entropy) if with_entropy else entropy


class Updater:
    """Runs a plan on an engine, and on the critic's where there is one, and tells the meters."""

    def __init__(
        self,
        engine: Engine,
        experience: Experience,
        knobs: LossKnobs,
        temperature: float,
        critic: Critic | None = None,
        graphs: Graphs | None = None,
    ) -> None:
        self._engine = engine
        self._experience = experience
        self._knobs = knobs
        self._temperature = temperature
        self._critic = critic
        self._graphs = graphs

    def run(self, plan: Sequence[MiniBatch], meters: Meters) -> Iterator[bool]:
        """One update after the other; yields whether each of them moved the weights."""
        self._engine.module.train()
        for number, mini in enumerate(plan):
            if self._critic is not None and mini.tokens > 0:
                self._update_critic(self._critic, number, mini, meters)
            if self._has_work(mini):
                yield self._update(number, mini, meters)
            else:
                self._look(number, mini, meters)
                yield False

    def _has_work(self, mini: MiniBatch) -> bool:
        penalties = self._knobs.kl_coef > 0 or self._knobs.entropy_coef > 0
        return mini.tokens > 0 and (mini.signal or penalties)

    def _update(self, number: int, mini: MiniBatch, meters: Meters) -> bool:
        for micro in mini.left_out:
            meters.add_left_out(number, self._experience.batch.response_mask[micro.index])
        for position, micro in enumerate(mini.micro):
            last = position == len(mini.micro) - 1
            if self._graphs is not None and micro.layout is not None:
                self._replay(self._graphs, number, mini, micro, meters)
                self._engine.added(last=last)
            else:
                self._engine.backward(self._loss(number, mini, micro, meters), last=last)
        result = self._engine.step()
        meters.add_step(number, result.grad_norm, self._engine.world_size)
        return result.stepped

    def _update_critic(self, critic: Critic, number: int, mini: MiniBatch, meters: Meters) -> None:
        """The critic learns from every response that has a score, with signal for the actor or not."""
        data, targets = self._experience, self._experience.targets
        assert targets is not None, "a critic without targets"
        critic.engine.module.train()
        for position, micro in enumerate(mini.micro):
            index, width = micro.index, micro.width
            loss = value_loss(
                critic.values(critic.engine.module, data.batch.rows(index, width)),
                targets.old_values[index, :width],
                targets.returns[index, :width],
                targets.mask[index, :width],
                mini.tokens,
                critic.value_clip,
            )
            meters.add_value_loss(number, loss)
            critic.engine.backward(loss, last=position == len(mini.micro) - 1)
        critic.engine.step()

    def _replay(
        self, graphs: Graphs, number: int, mini: MiniBatch, micro: MicroBatch, meters: Meters
    ) -> None:
        """Forward, loss and backward pass in one."""
        data = self._experience
        counts = Counts(tokens=max(mini.tokens, 1), responses=len(mini.rows))
        log_probs, loss = graphs.train(
            self._engine.module, data, micro, counts, self._knobs, self._temperature
        )  # [b, R]
        old, ref, advantages, mask = data.of(micro)
        meters.add_micro_batch(number, log_probs, old, ref, advantages, mask, loss)

    @torch.no_grad()
    def _look(self, number: int, mini: MiniBatch, meters: Meters) -> None:
        """Measure a skipped update: its gradient is exactly 0, its tokens still count."""
        for micro in mini.micro:
            self._loss(number, mini, micro, meters)

    def _loss(self, number: int, mini: MiniBatch, micro: MicroBatch, meters: Meters) -> Tensor:
        data, index, width = self._experience, micro.index, micro.width
        # The entropy costs a pass over the vocabulary: only when the loss asks for it.
        log_probs, entropy = micro_log_probs(
            self._engine.module, data.batch, micro, self._temperature, self._knobs.entropy_coef > 0
        )  # [b, R]
        old, ref, advantages, mask = data.of(micro)
        counts = Counts(tokens=max(mini.tokens, 1), responses=len(mini.rows))
        weights = None if data.importance is None else data.importance[index, :width]  # [b, R]
        loss = policy_loss(log_probs, old, ref, entropy, advantages, mask, counts, self._knobs, weights)
        meters.add_micro_batch(number, log_probs, old, ref, advantages, mask, loss)
        return loss


def fixed_subset(total: int, wanted: int) -> Rows:
    """The same evenly spread samples every rollout: at least `wanted`, or all there are."""
    count = min(wanted, total)
    return np.arange(count) * total // count


@torch.no_grad()
def measure_drift(
    model: nn.Module,
    experience: Experience,
    parts: Sequence[MicroBatch],
    temperature: float,
    meters: Meters,
    graphs: Graphs | None = None,
) -> None:
    """Forward this rank's part of the fixed subset once more, after the last update."""
    model.eval()
    for part in parts:
        batch = experience.batch
        log_probs, _ = micro_log_probs(model, batch, part, temperature, False, graphs)  # [b, R]
        old = experience.old_log_probs[part.index, : part.width]  # [b, R]
        mask = experience.batch.response_mask[part.index, : part.width]  # [b, R]
        meters.add_after_updates(log_probs, old, mask)


@contextmanager
def seeded_dropout(seed: int) -> Iterator[None]:
    """Dropout is the only reader of torch's global stream here: place it, then put it back."""
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        yield
