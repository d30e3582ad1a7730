"""TRL's GRPOTrainer: two lines in the user's script.

    from autotune.hooks.trl import AutotuneCallback
    trainer.add_callback(AutotuneCallback(trainer, "control.yaml"))

    declared    what is read, what is set, which versions were tested; loads nothing of TRL
    phases      micro-steps, updates and rollouts: TRL's batch arithmetic in our words
    knobs       where each knob lives in the running trainer, and when it may move
    meter       the hook on the loss: policy ratios and drift, which TRL does not log
    weights     the weights from before a rollout's updates, kept for a veto
    adapter     facts, reading, applying
    callback    the callback itself: logs regrouped into rollouts, saving, resuming
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from autotune.hooks.trl.callback import AutotuneCallback

__all__ = ["AutotuneCallback"]


def __getattr__(name: str) -> Any:
    """Torch, transformers and TRL are loaded when the callback is asked for, and not before."""
    if name == "AutotuneCallback":
        from autotune.hooks.trl.callback import AutotuneCallback

        return AutotuneCallback
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
