"""From a rollout's samples to what its updates learn from, under the knobs of that rollout.

    plan          which samples each update takes, and in which passes
    experience    old log-probs, the reference's, and credit: who gets how much of the reward
    drift         afterwards, how far the policy has moved

One object serves one rollout: the credit of a group's rewards is asked for twice and computed once.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cached_property

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from autotune.recipe import Recipe
from autotune.trainer.algorithms import ALGORITHMS
from autotune.trainer.clock import PhaseClock
from autotune.trainer.collect import Collected
from autotune.trainer.credit import Credit, critic_credit, group_credit, kl_penalty
from autotune.trainer.graphs import Graphs
from autotune.trainer.group import agree_on
from autotune.trainer.live import LiveKnobs
from autotune.trainer.losses import LossKnobs
from autotune.trainer.meters import Meters
from autotune.trainer.mismatch import OldLogProbs, Trust, old_log_probs
from autotune.trainer.packing import Packing
from autotune.trainer.parts import Parts
from autotune.trainer.ranks import Rows
from autotune.trainer.update import (
    BatchKnobs,
    Cutter,
    Experience,
    MicroBatch,
    MiniBatch,
    first_epoch,
    fixed_subset,
    make_plan,
    measure_drift,
    score_samples,
)

WITHOUT_GRADIENT = 2
"""A pass without gradient holds no activations: so many times a micro batch's tokens."""


def loss_knobs(recipe: Recipe, live: LiveKnobs) -> LossKnobs:
    """What the loss computes with in this rollout."""
    trainer = recipe.trainer
    in_loss = trainer.kl.placement == "loss"
    return LossKnobs(
        clip_low=live["clip_range_low"],
        clip_high=live["clip_range_high"],
        kl_coef=live["kl_coef"] if in_loss else 0.0,
        kl_estimator=trainer.kl.estimator,
        entropy_coef=live["entropy_coef"],
        ratio=trainer.loss_kind,
        average=trainer.average(),
        longest=live.count("max_response_length"),
    )


@dataclass
class Scoring:
    """What is computed from one rollout's samples.

    Args:
        recipe: of the run.
        parts: models, engine and ranks.
        live: the knobs, which stay during a rollout.
        data: what was sampled.
        rollout: its index.
        packed: whether passes have no padding.
        graphs: recorded passes, or None.
        note: tells something that is no number: note(about, text).
    """

    recipe: Recipe
    parts: Parts
    live: LiveKnobs
    data: Collected
    rollout: int
    packed: bool
    graphs: Graphs | None
    note: Callable[[str, str], None]

    def plan(self) -> list[MiniBatch]:
        """The rollout's updates: which samples each of them takes, in which micro batches."""
        samples = self.data.kept
        plan = make_plan(
            samples.lengths,
            torch.ones(len(samples.lengths)),  # whether there is signal is known later
            BatchKnobs(**{name: self.live.count(name) for name in BatchKnobs.__slots__}),
            (self.recipe.seed, self.rollout),
            self.parts.ranks,
            self.parts.engine.device,
            self._packing(),
            self._quiet(),
        )
        # A rank with one backward pass more would wait in it for the others, and they elsewhere.
        agree_on("the micro-batches of every update", [len(mini.micro) for mini in plan])
        return plan

    def _cutter(self) -> Cutter:
        samples = self.data.kept
        size, ranks = self.live.count("micro_batch_size"), self.parts.ranks
        return Cutter(samples.lengths, size, ranks, self.parts.engine.device, self._packing())

    def _packing(self) -> Packing | None:
        if not self.packed:
            return None
        samples = self.data.kept
        section, batch = self.recipe.trainer.packing, samples.batch
        group = len(samples.lengths) // len(samples.prompt_lengths)
        return Packing(
            prompt_lengths=samples.prompt_lengths.repeat(group),
            prompt_width=batch.prompt_ids.shape[1],
            response_width=batch.response_ids.shape[1],
            budget=section.tokens,
            chunk=section.head_tokens,
            compile=section.compile,
            compile_head=section.compile_head,
            whole_width=self.graphs is not None,
        )

    def _quiet(self) -> NDArray[np.bool_] | None:
        """Samples whose advantage is 0 while nothing else acts on them, [N]; None to train on all."""
        trainer, knobs = self.recipe.trainer, loss_knobs(self.recipe, self.live)
        wanted = trainer.packing.leave_out_quiet
        wanted_here = wanted == "on" or (wanted == "auto" and self.packed)
        acts_on_all = trainer.has_critic or trainer.kl.placement == "reward"
        if not wanted_here or acts_on_all or knobs.kl_coef > 0 or knobs.entropy_coef > 0:
            return None
        return (self._plain_credit.advantages == 0).numpy()

    @cached_property
    def _plain_credit(self) -> Credit:
        """Of a group's rewards alone: no KL in them, no critic."""
        return self._group_credit(None)

    def _group_credit(self, penalty: Tensor | None) -> Credit:
        algorithm = ALGORITHMS[self.recipe.trainer.algorithm]
        return group_credit(algorithm, self.data.rewards, penalty, self.live.count("rollout_n"))

    def experience(self, plan: list[MiniBatch], meters: Meters, clock: PhaseClock) -> Experience:
        """Log-probs of the sampling weights, once, of the reference, and the credit for it all."""
        parts, batch, temperature = self.parts, self.data.kept.batch, self.live["temperature"]
        micro = self._scored(plan)
        with clock.phase("old_log_prob"):
            old = self._old_log_probs(micro)
        ref = None
        with clock.phase("reference"):
            if parts.reference is not None:
                ref, _ = score_samples(
                    parts.reference, batch, micro, temperature, parts.ranks, graphs=self.graphs
                )
        if parts.ranks.rank == 0:  # everybody holds all of it, and meters are summed over ranks
            self._meter_sampled(old, ref, meters)
        credit = self._credit(old.log_probs, ref, micro, clock)
        advantages = credit.advantages.to(old.log_probs.device)
        return Experience(batch, advantages, old.log_probs, ref, credit.targets, old.importance)

    def _scored(self, plan: list[MiniBatch]) -> list[MicroBatch]:
        """Micro batches for the passes without gradient: those of the first epoch, whose ratios are then
        exactly 1 at first; with a token budget, all samples in as few as fit it."""
        cutter = self._cutter()
        packing = cutter.packing
        if packing is None or packing.budget is None:
            return first_epoch(plan, self.live.count("ppo_epochs"))
        wider = replace(packing, budget=WITHOUT_GRADIENT * packing.budget)
        return list(replace(cutter, packing=wider).parts(np.arange(len(self.data.kept.lengths))))

    def _old_log_probs(self, micro: list[MicroBatch]) -> OldLogProbs:
        """The trainer's log-probs of the sampling weights, or the sampler's where these may stand in."""
        parts, rollout, samples = self.parts, self.recipe.rollout, self.data.kept

        def score(rows: Rows | None) -> tuple[Tensor, Tensor]:
            some = micro
            if rows is not None:
                mine = parts.ranks.share(rows)
                some = list(self._cutter().of_one_rank(mine))
            batch, temperature = samples.batch, self.live["temperature"]
            return score_samples(parts.model, batch, some, temperature, parts.ranks, True, self.graphs)

        spare = rollout.old_log_probs == "sampler"
        subset = fixed_subset(len(samples.lengths), self.recipe.trainer.kl_step_responses)
        trust = Trust(spare, rollout.mismatch_bound, rollout.cap())
        mask = samples.batch.response_mask
        old = old_log_probs(score, samples.sampler_log_probs, mask, subset, trust)
        if old.mismatch is not None and old.seen is None:
            self.note(
                "rollout/mismatch",
                f"sampler and trainer differ by {old.mismatch:.3g} nats per token, above mismatch_bound"
                f" {rollout.mismatch_bound:g}: the old log-probs were recomputed",
            )
        return old

    def _meter_sampled(self, old: OldLogProbs, ref: Tensor | None, meters: Meters) -> None:
        """Facts of the sampling weights, over the samples that the trainer has scored itself."""

        def seen(whole: Tensor | None) -> Tensor | None:
            if whole is None or old.seen is None:
                return whole
            return whole[torch.from_numpy(old.seen).to(whole.device)]

        samples = self.data.kept
        mask = samples.batch.response_mask
        everything = (old.trainer, old.entropy, ref, samples.sampler_log_probs, mask)
        meters.add_sampled(*(seen(whole) for whole in everything))  # type: ignore[arg-type]

    def _credit(self, old: Tensor, ref: Tensor | None, micro: list[MicroBatch], clock: PhaseClock) -> Credit:
        """Advantages of the kept samples, and the critic's targets."""
        trainer, critic, kept = self.recipe.trainer, self.parts.critic, self.data.kept.batch
        penalty = None
        if ref is not None and trainer.kl.placement == "reward":
            penalty = kl_penalty(old, ref, kept.response_mask, self.live["kl_coef"])  # [N, R]
        if critic is None:
            return self._plain_credit if penalty is None else self._group_credit(penalty)
        with clock.phase("values"):
            values = critic.score(kept, micro, self.parts.ranks)  # [N, R]
        return critic_credit(self.data.rewards, penalty, values, kept.response_mask, trainer.critic)

    def drift(self, experience: Experience, meters: Meters) -> None:
        """How far the updates have moved the policy, on a fixed share of the samples."""
        samples = self.data.kept
        subset = fixed_subset(len(samples.lengths), self.recipe.trainer.kl_step_responses)
        parts = self._cutter().of_one_rank(self.parts.ranks.share(subset))
        temperature = self.live["temperature"]
        measure_drift(self.parts.model, experience, parts, temperature, meters, self.graphs)
