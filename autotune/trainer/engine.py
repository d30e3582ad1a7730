"""One DeepSpeed engine around one causal language model.

The loop says how many backward passes make an update, what the learning rate is and when a rollout
must be taken back; this file turns that into DeepSpeed calls. CPU (float32, gloo) and GPU (bfloat16
with float32 masters, nccl) run the same lines. What the file promises, and how:

* *The loop owns the accumulation boundary.* `backward(loss, last=...)` sets it each time, and
  DeepSpeed's own count of micro-batches is configured to 1 and never used. Gradients are **summed**
  over ranks, so a loss divided by the global number of tokens is right on any number of them.
* *Non-finite gradients reach nothing.* DeepSpeed drops such an update at ZeRO 1 and in bfloat16;
  in float32 at ZeRO 0 it has neither check nor gradient norm: there norm, check and clipping are
  ours.
* *The optimizer's state exists from the start.* One step with zero gradients at learning rate 0
  lets Adam lay out its own state, which is then zeroed. So a snapshot before the first update is
  like any other.
* *Nothing is pickled.* State leaves and enters as plain named tensors (`state_tensors`,
  `load_state`); DeepSpeed's checkpoint calls, which unpickle, are not used.

Where DeepSpeed keeps what (the only knowledge of its inside that this file needs): the optimizer's
`param_groups` always hold the tensors that Adam updates ("masters"). At ZeRO 0 in float32 these are
the model's parameters; else they are float32 copies, at ZeRO 1 flat and split over the ranks.
"""

from __future__ import annotations

import atexit
import contextlib
import io
import logging
import math
import os
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from autotune.errors import AdapterError, CheckpointError, InputError, TrainingError

if TYPE_CHECKING:
    import torch
    from torch import Tensor, nn

MOMENTS = ("exp_avg", "exp_avg_sq")
"""Adam's two running means, as torch names them."""

ZERO_STAGES = (0, 1)
"""Stages whose guards and resume are tested here."""

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
        zero_stage: DeepSpeed's ZeRO stage, 0 or 1.
        learning_rate: First value; `set_learning_rate` changes it before any update.
        betas: AdamW's decay rates of the two moments.
        weight_decay: AdamW's decoupled weight decay.
        max_grad_norm: Gradients are scaled down to this global norm; 0 turns clipping off.
        dtype: `float32`, `bfloat16`, or `auto`: float32 on CPU, bfloat16 on GPU.
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
    ) -> None:
        if zero_stage not in ZERO_STAGES:
            raise InputError(f"zero_stage {zero_stage} is not supported: use 0 or 1")
        device_type = _start_distributed()
        self._bfloat16 = _is_bfloat16(dtype, device_type)
        self._zero_stage = zero_stage
        self._max_grad_norm = max_grad_norm
        # DeepSpeed would clip without saying what the norm was, see the module's docstring.
        self._own_clipping = zero_stage == 0 and not self._bfloat16
        self._model = model
        self._trainable = {n: p for n, p in model.named_parameters() if p.requires_grad}
        adamw = {"lr": learning_rate, "betas": betas, "weight_decay": weight_decay}
        self._deepspeed = self._initialize(adamw, fused=device_type == "cuda")
        self._optimizer: torch.optim.Optimizer = self._deepspeed.basic_optimizer
        _lay_out_state(self._optimizer)
        self._link_state()
        self._boundary = False
        self._buffers: list[Tensor] = []
        self._serial = 0

    def _initialize(self, adamw: dict[str, Any], fused: bool) -> Any:
        import deepspeed
        import torch

        parameters = list(self._trainable.values())
        if not self._bfloat16:
            self._model.float()
        with _local_rank(), _banners_to_log():
            engine, *_ = deepspeed.initialize(
                model=self._model,
                model_parameters=parameters,
                # A callable, because the parameters move to the device in between.
                optimizer=lambda params: torch.optim.AdamW(params, fused=fused, **adamw),
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
            "zero_optimization": _zero_section(self._zero_stage, elements),
            "zero_allow_untested_optimizer": True,
            # Its throughput timer waits for the device in every update.
            "timers": {"throughput": {"enabled": False, "synchronized": False}},
        }
        if self._bfloat16:
            config["bf16"] = {"enabled": True, "check_grad_overflow": True}
            # At ZeRO 0 DeepSpeed can only accumulate in the parameters' own type.
            accumulate = "fp32" if self._zero_stage else "bf16"
            config["data_types"] = {"grad_accum_dtype": accumulate}
        return config

    def _link_state(self) -> None:
        """Let DeepSpeed see the laid-out moments; it would do so itself in its first step."""
        link = getattr(self._deepspeed.optimizer, "_lazy_init_hp_params_optimizer_state", None)
        if link is not None:
            link()

    # -- what the loop trains with -------------------------------------------------------------

    @property
    def module(self) -> nn.Module:
        """Call this for training forwards: DeepSpeed hooks the backward pass to its outputs."""
        module: nn.Module = self._deepspeed
        return module

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
        self._deepspeed.set_gradient_accumulation_boundary(last)
        # DeepSpeed averages over ranks and our losses are already divided by the global count.
        scaled = loss * self.world_size if self.world_size > 1 else loss
        self._deepspeed.backward(scaled, scale_wrt_gas=False)
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
        return StepResult(grad_norm=norm, stepped=bool(self._deepspeed.was_step_applied()))

    def _own_step(self) -> StepResult:
        import torch
        from torch.nn.utils import clip_grads_with_norm_, get_total_norm

        parameters = [p for p in self._trainable.values() if p.grad is not None]
        norm = get_total_norm([p.grad for p in parameters if p.grad is not None])  # []
        if not torch.isfinite(norm):
            self._deepspeed.zero_grad()
            return StepResult(grad_norm=norm, stepped=False)
        if self._max_grad_norm > 0:
            clip_grads_with_norm_(parameters, self._max_grad_norm, norm)
        self._deepspeed.step()
        return StepResult(grad_norm=norm, stepped=True)

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
        self._drop_gradients()

    def _live_tensors(self) -> list[Tensor]:
        """Everything that an update changes on this rank, in a fixed order."""
        tensors = [p.data for p in self._trainable.values()]
        known = {t.data_ptr() for t in tensors}
        for master in _masters(self._optimizer):
            if master.data_ptr() not in known:
                tensors.append(master.data)
            tensors.extend(self._optimizer.state[master][k] for k in ("step", *MOMENTS))
        return tensors

    def _drop_gradients(self) -> None:
        self._deepspeed.zero_grad()
        if hasattr(self._deepspeed.optimizer, "zero_grad"):
            self._deepspeed.optimizer.zero_grad()
        self._boundary = False

    # -- checkpoints ---------------------------------------------------------------------------

    def state_tensors(self) -> dict[str, Tensor]:
        """Weights and moments by parameter name, whole, float32, on the CPU; a collective call."""
        tensors: dict[str, Tensor] = {}
        for index, (name, parameter) in enumerate(self._trainable.items()):
            for kind in ("model", *MOMENTS):
                tensors[f"{kind}/{name}"] = self._read(index, parameter, kind)
        return tensors

    def steps(self) -> int:
        """Updates that Adam has applied (skipped ones do not count)."""
        states = (self._optimizer.state[master]["step"] for master in _masters(self._optimizer))
        counts = {int(step.item()) for step in states}
        if len(counts) != 1:
            raise TrainingError(f"Adam's step counts differ between parameters: {sorted(counts)}")
        return counts.pop()

    def load_state(self, tensors: dict[str, Tensor], steps: int) -> None:
        """Continue from what `state_tensors()` and `steps()` gave, bit for bit.

        Raises:
            CheckpointError: A tensor is missing, left over, or of another shape.
        """
        self._check_fit(tensors)
        for index, (name, parameter) in enumerate(self._trainable.items()):
            for kind in ("model", *MOMENTS):
                self._write(index, parameter, kind, tensors[f"{kind}/{name}"])
        for master in _masters(self._optimizer):
            self._optimizer.state[master]["step"].fill_(steps)
        self._drop_gradients()

    def _check_fit(self, tensors: dict[str, Tensor]) -> None:
        wanted = {
            f"{kind}/{name}": tuple(parameter.shape)
            for name, parameter in self._trainable.items()
            for kind in ("model", *MOMENTS)
        }
        found = {name: tuple(tensor.shape) for name, tensor in tensors.items()}
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
                value = self._whole(index, kind)
            elif kind == "model":
                value = safe_get_full_fp32_param(parameter)
            else:
                value = safe_get_full_optimizer_state(parameter, kind)
            return value.detach().to("cpu", torch.float32, copy=True).contiguous()

    def _write(self, index: int, parameter: Tensor, kind: str, value: Tensor) -> None:
        import torch
        from deepspeed.utils import safe_set_full_fp32_param, safe_set_full_optimizer_state

        with torch.no_grad():
            value = value.to(parameter.device, torch.float32)
            if kind == "model":
                parameter.copy_(value)
            if self._zero_stage == 0:
                self._whole(index, kind).copy_(value)
            elif kind == "model":
                safe_set_full_fp32_param(parameter, value)
            else:
                safe_set_full_optimizer_state(parameter, value, kind)

    def _whole(self, index: int, kind: str) -> Tensor:
        """ZeRO 0 keeps one unsplit master per parameter, in the same order."""
        master = _masters(self._optimizer)[index]
        if kind == "model":
            return master
        moment: Tensor = self._optimizer.state[master][kind]
        return moment

    def close(self) -> None:
        """Give back DeepSpeed's hooks and buffers; the process group lives until exit."""
        self._buffers = []
        with _banners_to_log():
            self._deepspeed.destroy()


def _masters(optimizer: torch.optim.Optimizer) -> list[Tensor]:
    return [parameter for group in optimizer.param_groups for parameter in group["params"]]


def _lay_out_state(optimizer: torch.optim.Optimizer) -> None:
    """Create Adam's state as Adam itself does, with no effect on the weights; then zero it."""
    rates = [group["lr"] for group in optimizer.param_groups]
    for master in _masters(optimizer):
        master.grad = master.new_zeros(master.shape)
    for group in optimizer.param_groups:
        group["lr"] = 0.0
    optimizer.step()
    for group, rate in zip(optimizer.param_groups, rates, strict=True):
        group["lr"] = rate
    for master in _masters(optimizer):
        master.grad = None
        for value in optimizer.state[master].values():
            value.zero_()


def _allocate_like(live: list[Tensor]) -> list[Tensor]:
    """Buffers beside the live tensors, or in host memory when the device is full."""
    import torch

    try:
        return [torch.empty_like(tensor) for tensor in live]
    except torch.OutOfMemoryError:
        return [torch.empty_like(tensor, device="cpu") for tensor in live]


def _zero_section(stage: int, elements: int) -> dict[str, Any]:
    bucket = min(max(elements, 2) + elements % 2, BUCKET_ELEMENTS)  # DeepSpeed wants an even size
    return {
        "stage": stage,
        "reduce_bucket_size": bucket,
        "allgather_bucket_size": bucket,
        "overlap_comm": False,
        "contiguous_gradients": False,
    }


def _is_bfloat16(dtype: str, device_type: str) -> bool:
    if dtype == "auto":
        return device_type == "cuda"
    if dtype not in ("float32", "bfloat16"):
        raise InputError(f"dtype {dtype!r} is unknown: use auto, float32 or bfloat16")
    return dtype == "bfloat16"


# -- starting DeepSpeed ----------------------------------------------------------------------


def _start_distributed() -> str:
    """Bring up the process group once per process, quietly; return the device type."""
    import torch.distributed as dist

    deepspeed = _import_quietly()
    from deepspeed.accelerator import get_accelerator

    _skip_shared_memory_op()
    device_type = str(get_accelerator().device_name())
    backend = "nccl" if device_type == "cuda" else "gloo"
    if not dist.is_initialized():
        if "RANK" in os.environ and "WORLD_SIZE" in os.environ:
            get_accelerator().set_device(int(os.environ.get("LOCAL_RANK", "0")))
            dist.init_process_group(backend)
        else:
            # One process, nobody to meet: a store inside the process needs no address and no port.
            dist.init_process_group(backend, store=dist.HashStore(), rank=0, world_size=1)
        atexit.register(_leave_process_group)
    with _local_rank():
        deepspeed.init_distributed(dist_backend=backend, auto_mpi_discovery=False, verbose=False)
    return device_type


def _leave_process_group() -> None:
    import torch.distributed as dist

    if dist.is_initialized():
        dist.destroy_process_group()


def _import_quietly() -> Any:
    """Import DeepSpeed, its log at WARNING and on stderr: stdout belongs to the run's screen."""
    before = logging.root.manager.disable
    logging.disable(logging.WARNING)  # that no GPU was found is no news here
    try:
        import deepspeed
    finally:
        logging.disable(before)
    deepspeed.logger.setLevel(logging.WARNING)
    for handler in deepspeed.logger.handlers:
        if type(handler) is logging.StreamHandler:  # its own, not one that a host has added
            handler.setStream(sys.stderr)
    return deepspeed


@contextlib.contextmanager
def _banners_to_log() -> Iterator[None]:
    """Some of DeepSpeed's classes print that they come and go; keep it for who debugs."""
    printed = io.StringIO()
    with contextlib.redirect_stdout(printed):
        yield
    if printed.getvalue():
        logging.getLogger(__name__).debug("%s", printed.getvalue())


def _skip_shared_memory_op() -> None:
    """Tell DeepSpeed that its C++ shared-memory op is not to be built.

    On CPU its communication backend compiles that op at start (minutes, and an error without a C++
    compiler). Only the all-reduce of tensor-parallel *inference* uses it; training collectives go
    through gloo, so nothing that this engine does becomes slower. DeepSpeed looks an op up in
    `deepspeed.ops.__compatible_ops__` (built at first access by probing every op, compilers
    included) and reads that table nowhere else; an op missing from it counts as incompatible.
    """
    import deepspeed.ops

    table = vars(deepspeed.ops).setdefault("__compatible_ops__", {})
    table["deepspeed_shm_comm"] = False


@contextlib.contextmanager
def _local_rank() -> Iterator[None]:
    """DeepSpeed insists on LOCAL_RANK, which only a launcher sets."""
    if "LOCAL_RANK" in os.environ:
        yield
        return
    os.environ["LOCAL_RANK"] = "0"
    try:
        yield
    finally:
        del os.environ["LOCAL_RANK"]
