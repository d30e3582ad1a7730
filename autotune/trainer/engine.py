"""One DeepSpeed engine around one causal language model, at any ZeRO stage.

The loop says how many backward passes make an update, what the learning rate is and when a rollout
must be taken back; this file turns that into DeepSpeed calls. CPU (float32, gloo) and GPU (bfloat16
with float32 masters, nccl) run the same lines. What the file promises, and how:

* *The loop owns the accumulation boundary.* `backward(loss, last=...)` sets it each time, and
  DeepSpeed's own count of micro-batches is configured to 1 and never used. Gradients are **summed**
  over ranks, so a loss divided by the global number of tokens is right on any number of them.
* *Non-finite gradients reach nothing.* DeepSpeed drops such an update from ZeRO 1 on; at ZeRO 0 norm,
  check and clipping are ours.
* *The optimizer's state exists from the start.* One step with zero gradients at learning rate 0
  lets Adam lay out its own state, which is then zeroed. So a snapshot before the first update is
  like any other.
* *Nothing is pickled.* State leaves and enters as plain named tensors, unsplit (`state_tensors`,
  `load_state`), so the number of ranks and the stage may change in between; DeepSpeed's checkpoint
  calls, which unpickle, are not used.
* *At ZeRO 3 nobody holds the weights, except where it is asked for.* `whole_weights()` gathers them
  once for sampling and scoring: ranks sample for different times, and a gather per layer would make
  them wait for each other at every token, or forever.

Where DeepSpeed keeps what (the only knowledge of its inside that this file needs): Adam updates
"masters". At ZeRO 0 in float32 these are the model's parameters, in bfloat16 one flat float32 copy that
is ours (`flat.py`); else they are flat float32 copies of DeepSpeed's, split over the ranks, and with
offloading in host memory. Up to ZeRO 2 they are in
the optimizer's `param_groups`; at ZeRO 3 these are empty between steps, the masters are in
`fp32_partitioned_groups_flat`, and a parameter's own part of the weights is its `ds_tensor`.
"""

from __future__ import annotations

import contextlib
import io
import logging
import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from autotune.errors import AdapterError, CheckpointError, InputError, TrainingError
from autotune.recipe.deepspeed import OFFLOADS, STAGES, merged, refusal
from autotune.trainer.flat import FlatAdamW
from autotune.trainer.group import import_deepspeed, start_group

if TYPE_CHECKING:
    import torch
    from torch import Tensor, nn

MOMENTS = ("exp_avg", "exp_avg_sq")
"""Adam's two running means, as torch names them."""

BUCKET_ELEMENTS = 50_000_000
"""Largest gradient bucket; a smaller model gets one bucket of its own size."""


@dataclass(frozen=True, slots=True)
class StepResult:
    """What one update did."""

    grad_norm: Tensor
    """Global 2-norm before clipping, a device scalar; not finite when nothing was stepped."""
    stepped: bool
    """False when a gradient was not finite: weights, moments and step count are as before."""


@dataclass(frozen=True, slots=True)
class Snapshot:
    """A claim on the engine's one set of snapshot buffers; the next `snapshot()` ends it."""

    serial: int


class Engine:
    """A model, its AdamW and its gradients, on one or many ranks.

    Args:
        model: A Hugging Face causal language model; moved and cast in place.
        zero_stage: what is split over the ranks: 0 nothing, 1 the optimizer's state, 2 gradients
            too, 3 weights too.
        learning_rate: First value; `set_learning_rate` changes it before any update.
        betas: AdamW's decay rates of the two moments.
        weight_decay: AdamW's decoupled weight decay.
        max_grad_norm: Gradients are scaled down to this global norm; 0 turns clipping off.
        dtype: `float32`, `bfloat16`, or `auto`: float32 on CPU, bfloat16 on GPU.
        offload: what waits in host memory: `none`, `optimizer`, or `all` (weights too, ZeRO 3).
        config: further DeepSpeed settings, see `autotune.recipe.deepspeed`.
    """

    def __init__(
        self,
        model: nn.Module,
        *,
        zero_stage: int,
        learning_rate: float,
        betas: tuple[float, float],
        weight_decay: float,
        max_grad_norm: float,
        dtype: str = "auto",
        offload: str = "none",
        config: Mapping[str, Any] | None = None,
    ) -> None:
        _check_choice("zero_stage", zero_stage, STAGES)
        _check_choice("offload", offload, OFFLOADS)
        device_type = start_group()
        self._bfloat16 = _is_bfloat16(dtype, device_type)
        if refused := refusal(zero_stage, "bfloat16" if self._bfloat16 else "float32", offload):
            raise InputError(refused)
        self._zero_stage = zero_stage
        self._offload = offload
        self._extra = dict(config or {})
        self._max_grad_norm = max_grad_norm
        # DeepSpeed would clip without saying what the norm was, see the module's docstring.
        self._own_clipping = zero_stage == 0
        self._flat = zero_stage == 0 and self._bfloat16
        self._model = model
        self._trainable = {n: p for n, p in model.named_parameters() if p.requires_grad}
        # Remembered, because at ZeRO 3 a parameter is empty while nobody uses it.
        self._shapes = {name: tuple(parameter.shape) for name, parameter in self._trainable.items()}
        adamw = {"lr": learning_rate, "betas": betas, "weight_decay": weight_decay}
        self._deepspeed = self._initialize(adamw, fused=device_type == "cuda" or offload != "none")
        self._optimizer: torch.optim.Optimizer = self._deepspeed.basic_optimizer
        _lay_out_state(self._optimizer, self._masters_by_group())
        self._link_state()
        self._boundary = False
        self._whole = False
        self._buffers: list[Tensor] = []
        self._serial = 0

    def _initialize(self, adamw: dict[str, Any], fused: bool) -> Any:
        import torch

        deepspeed = import_deepspeed()
        parameters = list(self._trainable.values())
        make: Any = FlatAdamW if self._flat else torch.optim.AdamW
        if not self._bfloat16:
            self._model.float()
        elif self._flat:
            for parameter in self._model.parameters():  # buffers keep their precision
                parameter.data = parameter.data.to(torch.bfloat16)
        with _banners_to_log():
            engine, *_ = deepspeed.initialize(
                model=self._model,
                model_parameters=parameters,
                # A callable, because the parameters move to the device in between.
                optimizer=lambda params: make(params, fused=fused, **adamw),
                config=self._config(sum(p.numel() for p in parameters)),
                dist_init_required=False,
            )
        return engine

    def _config(self, elements: int) -> dict[str, Any]:
        import torch.distributed

        clipping = 0.0 if self._own_clipping else self._max_grad_norm
        config: dict[str, Any] = {
            "train_micro_batch_size_per_gpu": 1,
            "gradient_accumulation_steps": 1,
            "train_batch_size": torch.distributed.get_world_size(),
            "gradient_clipping": clipping,
            "zero_optimization": _zero_section(self._zero_stage, elements, self._offload),
            "zero_allow_untested_optimizer": True,
            # Torch's own Adam updates offloaded masters: DeepSpeed's would have to be compiled.
            "zero_force_ds_cpu_optimizer": False,
            # Its throughput timer waits for the device in every update.
            "timers": {"throughput": {"enabled": False, "synchronized": False}},
        }
        if self._bfloat16 and not self._flat:
            config["bf16"] = {"enabled": True, "check_grad_overflow": True}
            config["data_types"] = {"grad_accum_dtype": "fp32"}
        return merged(config, self._extra)

    def _link_state(self) -> None:
        """Let DeepSpeed see the laid-out moments; it would do so itself in its first step."""
        link = getattr(self._deepspeed.optimizer, "_lazy_init_hp_params_optimizer_state", None)
        if link is not None:
            link()

    # -- what the loop trains with -------------------------------------------------------------

    @property
    def module(self) -> nn.Module:
        """Call this for training forwards: DeepSpeed hooks the backward pass to its outputs."""
        module: nn.Module = self._model if self._alone else self._deepspeed
        return module

    @property
    def _alone(self) -> bool:
        """Nothing is split and nobody is there to share with: torch's backward pass and our step are all
        there is to an update, and DeepSpeed's walks over all modules are spared."""
        return self._flat and self.world_size == 1

    @property
    def device(self) -> torch.device:
        """Where the weights are."""
        import torch

        return torch.device(self._deepspeed.device)

    @property
    def world_size(self) -> int:
        """Number of ranks."""
        return int(self._deepspeed.world_size)

    @property
    def rank(self) -> int:
        """This process's place among them; rank 0 writes."""
        return int(self._deepspeed.global_rank)

    def set_learning_rate(self, value: float) -> None:
        """Set the rate of the next update, in every parameter group.

        Raises:
            AdapterError: The value is negative or not finite.
        """
        if not (math.isfinite(value) and value >= 0):
            raise AdapterError(f"learning rate {value!r} refused: give a finite number >= 0")
        for group in self._deepspeed.optimizer.param_groups:
            group["lr"] = float(value)

    def learning_rate(self) -> float:
        """The rate that the next update will use, read from the optimizer itself.

        Raises:
            AdapterError: Parameter groups disagree, so somebody else wrote one.
        """
        rates = {float(group["lr"]) for group in self._optimizer.param_groups}
        if len(rates) != 1:
            raise AdapterError(
                f"parameter groups have different learning rates {sorted(rates)}: "
                "expected one; call set_learning_rate() and find who else writes it"
            )
        return rates.pop()

    def backward(self, loss: Tensor, *, last: bool) -> None:
        """Add this micro-batch's gradients; `last` says that `step()` comes next."""
        self._boundary = last
        if self._alone:
            loss.backward()
            self._flat_optimizer.gather()
            return
        self._deepspeed.set_gradient_accumulation_boundary(last)
        # DeepSpeed averages over ranks and our losses are already divided by the global count.
        scaled = loss * self.world_size if self.world_size > 1 else loss
        self._deepspeed.backward(scaled, scale_wrt_gas=False)

    @property
    def flat_optimizer(self) -> FlatAdamW | None:
        """The optimizer that gradients may be added to without `backward()`; None where DeepSpeed must see
        every backward pass."""
        return self._flat_optimizer if self._alone else None

    def added(self, *, last: bool) -> None:
        """Somebody has added a micro-batch's gradients to `flat_optimizer`; `last` as in `backward`."""
        self._boundary = last

    def step(self) -> StepResult:
        """Clip and apply the accumulated gradients, then drop them.

        Raises:
            TrainingError: No backward pass with `last=True` came before.
        """
        if not self._boundary:
            raise TrainingError("step() without gradients: expected backward(loss, last=True) just before it")
        self._boundary = False
        return self._own_step() if self._own_clipping else self._deepspeed_step()

    def _deepspeed_step(self) -> StepResult:
        import torch

        self._deepspeed.step()
        # A float (infinity) when the update was dropped, a tensor otherwise.
        norm = torch.as_tensor(self._deepspeed.get_global_grad_norm(), device=self.device)
        stepped = bool(self._deepspeed.was_step_applied())
        if not stepped:
            self._drop_gradients()  # with offloading DeepSpeed itself would keep them, for good
        return StepResult(grad_norm=norm, stepped=stepped)

    def _own_step(self) -> StepResult:
        import torch
        from torch.nn.utils import clip_grads_with_norm_, get_total_norm

        if self._flat and not self._alone:
            self._flat_optimizer.gather()  # DeepSpeed has summed the gradients over ranks
        parameters = [p for p in self._stepped() if p.grad is not None]
        norm = get_total_norm([p.grad for p in parameters if p.grad is not None])  # []
        if not torch.isfinite(norm):
            self._drop_gradients()
            return StepResult(grad_norm=norm, stepped=False)
        if self._max_grad_norm > 0:
            clip_grads_with_norm_(parameters, self._max_grad_norm, norm)
        (self._flat_optimizer if self._alone else self._deepspeed).step()
        return StepResult(grad_norm=norm, stepped=True)

    def _stepped(self) -> list[Tensor]:
        """What Adam sees at ZeRO 0: the parameters, or their one flat copy."""
        return [self._flat_optimizer.master] if self._flat else [*self._trainable.values()]

    @property
    def _flat_optimizer(self) -> FlatAdamW:
        assert isinstance(self._optimizer, FlatAdamW), "only ZeRO 0 in bfloat16 steps a flat copy"
        return self._optimizer

    # -- taking a rollout back -----------------------------------------------------------------

    def snapshot(self) -> Snapshot:
        """Copy weights, moments and step counts; the same buffers serve every call."""
        import torch

        live = self._live_tensors()
        if not self._buffers:
            self._buffers = _allocate_like(live)
        with torch.no_grad():
            torch._foreach_copy_(self._buffers, live)
        self._serial += 1
        return Snapshot(self._serial)

    def restore(self, snapshot: object) -> None:
        """Put a snapshot's values back in place and drop pending gradients.

        Raises:
            TrainingError: A later `snapshot()` has overwritten the buffers, or it is not ours.
        """
        import torch

        if snapshot != Snapshot(self._serial):
            raise TrainingError(
                f"cannot restore {snapshot!r}: expected the newest snapshot, number {self._serial};"
                " its buffers are reused, so restore before taking the next one"
            )
        with torch.no_grad():
            torch._foreach_copy_(self._live_tensors(), self._buffers)
        self._forget_gathered()
        self._drop_gradients()

    def _live_tensors(self) -> list[Tensor]:
        """Everything that an update changes on this rank, in a fixed order."""
        tensors = [self._part(p) for p in self._trainable.values()]
        known = {t.data_ptr() for t in tensors}
        for master in self._masters():
            if master.data_ptr() not in known:
                tensors.append(master.data)
            tensors.extend(self._optimizer.state[master][k] for k in ("step", *MOMENTS))
        return tensors

    def _part(self, parameter: Any) -> Tensor:
        """What this rank keeps of a parameter: all of it up to ZeRO 2."""
        part: Tensor = parameter.ds_tensor if self._zero_stage == 3 else parameter
        return part.data

    def _forget_gathered(self) -> None:
        """Small parameters stay gathered at ZeRO 3: their parts were written, so gather anew."""
        if self._zero_stage == 3:
            self._deepspeed.optimizer.parameter_offload.partition_all_parameters()

    def _drop_gradients(self) -> None:
        self._deepspeed.zero_grad()
        optimizer = self._deepspeed.optimizer
        if hasattr(optimizer, "zero_grad"):
            optimizer.zero_grad()
        if hasattr(optimizer, "all_grad_tensors"):
            _forget_accumulated(optimizer)
        self._boundary = False

    # -- weights for everybody -----------------------------------------------------------------

    @contextlib.contextmanager
    def whole_weights(self) -> Iterator[None]:
        """Inside, every rank can use the model alone, without its peers; a collective call.

        Up to ZeRO 2 that is always so. At ZeRO 3 the weights are gathered and DeepSpeed's hooks, which
        would give them back layer by layer, are taken off meanwhile. Do not train inside.
        """
        if self._zero_stage < 3 or self._whole:
            yield
            return
        from deepspeed.runtime.zero.stage3 import unwrap_model_for_generation

        self._whole = True
        try:
            with unwrap_model_for_generation(self._deepspeed):
                yield
        finally:
            self._whole = False

    # -- checkpoints ---------------------------------------------------------------------------

    def state_tensors(self, keep: bool = True) -> dict[str, Tensor]:
        """Weights and moments by parameter name, whole, float32, on the CPU; a collective call.

        Args:
            keep: False on ranks that only help to gather: they hold one tensor at a time.
        """
        tensors: dict[str, Tensor] = {}
        for index, (name, parameter) in enumerate(self._trainable.items()):
            for kind in ("model", *MOMENTS):
                value = self._read(index, parameter, kind)
                if keep:
                    tensors[f"{kind}/{name}"] = value
        return tensors

    def steps(self) -> int:
        """Updates that Adam has applied (skipped ones do not count)."""
        states = (self._optimizer.state[master]["step"] for master in self._masters())
        counts = {int(step.item()) for step in states}
        if len(counts) != 1:
            raise TrainingError(f"Adam's step counts differ between parameters: {sorted(counts)}")
        return counts.pop()

    def load_state(self, tensors: Mapping[str, Tensor], steps: int) -> None:
        """Continue from what `state_tensors()` and `steps()` gave, bit for bit.

        Raises:
            CheckpointError: A tensor is missing, left over, or of another shape.
        """
        known = getattr(tensors, "shapes", None)  # a file tells them without reading the tensors
        self.check_fit(known or {name: tuple(tensor.shape) for name, tensor in tensors.items()})
        for index, (name, parameter) in enumerate(self._trainable.items()):
            for kind in ("model", *MOMENTS):
                self._write(index, parameter, kind, tensors[f"{kind}/{name}"])
        for master in self._masters():
            self._optimizer.state[master]["step"].fill_(steps)
        self._forget_gathered()
        self._drop_gradients()

    def check_fit(self, found: Mapping[str, tuple[int, ...]]) -> None:
        """Raise `CheckpointError` unless these are the shapes of this engine's state."""
        wanted = {
            f"{kind}/{name}": self._shapes[name] for name in self._trainable for kind in ("model", *MOMENTS)
        }
        wrong = sorted(k for k in wanted.keys() | found.keys() if wanted.get(k) != found.get(k))
        if wrong:
            first = wrong[0]
            raise CheckpointError(
                f"optimizer state does not fit this model: {len(wrong)} tensors differ, first "
                f"{first!r}: found {found.get(first)}, expected {wanted.get(first)}; "
                "resume with the model that the checkpoint was made with"
            )

    def _read(self, index: int, parameter: Tensor, kind: str) -> Tensor:
        import torch
        from deepspeed.utils import safe_get_full_fp32_param, safe_get_full_optimizer_state

        with torch.no_grad():
            if self._zero_stage == 0:
                value = self._whole_master(index, kind)
            elif kind == "model":
                value = safe_get_full_fp32_param(parameter)
            else:
                value = safe_get_full_optimizer_state(parameter, kind)
            return value.detach().to("cpu", torch.float32, copy=True).contiguous()

    def _write(self, index: int, parameter: Tensor, kind: str, value: Tensor) -> None:
        import torch
        from deepspeed.utils import safe_set_full_fp32_param, safe_set_full_optimizer_state

        with torch.no_grad():
            if self._zero_stage == 3:
                self._write_part(parameter, kind, value)
                return
            value = value.to(parameter.device, torch.float32)
            if kind == "model":
                parameter.copy_(value)
            if self._zero_stage == 0:
                self._whole_master(index, kind).copy_(value)
            elif kind == "model":
                safe_set_full_fp32_param(parameter, value)
            else:
                safe_set_full_optimizer_state(parameter, value, kind)

    def _write_part(self, parameter: Any, kind: str, value: Tensor) -> None:
        """This rank's part of a whole value; the last rank's is filled up with zeros."""
        from deepspeed.utils import safe_set_local_fp32_param, safe_set_local_optimizer_state

        length = parameter.ds_tensor.numel()
        part = value.new_zeros(length * self.world_size)
        part[: value.numel()] = value.flatten()
        part = part[length * self.rank : length * (self.rank + 1)]
        if kind == "model":
            parameter.ds_tensor.data.copy_(part)
            safe_set_local_fp32_param(parameter, part)
        else:
            safe_set_local_optimizer_state(parameter, part, kind)

    def _whole_master(self, index: int, kind: str) -> Tensor:
        """ZeRO 0 keeps one unsplit master per parameter, in the same order, or all of them in a flat one."""
        if self._flat:
            return self._flat_optimizer.part(index, kind)
        master = self._masters()[index]
        if kind == "model":
            return master
        moment: Tensor = self._optimizer.state[master][kind]
        return moment

    def _masters(self) -> list[Tensor]:
        """The tensors that Adam updates on this rank."""
        return [master for group in self._masters_by_group() for master in group]

    def _masters_by_group(self) -> list[list[Tensor]]:
        """The same by the optimizer's parameter groups, which are empty at ZeRO 3 between steps."""
        groups = [list(group["params"]) for group in self._optimizer.param_groups]
        if self._zero_stage == 3:
            wrapper = self._deepspeed.optimizer
            for part, master in enumerate(wrapper.fp32_partitioned_groups_flat):
                groups[wrapper.sub_group_to_group_id[part]].append(master)
        return groups

    def close(self) -> None:
        """Give back DeepSpeed's hooks and buffers; the process group lives until exit."""
        self._buffers = []
        with _banners_to_log():
            self._deepspeed.destroy()


def _lay_out_state(optimizer: torch.optim.Optimizer, masters: list[list[Tensor]]) -> None:
    """Create Adam's state as Adam itself does, with no effect on the weights; then zero it."""
    import torch

    held = [(group["params"], group["lr"]) for group in optimizer.param_groups]
    every = [master for group in masters for master in group]
    gradients = [master.grad for master in every]  # buffers of DeepSpeed's when offloading
    for group, members in zip(optimizer.param_groups, masters, strict=True):
        group["params"], group["lr"] = members, 0.0
    for master in every:
        master.grad = torch.zeros_like(master)
    optimizer.step()
    for group, (parameters, rate) in zip(optimizer.param_groups, held, strict=True):
        group["params"], group["lr"] = parameters, rate
    for master, gradient in zip(every, gradients, strict=True):
        master.grad = gradient
        for value in optimizer.state[master].values():
            value.zero_()


def _allocate_like(live: list[Tensor]) -> list[Tensor]:
    """Buffers beside the live tensors, or in host memory when the device is full."""
    import torch

    try:
        return [torch.empty_like(tensor) for tensor in live]
    except torch.OutOfMemoryError:
        return [torch.empty_like(tensor, device="cpu") for tensor in live]


def _forget_accumulated(optimizer: Any) -> None:
    """ZeRO 1 and 2 sum reduced gradients in the optimizer itself, where `zero_grad()` leaves them."""
    for sums in (optimizer.averaged_gradients, optimizer.all_grad_tensors):
        sums.update(dict.fromkeys(sums))
    optimizer.micro_step_id = -1  # the next backward pass is an update's first
    optimizer.reset_cpu_buffers()


def _zero_section(stage: int, elements: int, offload: str) -> dict[str, Any]:
    bucket = min(max(elements, 2) + elements % 2, BUCKET_ELEMENTS)  # DeepSpeed wants an even size
    section: dict[str, Any] = {
        "stage": stage,
        "reduce_bucket_size": bucket,
        "allgather_bucket_size": bucket,
        "overlap_comm": False,
        "contiguous_gradients": stage == 3,
    }
    if offload != "none":
        section["offload_optimizer"] = {"device": "cpu", "pin_memory": _has_gpu()}
    if offload == "all":
        section["offload_param"] = {"device": "cpu", "pin_memory": _has_gpu()}
    return section


def _has_gpu() -> bool:
    import torch

    return torch.cuda.is_available()


def _check_choice(name: str, value: Any, known: tuple[Any, ...]) -> None:
    if value not in known:
        raise InputError(f"{name} {value!r} is not supported: use {', '.join(map(str, known))}")


def _is_bfloat16(dtype: str, device_type: str) -> bool:
    if dtype == "auto":
        return device_type == "cuda"
    if dtype not in ("float32", "bfloat16"):
        raise InputError(f"dtype {dtype!r} is unknown: use auto, float32 or bfloat16")
    return dtype == "bfloat16"


@contextlib.contextmanager
def _banners_to_log() -> Iterator[None]:
    """Some of DeepSpeed's classes print that they come and go; keep it for who debugs."""
    printed = io.StringIO()
    with contextlib.redirect_stdout(printed):
        yield
    if printed.getvalue():
        logging.getLogger(__name__).debug("%s", printed.getvalue())
