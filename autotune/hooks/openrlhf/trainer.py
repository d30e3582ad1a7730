"""OpenRLHF's trainer with the control loop before its logger and its checkpoint.

    fit -> init_checkpoint_states     the models exist; the guest is made, or goes on from a checkpoint
        -> generate_samples -> train_step -> _compute_rollout_stats      here a look at the rollout
        -> ppo_train                  and behind it one forward pass for `kl_step`
        -> save_logs_and_checkpoints  one `Guest.on_rollout` first, then OpenRLHF's loggers and checkpoint
        -> next generation            arguments and controllers are read again

The methods that are laid over OpenRLHF's are sent to its trainer process by value, so they are short and
find this module again by name.
"""

from __future__ import annotations

import importlib
import logging
from collections.abc import Iterator, Mapping
from importlib.metadata import version
from typing import Any

from autotune.errors import InputError
from autotune.hooks.drift import DriftSensor
from autotune.hooks.guest import Guest, read_control
from autotune.hooks.openrlhf.adapter import OpenRLHFAdapter, rollout_view
from autotune.hooks.openrlhf.declared import DECLARED
from autotune.hooks.openrlhf.drift import chosen, kl_step

MODULE = "openrlhf.trainer.ppo_trainer"
SYMBOLS = {
    MODULE: (
        "PPOTrainer.fit",
        "PPOTrainer.init_checkpoint_states",
        "PPOTrainer.save_logs_and_checkpoints",
        "PPOTrainer._compute_rollout_stats",
        "PPOTrainer.ppo_train",
        "PPOTrainer.evaluate",
    ),
    "openrlhf.trainer.ray.launcher": (
        "RayActorGroup.async_run_method",
        "RayActorGroup.async_run_method_batch",
    ),
    "openrlhf.trainer.ppo_utils.kl_controller": ("FixedKLController",),
    "openrlhf.models": ("PolicyLoss",),
    "openrlhf.cli.train_ppo_ray": ("train",),
}
"""Everything of OpenRLHF that is replaced or reached into, by module."""
STATE = "autotune"
log = logging.getLogger("autotune")


class Stopped(Exception):
    """Ends OpenRLHF's loop from within; caught in `fit`, so that the launcher goes on to save the model."""


def missing_symbols() -> list[str]:
    """What of `SYMBOLS` the installed OpenRLHF does not have."""
    return [
        f"{module}:{name}" for module, name in _symbols() if not _has(importlib.import_module(module), name)
    ]


def _symbols() -> Iterator[tuple[str, str]]:
    yield from ((module, name) for module, names in SYMBOLS.items() for name in names)


def _has(found: Any, dotted: str) -> bool:
    for part in dotted.split("."):
        found = plain(getattr(found, part, None))
        if found is None:
            return False
    return True


def plain(found: Any) -> Any:
    """The class behind Ray's `ActorClass`; anything else as it is."""
    wrapped = getattr(found, "__ray_metadata__", None)
    return found if wrapped is None else wrapped.modified_class


def install(control: str | Mapping[str, Any], accept_version: str = "") -> Any:
    """Put our subclass in the place of OpenRLHF's trainer, for the launcher that is run next.

    Raises:
        InputError: the control file is wrong, or OpenRLHF lacks something that is reached into.
    """
    read_control(control)
    missing = missing_symbols()
    if missing:
        raise InputError(
            f"OpenRLHF {version('openrlhf')} has no {', '.join(missing)}; expected a version"
            f" {DECLARED.versions}."
            " Its log can still be judged with `autotune advise`"
        )
    import ray

    module = importlib.import_module(MODULE)
    trainer = with_autotune(plain(module.PPOTrainer), control, accept_version)
    module.PPOTrainer = ray.remote(trainer)  # type: ignore[attr-defined]
    return trainer


def with_autotune(trainer: Any, control: Any, accept_version: str = "") -> Any:
    """A subclass of OpenRLHF's trainer that lets the control loop in."""

    class AutotunedTrainer(trainer):  # type: ignore[misc]
        autotune_options = (control, accept_version)
        autotune: Any = None

        def init_checkpoint_states(self) -> Any:
            from autotune.hooks.openrlhf.trainer import attach

            states = super().init_checkpoint_states()
            self.autotune = self.autotune or attach(self, *self.autotune_options)
            if self.autotune is not None:
                self.autotune.begin(states)
            return states

        def _compute_rollout_stats(self, experiences: Any) -> Any:
            stats = super()._compute_rollout_stats(experiences)
            if self.autotune is not None:
                self.autotune.look(experiences)
            return stats

        def ppo_train(self, global_steps: int) -> Any:
            status = super().ppo_train(global_steps)
            if self.autotune is not None:
                self.autotune.measure(status)
            return status

        def save_logs_and_checkpoints(
            self, global_step: int, logs_dict: Any = None, client_states: Any = None
        ) -> None:
            client_states = {} if client_states is None else client_states
            if self.autotune is not None:
                self.autotune.on_step(logs_dict or {}, global_step, client_states)
            super().save_logs_and_checkpoints(global_step, logs_dict, client_states)
            if self.autotune is not None:
                self.autotune.after_step()

        def evaluate(self, global_step: int, **generate_kwargs: Any) -> Any:
            logs = super().evaluate(global_step, **generate_kwargs)
            if self.autotune is not None:
                self.autotune.evaluated(logs)
            return logs

        def fit(self, global_step: int = 0) -> None:
            from autotune.hooks.openrlhf.trainer import run

            run(self, lambda: super(AutotunedTrainer, self).fit(global_step))

    return AutotunedTrainer


def run(trainer: Any, fit: Any) -> None:
    """OpenRLHF's `fit`, with the books closed whatever happens; its failures remain its own."""
    status = "failed"
    try:
        fit()
        status = "done"
    except Stopped:
        status = "done"  # the guest knows that it was a stop
        for tracker in (trainer.wandb_logger, trainer.tensorboard_logger):
            if tracker:
                tracker.close()
    finally:
        if trainer.autotune is not None:
            trainer.autotune.guest.end(status, "" if status == "done" else "OpenRLHF failed")


def attach(trainer: Any, control: Any, accept_version: str = "") -> Attachment | None:
    """The control loop for this run, or None where it cannot begin; nothing is raised."""
    try:
        return Attachment(trainer, control, accept_version)
    except Exception as failure:
        log.warning("autotune stays out of this run: %s: %s", type(failure).__name__, failure)
        return None


class Attachment:
    """One run of OpenRLHF with its guest.

    Args:
        trainer: OpenRLHF's trainer, whose models exist.
        control: a `control.yaml` or its fields.
        accept_version: a version that is acted on although it was not tested.
    """

    def __init__(self, trainer: Any, control: Any, accept_version: str = "") -> None:
        self.trainer = trainer
        self.adapter = OpenRLHFAdapter(trainer)
        args = trainer.args
        self.guest = Guest(
            self.adapter,
            read_control(control),
            str(args.ckpt.path),
            DECLARED,
            version=_version(),
            accept=accept_version,
            name=str(getattr(args.logger.wandb, "run_name", None) or "openrlhf"),
            seed=int(args.train.seed),
        )
        self._seen: dict[str, float] = {}
        self._drift = DriftSensor(self.guest)
        self._measured: list[Any] = []
        """Experiences of the rollout in progress on which the drift is measured."""
        self._tokens = 0.0
        self._evaluated: dict[str, float] = {}
        self._stopping = False

    def begin(self, states: Mapping[str, Any]) -> None:
        """Open the books, or go on with those of the checkpoint that OpenRLHF began from."""
        try:
            self.guest.begin(states.get(STATE) if states.get("global_step") else None)
            self.adapter.settle()  # a resumed run has taken its knobs back
        except Exception as failure:
            self.guest.stand_down(f"could not begin: {type(failure).__name__}: {failure}")

    def look(self, experiences: Any) -> None:
        """Measure on the rollout what OpenRLHF does not log."""
        try:
            found = columns(experiences)
            self._seen, self._tokens = rollout_view(*found), sum(found[3])
            places = chosen([len(e.sequences) for e in experiences], self.adapter.world_size)
            self._measured = [experiences[i] for i in places]
        except Exception as failure:
            self.guest.stand_down(f"the rollout could not be measured: {type(failure).__name__}: {failure}")

    def measure(self, status: Mapping[str, Any]) -> None:
        """How far the updates moved the policy; without that number its rules are silent."""
        experiences, self._measured = self._measured, []
        trained = "policy_loss" in status  # not while only the critic is trained
        if experiences and trained:
            self._seen |= self._drift.measure(lambda: kl_step(self.trainer, experiences))

    def on_step(self, status: Mapping[str, Any], step: int, client_states: dict[str, Any]) -> None:
        """One step was trained; the state goes into OpenRLHF's own checkpoint. Nothing is raised."""
        if self.guest.broken or self._stopping:
            return
        try:
            seen = {**self._seen, **self._evaluated}
            self.guest.on_rollout(self.adapter.record(status, self.guest.rollout, seen, self._tokens))
            self._seen, self._evaluated = {}, {}
            if not self.guest.broken:
                self.adapter.settle()
            client_states[STATE] = self.guest.state_dict()
        except Exception as failure:
            self.guest.stand_down(f"{type(failure).__name__}: {failure}")
        if self.guest.stop:
            self.trainer.args.ckpt.save_steps = 1  # this step's checkpoint is the last one
        if step % self.trainer.args.ckpt.save_steps == 0:
            self.guest.checkpoint(f"{self.trainer.args.ckpt.path} global_step{step}")

    def evaluated(self, logs: Mapping[str, Any]) -> None:
        """A held-out score; OpenRLHF evaluates after it has logged, so it is the next rollout's."""
        score = next((v for k, v in logs.items() if k.startswith("eval_") and k.endswith("_pass1")), None)
        if score is not None:
            self._evaluated["eval_score"] = float(score)

    def after_step(self) -> None:
        """A rule's stop: out of OpenRLHF's loop, now that it has logged and saved."""
        if not self.guest.stop or self._stopping:
            return
        self._stopping = True
        raise Stopped(self.guest.stop)


def columns(experiences: Any) -> tuple[list[str], list[float], list[float], list[float]]:
    """Prompt, reward, response tokens and all tokens of every sample, in the order of the experiences."""
    prompts = [prompt for e in experiences for prompt in e.prompts or ()]
    rewards = [float(r) for e in experiences for r in e.info["reward"].flatten().tolist()]
    lengths = [float(n) for e in experiences for n in e.response_length.flatten().tolist()]
    totals = [float(n) for e in experiences for n in e.total_length.flatten().tolist()]
    return prompts, rewards, lengths, totals


def _version() -> str:
    return version("openrlhf")
