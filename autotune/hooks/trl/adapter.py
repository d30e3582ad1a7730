"""The adapter of a running `GRPOTrainer`: its facts, its logs as a record, its knobs.

Logs come one per update. Those of a rollout are put together here (`Rollout`): what belongs to a
generation is in one of them only, and its absence from the others says nothing; what belongs to an
update is averaged. TRL writes None where every value was NaN: that is a fault and not a gap.
"""

from __future__ import annotations

import math
import time
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from autotune.decisions import Applied, Restore, RunFacts
from autotune.errors import AdapterError
from autotune.hooks.base import FrozenDetector, SingleProcess, set_all_or_none, snapshot_of
from autotune.hooks.trl.declared import DECLARED
from autotune.hooks.trl.knobs import CLIPPED_LOSSES, TrlKnobs
from autotune.hooks.trl.meter import LossHook, drops_out
from autotune.hooks.trl.weights import KeptWeights
from autotune.knobs import Capability
from autotune.metrics import Snapshot, Validity
from autotune.trainer.records import RolloutRecord

GENERATION: dict[str, str] = {
    "reward": "reward_mean",
    "reward_std": "reward_std",
    "frac_reward_zero_std": "zero_std_fraction",
    "completions/mean_length": "response_length_mean",
    "completions/max_length": "response_length_max",
    "completions/clipped_ratio": "truncated_fraction",
}
"""In the log of an update that had a generation before it."""
UPDATE: dict[str, str] = {"kl": "kl_ref", "entropy": "entropy", "grad_norm": "grad_norm"}
"""In every update's log."""
HOOKED = ("ratio_low", "ratio_in", "ratio_high", "kl_step")
"""Not logged by TRL in any form."""
PERCENTILES = ("response_length_p50", "response_length_p95", "response_length_p995")
NO_HOOK = "not logged: TRL logs it nowhere, and the hook on the loss is off"


@dataclass
class Rollout:
    """What is known of the rollout that runs, log by log."""

    knobs: dict[str, float]
    epoch: int
    started: float = field(default_factory=time.perf_counter)
    logs: list[dict[str, Any]] = field(default_factory=list)
    evaluated: float | None = None
    tokens_before: float | None = None

    def series(self, key: str) -> list[float]:
        """One key over the updates, where it is present; None, TRL's word for NaN, as NaN."""
        found = (log[key] for log in self.logs if key in log)
        return [math.nan if value is None else float(value) for value in found]


class TrlAdapter(SingleProcess):
    """`Adapter` of a trainer that has begun to train; the ranks are the guest's business.

    Args:
        trainer: a `GRPOTrainer`.
        data: its train data loader.
        hook: measures the loss; None leaves its metrics not logged.
        kept: copies of the weights; None where none are to come back.
        start: the knobs at the very start of a run that is resumed; else those of now.
        reward_maximum: the largest reward of a completion, where it is known.
    """

    def __init__(
        self,
        trainer: Any,
        data: Any = None,
        hook: LossHook | None = None,
        kept: KeptWeights | None = None,
        *,
        start: Mapping[str, float] | None = None,
        reward_maximum: float | None = None,
    ) -> None:
        self.trainer, self.hook, self.kept = trainer, hook, kept
        self.live = TrlKnobs(trainer, data)
        self.frozen = FrozenDetector()
        self.epoch = 0
        self._rollout = -1
        self._tokens: float | None = None
        self._facts = self._make_facts(start, reward_maximum)
        self.running = Rollout(self.knobs(), 0)

    # -- what there is -----------------------------------------------------------------------------

    def facts(self) -> RunFacts:
        return self._facts

    def _make_facts(self, start: Mapping[str, float] | None, reward_maximum: float | None) -> RunFacts:
        t, args, batches = self.trainer, self.trainer.args, self.live.batches
        return RunFacts(
            rollouts=max(math.ceil(t.state.max_steps / batches.updates), 1),
            world_size=batches.ranks,
            algorithm=str(t.loss_type),
            loss_kind="sequence" if t.importance_sampling_level == "sequence" else "token",
            has_reference=float(args.beta) != 0.0,
            has_critic=False,
            knobs=dict(start or self.knobs()),
            knob_capability=self.live.capability(),
            metric_capability=self._metrics(),
            lr_warmup=math.ceil(args.get_warmup_steps(t.state.max_steps) / batches.updates),
            reward_maximum=reward_maximum,
            fixed_micro_batch=batches.micro,
        )

    def _metrics(self) -> dict[str, Capability]:
        names = [row.name for row in DECLARED.metrics if not row.name.endswith("/…")]
        table = dict.fromkeys(names, Capability(Validity.VALID))
        missing = {**(DECLARED.missing or {}), **self._not_here()}
        return table | {name: Capability(Validity.NOT_LOGGED, why) for name, why in missing.items()}

    def _not_here(self) -> dict[str, str]:
        """Metrics that this very run does not have."""
        t, found = self.trainer, dict[str, str]()
        found["eval_score"] = "this run does not evaluate" if str(t.args.eval_strategy.value) == "no" else ""
        if not (t.use_vllm and t.vllm_importance_sampling_correction):
            found["kl_mismatch"] = "one model samples and trains, or vLLM's log-probs are not asked for"
        if float(t.args.beta) == 0.0:
            found["kl_ref"] = "beta is 0: no reference model; no `kl` logged is not a KL of 0"
        if t.loss_type not in CLIPPED_LOSSES:
            why = f"loss_type {t.loss_type!r} does not clip as PPO does"
            found |= dict.fromkeys(("clip_ratio", *HOOKED[:3]), why)
        if t.mask_truncated_completions:
            why = "mask_truncated_completions hides the length of what was cut"
            found |= dict.fromkeys(PERCENTILES, why)
        if self.hook is None:
            found |= self._without_hook()
        elif drops_out(t.model):
            found["kl_step"] = "dropout is active and drowns the drift; set disable_dropout=True"
        return {name: why for name, why in found.items() if why}

    def _without_hook(self) -> dict[str, str]:
        found = dict.fromkeys((*HOOKED, *PERCENTILES, "kl_mismatch"), NO_HOOK)
        if self.trainer.args.logging_nan_inf_filter:
            found["loss"] = "logging_nan_inf_filter puts an average in the place of NaN, and the hook is off"
        return found

    # -- sensing -----------------------------------------------------------------------------------

    def start_rollout(self) -> None:
        """Before the first micro-step of a rollout, with its knobs in force."""
        self.running = Rollout(self.knobs(), self.epoch, tokens_before=self._tokens)
        if self.hook is not None:
            self.hook.start(self.live.batches.updates, self.live.batches.accumulation)

    def finish_rollout(self, index: int) -> RolloutRecord:
        """The running rollout as a record; a collective call."""
        run = self.running
        hooked, per_update, histograms = self.hook.finish() if self.hook else ({}, {}, {})
        seconds = time.perf_counter() - run.started
        scalars = {**self._logged(run), **hooked, **self._speed(run, seconds)}
        scalars |= {"time/rollout": seconds, "eval_score": run.evaluated}
        per_update |= {ours: run.series(key) for key, ours in UPDATE.items() if run.series(key)}
        return RolloutRecord(index, run.knobs, run.epoch, scalars, per_update, histograms)

    def _logged(self, run: Rollout) -> dict[str, float | None]:
        keys = {**GENERATION, **UPDATE, **self._components(run), "clip_ratio/region_mean": "clip_ratio"}
        found: dict[str, float | None] = {
            ours: sum(values) / len(values) for key, ours in keys.items() if (values := run.series(key))
        }
        rates, losses = run.series("learning_rate"), run.series("loss")
        found["learning_rate"] = rates[-1] if rates else None
        if self.hook is None and losses and not self.trainer.args.logging_nan_inf_filter:
            found["loss"] = sum(losses) / len(losses)
        return found

    def _components(self, run: Rollout) -> dict[str, str]:
        keys = sorted({key for log in run.logs for key in log if key.startswith("rewards/")})
        means = [key for key in keys if key.endswith("/mean")]
        return {key: f"reward/{key.removeprefix('rewards/').removesuffix('/mean')}" for key in means}

    def _speed(self, run: Rollout, seconds: float) -> dict[str, float]:
        tokens = run.series("num_tokens")
        self._tokens = tokens[-1] if tokens else self._tokens
        if not tokens or (run.tokens_before is None and self._rollout >= 0):
            return {}
        return {"tokens_per_second": (tokens[-1] - (run.tokens_before or 0.0)) / max(seconds, 1e-9)}

    def read(self, raw: RolloutRecord, rollout: int) -> Snapshot:
        self._rollout = raw.rollout
        return snapshot_of(raw, self._facts, self.frozen)

    # -- acting ------------------------------------------------------------------------------------

    def knobs(self) -> dict[str, float]:
        return self.live.vector()

    def apply(self, values: Mapping[str, float], epoch: int) -> list[Applied]:
        applied = set_all_or_none(values, self.live.vector, self.live.set_many, self._rollout + 1)
        self.epoch = epoch
        return applied

    def restore(self, restore: Restore) -> int:
        if self.kept is None:
            raise AdapterError("no weights are kept in this run (keep_bytes=0)")
        if restore.kind == "undo":
            self.kept.undo()
            return restore.before_rollout
        if restore.kind == "checkpoint":
            return self.kept.restore(restore.before_rollout)
        raise AdapterError(f"restore kind {restore.kind!r} is unknown; expected undo or checkpoint")

    # -- keeping -----------------------------------------------------------------------------------

    def state_dict(self) -> dict[str, Any]:
        """JSON state for a checkpoint."""
        return {
            "frozen": self.frozen.state(),
            "start": dict(self._facts.knobs),
            "rollouts": self._facts.rollouts,
            "max_steps": int(self.trainer.state.max_steps),
            "tokens": self._tokens,
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Inverse of `state_dict`; the knobs themselves are set by the guest right after."""
        self.frozen.load(state["frozen"])
        self._tokens = state["tokens"]
        self._facts = replace(self._facts, knobs=dict(state["start"]), rollouts=int(state["rollouts"]))
        self.trainer.state.max_steps = int(state["max_steps"])
