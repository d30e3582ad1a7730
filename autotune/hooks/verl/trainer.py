"""verl's trainer with the control loop behind its logger.

    fit -> on_train_begin                 the guest is made, on the driver, when everything exists
        -> step … _update_actor           verl's own, and behind it one forward pass for `kl_step`
        -> … on_step_end                  verl's own; weights are in the sampler again
        -> _compute_metrics               and here a look at the batch, before verl drops it
        -> logger.log(metrics, step)      verl's loggers first, then one `Guest.on_rollout`
        -> next step                      prompts are handed out and the configuration is read again

verl saves its checkpoint inside a step and logs at the step's end. So the controller's state is written
beside the checkpoint when it is saved, and once more after the decision of that very step.
"""

from __future__ import annotations

import json
import logging
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from autotune.errors import InputError
from autotune.hooks.drift import DriftSensor
from autotune.hooks.guest import Guest, read_control
from autotune.hooks.verl.adapter import VerlAdapter, rollout_view
from autotune.hooks.verl.declared import DECLARED
from autotune.hooks.verl.drift import kl_step

STATE = "autotune.json"
OPTIONS = ("control", "accept_version")
log = logging.getLogger("autotune")


def install() -> list[str]:
    """Put our subclass in the place of every trainer in verl's registry; the names that were replaced."""
    from verl.trainer.ppo.v1.trainer_base import TRAINER_REGISTRY

    replaced = []
    for name, trainer in list(TRAINER_REGISTRY.items()):
        if not getattr(trainer, "has_autotune", False):
            TRAINER_REGISTRY[name] = with_autotune(trainer)
            replaced.append(name)
    return replaced


def with_autotune(trainer: Any) -> Any:
    """A subclass of one of verl's trainers that lets the control loop in where the configuration asks."""
    return type(trainer.__name__, (_Autotuned, trainer), {"__module__": trainer.__module__})


class _Autotuned:
    """What is laid over verl's trainer; every step of ours is fenced, every step of verl's is verl's."""

    has_autotune = True
    autotune: Attachment | None = None

    def on_train_begin(self) -> None:
        super().on_train_begin()  # type: ignore[misc]
        self.autotune = self.autotune or attach(self)
        if self.autotune is not None:
            self.autotune.begin()
            self.logger: Any = Tap(self.logger, self.autotune)

    def _update_actor(self, batch: Any, metrics: Any) -> Any:
        batch = super()._update_actor(batch, metrics)  # type: ignore[misc]
        if self.autotune is not None:
            self.autotune.measure(batch)
        return batch

    def _compute_metrics(self, batch: Any, metrics: Any, *arguments: Any, **named: Any) -> None:
        super()._compute_metrics(batch, metrics, *arguments, **named)  # type: ignore[misc]
        if self.autotune is not None:
            self.autotune.look(batch)

    def _save_checkpoint(self) -> None:
        super()._save_checkpoint()  # type: ignore[misc]
        if self.autotune is not None:
            self.autotune.saved()


def attach(trainer: Any) -> Attachment | None:
    """The control loop for this run, or None where it is not asked for or cannot begin; nothing is raised."""
    options = trainer.config.get("autotune")
    if not options:
        return None
    try:
        return Attachment(trainer, options)
    except Exception as failure:
        log.warning("autotune stays out of this run: %s: %s", type(failure).__name__, failure)
        return None


class Attachment:
    """One run of verl with its guest.

    Args:
        trainer: verl's trainer, just before its first step.
        options: the `autotune` section of verl's configuration.

    Raises:
        InputError: an option is wrong, or the mode is one that cannot be controlled.
    """

    def __init__(self, trainer: Any, options: Mapping[str, Any]) -> None:
        self.trainer = trainer
        control = _control(trainer, options)
        self.adapter = VerlAdapter(trainer)
        self.folder = Path(str(trainer.config.trainer.default_local_dir))
        self.guest = Guest(
            self.adapter,
            read_control(control),
            self.folder,
            DECLARED,
            version=_version(),
            accept=str(options.get("accept_version") or ""),
            name=str(trainer.config.trainer.experiment_name),
            seed=int(trainer.config.data.get("seed") or 0),
            config={
                "first_step": int(trainer.global_steps),
                "total_steps": int(trainer.total_training_steps),
            },
        )
        self._seen: dict[str, float] = {}
        self._drift = DriftSensor(self.guest)
        self._moved: dict[str, float] = {}
        self._checkpoint: Path | None = None

    def begin(self) -> None:
        """Open the books, or go on with those of the checkpoint that verl began from."""
        try:
            self.guest.begin(self._state())
            self.adapter.settle()  # a resumed run has taken its knobs back
        except Exception as failure:
            self.guest.stand_down(f"could not begin: {type(failure).__name__}: {failure}")

    # -- one step ----------------------------------------------------------------------------------

    def measure(self, batch: Any) -> None:
        """How far this step's updates moved the policy; without that number its rules are silent."""
        self._moved = {}
        if self.adapter.measures_drift:
            self._moved = self._drift.measure(lambda: kl_step(self.trainer, batch, self.adapter.world_size))

    def look(self, batch: Any) -> None:
        """Measure on the batch what verl does not log; verl drops it right after."""
        config = self.trainer.config.actor_rollout_ref.rollout
        limit = config.get("max_model_len")
        try:
            tags, scores = list(batch.tags), scores_of(batch)
            total = int(limit) if limit else None
            self._seen = rollout_view(list(batch.keys), tags, scores, int(config.response_length), total)
        except Exception as failure:
            self._seen = {}
            self.guest.stand_down(f"the batch could not be measured: {type(failure).__name__}: {failure}")

    def on_log(self, data: Mapping[str, Any], step: int) -> None:
        """verl has logged a step."""
        if "training/global_step" not in data or self.guest.broken:
            return  # a validation before the first step, or nothing is done any more
        try:
            self._one(data, step)
        except Exception as failure:
            self.guest.stand_down(f"{type(failure).__name__}: {failure}")

    def _one(self, data: Mapping[str, Any], step: int) -> None:
        record = self.adapter.record(data, self.guest.rollout, self._seen | self._moved)
        self._seen, self._moved = {}, {}
        self.guest.on_rollout(record)
        if not self.guest.broken:
            self.adapter.settle()
        if self._checkpoint is not None:
            self._write(self._checkpoint)
            self.guest.checkpoint(self._checkpoint)
            self._checkpoint = None
        if self.guest.stop:
            self._end_training(step)

    def _end_training(self, step: int) -> None:
        """verl's loop ends when its step passes the total; what is not saved yet is saved first."""
        latest = self.folder / f"global_step_{step}"
        if self.trainer.config.trainer.save_freq > 0 and not latest.exists():
            self.trainer._save_checkpoint()
        self.trainer.total_training_steps = step

    # -- keeping -----------------------------------------------------------------------------------

    def saved(self) -> None:
        """verl has written the checkpoint of the present step, whose decision is still to come."""
        folder = self.folder / f"global_step_{self.trainer.global_steps}"
        self._checkpoint = folder
        self._write(folder)

    def _write(self, folder: Path) -> None:
        try:
            state = {**self.guest.state_dict(), "step": int(self.trainer.global_steps)}
            part = folder / (STATE + ".part")
            part.write_text(json.dumps(state), "utf-8")
            os.replace(part, folder / STATE)
        except Exception as failure:
            log.warning("autotune could not keep its state: %s: %s", type(failure).__name__, failure)

    def _state(self) -> dict[str, Any] | None:
        """The state beside the checkpoint that verl began from; None for a fresh run."""
        done = int(self.trainer.global_steps) - 1
        if done < 1:
            return None
        path = _resumed_from(self.trainer, self.folder, done) / STATE
        if not path.is_file():
            log.warning("autotune begins afresh: there is no %s", path)
            return None
        state: dict[str, Any] = json.loads(path.read_text("utf-8"))
        return state

    def end(self, exit_code: int) -> None:
        failed = "" if exit_code == 0 else "verl failed"
        self.guest.end("failed" if failed else "done", failed)


def _control(trainer: Any, options: Mapping[str, Any]) -> Any:
    unknown = [name for name in options if name not in OPTIONS]
    if unknown or "control" not in options:
        raise InputError(
            f"verl's configuration has autotune.{', autotune.'.join(options)};"
            f" expected +autotune.control=FILE and at most {', '.join(OPTIONS[1:])}"
        )
    if trainer.trainer_mode != "sync":
        raise InputError(
            f"trainer.v1.trainer_mode is {trainer.trainer_mode!r}: there, rollouts in flight use old"
            f" settings."
            " Expected sync; its log can still be judged with `autotune advise`"
        )
    control = options["control"]
    return control if isinstance(control, str) else _plain(control)


def _plain(section: Any) -> dict[str, Any]:
    from omegaconf import OmegaConf

    found: dict[str, Any] = OmegaConf.to_container(section, resolve=True)
    return found


def _version() -> str:
    from verl import __version__

    return str(__version__)


def _resumed_from(trainer: Any, folder: Path, step: int) -> Path:
    config = trainer.config.trainer
    if config.get("resume_mode") == "resume_path":
        return Path(str(config.resume_from_path))
    return folder / f"global_step_{step}"


def scores_of(batch: Any) -> list[float]:
    """Reward of each sample, from verl's transfer queue; a nested tensor of token scores, [B, tokens]."""
    import transfer_queue

    data = transfer_queue.kv_batch_get(
        keys=batch.keys, partition_id=batch.partition_id, select_fields=["rm_scores"]
    )
    return [float(row.sum()) for row in data["rm_scores"]]


class Tap:
    """verl's `Tracking` with an ear: logs as before, then tells."""

    def __init__(self, logger: Any, attachment: Attachment) -> None:
        self._logger, self._attachment = logger, attachment

    def log(self, data: Mapping[str, Any], step: int, **named: Any) -> None:
        self._logger.log(data=data, step=step, **named)
        self._attachment.on_log(data, step)

    def finish(self, exit_code: int = 0) -> None:
        self._attachment.end(exit_code)
        self._logger.finish(exit_code=exit_code)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._logger, name)
