"""Where each knob lives in a running `GRPOTrainer`: read there, set there, refused where it would lie.

    actor_learning_rate   the schedule's base, every parameter group and the schedule's last rate. The
                          schedule overwrites a group after one update, so the base is what lasts
    kl_coef               trainer.beta, which must never pass through 0
    clip_range_*          trainer.epsilon_*; args.epsilon was copied once and is dead
    ppo_mini_batch_size   args.gradient_accumulation_steps, and state.max_steps with it
    ppo_epochs            trainer.num_iterations and the sampler's repeat_count
    max_response_length   four places, one number
    temperature           the sampler's and the one that the log-probs are scaled with
    entropy_coef          trainer.entropy_coef

Everything here is called between two rollouts. TRL counts its phase in `trainer._step`; it is set to 0 when
mini-batch or epochs move, so that generations and updates begin together there whatever the new numbers.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from typing import Any

from autotune.errors import AdapterError
from autotune.hooks.trl.phases import Batches
from autotune.knobs import KNOBS, Capability, Liveness

CLIPPED_LOSSES = ("grpo", "bnpo", "dr_grpo", "dapo", "luspo")
"""Losses of TRL that clip the ratio as PPO does."""
STEADY = ("constant", "constant_with_warmup")
NEXT = Capability(Liveness.NEXT_ROLLOUT)
LIVE = Capability(Liveness.LIVE)


def no(reason: str) -> Capability:
    return Capability(Liveness.UNAVAILABLE, reason)


class TrlKnobs:
    """The knobs of one trainer, at any time after its training has begun.

    Args:
        trainer: a `GRPOTrainer`.
        data: its train data loader, whose sampler repeats the prompts; None where nobody knows it.
    """

    def __init__(self, trainer: Any, data: Any = None) -> None:
        self.trainer, self.args = trainer, trainer.args
        self.sampler = find_sampler(data)
        self.batch_reason = self._why_batches_stay(data)
        self.start_length = int(trainer.max_completion_length)
        self.limit = self._most_updates(data)
        self.micro_steps = 0
        """Micro-steps of this epoch that are behind us; the callback counts them."""
        self.resuming = False
        """Saved knobs are being set again: the number of updates left is saved too."""

    # -- reading -----------------------------------------------------------------------------------

    @property
    def batches(self) -> Batches:
        return Batches(
            micro=int(self.args.per_device_train_batch_size),
            ranks=int(self.trainer.accelerator.num_processes),
            steps_per_generation=int(self.args.steps_per_generation),
            group=int(self.trainer.num_generations),
            iterations=int(self.trainer.num_iterations),
            accumulation=int(self.args.gradient_accumulation_steps),
        )

    def vector(self) -> dict[str, float]:
        """Every knob, from where the trainer will use it next."""
        t = self.trainer
        return {
            **self.batches.knobs(),
            "kl_coef": float(t.beta),
            "clip_range_low": float(t.epsilon_low),
            "clip_range_high": float(t.epsilon_high),
            "actor_learning_rate": self.rate(),
            "max_response_length": min(lengths) if len(lengths := self._lengths()) > 1 else lengths[0],
            "temperature": self.temperature(),
            "entropy_coef": float(t.entropy_coef),
        }

    def rate(self) -> float:
        """The peak rate: the largest of the schedule's bases, or of the groups without a schedule."""
        bases = getattr(self.trainer.lr_scheduler, "base_lrs", None)
        if bases:
            return float(max(bases))
        return float(max(group["lr"] for group in self.trainer.optimizer.param_groups))

    def _lengths(self) -> list[int]:
        t = self.trainer
        if t.use_vllm:
            return [int(t.vllm_generation.max_completion_length)]
        return [int(t.generation_config.max_new_tokens), int(t.generation_kwargs["max_new_tokens"])]

    def temperature(self) -> float:
        """The sampler's; NaN where the log-probs are scaled with another one."""
        found = {self._sampling().temperature, *(cell.cell_contents for cell in self._scalings())}
        return float(found.pop()) if len(found) == 1 else math.nan

    def _sampling(self) -> Any:
        return self.trainer.vllm_generation if self.trainer.use_vllm else self.trainer.generation_config

    def _scalings(self) -> Iterator[Any]:
        """Where the fused head of policy and reference holds the temperature of its log-probs."""
        for model in (self.trainer.model, self.trainer.ref_model):
            if model is not None:
                cell = temperature_cell(model)
                if cell is not None:
                    yield cell

    # -- what can move -----------------------------------------------------------------------------

    def capability(self) -> dict[str, Capability]:
        """Every knob of this run, and why it cannot move where it cannot."""
        batches = self._batch_capability()
        return {
            "train_batch_size": Capability(Liveness.RESTART, "sampler and data loader keep it"),
            "rollout_n": Capability(Liveness.RESTART, "the sampler keeps it"),
            "micro_batch_size": Capability(Liveness.RESTART, "the data loader keeps it"),
            "rollout_micro_batch_size": no("one call samples all of a rank's share"),
            "num_rollout_batches": no("one call samples all of a rank's share"),
            "ppo_mini_batch_size": batches,
            "ppo_epochs": self._epochs(batches),
            "kl_coef": self._beta(),
            **dict.fromkeys(("clip_range_low", "clip_range_high"), self._clip()),
            "actor_learning_rate": self._rate(),
            "max_response_length": self._length(),
            "temperature": self._temperature(),
            "entropy_coef": self._entropy(),
        }

    def _why_batches_stay(self, data: Any) -> str:
        if data is None:
            return "the train data loader is not known"
        if self.batches.problem or self.batches.odd:
            return self.batches.problem or self.batches.odd
        if self.trainer.is_deepspeed_enabled:
            return "DeepSpeed's engine keeps the accumulation that it was made with"
        kind = getattr(self.args.lr_scheduler_type, "value", self.args.lr_scheduler_type)
        if kind not in STEADY:
            return (
                f"lr_scheduler_type {kind!r} counts updates to a horizon fixed at the start;"
                f" expected {' or '.join(STEADY)}"
            )
        return ""

    def _batch_capability(self) -> Capability:
        return no(self.batch_reason) if self.batch_reason else NEXT

    def _epochs(self, batches: Capability) -> Capability:
        if batches.acts and self.sampler is None:
            return no("there is no RepeatSampler whose repeat_count could follow (an iterable dataset?)")
        return batches

    def _beta(self) -> Capability:
        started_at_zero = float(self.args.beta) == 0.0
        return no("beta was 0 at the start, so there is no reference model") if started_at_zero else NEXT

    def _clip(self) -> Capability:
        loss = self.trainer.loss_type
        return LIVE if loss in CLIPPED_LOSSES else no(f"loss_type {loss!r} does not clip as PPO does")

    def _rate(self) -> Capability:
        if self.trainer.is_deepspeed_enabled or not getattr(self.trainer.lr_scheduler, "base_lrs", None):
            kind = type(self.trainer.lr_scheduler).__name__
            return no(f"the schedule ({kind}) has no base rates that could be moved")
        return LIVE

    def _length(self) -> Capability:
        if self.trainer.loss_type == "dr_grpo":
            return no("loss_type 'dr_grpo' divides by max_completion_length: moving it would scale the loss")
        return NEXT

    def _temperature(self) -> Capability:
        wanted = 1 if self.trainer.ref_model is None else 2
        if len(list(self._scalings())) != wanted:
            return no("the temperature that log-probs are scaled with is out of reach")
        return NEXT

    def _entropy(self) -> Capability:
        if self.trainer.use_adaptive_entropy:
            return no("use_adaptive_entropy moves it already")
        return LIVE if self.trainer._entropy_bonus_enabled else no("entropy_coef was 0 at the start")

    # -- setting -----------------------------------------------------------------------------------

    def set_many(self, values: Mapping[str, float]) -> None:
        """Set several knobs; mini-batch and epochs together.

        Raises:
            AdapterError: a value is refused, possibly with others already set.
        """
        table = self.capability()
        now = self.vector()
        for name, value in values.items():
            same = abs(value - now[name]) <= 1e-9 * abs(value)
            if not same and not table[name].acts:
                raise AdapterError(f"{name} cannot be set in this run: {table[name].reason}")
            if not math.isfinite(value):
                raise AdapterError(f"{name} = {value}: expected a finite number")
        moved = {name: value for name, value in values.items() if value != now[name]}
        self._set_batches(moved)
        for name in sorted(moved, key=list(KNOBS).index):
            setter = getattr(self, f"_set_{name}", None)
            if setter is not None:
                setter(float(moved[name]))

    def _set_batches(self, moved: Mapping[str, float]) -> None:
        if not moved.keys() & {"ppo_mini_batch_size", "ppo_epochs"}:
            return
        before, now = self.batches, self.batches.knobs()
        mini = moved.get("ppo_mini_batch_size", now["ppo_mini_batch_size"])
        epochs = moved.get("ppo_epochs", now["ppo_epochs"])
        accumulation = before.accumulation_for(mini)
        if not accumulation or epochs != int(epochs) or epochs < 1:
            raise AdapterError(
                f"ppo_mini_batch_size = {mini:g} prompts, ppo_epochs = {epochs:g}: an update must take whole"
                f" micro-steps ({before.micro * before.ranks} completions) that divide a generation's"
                f" {before.steps_per_generation}"
            )
        after = before.with_(iterations=int(epochs), accumulation=accumulation)
        if self.micro_steps % accumulation:
            raise AdapterError(
                f"gradient_accumulation_steps = {accumulation} does not divide the {self.micro_steps}"
                " micro-steps of this epoch: an update would be cut in two"
            )
        self._keep_rollouts(before, after)
        self.args.gradient_accumulation_steps = accumulation
        if after.iterations != before.iterations:
            self.trainer.num_iterations = after.iterations
            self.sampler.repeat_count = after.iterations * after.steps_per_generation
        self.trainer._step = 0

    def _most_updates(self, data: Any) -> int:
        """Updates that the epochs of this run have, as they were counted at its start."""
        length = len(data) if data is not None and hasattr(data, "__len__") else 0
        per_epoch = max(math.ceil(length / max(self.batches.accumulation, 1)), 1)
        return per_epoch * int(getattr(self.trainer.state, "num_train_epochs", 1) or 1)

    def _keep_rollouts(self, before: Batches, after: Batches) -> None:
        """Other updates per rollout, the same number of rollouts: the last update's number moves."""
        if self.resuming:
            return
        state = self.trainer.state
        left = max(math.ceil((state.max_steps - state.global_step) / before.updates), 0)
        wanted = state.global_step + left * after.updates
        if after.updates > before.updates and wanted > self.limit:
            raise AdapterError(
                f"{after.updates} updates per rollout make {wanted} updates in all, and the run's epochs were"
                f" counted at its start to hold {self.limit}: give it more prompts"
            )
        state.max_steps = wanted

    def _set_actor_learning_rate(self, value: float) -> None:
        if value <= 0:
            raise AdapterError(f"actor_learning_rate = {value:g}: expected a number above 0")
        schedule, optimizer = self.trainer.lr_scheduler, self.trainer.optimizer
        peak = max(schedule.base_lrs)
        factor = value / peak
        schedule.base_lrs = [value if base == peak else base * factor for base in schedule.base_lrs]
        rates = self._rates_now(schedule, factor)
        for group, rate, base in zip(optimizer.param_groups, rates, schedule.base_lrs, strict=True):
            group["lr"], group["initial_lr"] = rate, base
        schedule._last_lr = list(rates)

    def _rates_now(self, schedule: Any, factor: float) -> list[float]:
        """What the schedule would write now; where it has no formula, the present rates scaled."""
        shapes = getattr(schedule, "lr_lambdas", None)
        if shapes:
            pairs = zip(schedule.base_lrs, shapes, strict=True)
            return [base * shape(schedule.last_epoch) for base, shape in pairs]
        return [group["lr"] * factor for group in self.trainer.optimizer.param_groups]

    def _set_kl_coef(self, value: float) -> None:
        if value <= 0:
            raise AdapterError(
                f"kl_coef = {value:g}: expected above 0; a generation made at beta = 0 has no reference"
                " log-probs"
            )
        self.trainer.beta = value

    def _set_clip_range_low(self, value: float) -> None:
        self.trainer.epsilon_low = _between(value, 0.0, 1.0, "clip_range_low")

    def _set_clip_range_high(self, value: float) -> None:
        self.trainer.epsilon_high = _between(value, 0.0, math.inf, "clip_range_high")

    def _set_entropy_coef(self, value: float) -> None:
        self.trainer.entropy_coef = value

    def _set_max_response_length(self, value: float) -> None:
        length, t = int(value), self.trainer
        if length != value or length < 1 or length > self._longest():
            raise AdapterError(
                f"max_response_length = {value:g}: expected a whole number from 1 to {self._longest()} tokens"
            )
        t.max_completion_length = length
        if t.use_vllm:
            t.vllm_generation.max_completion_length = length
        else:
            t.generation_config.max_new_tokens = length
            t.generation_kwargs["max_new_tokens"] = length

    def _longest(self) -> int:
        """What engine and model can hold."""
        if self.trainer.use_vllm:
            limit = self.args.vllm_max_model_length
            return int(limit) - 1 if limit else self.start_length
        context = getattr(self.trainer.model.config, "max_position_embeddings", None)
        return int(context) - 1 if context else 1 << 20

    def _set_temperature(self, value: float) -> None:
        _between(value, 0.0, math.inf, "temperature")
        self._sampling().temperature = value
        if not self.trainer.use_vllm:
            self.trainer.generation_kwargs["temperature"] = value
        for cell in self._scalings():
            cell.cell_contents = value
        self.trainer.temperature = value


def _between(value: float, low: float, high: float, name: str) -> float:
    if not low < value < high:
        raise AdapterError(f"{name} = {value:g}: expected a number between {low:g} and {high:g}")
    return value


def find_sampler(data: Any) -> Any:
    """TRL's RepeatSampler behind a data loader and whatever was wrapped around it; None without one."""
    here = data
    for _ in range(8):
        if here is None or hasattr(here, "repeat_count"):
            return here
        inner = (getattr(here, name, None) for name in ("batch_sampler", "sampler", "base_dataloader"))
        here = next((found for found in inner if found is not None), None)
    return None


def temperature_cell(model: Any) -> Any:
    """The closure cell of TRL's fused forward that holds the temperature; None where it is not there.

    Calling `add_fused_lm_head` again would do the same and nest one more wrapper each time.
    """
    if hasattr(model, "get_base_model"):
        model = model.get_base_model()
    while hasattr(model, "module"):
        model = model.module
    forward: Any = getattr(model.__dict__.get("forward"), "__func__", None)
    names = getattr(getattr(forward, "__code__", None), "co_freevars", ())
    if "temperature" not in names:
        return None
    return forward.__closure__[names.index("temperature")]
