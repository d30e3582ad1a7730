"""What a recipe says about prompts and rewards is checked before a run, with the line to change."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from autotune.errors import RecipeError
from autotune.recipe import Recipe, load_recipe, recipe_facts

Write = Callable[..., Path]


@pytest.fixture
def write(tmp_path: Path) -> Write:
    def file(text: str, name: str = "r.yaml") -> Path:
        (tmp_path / name).write_text(text, encoding="utf-8")
        return tmp_path / name

    return file


def problems(path: Path) -> list[str]:
    with pytest.raises(RecipeError) as caught:
        load_recipe(path)
    return [str(p).replace(f"{path.parent}/", "") for p in caught.value.problems]


def only(path: Path) -> str:
    found = problems(path)
    assert len(found) == 1, found
    return found[0]


# ---------------------------------------------------------------------------------- code by import

IMPORT = """task: {type: sums}
rewards:
  - type: import
    function: my_rewards.py:score
"""


def test_without_permission_the_command_ends_with_2_and_the_line_to_add(write: Write) -> None:
    write("raise SystemExit('this code was run')", "my_rewards.py")
    path = write(IMPORT)
    done = subprocess.run(
        [sys.executable, "-m", "autotune", "run", str(path)], capture_output=True, text=True, timeout=60
    )
    said = " ".join((done.stdout + done.stderr).split())
    assert done.returncode == 2
    assert "add the line `allow_code: true` to rewards.0" in said
    assert "r.yaml:3" in said and "this code was run" not in said
    assert not (path.parent / "runs").exists()
    allowed = load_recipe(write(IMPORT + "    allow_code: true\n"))
    assert allowed.rewards[0].function == f"{path.parent / 'my_rewards.py'}:score"  # beside the recipe


@pytest.mark.parametrize(
    ("function", "message"),
    [
        ("score", "expected package.module:function or path/to/file.py:function"),
        ("os.path:join:x", "expected package.module:function"),
        ("nowhere/rewards.py:score", "there is no file 'nowhere/rewards.py'"),
        ("my-module:score", "expected package.module:function"),
    ],
)
def test_names_of_functions(write: Write, function: str, message: str) -> None:
    text = f"rewards: [{{type: import, function: '{function}', allow_code: true}}]"
    assert message in only(write(text))


# ------------------------------------------------------------------------------------ other rewards


@pytest.mark.parametrize(
    ("rewards", "message"),
    [
        ("[{type: model, path: ./nowhere}]", "rewards.0.path: there is no folder './nowhere'"),
        ("[{type: model}]", "rewards.0.path: is missing"),
        ("[{type: exact_match, name: a}, {type: regex, pattern: x, name: a}]", "the name of another reward"),
        ("[{type: exact_match}, {type: regex, pattern: x, name: exact_match}]", "rewards.1.name: 'exact_"),
        ("[{type: exact_match, name: a/b}]", "expected letters, digits"),
        ("[{type: math_verify, time_limit: 0}]", "expected more than 0"),
        ("[{type: mathverify}]", "did you mean math_verify"),
        ("[{type: task}]", "has no scorer of its own"),
    ],
)
def test_rewards(write: Write, rewards: str, message: str) -> None:
    assert message in only(write(f"rewards: {rewards}"))


def test_a_reward_model_beside_the_recipe_is_found_and_looked_at(write: Write, tmp_path: Path) -> None:
    (tmp_path / "rm").mkdir()
    path = write("rewards: [{type: model, path: rm}]")
    assert "has no config.json" in only(path)
    (tmp_path / "rm" / "config.json").write_text("{}")
    (tmp_path / "rm" / "model.safetensors").touch()
    assert load_recipe(path).rewards[0].path == str((tmp_path / "rm").resolve())


@pytest.mark.parametrize(
    ("rewards", "maximum"),
    [
        ([{"type": "math_verify"}, {"type": "regex", "pattern": "x", "weight": 0.5}], 1.5),
        ([{"type": "exact_match"}, {"type": "regex", "pattern": "x", "weight": -1}], 1.0),
        ([{"type": "model", "path": "rm"}], None),
        ([{"type": "model", "path": "rm", "label": "good"}], 1.0),
        ([{"type": "exact_match"}, {"type": "import", "function": "a:b"}], None),
        ([{"type": "import", "function": "a:b", "maximum": 3, "weight": 2}], 6.0),
        ([{"type": "import", "function": "a:b", "maximum": 3, "weight": -2}], None),
    ],
)
def test_the_largest_reward_is_known_or_not(rewards: list[dict[str, Any]], maximum: float | None) -> None:
    assert recipe_facts(Recipe.model_validate({"rewards": rewards})).reward_maximum == maximum


# ---------------------------------------------------------------------------------------------- data


def test_answers_are_needed_by_rewards_that_compare(write: Write) -> None:
    write('{"prompt": "p"}\n{"prompt": "q"}\n', "d.jsonl")
    task = "task: {type: jsonl, path: d.jsonl, answer_column: null}\n"
    assert "received null, but the reward exact_match compares with it" in only(write(task))
    code = "rewards: [{type: import, function: 'a:b', allow_code: true}]"
    assert load_recipe(write(task + code)).task.answer_column is None
    assert "null where none does" in only(write("task: {type: jsonl, path: d.jsonl}\n" + code))


def test_nested_columns_and_chat_messages(write: Write) -> None:
    row = {"prompt": [{"role": "user", "content": "2 + 2"}], "reward_model": {"ground_truth": "4"}}
    write(json.dumps(row), "d.jsonl")
    task = "task: {type: jsonl, path: d.jsonl, answer_column: reward_model.ground_truth%s}"
    assert load_recipe(write(task % ", chat_template: true"))
    found = only(write(task % ""))
    assert "r.yaml:1: task.prompt_column: d.jsonl:1: column 'prompt' holds chat messages" in found
    wrong = task.replace("ground_truth", "groundtruth") % ", chat_template: true"
    assert "missing reward column 'reward_model.groundtruth'" in only(write(wrong))


def test_a_system_prompt_needs_a_template(write: Write) -> None:
    write('{"prompt": "p", "answer": "a"}\n', "d.jsonl")
    path = write("task:\n  type: jsonl\n  path: d.jsonl\n  system_prompt: Be brief.\n")
    assert only(path).startswith("r.yaml:4: task.system_prompt: is only used with a chat template")


# ------------------------------------------------------------------------------------------- Parquet

PARQUET = "task: {type: parquet, path: d.parquet}"


@pytest.fixture
def parquet(tmp_path: Path) -> Callable[..., None]:
    arrow, files = pytest.importorskip("pyarrow"), pytest.importorskip("pyarrow.parquet")

    def file(rows: dict[str, list[Any]]) -> None:
        files.write_table(arrow.table(rows), tmp_path / "d.parquet")

    return file


def test_parquet_files_are_looked_into(write: Write, parquet: Callable[..., None]) -> None:
    assert "d.parquet' cannot be read: there is no such file" in only(write(PARQUET))
    write("not Parquet at all", "d.parquet")
    assert "d.parquet cannot be read as Parquet" in only(write(PARQUET))
    parquet({"prompt": [], "answer": []})
    assert "d.parquet has no rows" in only(write(PARQUET))
    parquet({"prompt": ["p"], "anwser": ["a"]})
    found = only(write(PARQUET))
    assert "r.yaml:1: task.answer_column: d.parquet: row 1: missing reward column 'answer'" in found
    parquet({"prompt": ["p"], "answer": [None]})
    assert "column 'answer' is null; expected text" in only(write(PARQUET))
    parquet({"prompt": ["p", "q"], "answer": [1, 2]})
    assert load_recipe(write(PARQUET)).task.type == "parquet"


# -------------------------------------------------------------------------------------- reasoning-gym


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ("name: chain_sun", "task.name: received 'chain_sun'; did you mean chain_sum?"),
        ("name: xyzzy", "and 94 more"),
        ("name: chain_sum, config: {min_term: 3}", "no setting 'min_term'; did you mean min_terms?"),
        ("name: chain_sum, config: {size: 3}", "expected task.size"),
        ("name: chain_sum, difficulty: 99", "has the levels 0 to 10"),
        ("name: chain_sum, difficulty: {num_term: 1}", "no attribute 'num_term'; did you mean num_terms?"),
        ("name: chain_sum, difficulty: {num_digits: 10}", "received num_digits: 10; expected 0 to 9"),
        ("name: chain_sum, difficulty: -1", "expected at least 0"),
    ],
)
def test_reasoning_gym_names(write: Write, fields: str, message: str) -> None:
    pytest.importorskip("reasoning_gym")
    found = only(write(f"task: {{type: reasoning_gym, {fields}}}\nrewards: [{{type: task}}]"))
    assert message in found and found.startswith("r.yaml:1")


# ----------------------------------------------------------------------------------------- the page


def test_the_examples_of_the_page_are_valid(write: Write, parquet: Callable[..., None]) -> None:
    """docs/rewards.md: every recipe on it loads, whatever it names being there."""
    pytest.importorskip("reasoning_gym")
    page = (Path(__file__).resolve().parent.parent / "docs" / "rewards.md").read_text(encoding="utf-8")
    rewards, data, gym = re.findall(r"```yaml\n(.*?)```", page, flags=re.DOTALL)
    code = re.findall(r"```python\n(.*?)```", page, flags=re.DOTALL)[0]
    write(code, "my_rewards.py")
    message = {"role": "user", "content": "2 + 2"}
    parquet({"prompt": [[message]], "reward_model": [{"ground_truth": "4"}]})
    (write("", "x").parent / "d.parquet").rename(write("", "train.parquet"))
    data = data.replace("test.parquet", "train.parquet")
    assert len(load_recipe(write(gym.replace("rewards: [{type: task}]", "") + rewards)).rewards) == 6
    assert load_recipe(write(data)).task.system_prompt == "Reply with the number only."
    assert load_recipe(write(gym)).task.difficulty == {"num_terms": 2, "num_digits": 1}
    namespace: dict[str, Any] = {}
    exec(code, namespace)
    assert namespace["short"](responses=["x" * 100], answers=[""]) == [0.75]
