"""The picture of the policy ratio, and the machine's samples as points."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest

from autotune.metrics import RATIO_BINS, RATIO_LIMIT
from autotune.tracking.figures import policy_ratio_png, ratio_edges, ratio_shares
from autotune.tracking.system import FILE, Sampler, sample_points


def test_shares_of_each_rollout_sum_to_one() -> None:
    counts = {3: [1.0] * (RATIO_BINS + 2), 1: [0.0] * (RATIO_BINS + 1) + [5.0], 2: [0.0] * (RATIO_BINS + 2)}
    shares = ratio_shares(counts)
    assert shares.sum(axis=0) == pytest.approx([1.0, 0.0, 1.0])  # rollouts 1, 2, 3
    assert shares[-1, 0] == 1.0


def test_edges_are_the_ones_that_the_trainer_counts_by() -> None:
    edges = ratio_edges()
    assert len(edges) == RATIO_BINS + 3
    assert (edges[1], edges[-2]) == pytest.approx((1 / RATIO_LIMIT, RATIO_LIMIT))
    assert edges[RATIO_BINS // 2 + 1] == pytest.approx(1.0)
    assert np.diff(np.log(edges)) == pytest.approx(np.log(edges[1] / edges[0]))


def test_shade_of_a_rollout_stands_where_its_tokens_are(tmp_path: Path) -> None:
    image = pytest.importorskip("matplotlib.image")
    low = [0.0] * (RATIO_BINS + 2)
    low[8] = 100.0
    high = [0.0] * (RATIO_BINS + 2)
    high[-8] = 100.0
    path = tmp_path / "ratio.png"
    path.write_bytes(policy_ratio_png({0: low, 1: high}, {0: (0.8, 1.2), 1: (0.8, 1.2)}))
    pixels = image.imread(path)[:, :800, :3]
    shaded = np.abs(pixels - np.array([0.993, 0.906, 0.144])).sum(axis=2) < 0.05  # viridis at share 1
    rows, columns = np.nonzero(shaded)
    left, right = columns < columns.min() + 50, columns > columns.max() - 50
    assert rows[left].min() > rows[right].max()  # rollout 0 has low ratios, rollout 1 high ones


def test_machine_is_sampled_into_a_file_under_mlflows_names(tmp_path: Path) -> None:
    pytest.importorskip("mlflow.system_metrics.metrics.cpu_monitor")
    sampler = Sampler(tmp_path, 0.2)
    sampler.start()
    while not (tmp_path / FILE).exists() and sampler.is_alive():
        sampler.join(0.05)
    sampler.stop()
    lines = [json.loads(line) for line in (tmp_path / FILE).read_text().splitlines()]
    start = lines[0]["at"] - 5.0
    points = {p.name: p for p in sample_points(lines[0], 7, start)}
    memory = points["system/system_memory_usage_percentage"]
    assert 0 < memory.value < 100
    assert (memory.step, memory.after) == (7, pytest.approx(5.0))
    assert "system/cpu_utilization_percentage" in points
