"""What a log says about the run beside its metrics: batch sizes, totals, a dump of the configuration.

Only what is written there: HF's `Total train batch size ... = 8`, `trainer_state.json`'s `max_steps`,
verl's printed config. Everything becomes a `Hints`: knobs by our names, totals, and remarks for people.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from autotune.logs.lines import unprefixed


@dataclass
class Hints:
    """Facts found so far; filled while lines go by."""

    knobs: dict[str, float] = field(default_factory=dict)
    total_steps: int = 0
    responses: int = 0
    """Responses behind one optimizer step, where prompts and group size are not known apart."""
    steps_per_row: int = 0
    finished: bool = False
    """A run summary was seen: nothing will follow."""
    progress: int = 0
    """Progress lines without a metric."""
    remarks: list[str] = field(default_factory=list)

    def remark(self, text: str) -> None:
        if text not in self.remarks:
            self.remarks.append(text)


_HF = {
    "Total optimization steps": "total_steps",
    "Total train batch size": "responses",
}
_HF_LINE = re.compile(r"^\s*(Total optimization steps|Total train batch size)[^=]*= ([\d,]+)\s*$")
_PROGRESS = re.compile(r"(\d+)%\|.*?\| *(\d+)/(\d+) \[")
_DUMP_LINES = 5000
_QUOTED = re.compile(r"'[^']*'|\"[^\"]*\"")

VERL_KNOBS: dict[str, tuple[str, ...]] = {
    "train_batch_size": ("data.train_batch_size",),
    "rollout_n": ("actor_rollout_ref.rollout.n",),
    "ppo_mini_batch_size": ("actor_rollout_ref.actor.ppo_mini_batch_size",),
    "ppo_epochs": ("actor_rollout_ref.actor.ppo_epochs",),
    "clip_range_low": ("actor_rollout_ref.actor.clip_ratio_low", "actor_rollout_ref.actor.clip_ratio"),
    "clip_range_high": ("actor_rollout_ref.actor.clip_ratio_high", "actor_rollout_ref.actor.clip_ratio"),
    "actor_learning_rate": ("actor_rollout_ref.actor.optim.lr",),
    "critic_learning_rate": ("critic.optim.lr",),
    "entropy_coef": ("actor_rollout_ref.actor.entropy_coeff",),
    "max_response_length": ("data.max_response_length", "actor_rollout_ref.rollout.response_length"),
    "max_prompt_length": ("data.max_prompt_length",),
    "temperature": ("actor_rollout_ref.rollout.temperature",),
}
"""Our knob -> dotted places in verl's configuration, the first that has a number wins."""

TRL_KNOBS: dict[str, tuple[str, ...]] = {
    "rollout_n": ("num_generations",),
    "actor_learning_rate": ("learning_rate",),
    "kl_coef": ("beta",),
    "clip_range_low": ("epsilon",),
    "clip_range_high": ("epsilon_high", "epsilon"),
    "ppo_epochs": ("num_iterations",),
    "max_response_length": ("max_completion_length",),
    "max_prompt_length": ("max_prompt_length",),
    "temperature": ("temperature",),
}
"""Our knob -> TRL's argument; batch sizes are derived in `trl_batch`."""


class HeaderReader:
    """Feeds on every line that is no metric row."""

    def __init__(self, hints: Hints) -> None:
        self.hints = hints
        self._dump: list[str] = []
        self._open: list[str] = []
        """Closing brackets that the dump still owes, innermost last."""

    def feed(self, line: str) -> None:
        bare = unprefixed(line).rstrip()
        if self._dump and bare.startswith(" ") and len(self._dump) < _DUMP_LINES:
            self._feed_dump(bare)
            return
        self.finish()
        if "{'actor_rollout_ref'" in bare:
            self._feed_dump(bare[bare.index("{") :])
            return
        found = _HF_LINE.match(line)
        if found:
            setattr(self.hints, _HF[found[1]], int(found[2].replace(",", "")))
            return
        bar = _PROGRESS.search(line)
        if bar and "Training" in line:
            self.hints.progress += 1
            self.hints.total_steps = self.hints.total_steps or int(bar[3])

    def _feed_dump(self, line: str) -> None:
        self._dump.append(line)
        for mark in _QUOTED.sub("", line):
            if mark in "{[(":
                self._open.append({"{": "}", "[": "]", "(": ")"}[mark])
            elif mark in "}])" and self._open:
                self._open.pop()
        if not self._open:
            self.finish()

    def finish(self) -> None:
        """Read the dump, also one that was cut off: what stands there is still true."""
        if not self._dump:
            return
        text = "\n".join(self._dump).rstrip().rstrip(",") + "".join(reversed(self._open))
        self._dump, self._open = [], []
        try:
            config = ast.literal_eval(text)
        except (ValueError, SyntaxError, MemoryError, RecursionError):
            self.hints.remark("the configuration that is printed in this log could not be read")
            return
        verl_config(config, self.hints)


def verl_config(config: Mapping[str, Any], hints: Hints) -> None:
    """Knobs, and what looks wrong, from verl's whole configuration."""
    read_knobs(config, VERL_KNOBS, hints)
    in_loss = bool(_at(config, "actor_rollout_ref.actor.use_kl_loss"))
    in_reward = _at(config, "algorithm.use_kl_in_reward")
    place = "actor_rollout_ref.actor.kl_loss_coef" if in_loss else "algorithm.kl_ctrl.kl_coef"
    coef = _at(config, place)
    if isinstance(coef, (int, float)):
        hints.knobs["kl_coef"] = float(coef)
    if in_loss and in_reward:
        hints.remark("KL stands both in the loss and in the reward: one of the two should go")
    train, mini = hints.knobs.get("train_batch_size"), hints.knobs.get("ppo_mini_batch_size")
    if train and mini and mini > train:
        hints.remark(
            f"ppo_mini_batch_size {mini:g} prompts > train_batch_size {train:g} prompts:"
            " one update per rollout, the mini-batch has no effect"
        )
        hints.knobs["ppo_mini_batch_size"] = train


def read_knobs(config: Mapping[str, Any], places: Mapping[str, tuple[str, ...]], hints: Hints) -> None:
    for knob, dotted in places.items():
        values = [_at(config, place) for place in dotted]
        found = next((v for v in values if isinstance(v, (int, float)) and not isinstance(v, bool)), None)
        if found is not None:
            hints.knobs[knob] = float(found)


def _at(config: Any, dotted: str) -> Any:
    for part in dotted.split("."):
        config = config.get(part) if isinstance(config, Mapping) else None
    return config


def trl_args(args: Mapping[str, Any], hints: Hints) -> None:
    """TRL's arguments, as MLflow params or `trainer_state.json` hold them."""
    read_knobs(args, TRL_KNOBS, hints)
    n, micro = hints.knobs.get("rollout_n"), args.get("per_device_train_batch_size")
    accumulate, world = args.get("gradient_accumulation_steps"), args.get("world_size", 1)
    if not (n and isinstance(micro, (int, float)) and isinstance(accumulate, (int, float))):
        return
    per_update = micro * accumulate * float(world or 1) / n  # prompts
    steps = args.get("steps_per_generation") or accumulate
    per_rollout = micro * float(steps) * float(world or 1) / n
    if per_update >= 1 and per_rollout % per_update == 0:
        hints.knobs["train_batch_size"] = per_rollout
        hints.knobs["ppo_mini_batch_size"] = per_update
        hints.knobs.setdefault("ppo_epochs", 1.0)
