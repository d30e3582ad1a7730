"""Anyone's loop: hand over how to read and set your knobs, then tell the metrics once a rollout.

    tuner = Autotune("control.yaml", rollouts=200, folder="runs/mine", knobs={
        "actor_learning_rate": (lambda: group["lr"], lambda value: group.update(lr=value)),
        "kl_coef": (lambda: loss.beta, lambda value: setattr(loss, "beta", value)),
        "train_batch_size": 64, "rollout_n": 8, "ppo_mini_batch_size": 16, "ppo_epochs": 1,
    })
    for rollout in range(200):
        ...                                      # sample, update
        tuner.step({"reward_mean": r, "kl_step": d, "kl_ref": k, "clip_ratio": c})
        if tuner.stop:
            break

A knob given as a number is known and does not move; one that is not given at all switches off the rules
that compute with it, and the journal says so. Metrics go by their canonical names; None is "not measured
this time". Nothing that fails in here reaches the loop.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from autotune.controller import Controller, ControlSettings
from autotune.decisions import Applied, Restore, RunFacts
from autotune.errors import AdapterError, InputError
from autotune.hooks.base import FrozenDetector, SingleProcess, one_by_one, set_all_or_none, snapshot_of
from autotune.hooks.declared import Declaration, KnobRow, MetricRow
from autotune.hooks.guest import Guest, read_control
from autotune.knobs import KNOBS, Capability, Liveness, batch_problems, expand
from autotune.metrics import METRICS, Snapshot, Validity, spec_of
from autotune.policies import POLICIES
from autotune.policies.reads import READS
from autotune.recipe import ControlSection
from autotune.trainer.records import RolloutRecord

Knob = float | tuple[Callable[[], float], Callable[[float], object]]
"""A number that stays, or how to read and how to set it."""
LOSSES = ("token", "sequence", "none")

NOT_TOLD: dict[str, float] = {
    "train_batch_size": 8,
    "rollout_n": 8,
    "ppo_epochs": 1,
    "kl_coef": 0.0,
    "clip_range_low": 0.2,
    "clip_range_high": 0.2,
    "actor_learning_rate": 1.0,
    "critic_learning_rate": 1.0,
    "max_prompt_length": 1,
    "max_response_length": 1,
    "temperature": 1.0,
    "entropy_coef": 0.0,
    "micro_batch_size": 1,
    "num_rollout_batches": 1,
}
"""Neutral numbers in the places of knobs that nobody told; rules that compute with them are off."""

log = logging.getLogger("autotune")

DECLARED = Declaration(
    trainer="generic",
    title="Your own loop",
    package="",
    versions=(),
    lines="""
from autotune.hooks.generic import Autotune
tuner = Autotune("control.yaml", rollouts=200, knobs={
    # how to read it, how to set it
    "actor_learning_rate": (lambda: group["lr"], lambda value: group.update(lr=value)),
    # known, and they stay
    "train_batch_size": 64, "rollout_n": 8, "ppo_mini_batch_size": 16, "ppo_epochs": 1,
})
tuner.step({"reward_mean": r, "kl_step": d, "clip_ratio": c})  # once a rollout; `tuner.stop` says why to end
""",
    metrics=(
        *(MetricRow(name, f"`{name}`") for name in METRICS),
        MetricRow("reward/…", "`reward/NAME`", "one component of the reward"),
    ),
    knobs=tuple(KnobRow(name, "your setter", Liveness.NEXT_ROLLOUT) for name in KNOBS),
    sensor="give `clip_ratio`, `ratio_low` and `ratio_high`, and make more than one update per rollout.",
    words=(
        "The journal goes into `folder=`, by default `runs/generic`. Rules that compute with a knob that"
        " was not told are off, and the log says which.",
        "`tuner.state_dict()` goes into your checkpoint (plain JSON) and `tuner.load_state_dict()`"
        " brings decisions and"
        " knobs back. `undo=` takes a function that brings back the weights from before the last"
        " updates; without it"
        " the veto on too large a step lowers the learning rate alone.",
        '`loss="none"` is for DPO and its kin: rules about the KL penalty and about clipping stand down'
        ' and say why.'
        ' `loss="sequence"` is for ratios of whole responses (GSPO).',
    ),
)


class Autotune:
    """The controller for a loop of your own.

    Args:
        control: a `control.yaml`, or a mapping of its fields.
        knobs: canonical name (or `clip_range`) -> (read, set), or a number that stays.
        rollouts: how many the loop will make; the controller's pace follows from it.
        folder: where the journal goes.
        metrics: names that will be told at every rollout, where the first call has not all of them.
        loss: `token`, `sequence` or `none`.
        reference: whether there is a reference model; by default, whether `kl_coef` is above 0.
        critic: whether there is a critic; by default, whether its learning rate was given.
        reward_maximum: the largest reward that a response can get, where it is known.
        lr_warmup: rollouts of learning-rate warm-up.
        undo: brings back weights and optimizer from before the last updates.
        name: of the run, for the journal's readers.
        seed: of the run.

    Raises:
        InputError: the control file or a knob is wrong.
    """

    def __init__(
        self,
        control: str | Path | Mapping[str, Any] | ControlSection,
        knobs: Mapping[str, Knob],
        *,
        rollouts: int,
        folder: str | Path = "runs/generic",
        metrics: Sequence[str] = (),
        loss: str = "token",
        reference: bool | None = None,
        critic: bool | None = None,
        reward_maximum: float | None = None,
        lr_warmup: int = 0,
        undo: Callable[[], object] | None = None,
        name: str = "",
        seed: int = 0,
    ) -> None:
        if loss not in LOSSES:
            raise InputError(f"loss is {loss!r}; expected one of {', '.join(LOSSES)}")
        self._control, self._folder, self._name, self._seed = read_control(control), folder, name, seed
        told = _real(knobs)
        facts = RunFacts(
            rollouts=rollouts,
            world_size=1,
            algorithm="yours",
            loss_kind=loss,
            has_reference=loss != "none" and _given(reference, told, "kl_coef"),
            has_critic=_given(critic, told, "critic_learning_rate"),
            knobs={},
            lr_warmup=lr_warmup,
            reward_maximum=reward_maximum,
        )
        self._adapter = GenericAdapter(told, facts, undo)
        Controller(ControlSettings(**self._control.model_dump()), self._adapter.facts())  # may raise
        self._promised = tuple(metrics)
        self._state: Mapping[str, Any] | None = None
        self._guest: Guest | None = None

    def step(
        self,
        metrics: Mapping[str, float | None],
        *,
        per_update: Mapping[str, Sequence[float]] | None = None,
        histograms: Mapping[str, Sequence[float]] | None = None,
    ) -> dict[str, float]:
        """One finished rollout.

        Args:
            metrics: canonical name -> number, or None.
            per_update: canonical name -> one number per update.
            histograms: `policy_ratio` -> counts, as `autotune.metrics.RATIO_BINS` has them.

        Returns:
            What was changed for the next rollout: knob -> the value that was read back.
        """
        guest = self._guest or self._begin(metrics)
        told = (guest.rollout, metrics, per_update or {}, histograms or {})
        guest.on_rollout(lambda: self._adapter.record(*told))
        return dict(guest.changed)

    def _begin(self, metrics: Mapping[str, Any]) -> Guest:
        """The first rollout shows which metrics there are, and with that the run's facts are whole."""
        self._adapter.promise([*self._promised, *metrics])
        if self._state:
            self._adapter.began_with(self._state["adapter"]["start"])
        control = self._control
        off = self._adapter.off()
        if off:
            policies = {**control.policies, **dict.fromkeys(off, "off")}
            control = control.model_copy(update={"policies": policies})
        self._guest = Guest(
            self._adapter, control, self._folder, DECLARED, name=self._name, seed=self._seed
        )
        self._guest.begin(self._state)
        for why in dict.fromkeys(off.values()):
            self._guest.note(f"{', '.join(r for r, w in off.items() if w == why)} off: {why}")
        return self._guest

    @property
    def stop(self) -> str:
        """Why a rule wants the run to end, or an empty string."""
        return self._guest.stop if self._guest else ""

    @property
    def broken(self) -> str:
        """Why the controller stood down, or an empty string."""
        return self._guest.broken if self._guest else ""

    def state_dict(self) -> dict[str, Any]:
        """Plain JSON for your checkpoint."""
        return self._guest.state_dict() if self._guest else dict(self._state or {})

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on where `state_dict` was taken; before the first `step`. The saved knobs are set at once.

        Raises:
            InputError: it is too late, or a knob does not take its saved value.
        """
        if self._guest is not None:
            raise InputError("load_state_dict came after the first step; call it right after making Autotune")
        self._state = dict(state) or None
        if not state:
            return
        now = self._adapter.knobs()
        moved = {k: v for k, v in state["knobs"].items() if now.get(k) != v}
        wrong = [item for item in self._adapter.apply(moved, int(state["epoch"])) if not item.ok]
        if wrong:
            raise InputError(f"the loop does not take its saved knobs back: {wrong[0].error}")

    def close(self, status: str = "done") -> None:
        """Write the journal's last line."""
        if self._guest is not None:
            self._guest.end(status)


class GenericAdapter(SingleProcess):
    """Adapter of a loop that is known by its getters and setters alone."""

    def __init__(
        self, told: Mapping[str, Knob], facts: RunFacts, undo: Callable[[], object] | None = None
    ) -> None:
        self._told, self._undo = dict(told), undo
        self._frozen = FrozenDetector()
        self._epoch, self._rollout = 0, -1
        self._unknown: set[str] = set()
        self._neutral = self._fill()
        self._facts = replace(
            facts,
            knobs=self.knobs(),
            knob_capability=self._capability(facts.loss_kind, facts.has_reference),
            fixed_micro_batch=self._fixed(),
        )
        problems = batch_problems(self.knobs(), 1) if self._batches_told() else []
        if problems:
            raise InputError("; ".join(f"{knob}: {message}" for knob, message in problems))

    # -- what there is -----------------------------------------------------------------------------

    def facts(self) -> RunFacts:
        return self._facts

    def knobs(self) -> dict[str, float]:
        vector = {name: _read(name, knob) for name, knob in self._told.items()}
        return {name: vector.get(name, self._neutral.get(name, 0.0)) for name in KNOBS if
                name in vector or name in self._neutral}  # fmt: skip

    def _fill(self) -> dict[str, float]:
        """Numbers for what was not told, so that the batch arithmetic holds."""
        known = {name: _read(name, knob) for name, knob in self._told.items()}
        vector = {**NOT_TOLD, **known}
        train, n = vector["train_batch_size"], vector["rollout_n"]
        vector.setdefault("ppo_mini_batch_size", train)
        vector.setdefault("rollout_micro_batch_size", train * n / vector["num_rollout_batches"])
        return {name: value for name, value in vector.items() if name not in known}

    def _batches_told(self) -> bool:
        return bool({"train_batch_size", "ppo_mini_batch_size"} <= self._told.keys())

    def _fixed(self) -> int:
        """A micro batch that was told as a number is one that the loop cannot cut anew."""
        told = self._told.get("micro_batch_size", 1)
        return int(told) if isinstance(told, (int, float)) else 1

    def _capability(self, loss: str, has_reference: bool) -> dict[str, Capability]:
        table = {}
        for name in KNOBS:
            knob = self._told.get(name)
            if isinstance(knob, tuple):
                table[name] = Capability(Liveness.NEXT_ROLLOUT)
            elif knob is not None:
                table[name] = Capability(Liveness.UNAVAILABLE, f"{name} was given as a number: no setter")
            else:
                table[name] = Capability(Liveness.UNAVAILABLE, f"{name} was not given to Autotune(knobs=…)")
        if not has_reference:
            table["kl_coef"] = Capability(Liveness.UNAVAILABLE, "there is no reference model")
        if loss == "none":
            why = "this loss (DPO and its kin) has no KL penalty: its reference is part of the loss itself"
            table["kl_coef"] = Capability(Liveness.UNAVAILABLE, why)
        return table

    def began_with(self, knobs: Mapping[str, float]) -> None:
        """The knobs at the very start of a run that goes on: a loop may come back with changed ones."""
        self._facts = replace(self._facts, knobs=dict(knobs))

    def promise(self, metrics: Sequence[str]) -> None:
        """Metrics that the loop will tell: from now on their absence is noticed."""
        table = {name: Capability(Validity.VALID) for name in metrics if _canonical(name)}
        if self._facts.loss_kind == "none":
            why = "this loss (DPO and its kin) has no policy ratio: nothing is clipped"
            ratios = ("clip_ratio", "ratio_low", "ratio_in", "ratio_high")
            table |= dict.fromkeys(ratios, Capability(Validity.NOT_LOGGED, why))
        if not self._facts.has_reference:
            table.pop("kl_ref", None)
        self._facts = replace(self._facts, metric_capability=table)

    def off(self) -> dict[str, str]:
        """Rule -> why it is off: it computes with a knob that was not told."""
        found = {}
        for rule, reads in READS.items():
            missing = [knob for knob in reads if knob not in self._told]
            policy = POLICIES[rule]
            stands_down = policy.needs_ratio or "kl_coef" in policy.moves
            if missing and not (stands_down and self._facts.loss_kind == "none"):
                found[rule] = f"{', '.join(missing)} not given to Autotune(knobs=…)"
        return found

    # -- sensing -----------------------------------------------------------------------------------

    def record(
        self,
        rollout: int,
        metrics: Mapping[str, float | None],
        per_update: Mapping[str, Sequence[float]],
        histograms: Mapping[str, Sequence[float]],
    ) -> RolloutRecord:
        """What the loop told, as a record; names that nobody knows are left out, and said once."""
        for name in metrics:
            if not _canonical(name) and name not in self._unknown:
                self._unknown.add(name)
                log.warning("autotune: %r is no canonical metric and is not read; see autotune.metrics", name)
        return RolloutRecord(
            rollout,
            self.knobs(),
            self._epoch,
            {name: value for name, value in metrics.items() if _canonical(name)},
            {name: list(values) for name, values in per_update.items()},
            {name: list(values) for name, values in histograms.items()},
        )

    def read(self, raw: RolloutRecord, rollout: int) -> Snapshot:
        self._rollout = raw.rollout
        return snapshot_of(raw, self._facts, self._frozen)

    # -- acting ------------------------------------------------------------------------------------

    def apply(self, values: Mapping[str, float], epoch: int) -> list[Applied]:
        applied = set_all_or_none(values, self.knobs, one_by_one(self._set), self._rollout + 1)
        self._epoch = epoch
        return applied

    def _set(self, name: str, value: float) -> None:
        knob = self._told.get(name)
        if isinstance(knob, tuple):
            try:
                knob[1](value)
            except Exception as error:
                raise AdapterError(f"{name} = {value:g}: {type(error).__name__}: {error}") from error
        elif abs(value - self.knobs()[name]) > 1e-9 * abs(value):
            raise AdapterError(f"{name} cannot be set: {self._facts.knob_capability[name].reason}")

    def restore(self, restore: Restore) -> int:
        if restore.kind != "undo" or self._undo is None:
            why = "give Autotune(undo=…)" if restore.kind == "undo" else "only undo can be"
            raise AdapterError(f"restore kind {restore.kind!r} cannot be done here; {why}")
        self._undo()
        return restore.before_rollout

    def state_dict(self) -> dict[str, Any]:
        return {"frozen": self._frozen.state(), "epoch": self._epoch, "start": dict(self._facts.knobs)}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self._frozen.load(state["frozen"])
        self._epoch = int(state["epoch"])


def _real(knobs: Mapping[str, Knob]) -> dict[str, Knob]:
    unknown = [name for name in knobs if any(real not in KNOBS for real in expand(name))]
    if unknown:
        raise InputError(f"{', '.join(unknown)} is no knob; expected any of {', '.join(KNOBS)}, clip_range")
    return {real: knob for name, knob in knobs.items() for real in expand(name)}


def _given(said: bool | None, told: Mapping[str, Knob], knob: str) -> bool:
    return said if said is not None else knob in told and _read(knob, told[knob]) > 0


def _read(name: str, knob: Knob) -> float:
    value = knob[0]() if isinstance(knob, tuple) else knob
    return int(value) if KNOBS[name].integer and value == int(value) else float(value)


def _canonical(name: str) -> bool:
    try:
        spec_of(name)
    except KeyError:
        return False
    return True
