"""The policy-ratio histogram over a run as one picture: a column for each rollout, shaded by share.

MLflow shows PNG artifacts on a run's page. Drawn by matplotlib, which mlflow brings along, in the
feeder's process.
"""

from __future__ import annotations

import io
from collections.abc import Mapping, Sequence

import numpy as np

from autotune.metrics import RATIO_BINS, RATIO_LIMIT

LEAST_SHARE = 1e-4
"""Share of a rollout's tokens at which the shading begins."""


def ratio_shares(histograms: Mapping[int, Sequence[float]]) -> np.ndarray:
    """Histograms by rollout as shares of their tokens, [RATIO_BINS + 2, rollouts]; no tokens are no share."""
    counts = np.array([histograms[t] for t in sorted(histograms)], dtype=float).T
    return counts / np.maximum(counts.sum(axis=0), 1.0)


def ratio_edges() -> np.ndarray:
    """Edges of the bins of a policy-ratio histogram with its two overflow bins, [RATIO_BINS + 3]."""
    inner = np.geomspace(1 / RATIO_LIMIT, RATIO_LIMIT, RATIO_BINS + 1)
    step = inner[1] / inner[0]
    return np.concatenate(([inner[0] / step], inner, [inner[-1] * step]))


def policy_ratio_png(
    histograms: Mapping[int, Sequence[float]], clip: Mapping[int, tuple[float, float]]
) -> bytes:
    """A heat map with the clip range drawn in.

    Args:
        histograms: rollout -> counts of tokens, [RATIO_BINS + 2] as in `Snapshot.histograms`.
        clip: rollout -> (1 - clip_range_low, 1 + clip_range_high) in force there.
    """
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot
    from matplotlib.colors import LogNorm

    rollouts = sorted(histograms)
    figure, axes = pyplot.subplots(figsize=(9, 4), dpi=110, layout="constrained")
    shares = np.ma.masked_less(ratio_shares(histograms), LEAST_SHARE)
    across = np.append(np.array(rollouts) - 0.5, rollouts[-1] + 0.5)
    mesh = axes.pcolormesh(across, ratio_edges(), shares, norm=LogNorm(LEAST_SHARE, 1.0), cmap="viridis")
    for side in (0, 1):
        ends = [clip[t][side] for t in rollouts if t in clip]
        axes.step([t for t in rollouts if t in clip], ends, where="mid", color="#d62728", linewidth=1)
    axes.set(yscale="log", xlabel="rollout", ylabel="policy ratio", title="Policy ratio and clip range (red)")
    axes.set_yticks([1 / 8, 1 / 4, 1 / 2, 1, 2, 4, 8], ["1/8", "1/4", "1/2", "1", "2", "4", "8"])
    axes.minorticks_off()
    figure.colorbar(mesh, label="share of tokens")
    target = io.BytesIO()
    figure.savefig(target, format="png")
    pyplot.close(figure)
    return target.getvalue()
