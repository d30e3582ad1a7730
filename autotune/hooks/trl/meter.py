"""The hook on the loss: what the loss computes anyway is measured on the way past.

TRL logs neither the policy ratio nor the drift. Both follow from the log-probs that `_compute_loss` asks
for, so the hook stands between the two methods: it keeps the detached result of one and reads the inputs
of the other. Sums are our own trainer's (`autotune.trainer.meters`): the same words, the same estimators.

The drift after the last update needs weights that no training pass has seen: one forward pass without
gradient over the rollout's first micro batch, whose log-probs under the sampling weights are known from the
training pass. With active dropout these two could not be compared, and `kl_step` is not offered.

Nothing in here touches the loss, a gradient or a random stream; a test holds all three bit for bit. What
fails in here takes the hook out and leaves the training alone.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import torch
from torch import Tensor

from autotune.trainer.meters import Meters

LENGTHS = (("response_length_p50", 0.5), ("response_length_p95", 0.95), ("response_length_p995", 0.995))


class AcceleratedRanks:
    """`autotune.trainer.ranks.Ranks`, as far as meters need it, over the host's accelerator."""

    def __init__(self, accelerator: Any) -> None:
        self.accelerator = accelerator
        self.size = int(accelerator.num_processes)

    def sum(self, tensor: Tensor) -> Tensor:
        return tensor if self.size == 1 else self.accelerator.reduce(tensor, reduction="sum")


class LossHook:
    """Measures every training micro-step of a `GRPOTrainer`."""

    def __init__(self, trainer: Any) -> None:
        self.trainer = trainer
        self.ranks = AcceleratedRanks(trainer.accelerator)
        self.failed = ""
        """Why it was taken out, or empty."""
        self._plain: dict[str, Callable[..., Any]] = {}
        self._inside = False
        self._seen: tuple[tuple[Any, ...], dict[str, Any], Tensor] | None = None
        self._meters: Meters | None = None
        self._forget()

    def _forget(self) -> None:
        self._step = 0
        self._lengths: list[Tensor] = []
        self._probe: tuple[tuple[Any, ...], dict[str, Any], Tensor, Tensor] | None = None

    # -- in and out --------------------------------------------------------------------------------

    def install(self) -> None:
        """Stand between the two methods of this one trainer."""
        names = ("_compute_loss", "_get_per_token_logps_and_entropies")
        self._plain = {name: getattr(self.trainer, name) for name in names}
        self.trainer._compute_loss = self._compute_loss
        self.trainer._get_per_token_logps_and_entropies = self._log_probs

    def remove(self) -> None:
        """Leave the trainer as it was found."""
        for name in self._plain:
            if getattr(self.trainer, name) in (self._compute_loss, self._log_probs):
                delattr(self.trainer, name)
        self._meters, self._seen = None, None
        self._forget()

    def start(self, updates: int, accumulation: int) -> None:
        """A new rollout of `updates` updates of `accumulation` micro-steps."""
        t = self.trainer
        ratio = "sequence" if t.importance_sampling_level == "sequence" else "token"
        clip = (float(t.epsilon_low), float(t.epsilon_high))
        self._meters = Meters(updates, *clip, False, t.accelerator.device, ratio=ratio)
        self._updates, self._accumulation, self._ratio = updates, accumulation, ratio
        self._forget()

    # -- on the way past ---------------------------------------------------------------------------

    def _log_probs(self, *args: Any, **kwargs: Any) -> Any:
        found = self._plain["_get_per_token_logps_and_entropies"](*args, **kwargs)
        if self._inside:
            self._seen = (args, kwargs, found[0].detach())
        return found

    def _compute_loss(self, model: Any, inputs: Any) -> Any:
        self._inside = bool(self.trainer.model.training) and self._meters is not None and not self.failed
        try:
            loss = self._plain["_compute_loss"](model, inputs)
        finally:
            watching, self._inside = self._inside, False
        if watching:
            try:
                self._measure(inputs, loss.detach())
            except Exception as failure:
                self.failed = f"{type(failure).__name__}: {failure}"
        return loss

    @torch.no_grad()
    def _measure(self, inputs: Any, loss: Tensor) -> None:
        assert self._meters is not None and self._seen is not None
        args, kwargs, log_probs = self._seen
        self._seen = None
        mask = inputs["completion_mask"].bool()  # [B, R]
        self._lengths.append(mask.sum(dim=1))
        if "tool_mask" in inputs:
            mask = mask & inputs["tool_mask"].bool()
        old = inputs.get("old_per_token_logps")
        old = log_probs if old is None else old
        update = min(self._step // self._accumulation, self._updates - 1)
        parts = (log_probs, old, None, inputs["advantages"], mask, loss / self.ranks.size)
        self._meters.add_micro_batch(update, *parts)
        if (sampler := inputs.get("sampling_per_token_logps")) is not None and update == 0:
            scored = mask & ~sampler.isnan()
            self._meters.add_sampled(old, torch.zeros_like(old), None, sampler.nan_to_num(), scored)
        if self._step == 0:
            self._probe = (args, kwargs, log_probs, mask)
        self._step += 1

    # -- at the end of a rollout -------------------------------------------------------------------

    def measure_drift(self) -> None:
        """After the last update, before anything else happens to the weights."""
        if self._probe is None or self._meters is None or self.failed:
            return
        args, kwargs, before, mask = self._probe
        try:
            with torch.no_grad(), _same_random_numbers(self.trainer), self._no_checkpointing():
                model = self.trainer.model if args and not self._sharded() else args[0]
                after = self._plain["_get_per_token_logps_and_entropies"](model, *args[1:], **kwargs)[0]
            self._meters.add_after_updates(after, before, mask)
        except Exception as failure:
            self.failed = f"{type(failure).__name__}: {failure}"
        self._probe = None

    def _sharded(self) -> bool:
        return bool(self.trainer.is_fsdp_enabled or self.trainer.is_deepspeed_enabled)

    def _no_checkpointing(self) -> contextlib.AbstractContextManager[Any]:
        from trl.models.utils import disable_gradient_checkpointing

        settings = self.trainer.args.gradient_checkpointing_kwargs
        context: contextlib.AbstractContextManager[Any] = disable_gradient_checkpointing(
            self.trainer.model, settings
        )
        return context

    def finish(
        self,
    ) -> tuple[dict[str, float], dict[str, list[float]], dict[str, list[float]]]:
        """(scalars, per update, histograms) of the rollout, over all ranks; the meters are used up."""
        if self._meters is None or self.failed or not self._step:
            return {}, {}, {}
        meters, self._meters = self._meters, None
        lengths = torch.cat(self._lengths[: self._generated()])
        if self.ranks.size > 1:
            lengths = self.trainer.accelerator.gather(lengths)
        found = meters.finish(self.ranks)  # type: ignore[arg-type]
        scalars = {k: v for k, v in found.scalars.items() if k not in ("entropy", "grad_norm")}
        if not self.trainer.mask_truncated_completions:
            values = lengths.cpu().numpy()
            scalars |= {name: float(np.quantile(values, q)) for name, q in LENGTHS}
        per_update = {k: v for k, v in found.per_update.items() if k != "grad_norm"}
        return scalars, per_update, found.histograms

    def _generated(self) -> int:
        """Micro-steps of the first pass over the data: later passes see the same completions."""
        return max(self._step // int(self.trainer.num_iterations), 1)


def drops_out(model: Any) -> bool:
    """Whether a training pass of this model draws random numbers for dropout."""
    if any(isinstance(m, torch.nn.Dropout) and m.p > 0 for m in model.modules()):
        return True
    functional = getattr(getattr(model, "config", None), "attention_dropout", 0.0)
    return isinstance(functional, float) and functional > 0


@contextlib.contextmanager
def _same_random_numbers(trainer: Any) -> Iterator[None]:
    device = trainer.accelerator.device
    devices = [device] if device.type == "cuda" else []
    with torch.random.fork_rng(devices=devices):
        yield
