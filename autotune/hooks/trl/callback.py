"""The callback that a user adds: TRL's events become rollouts, and a guest decides between them.

    on_train_begin   read the run's facts, open the journal; after a resume, put saved knobs back
    on_step_end      ask for a log of this update; at the end of a rollout, measure the drift
    on_log           keep the update's log; at the end of a rollout, decide and act
    on_save          note the checkpoint; `state()` is in it
    on_train_end     close the journal

Everything that is set is set in `on_log`, after the schedule's step and before the next update begins, which
is the one place where all of TRL's phases are at rest. Evaluation logs and the summary at the end have no
`loss` of an update and are passed over. Both classes of ranks run the same events; the guest decides on the
first.

Resuming. transformers counts how far the data was read in updates of the *present* length; when mini-batches
or epochs have moved, that is wrong, so the two methods that compute it are corrected from the saved state.
TRL itself begins with a new generation after a resume, so an unfinished rollout is lost; ours begins with it.
"""

from __future__ import annotations

import contextlib
import importlib.metadata
import logging
import math
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from transformers import TrainerCallback
from transformers.trainer_callback import ExportableState

from autotune.errors import InputError
from autotune.hooks.guest import Alone, Guest, Peers, read_control
from autotune.hooks.trl.adapter import TrlAdapter
from autotune.hooks.trl.declared import DECLARED
from autotune.hooks.trl.meter import LossHook
from autotune.hooks.trl.weights import KeptWeights
from autotune.recipe import ControlSection

log = logging.getLogger("autotune")
KEEP_BYTES = 4 * 2**30


class AutotuneCallback(TrainerCallback, ExportableState):
    """The controller inside a `GRPOTrainer`.

    Args:
        trainer: the trainer that it will be added to.
        control: a `control.yaml`, or a mapping of its fields.
        hook: measure policy ratio and drift at the loss; without it B4a, B4b and X1 have no sensor.
        keep_bytes: memory that copies of weights and moments may take; 0 keeps none.
        accept_version: a version of TRL that is acted on although it was not tested.
        reward_maximum: the largest reward of a completion, where it is known.
        name: of the run; by default the output folder's.

    Raises:
        InputError: the control file is wrong, or this is no `GRPOTrainer`.
    """

    _latest: AutotuneCallback | None = None

    def __init__(
        self,
        trainer: Any = None,
        control: str | Path | Mapping[str, Any] | ControlSection = "control.yaml",
        *,
        hook: bool = True,
        keep_bytes: int = KEEP_BYTES,
        accept_version: str = "",
        reward_maximum: float | None = None,
        name: str = "",
    ) -> None:
        if trainer is None and AutotuneCallback._latest is not None:
            # transformers makes callbacks anew from their saved state, without the trainer: be the same one
            self.__dict__ = AutotuneCallback._latest.__dict__
            return
        _check_kind(trainer)
        _check_alone(trainer)
        self.trainer, self.control = trainer, read_control(control)
        self.hook_wanted, self.keep_bytes = hook, keep_bytes
        self.accept_version, self.reward_maximum, self.name = accept_version, reward_maximum, name
        self.version = importlib.metadata.version("trl")
        self.saved: Mapping[str, Any] | None = None
        """What the checkpoint had that this run was resumed from."""
        self.guest: Guest | None = None
        self.adapter: TrlAdapter | None = None
        self.failed = ""
        self._begun = False
        self._at_resume = False
        self._epoch_rollouts = 0
        """Rollouts that took their prompts from this epoch."""
        self._steps = 0
        """Micro-steps of the rollout that runs."""
        AutotuneCallback._latest = self
        self._correct_resuming()

    # -- events ------------------------------------------------------------------------------------

    def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Look at the run as it stands, open the books, put saved knobs back."""
        # A checkpoint without this callback has no place for its state, and saving would fail for it.
        state.stateful_callbacks.setdefault(type(self).__name__, {})
        with self._fence("could not begin"):
            self._begin(kwargs.get("train_dataloader"))

    def on_epoch_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        if self.adapter is not None and not self._at_resume:
            self.adapter.live.micro_steps, self._epoch_rollouts = 0, 0
        self._at_resume = False

    def on_substep_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self._count(1)

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Every update is logged; after the last one of a rollout the weights have gone their way."""
        control.should_log = True
        self._count(1)
        with self._fence("could not measure the drift"):
            if self._due() and self.adapter is not None and self.adapter.hook is not None:
                self.adapter.hook.measure_drift()

    def on_log(self, args: Any, state: Any, control: Any, logs: Any = None, **kwargs: Any) -> None:
        """An update's log; at the end of a rollout, the decision."""
        if self.adapter is None or not logs:
            return
        with self._fence("failed"):
            if "eval_reward" in logs:
                self.adapter.running.evaluated = logs["eval_reward"]
            elif "loss" in logs:
                self.adapter.running.logs.append(dict(logs))
                self._finish_when_due(control)

    def on_step_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """A rollout whose last log somebody else suppressed is finished late rather than never."""
        with self._fence("failed"):
            self._finish_when_due(control)

    def on_save(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        if self.guest is not None:
            self.guest.checkpoint(Path(args.output_dir) / f"checkpoint-{state.global_step}")

    def on_train_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        with self._fence("could not end"):
            if self.guest is not None:
                self.guest.end("done")
            self._take_out()

    def state(self) -> dict[str, Any]:
        """For `stateful_callbacks` of a checkpoint."""
        saved = None
        with self._fence("could not save its state"):
            if self.guest is not None and self.adapter is not None and not self.guest.broken:
                batches = self.adapter.live.batches
                taken = self._epoch_rollouts * batches.every * batches.generations
                position = {
                    "epoch": math.floor(self.trainer.state.epoch or 0.0) if self._midway() else self._epoch(),
                    "micro_steps": taken if self._midway() else 0,
                    "moved": batches != self._first_batches,
                }
                saved = {"guest": self.guest.state_dict(), "position": position}
        return {"args": {}, "attributes": {"saved": saved}}

    # -- beginning ---------------------------------------------------------------------------------

    def _begin(self, data: Any) -> None:
        t = self.trainer
        self._at_resume = t.state.global_step > 0
        self.saved = self._found_state()
        start = self.saved["guest"]["adapter"]["start"] if self.saved else None
        hook = LossHook(t) if self.hook_wanted else None
        kept = KeptWeights(t, self.keep_bytes) if self.keep_bytes and self.control.mode == "act" else None
        self.adapter = TrlAdapter(t, data, hook, kept, start=start, reward_maximum=self.reward_maximum)
        self._first_batches = self.adapter.live.batches
        self.guest = self._make_guest()
        self._begin_guest()
        if hook is not None:
            hook.install()
        if self.adapter.live.batches.problem:
            self.guest.stand_down(self.adapter.live.batches.problem)
        elif kept is not None and kept.reason:
            self.guest.note(f"a veto cannot bring weights back: {kept.reason}")
        self._begun = True
        self._start_rollout()

    def _make_guest(self) -> Guest:
        t, args = self.trainer, self.trainer.args
        assert self.adapter is not None
        return Guest(
            self.adapter,
            self.control,
            args.output_dir,
            DECLARED,
            version=self.version,
            accept=self.accept_version,
            name=self.name,
            seed=int(args.seed),
            config={"loss_type": str(t.loss_type), "max_steps": int(t.state.max_steps)},
            peers=AcceleratedPeers(t.accelerator) if t.accelerator.num_processes > 1 else Alone(),
        )

    def _begin_guest(self) -> None:
        assert self.guest is not None and self.adapter is not None
        live = self.adapter.live
        if self.saved:
            live.micro_steps = int(self.saved["position"]["micro_steps"])
            self._epoch_rollouts = live.micro_steps // max(live.batches.every * live.batches.generations, 1)
            live.resuming = True
        self.guest.begin(self.saved["guest"] if self.saved else None)
        live.resuming = False
        if self.saved:
            batches = live.batches  # those of the saved knobs
            self._epoch_rollouts = live.micro_steps // max(batches.every * batches.generations, 1)

    def _found_state(self) -> Mapping[str, Any] | None:
        """This callback's state in the checkpoint that was resumed from, if there is any."""
        stored = (self.trainer.state.stateful_callbacks or {}).get(type(self).__name__) or {}
        stored = stored[0] if isinstance(stored, list) else stored
        found = (stored.get("attributes") or {}).get("saved")
        return found if self.trainer.state.global_step > 0 and found else None

    # -- rollouts ----------------------------------------------------------------------------------

    def _count(self, steps: int) -> None:
        self._steps += steps
        if self.adapter is not None:
            self.adapter.live.micro_steps += steps

    def _due(self) -> bool:
        if self.adapter is None or self.guest is None or not self._begun:
            return False
        steps = self.adapter.live.batches.steps
        return steps > 0 and self._steps >= steps

    def _finish_when_due(self, control: Any) -> None:
        if not self._due():
            return
        assert self.adapter is not None and self.guest is not None
        record = self.adapter.finish_rollout(self.guest.rollout)
        self._epoch_rollouts += 1
        self._tell_of_hook()
        self.guest.on_rollout(record)
        if self.guest.stop and self.guest.control.mode == "act":
            control.should_training_stop = control.should_save = True
        self._start_rollout()

    def _start_rollout(self) -> None:
        assert self.adapter is not None and self.guest is not None
        self._steps = 0
        self.adapter.start_rollout()
        if self.adapter.kept is not None and not self.guest.broken:
            self.adapter.kept.keep(self.guest.rollout)

    def _tell_of_hook(self) -> None:
        hook = self.adapter.hook if self.adapter else None
        if hook is not None and hook.failed and self.guest is not None:
            self.guest.note(f"the hook on the loss was taken out: {hook.failed}")
            hook.remove()
            assert self.adapter is not None
            self.adapter.hook = None

    # -- resuming ----------------------------------------------------------------------------------

    def _epoch(self) -> int:
        return round(self.trainer.state.epoch or 0.0)

    def _midway(self) -> bool:
        """Whether the epoch has prompts left; at its very end the next one is meant."""
        epoch = float(self.trainer.state.epoch or 0.0)
        return abs(epoch - round(epoch)) > 1e-9

    def _correct_resuming(self) -> None:
        """Wrap the two methods that place a resumed run in its data."""
        t = self.trainer
        place, run_epoch = getattr(t, "_init_training_state", None), getattr(t, "_run_epoch", None)
        if place is None or run_epoch is None:
            return

        def _init_training_state(*args: Any, **kwargs: Any) -> Any:
            found = place(*args, **kwargs)
            position = (self._found_state() or {}).get("position")
            if not position or not position["moved"] or t.args.ignore_data_skip:
                return found
            return position["epoch"], position["micro_steps"]

        def _run_epoch(*args: Any, **kwargs: Any) -> Any:
            position = (self.saved or {}).get("position")
            resumed = kwargs.get("resume_from_checkpoint") is not None
            if position and position["moved"] and resumed and kwargs["epoch"] == kwargs["epochs_trained"]:
                length, each = kwargs["steps_in_epoch"], t.args.gradient_accumulation_steps
                kwargs["num_update_steps_per_epoch"] = math.ceil(length / each)
            return run_epoch(*args, **kwargs)

        t._init_training_state, t._run_epoch = _init_training_state, _run_epoch

    # -- manners -----------------------------------------------------------------------------------

    @contextlib.contextmanager
    def _fence(self, what: str) -> Iterator[None]:
        """Nothing that goes wrong in here reaches the training."""
        try:
            yield
        except Exception as failure:
            self.failed = self.failed or f"{what}: {type(failure).__name__}: {failure}"
            if self.guest is not None:
                self.guest.stand_down(self.failed)
            else:
                log.warning("autotune stands down, training goes on: %s", self.failed)
            self._begun = False
            with contextlib.suppress(Exception):
                self._take_out()

    def _take_out(self) -> None:
        if self.adapter is not None and self.adapter.hook is not None:
            self.adapter.hook.remove()
            self.adapter.hook = None


class AcceleratedPeers(Peers):
    """The ranks of the host's accelerator; JSON texts only, so nothing is pickled."""

    def __init__(self, accelerator: Any) -> None:
        self.accelerator = accelerator

    @property
    def first(self) -> bool:
        return bool(self.accelerator.is_main_process)

    def from_first(self, value: Any) -> Any:
        import json

        text = json.dumps(value if self.first else None).encode()
        size = self._sum(torch.tensor([len(text) if self.first else 0]))
        buffer = torch.zeros(int(size), dtype=torch.int32)
        if self.first:
            buffer.copy_(torch.tensor(list(text), dtype=torch.int32))
        return json.loads(bytes(self._sum(buffer).tolist()))

    def from_all(self, text: str) -> list[str]:
        """One short ASCII text of each rank, in their order."""
        row = torch.zeros(128, dtype=torch.int32)
        codes = list(text.encode()[:128])
        row[: len(codes)] = torch.tensor(codes, dtype=torch.int32)
        table = self.accelerator.gather(row[None].to(self.accelerator.device)).cpu()
        return [bytes(int(code) for code in line if code).decode() for line in table.tolist()]

    def _sum(self, tensor: torch.Tensor) -> torch.Tensor:
        found: torch.Tensor = self.accelerator.reduce(tensor.to(self.accelerator.device), reduction="sum")
        return found.cpu()


def _check_kind(trainer: Any) -> None:
    """A `GRPOTrainer`: others have other words for the same keys.

    Raises:
        InputError: with the way for other trainers.
    """
    from trl.trainer.grpo_trainer import GRPOTrainer

    if not isinstance(trainer, GRPOTrainer):
        raise InputError(
            f"received a {type(trainer).__name__}; expected a trl.GRPOTrainer. For any other trainer call"
            " autotune.hooks.generic.Autotune from a callback of your own"
        )


def _check_alone(trainer: Any) -> None:
    """transformers only warns of a second callback of one class, and calls both.

    Raises:
        InputError: the trainer has one already.
    """
    if any(isinstance(callback, AutotuneCallback) for callback in trainer.callback_handler.callbacks):
        raise InputError(
            "this trainer has an AutotuneCallback already, and a second one would set the same knobs;"
            " expected one"
        )
