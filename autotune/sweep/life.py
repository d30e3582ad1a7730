"""Signs of life. Optuna has heartbeats for relational storages only; these work for all of them.

A running trial's worker counts up its attribute `beat`. Others watch: a count that has not moved for
`grace` seconds of the watcher's own clock belongs to a worker that is gone, so no two clocks are compared.
Failing a trial is atomic in every storage and succeeds once; whoever succeeded queues it again, with its
values and its slot, so the next worker finds the run folder and resumes from its checkpoint.

A worker that was only frozen finds its trial taken away at its next beat, and ends its run.
"""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from autotune.sweep.storages import optuna
from autotune.sweep.studies import ATTEMPT, REASON, SLOT

RETRIES = 1
"""How many workers a trial may cost beside its first."""
LOST = "its worker is gone"

Clock = Callable[[], float]


def claim(study: Any) -> Any:
    """The next waiting trial, now this worker's; None when none waits.

    The queue is never extended, unlike with `Study.ask`: the number of trials is the plan's.
    """
    package, storage = optuna(), study._storage
    running = package.trial.TrialState.RUNNING
    queue = study.get_trials(deepcopy=False, states=_states("WAITING"))
    for waiting in sorted(queue, key=lambda t: t.number):
        with contextlib.suppress(package.exceptions.UpdateFinishedTrialError):
            if not storage.set_trial_state_values(waiting._trial_id, state=running):
                continue
            if _again(study, waiting):
                fail(study, waiting, "queued twice; the other one runs")
                continue
            return storage.get_trial(waiting._trial_id)
    return None


def unfinished() -> tuple[Any, ...]:
    """States of trials that somebody works on, or will."""
    return _states("WAITING", "RUNNING")


def _states(*names: str) -> tuple[Any, ...]:
    return tuple(getattr(optuna().trial.TrialState, name) for name in names)


def _again(study: Any, trial: Any) -> bool:
    """Whether the same attempt at the same slot was queued before: two rescuers at one moment."""
    mine = (trial.user_attrs.get(SLOT), trial.user_attrs.get(ATTEMPT), trial.user_attrs.get("stop", 0))
    return any(
        t.number < trial.number
        and (t.user_attrs.get(SLOT), t.user_attrs.get(ATTEMPT), t.user_attrs.get("stop", 0)) == mine
        for t in study.get_trials(deepcopy=False)
    )


def fail(study: Any, trial: Any, reason: str) -> bool:
    """End a trial as failed; False when somebody else has ended it."""
    package, storage = optuna(), study._storage
    try:
        storage.set_trial_user_attr(trial._trial_id, REASON, reason)
        return bool(storage.set_trial_state_values(trial._trial_id, state=package.trial.TrialState.FAIL))
    except package.exceptions.UpdateFinishedTrialError:
        return False


def queue_again(study: Any, trial: Any, attempt: int, stop: int = 0) -> None:
    """The same trial once more, with its values.

    Args:
        attempt: workers that it has cost.
        stop: times that it was handed back in good order.
    """
    package = optuna()
    study.add_trial(
        package.trial.create_trial(
            state=package.trial.TrialState.WAITING,
            params=trial.params,
            distributions=trial.distributions,
            system_attrs={k: v for k, v in trial.system_attrs.items() if k == "fixed_params"},
            user_attrs={SLOT: trial.user_attrs[SLOT], ATTEMPT: attempt, "stop": stop, "after": trial.number},
        )
    )


def _retry(study: Any, trial: Any) -> None:
    """Queue a lost trial again, unless it has cost too many workers already."""
    attempt = trial.user_attrs.get(ATTEMPT, 0)
    if attempt < RETRIES:
        queue_again(study, trial, attempt + 1, trial.user_attrs.get("stop", 0))


def hand_back(study: Any, trial: Any) -> None:
    """An interrupted worker returns its trial; that costs no retry."""
    now = study._storage.get_trial(trial._trial_id)
    if fail(study, trial, "interrupted; queued again"):
        queue_again(study, now, now.user_attrs.get(ATTEMPT, 0), now.user_attrs.get("stop", 0) + 1)


@dataclass
class Watch:
    """What one worker knows of the others' signs of life."""

    study: Any
    grace: float
    clock: Clock = time.monotonic
    seen: dict[int, tuple[Any, float]] = field(default_factory=dict)
    """Trial number -> (last count, when it was new by this clock)."""

    def rescue(self, own: int | None = None) -> list[int]:
        """Queue again what belongs to workers that are gone; the numbers of those trials."""
        running = self.study.get_trials(deepcopy=False, states=_states("RUNNING"))
        gone = [trial for trial in running if trial.number != own and self._silent(trial)]
        rescued = [trial.number for trial in gone if fail(self.study, trial, LOST)]
        for trial in gone:
            if trial.number in rescued:
                _retry(self.study, trial)
        self._orphans()
        return rescued

    def _silent(self, trial: Any) -> bool:
        return self._unchanged(trial.number, trial.user_attrs.get("beat", 0))

    def _unchanged(self, number: int, count: Any) -> bool:
        last, since = self.seen.get(number, (None, 0.0))
        if last != count:
            self.seen[number] = (count, self.clock())
            return False
        return self.clock() - since > self.grace

    def _orphans(self) -> None:
        """Failed by a rescuer that was killed before it could queue them again."""
        trials = self.study.get_trials(deepcopy=False)
        followed = {t.user_attrs.get("after") for t in trials}
        for trial in trials:
            alone = trial.user_attrs.get(REASON) == LOST and trial.number not in followed
            if alone and self._unchanged(trial.number, LOST):
                _retry(self.study, trial)


class Beating:
    """Counts up a trial's sign of life in a thread of its own, and looks after the others meanwhile."""

    def __init__(self, study: Any, trial: Any, every: float, watch: Watch) -> None:
        self.study, self.trial, self.every, self.watch = study, trial, every, watch
        self.lost = False
        """Whether the trial was taken away."""
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._run, daemon=True)

    def __enter__(self) -> Beating:
        self._thread.start()
        return self

    def __exit__(self, *exc: object) -> None:
        self._over.set()
        self._thread.join()

    def _run(self) -> None:
        count = 0
        while not self.lost:
            count += 1
            with contextlib.suppress(Exception):  # a storage that does not answer may do so at the next beat
                self._beat(count)
            if self._over.wait(self.every):
                return

    def _beat(self, count: int) -> None:
        try:
            self.study._storage.set_trial_user_attr(self.trial._trial_id, "beat", count)
        except optuna().exceptions.UpdateFinishedTrialError:
            self.lost = not self._over.is_set()
            return
        self.watch.rescue(self.trial.number)
