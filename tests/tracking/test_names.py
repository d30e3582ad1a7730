"""Names, params and limits: what MLflow would refuse never reaches it."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from autotune.tracking.names import KEY_LIMIT, PARAM_LIMIT, clean_name, clean_names, params_of


@pytest.mark.parametrize(
    ("name", "clean"),
    [
        ("reward_mean", "reward_mean"),
        ("timing(s)/gen", "timing_s_/gen"),
        ("val-aux/x/reward/mean@1", "val-aux/x/reward/mean_at_1"),
        ("../../etc", "etc"),
        ("/a//b/", "a/b"),
        ("naïve μ", "na_ve__"),
        ("", "_"),
        ("...", "_"),
    ],
)
def test_known_troubles(name: str, clean: str) -> None:
    assert clean_name(name) == clean


@given(st.text(max_size=600))
def test_mlflow_accepts_every_cleaned_name(name: str) -> None:
    validation = pytest.importorskip("mlflow.utils.validation")
    clean = clean_name(name)
    assert len(clean) <= KEY_LIMIT
    validation._validate_metric_name(clean)
    validation._validate_param(clean, "x")


@given(st.dictionaries(st.text("a@(/.é", max_size=5), st.integers(), max_size=30))
def test_no_value_is_lost_to_a_collision(values: dict[str, int]) -> None:
    assert sorted(clean_names(values).values()) == sorted(values.values())


def test_params_are_dotted_text_within_the_limit() -> None:
    params = params_of(
        {
            "trainer": {"kl_coef": 1e-6, "adam_betas": [0.9, 0.99]},
            "rewards": [{"type": "regex", "pattern": "x" * 9999}],
            "model": {"lora": None},
            "pin": [],
        }
    )
    assert params["trainer.kl_coef"] == "1e-06"
    assert params["trainer.adam_betas"] == "[0.9, 0.99]"
    assert params["rewards.0.type"] == "regex"
    assert params["model.lora"] == "null"
    assert params["pin"] == "[]"
    assert len(params["rewards.0.pattern"]) == PARAM_LIMIT
    assert params["rewards.0.pattern"].endswith("…")
