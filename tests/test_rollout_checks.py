"""Recipes whose `rollout:` section contradicts itself or the rest."""

from __future__ import annotations

import math
from typing import Any

import pytest

from autotune.recipe import Recipe
from autotune.recipe.rollout_checks import check_rollout


def problems(rollout: dict[str, Any], **trainer: Any) -> list[str]:
    recipe = Recipe.model_validate({"rollout": rollout, "trainer": trainer})
    return [".".join(str(part) for part in key) for key, _ in check_rollout(recipe)]


@pytest.mark.parametrize("engine", ["hf", "vllm", "vllm_server"])
def test_defaults_have_none(engine: str) -> None:
    assert problems({"engine": engine}) == []


@pytest.mark.parametrize(
    ("rollout", "field"),
    [
        ({"engine": "hf", "sleep": 1}, "rollout.sleep"),
        ({"engine": "hf", "max_model_len": 64}, "rollout.max_model_len"),
        ({"engine": "hf", "server": {"port": 8400}}, "rollout.server"),
        ({"engine": "vllm", "static_cache": True}, "rollout.static_cache"),
        ({"engine": "vllm", "server": {"port": 8400}}, "rollout.server"),
        ({"engine": "vllm", "max_model_len": 23}, "rollout.max_model_len"),
        ({"engine": "vllm_server", "server": {"start": False}}, "rollout.server.port"),
        ({"engine": "vllm_server", "server": {"transfer": "ipc", "devices": [1]}}, "rollout.server.transfer"),
        ({"engine": "vllm_server", "server": {"replicas": 2, "devices": [1]}}, "rollout.server.devices"),
    ],
)
def test_contradictions_are_found(rollout: dict[str, Any], field: str) -> None:
    assert problems(rollout) == [field]


def test_the_longest_sequence_just_fits() -> None:
    assert problems({"engine": "vllm", "max_model_len": 24}) == []


def test_vllm_does_not_sample_hotter_than_two() -> None:
    assert problems({"engine": "vllm"}, temperature=2.5) == ["trainer.temperature"]
    assert problems({"engine": "hf"}, temperature=2.5) == []


def test_the_cap_follows_the_engine_unless_it_is_given() -> None:
    def cap(**rollout: Any) -> float | None:
        return Recipe.model_validate({"rollout": rollout}).rollout.cap()

    assert cap() is None and cap(engine="vllm") == 2.0 and cap(engine="vllm_server") == 2.0
    assert cap(engine="vllm", importance_cap=None) is None
    assert cap(importance_cap=3) == 3.0
    assert Recipe.model_validate({}).rollout.highest_temperature() == math.inf
