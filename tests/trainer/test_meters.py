"""Every meter against a plain recomputation from log-probs in numpy, and the single copy."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from autotune.metrics import RATIO_BINS, RATIO_LIMIT
from autotune.trainer.meters import Meters, ratio_bins
from autotune.trainer.ranks import Ranks

LOW, HIGH = 0.2, 0.3
CPU = torch.device("cpu")
N, R, U = 24, 5, 3


@pytest.fixture
def data() -> dict[str, torch.Tensor]:
    """Log-probs with wide ratios, ragged lengths, and NaN where there is no token."""
    g = torch.Generator().manual_seed(4)
    mask = torch.arange(R)[None, :] < torch.randint(1, R + 1, (N, 1), generator=g)
    old = -torch.rand(N, R, generator=g) * 3
    tensors = {
        "old": old,
        "new": old + torch.randn(N, R, generator=g) * 0.8,
        "ref": old + torch.randn(N, R, generator=g) * 0.5,
        "sampler": old + torch.randn(N, R, generator=g) * 0.01,
        "entropy": torch.rand(N, R, generator=g),
    }
    filled = {k: v.masked_fill(~mask, torch.nan) for k, v in tensors.items()}
    advantages = torch.randn(N, generator=g).masked_fill(torch.arange(N) % 5 == 0, 0.0)
    return {**filled, "mask": mask, "advantages": advantages}


def fill(data: dict[str, torch.Tensor], micro: int) -> Meters:
    """Three updates of eight samples each, in micro batches."""
    meters = Meters(U, LOW, HIGH, True, CPU)
    meters.add_sampled(data["old"], data["entropy"], data["ref"], data["sampler"], data["mask"])
    for update, rows in enumerate(torch.arange(N).split(N // U)):
        for index in rows.split(micro):
            part = {k: v[index] for k, v in data.items()}
            meters.add_micro_batch(
                update,
                part["new"],
                part["old"],
                part["ref"],
                part["advantages"],
                part["mask"],
                torch.tensor(0.25),
            )
        meters.add_step(update, torch.tensor(float(update + 1)), 1)
    meters.add_after_updates(data["new"][:6], data["old"][:6], data["mask"][:6])
    return meters


def k3(d: np.ndarray) -> np.ndarray:
    return np.exp(d) - 1 - d


def recompute(data: dict[str, torch.Tensor], rows: slice) -> dict[str, Any]:
    """Means over the tokens of some samples, from the definitions."""
    x = {k: v.numpy().astype(np.float64) for k, v in data.items()}
    mask = data["mask"].numpy()[rows]
    new, old, ref = (x[k][rows][mask] for k in ("new", "old", "ref"))
    a = np.broadcast_to(x["advantages"][rows][:, None], mask.shape)[mask]
    r = np.exp(new - old)
    edges = np.exp(np.linspace(-np.log(RATIO_LIMIT), np.log(RATIO_LIMIT), RATIO_BINS + 1))
    inner, _ = np.histogram(r, edges)
    # what the objective loses to the clip: minimum of both branches is the clipped one, and differs
    plain, clipped = r * a, np.clip(r, 1 - LOW, 1 + HIGH) * a
    return {
        "clip_ratio": np.mean(clipped < plain),
        "ratio_low": np.mean(r < 1 - LOW),
        "ratio_in": np.mean((r >= 1 - LOW) & (r <= 1 + HIGH)),
        "ratio_high": np.mean(r > 1 + HIGH),
        "kl_step": np.mean(k3(new - old)),
        "kl_ref": np.mean(k3(ref - new)),
        "histogram": [np.sum(r < 1 / RATIO_LIMIT), *inner, np.sum(r >= RATIO_LIMIT)],
    }


@pytest.mark.parametrize("micro", [1, 3, 8])
def test_equal_to_a_plain_recomputation(data: dict[str, torch.Tensor], micro: int) -> None:
    got = fill(data, micro).finish(Ranks())
    updates = [recompute(data, slice(8 * u, 8 * u + 8)) for u in range(U)]
    for name in ("clip_ratio", "ratio_low", "ratio_in", "ratio_high", "kl_step", "kl_ref"):
        expected = [update[name] for update in updates]
        assert got.per_update[name] == pytest.approx(expected, rel=1e-5), name
    everything = recompute(data, slice(None))
    for name in ("clip_ratio", "ratio_low", "ratio_in", "ratio_high"):
        assert got.scalars[name] == pytest.approx(everything[name], rel=1e-6), name
    assert everything["clip_ratio"] > 0.1  # the data does exercise the clip
    assert got.histograms["policy_ratio"] == everything["histogram"]
    assert got.histograms["policy_ratio_last"] == updates[-1]["histogram"]
    assert sum(got.histograms["policy_ratio"]) == data["mask"].sum()


def test_rollout_wide_means(data: dict[str, torch.Tensor]) -> None:
    got = fill(data, 8).finish(Ranks()).scalars
    mask = data["mask"].numpy()
    x = {k: v.numpy().astype(np.float64)[mask] for k, v in data.items() if v.shape == (N, R)}
    assert got["kl_ref"] == pytest.approx(np.mean(k3(x["ref"] - x["old"])), rel=1e-5)
    assert got["kl_mismatch"] == pytest.approx(np.mean(k3(x["old"] - x["sampler"])), rel=1e-3)
    assert got["entropy"] == pytest.approx(np.mean(x["entropy"]), rel=1e-6)
    assert got["kl_step"] == pytest.approx(recompute(data, slice(6))["kl_step"], rel=1e-5)
    assert got["grad_norm"] == 2.0
    assert got["loss"] == pytest.approx(0.25)


def test_shares_add_up(data: dict[str, torch.Tensor]) -> None:
    got = fill(data, 8).finish(Ranks()).scalars
    assert got["ratio_low"] + got["ratio_in"] + got["ratio_high"] == pytest.approx(1.0)


def test_a_drift_near_zero_is_never_negative() -> None:
    """In float32 exp(d) - 1 - d is off by 6e-8 and would read as a KL out of range."""
    generator = torch.Generator().manual_seed(0)
    old = -torch.rand(400, 1, generator=generator) * 1e-3
    new = old + torch.randn(400, 1, generator=generator) * 1e-6
    assert (torch.exp(new - old) - 1 - (new - old)).min() < 0
    meters = Meters(1, LOW, HIGH, False, CPU)
    ones = torch.ones(400, 1, dtype=torch.bool)
    meters.add_micro_batch(0, new, old, None, torch.ones(400), ones, torch.tensor(0.0))
    assert 0 <= meters.finish(Ranks()).per_update["kl_step"][0] < 1e-11


def test_without_reference_or_tokens() -> None:
    meters = Meters(1, LOW, HIGH, False, CPU)
    got = meters.finish(Ranks())
    assert "kl_ref" not in got.scalars | got.per_update
    assert "kl_mismatch" not in got.scalars
    assert np.isnan(got.scalars["kl_step"])


def test_mismatch_is_over_the_tokens_whose_log_probs_the_sampler_told() -> None:
    old, mask = torch.tensor([[-1.0, -2.0], [-3.0, -4.0]]), torch.tensor([[True, True], [True, False]])
    told = torch.tensor([[-1.1, -2.2], [math.nan, math.nan]])
    meters = Meters(1, LOW, HIGH, False, CPU)
    meters.add_sampled(old, -old, None, told, mask)
    wanted = (math.expm1(0.1) - 0.1 + math.expm1(0.2) - 0.2) / 2
    assert meters.finish(Ranks()).scalars["kl_mismatch"] == pytest.approx(wanted, rel=1e-5)


def test_a_mismatch_that_nobody_could_measure_is_no_number_at_all() -> None:
    """Not NaN, which is a fault: dynamic sampling may replace every prompt whose log-probs were told."""
    old, mask = -torch.ones(2, 2), torch.ones(2, 2, dtype=torch.bool)
    meters = Meters(1, LOW, HIGH, False, CPU)
    meters.add_sampled(old, -old, None, torch.full((2, 2), math.nan), mask)
    assert "kl_mismatch" not in meters.finish(Ranks()).scalars


def test_bins() -> None:
    ratios = torch.tensor([0.0, 0.1, 0.125001, 1.0, 0.99999, 7.9999, 8.001, torch.inf, torch.nan])
    assert ratio_bins(ratios.log()).tolist() == [0, 0, 1, 33, 32, 64, 65, 65, 65]


class HostReads(TorchDispatchMode):
    """Counts what would make the host wait for a device."""

    WAITS = ("_local_scalar_dense", "nonzero", "masked_select", "equal", "is_nonzero")

    def __init__(self) -> None:
        super().__init__()
        self.waits: list[str] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = str(func)
        if any(f"aten.{wait}." in name for wait in self.WAITS):
            self.waits.append(name)
        return func(*args, **(kwargs or {}))


def test_one_copy_to_the_host_per_rollout(
    data: dict[str, torch.Tensor], monkeypatch: pytest.MonkeyPatch
) -> None:
    copied: list[tuple[int, ...]] = []
    copy = torch.Tensor.copy_

    def copying(self: torch.Tensor, source: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
        copied.append(tuple(source.shape))
        return copy(self, source, *args, **kwargs)

    monkeypatch.setattr(torch.Tensor, "copy_", copying)
    for name in ("cpu", "tolist", "numpy", "item"):
        original = getattr(torch.Tensor, name)

        def spy(self: torch.Tensor, *args: Any, name: str = name, original: Any = original) -> Any:
            assert isinstance(self, OnHost), f"{name}() reads a device tensor"
            return original(self, *args)

        monkeypatch.setattr(torch.Tensor, name, spy)
    with HostReads() as reads:
        meters = fill(data, 3)
        assert copied == []
        meters.send(Ranks())
    assert reads.waits == []
    assert meters._sent is not None
    meters._sent = meters._sent.as_subclass(OnHost)
    meters.finish(Ranks())
    assert copied == [(U * 12 + 2 * (RATIO_BINS + 2) + 7,)]


class OnHost(torch.Tensor):
    """Marks what has been sent to the host; views of it stay marked."""
