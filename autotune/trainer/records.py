"""What the trainer says about one finished rollout: plain numbers, no tensors, nothing judged."""

from __future__ import annotations

from dataclasses import dataclass, field


@dataclass(frozen=True, slots=True)
class RolloutRecord:
    """One rollout as it was measured; an adapter turns it into a snapshot."""

    rollout: int
    knobs: dict[str, float]
    """The vector that this rollout's data and updates were made under."""
    epoch: int
    """Config epoch of that vector."""
    scalars: dict[str, float | None]
    """Canonical metric name -> value; None where this rollout had nothing to measure."""
    per_update: dict[str, list[float]] = field(default_factory=dict)
    """Canonical metric name -> one value per update, [U]."""
    histograms: dict[str, list[float]] = field(default_factory=dict)
    """`policy_ratio` (all updates) and `policy_ratio_last` -> counts, [RATIO_BINS + 2]."""
    times: dict[str, float] = field(default_factory=dict)
    """Phase -> seconds: rollout, old_log_prob, reference, update, kl_step_forward, total, eval."""
