"""Sums on the device, one copy to the host per rollout.

Everything that is measured while training is a sum over tokens, so it lives in one float64 buffer
on the device: U rows of per-update sums, two histograms and the rollout's own sums. `send` reduces
it over ranks in one collective and copies it in one go, `finish` divides by the token counts on the
host. Nothing before that waits for the device, nor `finish` itself where the rollout has been waited for.

With d = log-prob - old log-prob and r = exp(d), over response tokens:

    clip_ratio            tokens whose clipped branch is active (`losses.clipped_branch_active`)
    ratio_low/in/high     r < 1 - low, inside, r > 1 + high, whatever the advantage
    kl_step               mean of r - 1 - d: k3 of KL(sampling weights || weights now)
    kl_ref                mean of exp(e) - 1 - e with e = reference log-prob - log-prob
    policy_ratio          counts of r in 64 log-spaced bins over [1/8, 8] and two overflow bins
    value_loss            the critic's clipped squared error / 2, token mean

Where the ratio belongs to a whole response (GSPO), r is that one, and `clip_ratio`, the three shares
and the histogram count responses; `kl_step` and `kl_ref` stay means over tokens.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from autotune.metrics import RATIO_BINS, RATIO_LIMIT
from autotune.trainer.losses import clipped_branch_active, per_token, precise_k3, ratio_difference
from autotune.trainer.ranks import Ranks

UPDATE_SUMS = (
    *("tokens", "ratios", "clipped", "low", "in", "high"),
    *("kl_step", "kl_ref", "loss", "grad_norm", "value_loss", "left_out"),
)
"""`ratios` is how many there were: one per token, or one per response; `left_out` how many there would
have been in samples without signal. Those are never clipped, so the clip share counts them."""
ROLLOUT_SUMS = (
    *("tokens", "entropy", "kl_ref", "kl_mismatch", "last_tokens", "kl_step_last"),
    "mismatch_tokens",
)
_BINS = RATIO_BINS + 2


@dataclass(frozen=True, slots=True)
class Measured:
    """A rollout's meters on the host."""

    per_update: dict[str, list[float]]
    scalars: dict[str, float]
    histograms: dict[str, list[float]]


def ratio_bins(log_ratio: Tensor) -> Tensor:
    """Histogram bin of every log-ratio, int64: 0 and RATIO_BINS + 1 are the overflow bins.

    A bin holds its lower edge; a ratio of exactly 1 is the first of the upper half. NaN counts as
    too high, so that no token is lost from the total.
    """
    position = (log_ratio / (2 * math.log(RATIO_LIMIT)) + 0.5) * RATIO_BINS
    return position.nan_to_num(nan=torch.inf).floor().clamp(-1, RATIO_BINS).long() + 1


def _masked_sum(values: Tensor, mask: Tensor) -> Tensor:
    """Sum over response tokens in float64; padding may hold anything, NaN included."""
    return torch.where(mask, values, 0.0).sum(dtype=torch.float64)


class Meters:
    """Accumulates one rollout's measurements."""

    def __init__(
        self,
        updates: int,
        clip_low: float,
        clip_high: float,
        has_reference: bool,
        device: torch.device,
        *,
        ratio: str = "token",
        has_critic: bool = False,
    ) -> None:
        self._updates = updates
        self._clip = (clip_low, clip_high)
        self._has_reference = has_reference
        self._has_critic = has_critic
        self._ratio = ratio
        width = updates * len(UPDATE_SUMS) + 2 * _BINS + len(ROLLOUT_SUMS)
        self._buffer = torch.zeros(width, dtype=torch.float64, device=device)
        rows, histograms, rollout = self._views(self._buffer)
        self._rows = rows  # [U, len(UPDATE_SUMS)]
        self._histograms = histograms  # [2, RATIO_BINS + 2]: all updates, last update
        self._rollout = rollout  # [len(ROLLOUT_SUMS)]
        self._sent: Tensor | None = None  # all of it on the host
        self._arrival: Any = None

    def _views(self, buffer: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        sizes = [self._updates * len(UPDATE_SUMS), 2 * _BINS, len(ROLLOUT_SUMS)]
        rows, histograms, rollout = torch.split(buffer, sizes)
        return rows.view(self._updates, -1), histograms.view(2, _BINS), rollout

    @torch.no_grad()
    def add_sampled(
        self,
        old_log_probs: Tensor,
        entropy: Tensor,
        ref_log_probs: Tensor | None,
        sampler_log_probs: Tensor | None,
        mask: Tensor,
    ) -> None:
        """Facts of the sampling weights on this rank's samples, everything [B, R]."""
        self._add(self._rollout, ROLLOUT_SUMS, "tokens", mask.sum())
        self._add(self._rollout, ROLLOUT_SUMS, "entropy", _masked_sum(entropy, mask))
        if ref_log_probs is not None:
            kl = precise_k3(ref_log_probs - old_log_probs)  # [B, R]
            self._add(self._rollout, ROLLOUT_SUMS, "kl_ref", _masked_sum(kl, mask))
        if sampler_log_probs is not None:
            told = mask & ~sampler_log_probs.isnan()  # [B, R]
            mismatch = precise_k3(old_log_probs - sampler_log_probs)  # [B, R]
            self._add(self._rollout, ROLLOUT_SUMS, "mismatch_tokens", told.sum())
            self._add(self._rollout, ROLLOUT_SUMS, "kl_mismatch", _masked_sum(mismatch, told))

    @torch.no_grad()
    def add_micro_batch(
        self,
        update: int,
        log_probs: Tensor,
        old_log_probs: Tensor,
        ref_log_probs: Tensor | None,
        advantages: Tensor,
        mask: Tensor,
        loss: Tensor,
    ) -> None:
        """What one training forward saw; tensors [B, R], advantages [B] or [B, R], loss our part."""
        difference = log_probs.detach() - old_log_probs  # [B, R]
        row = self._rows[update]
        self._add(row, UPDATE_SUMS, "tokens", mask.sum())
        self._add_ratios(update, difference, advantages, mask)
        self._add(row, UPDATE_SUMS, "kl_step", _masked_sum(precise_k3(difference), mask))
        if ref_log_probs is not None:
            kl = precise_k3(ref_log_probs - log_probs.detach())  # [B, R]
            self._add(row, UPDATE_SUMS, "kl_ref", _masked_sum(kl, mask))
        self._add(row, UPDATE_SUMS, "loss", loss.detach().double())

    def _add_ratios(self, update: int, difference: Tensor, advantages: Tensor, mask: Tensor) -> None:
        """Shares and histogram of what is clipped: tokens [B, R], or responses [B, 1]."""
        log_ratio = ratio_difference(difference, mask, self._ratio)  # [B, R] or [B, 1]
        units = mask if self._ratio == "token" else mask.any(dim=1, keepdim=True)
        ratio, (low, high) = log_ratio.exp(), self._clip
        below, above = ratio < 1.0 - low, ratio > 1.0 + high
        clipped = clipped_branch_active(ratio, per_token(advantages), low, high)
        for name, chosen in (
            ("ratios", units),
            ("clipped", clipped & units),
            ("low", below & units),
            ("in", ~below & ~above & units),
            ("high", above & units),
        ):
            self._add(self._rows[update], UPDATE_SUMS, name, chosen.sum())
        self._count_ratios(update, log_ratio, units)

    @torch.no_grad()
    def add_left_out(self, update: int, mask: Tensor) -> None:
        """Samples without signal that were not trained on, [B, R]: ratios nobody computed."""
        units = mask if self._ratio == "token" else mask.any(dim=1)
        self._add(self._rows[update], UPDATE_SUMS, "left_out", units.sum())

    @torch.no_grad()
    def add_value_loss(self, update: int, loss: Tensor) -> None:
        """The critic's loss on one micro batch: this rank's part of the mini-batch's."""
        self._add(self._rows[update], UPDATE_SUMS, "value_loss", loss.detach().double())

    @torch.no_grad()
    def add_step(self, update: int, grad_norm: Tensor, world_size: int) -> None:
        """The global gradient norm, the same on every rank: each adds its share of it."""
        share = grad_norm.detach().double() / world_size
        self._add(self._rows[update], UPDATE_SUMS, "grad_norm", share)

    @torch.no_grad()
    def add_after_updates(self, log_probs: Tensor, old_log_probs: Tensor, mask: Tensor) -> None:
        """Drift after the last update on the fixed subset; tensors [B, R]."""
        drift = precise_k3(log_probs - old_log_probs)  # [B, R]
        self._add(self._rollout, ROLLOUT_SUMS, "last_tokens", mask.sum())
        self._add(self._rollout, ROLLOUT_SUMS, "kl_step_last", _masked_sum(drift, mask))

    def send(self, ranks: Ranks) -> None:
        """Reduce over ranks and start the one copy to the host, without waiting for it."""
        total, on_gpu = ranks.sum(self._buffer), self._buffer.is_cuda
        self._sent = torch.empty(total.shape, dtype=total.dtype, pin_memory=on_gpu)
        self._sent.copy_(total, non_blocking=True)
        if on_gpu:
            event: Any = torch.cuda.Event  # torch gives it no types
            self._arrival = event()
            self._arrival.record()

    def finish(self, ranks: Ranks) -> Measured:
        """Turn sums into means; waits for the copy only where nobody has waited since it was sent."""
        if self._sent is None:
            self.send(ranks)
        if self._arrival is not None and not self._arrival.query():
            self._arrival.synchronize()
        assert self._sent is not None
        rows, histograms, rollout = self._views(self._sent)
        columns = dict(zip(UPDATE_SUMS, rows.T.tolist(), strict=True))
        columns["all_ratios"] = [a + b for a, b in zip(columns["ratios"], columns["left_out"], strict=True)]
        sums = dict(zip(ROLLOUT_SUMS, rollout.tolist(), strict=True))
        return Measured(
            per_update=self._per_update(columns),
            scalars=self._scalars(columns, sums),
            histograms=dict(zip(("policy_ratio", "policy_ratio_last"), histograms.tolist(), strict=True)),
        )

    @staticmethod
    def _add(target: Tensor, names: tuple[str, ...], name: str, value: Tensor) -> None:
        target[names.index(name)] += value

    def _count_ratios(self, update: int, difference: Tensor, mask: Tensor) -> None:
        bins, ones = ratio_bins(difference).flatten(), mask.flatten().double()
        self._histograms[0].index_add_(0, bins, ones)
        if update == self._updates - 1:
            self._histograms[1].index_add_(0, bins, ones)

    def _per_update(self, columns: dict[str, list[float]]) -> dict[str, list[float]]:
        shares = {"clip_ratio": "clipped", "ratio_low": "low", "ratio_in": "in", "ratio_high": "high"}
        means = dict.fromkeys(shares.values(), "ratios") | {"clipped": "all_ratios", "kl_step": "tokens"}
        names = {column: name for name, column in shares.items()}
        if self._has_reference:
            means["kl_ref"] = "tokens"
        per_update = {
            names.get(column, column): [
                _ratio(s, n) for s, n in zip(columns[column], columns[count], strict=True)
            ]
            for column, count in means.items()
        }
        return per_update | {name: columns[name] for name in self._losses()}

    def _losses(self) -> tuple[str, ...]:
        return ("grad_norm", "loss", "value_loss") if self._has_critic else ("grad_norm", "loss")

    def _scalars(self, columns: dict[str, list[float]], sums: dict[str, float]) -> dict[str, float]:
        counts = sum(columns["ratios"])
        shares = {"clip_ratio": "clipped", "ratio_low": "low", "ratio_in": "in", "ratio_high": "high"}
        scalars = {name: _ratio(sum(columns[column]), counts) for name, column in shares.items()}
        scalars["clip_ratio"] = _ratio(sum(columns["clipped"]), sum(columns["all_ratios"]))
        scalars |= {name: sum(columns[name]) / self._updates for name in self._losses()}
        scalars["entropy"] = _ratio(sums["entropy"], sums["tokens"])
        scalars["kl_step"] = _ratio(sums["kl_step_last"], sums["last_tokens"])
        if self._has_reference:
            scalars["kl_ref"] = _ratio(sums["kl_ref"], sums["tokens"])
        if sums["mismatch_tokens"]:  # with `log_probs: some`, those told may all have been replaced
            scalars["kl_mismatch"] = _ratio(sums["kl_mismatch"], sums["mismatch_tokens"])
        return scalars


def _ratio(total: float, count: float) -> float:
    """A mean over tokens; NaN where there was none, which no reader takes for a number."""
    return total / count if count else math.nan
