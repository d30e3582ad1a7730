"""Rewards of every kind in real runs of two rollouts: what is logged, journalled and learnt from."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from autotune.journal import read_journal
from autotune.recipe import load_recipe

Go = Callable[..., list[dict[str, Any]]]

RECIPE = """
seed: 3
run_dir: {run}
model: {{path: {model}}}
task: {task}
rewards: {rewards}
trainer: {{rollouts: 2, train_batch_size: 8, rollout_n: 4, ppo_mini_batch_size: 4, micro_batch_size: 16,
  rollout_micro_batch_size: 32, actor_learning_rate: 0.01, max_response_length: 6}}
eval: {{every: 0, prompts: 4}}
control: {{mode: shadow}}
tracking: {{mlflow: {{enabled: false}}}}
"""


@pytest.fixture
def go(tiny_folder: Path, tiny_prompts: Path, tmp_path: Path) -> Go:
    """Runs a recipe with the given `rewards` (and `task`) as a user would; its journal."""

    def run_it(rewards: str, task: str | None = None, *overrides: str) -> list[dict[str, Any]]:
        from autotune.run import run

        text = RECIPE.format(
            run=tmp_path / "run",
            model=tiny_folder,
            task=task or f"{{type: jsonl, path: {tiny_prompts}}}",
            rewards=rewards,
        )
        (tmp_path / "recipe.yaml").write_text(text, encoding="utf-8")
        with open(tmp_path / "output.txt", "a", encoding="utf-8") as output:
            run(load_recipe(tmp_path / "recipe.yaml", overrides), console=Console(file=output))
        return read_journal(tmp_path / "run" / "journal.jsonl")

    return run_it


def metrics(lines: list[dict[str, Any]]) -> list[dict[str, float]]:
    return [line["snapshot"]["metrics"] for line in lines if line["type"] == "rollout"]


def notes(lines: list[dict[str, Any]]) -> list[tuple[str, str]]:
    return [(line["about"], line["text"]) for line in lines if line["type"] == "note"]


def test_jsonl_and_math_verify(go: Go, tmp_path: Path) -> None:
    """The tiny random model writes like `4n+71p`: a number that counts as 4 about once in eight."""
    pytest.importorskip("math_verify")
    rows = [{"prompt": f"{i}>", "answer": r"$\frac{8}{2}$"} for i in range(40)]
    (tmp_path / "d.jsonl").write_text("\n".join(map(json.dumps, rows)))
    lines = go("[{type: math_verify}]", "{type: jsonl, path: d.jsonl}")
    found = metrics(lines)
    assert len(found) == 2 and lines[-1]["status"] == "done" and notes(lines) == []
    assert all(m["rollout_success_rate"] == 1 for m in found)
    assert all(m["reward/math_verify"] == m["reward_mean"] for m in found)
    assert 0 < found[0]["reward_mean"] < 1 and found[0]["grad_norm"] > 0


FUNCTIONS = """
import os, time

def digits(responses):
    return [sum(c.isdigit() for c in r) for r in responses]

def fragile(responses, level):
    print("asked about", responses)
    if level[0] == 3:
        os._exit(9)
    if level[0] == 4:
        raise KeyError("four")
    return [1.0]
"""


def test_several_weighted_components_and_a_function_that_fails(go: Go, tmp_path: Path) -> None:
    (tmp_path / "mine.py").write_text(FUNCTIONS)
    rows = [{"prompt": f"{i}>", "answer": str(i), "level": i % 5} for i in range(30)]
    (tmp_path / "d.jsonl").write_text("\n".join(map(json.dumps, [*rows, rows[0]])))
    rewards = """
  - {type: regex, pattern: '(.)$', weight: 2.0}
  - {type: import, function: 'mine.py:digits', allow_code: true, name: digits, weight: 0.5, batch_size: 32}
  - {type: import, function: 'mine.py:fragile', allow_code: true, time_limit: 60}
"""
    lines = go(rewards, "{type: jsonl, path: d.jsonl}")
    for found in metrics(lines):
        assert 0 < found["rollout_success_rate"] < 1 and found["reward/import"] == 1.0
        assert found["reward/digits"] > 0
        assert abs(found["reward_mean"] - 1.0 - 0.5 * found["reward/digits"]) < 2  # + 2 x regex
    told = notes(lines)
    assert ("reward/import", "KeyError: 'four' (mine.py:12)") in told
    assert ("task", "1 of 28 training prompts repeat an earlier one; they are kept") in told
    died = [text for _, text in told if text.startswith("its process ended (exit code 9); its last words")]
    assert len(died) == 1 and len(told) == 3, told  # each once, in two rollouts and two evaluations
    assert "asked about" in (tmp_path / "run" / "reward-import.log").read_text()
    assert "note on reward/import: KeyError" in (tmp_path / "output.txt").read_text()


def test_a_reward_model(go: Go, tmp_path: Path) -> None:
    import torch
    from transformers import Qwen2Config, Qwen2ForSequenceClassification

    from autotune.trainer.builtin import character_tokenizer

    tokenizer = character_tokenizer()
    torch.manual_seed(2)
    config = Qwen2Config(
        vocab_size=len(tokenizer), hidden_size=16, num_hidden_layers=1, num_attention_heads=2,
        num_key_value_heads=1, intermediate_size=24, num_labels=1, initializer_range=0.5,
    )  # fmt: skip
    Qwen2ForSequenceClassification(config).save_pretrained(tmp_path / "rm")
    tokenizer.save_pretrained(tmp_path / "rm")
    lines = go("[{type: model, path: rm, name: taste, weight: 3, batch_size: 5}]", None, "trainer.kl_coef=0")
    found = metrics(lines)
    assert [m["reward_mean"] for m in found] == pytest.approx([3 * m["reward/taste"] for m in found])
    assert all(m["reward_std"] > 0 for m in found)
    assert lines[0]["facts"]["reward_maximum"] is None
    assert all(m["grad_norm"] > 0 for m in found)


def test_a_function_that_never_scores_fails_the_success_gate_and_the_run_ends_in_order(
    go: Go, tmp_path: Path
) -> None:
    (tmp_path / "mine.py").write_text("def f(responses): raise RuntimeError('never')")
    lines = go("[{type: import, function: 'mine.py:f', allow_code: true}]")
    assert lines[-1]["status"] == "done"
    assert all(m["rollout_success_rate"] == 0 and "reward_mean" not in m for m in metrics(lines))
    assert notes(lines) == [("reward/import", "RuntimeError: never (mine.py:1)")]
