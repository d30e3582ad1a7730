"""What counts as a measurement: everything else is a state of its own and never the number 0."""

from __future__ import annotations

import json
import math
from dataclasses import FrozenInstanceError
from decimal import Decimal
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from autotune.metrics import FAMILIES, METRICS, Reading, Snapshot, Validity, read_metric, spec_of
from tests.series import QUICK, snapshot

V = Validity


@pytest.mark.parametrize(
    ("raw", "validity"),
    [
        (0.5, V.VALID),
        (0, V.VALID),
        (-0.0, V.VALID),
        (np.float32(0.5), V.VALID),
        (np.float64(0.5), V.VALID),
        (np.int64(1), V.VALID),
        (np.array(0.5), V.VALID),
        (None, V.MISSING),
        (math.nan, V.NON_FINITE),
        (math.inf, V.NON_FINITE),
        (-math.inf, V.NON_FINITE),
        (np.float64("nan"), V.NON_FINITE),
        (Decimal("NaN"), V.NON_FINITE),
        ("nan", V.NON_FINITE),
        ("0.5", V.NON_FINITE),
        (True, V.NON_FINITE),
        (False, V.NON_FINITE),
        ([0.5], V.NON_FINITE),
        ({}, V.NON_FINITE),
        (1e308, V.OUT_OF_RANGE),
        (-1e-9, V.OUT_OF_RANGE),
        (1.0000001, V.OUT_OF_RANGE),
        (30.0, V.OUT_OF_RANGE),  # a share reported in percent
        (1.0, V.VALID),
    ],
)
def test_only_a_finite_number_inside_its_range_is_valid(raw: Any, validity: Validity) -> None:
    reading = read_metric("clip_ratio", raw)
    assert reading.validity is validity
    assert (reading.value is None) == (validity is not V.VALID)
    assert bool(reading.reason) == (validity is not V.VALID)
    if validity is V.VALID:
        assert type(reading.value) is float


@pytest.mark.parametrize("raw", [np.True_, np.array([0.1, 0.2]), 10**400], ids=["bool_", "array", "huge"])
def test_what_is_no_number_never_becomes_one_nor_ends_the_run(raw: Any) -> None:
    assert read_metric("clip_ratio", raw).validity is V.NON_FINITE


def test_a_negative_kl_is_a_fault_and_not_a_low_kl() -> None:
    reading = read_metric("kl_ref", -0.001)
    assert reading.validity is V.OUT_OF_RANGE and "[0, inf] nats/token" in reading.reason


@pytest.mark.parametrize("name", ["reward_mean", "loss", "eval_score", "reward/format"])
def test_rewards_and_losses_may_be_negative(name: str) -> None:
    assert read_metric(name, -3.5) == Reading(-3.5)


def test_open_families_and_unknown_names() -> None:
    assert spec_of("reward/format") is FAMILIES["reward/"]
    assert spec_of("time/rollout").unit == "s"
    with pytest.raises(KeyError, match="klref"):
        spec_of("klref")


def test_the_table_names_each_metric_by_its_key_with_a_range_that_is_one() -> None:
    for name, spec in METRICS.items():
        assert spec.name == name and spec.unit and spec.what and spec.low < spec.high


@pytest.mark.parametrize("state", [s for s in Validity if s is not V.VALID])
def test_a_snapshot_gives_no_number_for_any_state_but_valid(state: Validity) -> None:
    snap = snapshot(0, readings={"kl_step": Reading(0.01, state, "why")})
    assert snap.value("kl_step") is None and snap.value("reward_mean") == 0.5
    faults = {V.NON_FINITE, V.OUT_OF_RANGE, V.FROZEN}
    assert (("kl_step", snap.reading("kl_step")) in list(snap.invalid())) == (state in faults)


def test_what_was_never_logged_says_so() -> None:
    snap = snapshot(0)
    assert snap.value("gpu_memory_fraction") is None
    assert snap.reading("gpu_memory_fraction").validity is V.NOT_LOGGED
    assert "gpu_memory_fraction" in snap.reading("gpu_memory_fraction").reason


def test_a_snapshot_is_frozen() -> None:
    with pytest.raises(FrozenInstanceError):
        snapshot(0).rollout = 1  # type: ignore[misc]


RAW = st.none() | st.floats() | st.booleans() | st.text(max_size=3)


@QUICK
@given(st.dictionaries(st.sampled_from(sorted(METRICS)), RAW), st.integers(0, 10**6), st.integers(0, 99))
def test_a_snapshot_survives_json(raw: dict[str, Any], rollout: int, epoch: int) -> None:
    snap = Snapshot(
        rollout=rollout,
        knobs={"kl_coef": 0.005},
        readings={n: read_metric(n, v) for n, v in raw.items()},
        epoch=epoch,
        per_update={"kl_step": (0.0, 0.01)},
        histograms={"policy_ratio": (1.0, 2.0)},
    )
    assert Snapshot.from_json(json.loads(json.dumps(snap.to_json(), allow_nan=False))) == snap
