"""Foreign reward functions: whatever they do, the run goes on and only the guilty response is lost."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from autotune.errors import InputError
from autotune.recipe.schema import ImportReward
from autotune.trainer.rewards import Rewards, RewardTable, Surroundings, build_rewards, foreign
from autotune.trainer.tasks.base import Example, TaskData
from tests.processes import ends

FUNCTIONS = '''
import os, sys, time
import numpy as np

def length(responses):
    return [len(r) for r in responses]

def as_in_trl(completions, prompts, level, **kwargs):
    assert kwargs["answers"] == ["yes"] * len(prompts)
    return np.array([len(c) + len(p) + v for c, p, v in zip(completions, prompts, level)])

def number_by_response(responses):
    return {"nan": float("nan"), "inf": float("inf"), "none": None, "text": "1", "true": True,
            "complex": 1j}.get(responses[0], 0.5)

def wrong_length(responses):
    return [1.0] * (len(responses) + ("long" in responses))

def moody(responses):
    if "raise" in responses:
        raise ValueError("I do not like this")
    if "exit" in responses:
        sys.exit("enough")
    if "die" in responses:
        print("the end is near", file=sys.stderr)
        os._exit(7)
    if "fault" in responses:
        os.kill(os.getpid(), 11)
    if "hang" in responses:
        time.sleep(600)
    if "spin" in responses:
        while True:
            pass
    return [1.0] * len(responses)

def talkative(responses):
    print('{"scores": [9, 9, 9, 9]}')
    os.write(1, b"straight to the descriptor")
    sys.stderr.write("x" * 200_000)
    return [float(os.getpid() > 0) for _ in responses]

async def awaited(responses):
    return [2.0 for _ in responses]

def same_process(responses):
    return [os.getpid()] * len(responses)

def unfillable(responses, temperature_of_the_room):
    return [0.0]

def with_default(responses, temperature_of_the_room=20):
    return [temperature_of_the_room] * len(responses)

not_a_function = 3
'''


@pytest.fixture(scope="module")
def file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("code") / "my_rewards.py"
    path.write_text(FUNCTIONS, encoding="utf-8")
    return path


@pytest.fixture
def build(file: Path, tmp_path: Path) -> Iterator[Callable[..., Rewards]]:
    made: list[Rewards] = []

    def reward(name: str, **fields: Any) -> Rewards:
        section = ImportReward(function=f"{file}:{name}", allow_code=True, **fields)
        made.append(build_rewards([section], task(), Surroundings(folder=tmp_path)))
        return made[-1]

    yield reward
    for rewards in made:
        rewards.close()


def example(prompt: str = "??") -> Example:
    return Example(prompt, "yes", {"level": 10})


def task() -> TaskData:
    return TaskData([example()], [], None, lambda e: [])


def score(rewards: Rewards, *responses: str) -> RewardTable:
    return rewards.score(responses, [example()] * len(responses))


def test_scores_come_from_another_process_that_stays(build: Callable[..., Rewards]) -> None:
    rewards = build("same_process")
    first, second = score(rewards, "a", "b").total, score(rewards, "c").total
    assert {*first, *second} == {first[0]} and first[0] != os.getpid()


def test_arguments_are_filled_by_name_as_trl_s_functions_expect(build: Callable[..., Rewards]) -> None:
    assert score(build("length"), "a", "abc").total == [1.0, 3.0]
    assert score(build("as_in_trl", batch_size=2), "a", "abc", "").total == [13.0, 15.0, 12.0]
    assert score(build("with_default"), "a").total == [20.0]
    assert score(build("awaited"), "a").total == [2.0]


def test_what_is_no_finite_number_is_not_scorable(build: Callable[..., Rewards]) -> None:
    rewards = build("number_by_response")
    table = score(rewards, "nan", "ok", "inf", "none", "text", "true", "complex")
    assert table.total == [None, 0.5, None, None, None, 1.0, None]
    told = [news.text for news in rewards.news()]
    assert told[0] == "it returned nan, not a finite number" and "None" in told[2]
    assert score(rewards, "nan", "ok").total == [None, 0.5] and rewards.news() == []  # told once


def test_a_wrong_number_of_scores_costs_the_guilty_response_only(build: Callable[..., Rewards]) -> None:
    rewards = build("wrong_length", batch_size=4)
    assert score(rewards, "a", "long", "b", "c").total == [1.0, None, 1.0, 1.0]
    assert "2 scores for 1 responses; expected one each" in rewards.news()[0].text


@pytest.mark.parametrize("batch_size", [1, 3])
@pytest.mark.parametrize(
    ("response", "reason"),
    [
        ("raise", "ValueError: I do not like this (my_rewards.py:"),
        ("exit", "SystemExit: enough"),
        ("die", "its process ended (exit code 7); its last words: the end is near"),
        ("fault", "its process ended (SIGSEGV)"),
    ],
)
def test_crashes_cost_their_own_response(
    build: Callable[..., Rewards], response: str, reason: str, batch_size: int
) -> None:
    rewards = build("moody", batch_size=batch_size)
    assert score(rewards, "a", response, "b", "c").total == [1.0, None, 1.0, 1.0]
    news = rewards.news()
    assert len(news) == 1 and news[0].component == "import"
    assert news[0].text.startswith(reason)


@pytest.mark.parametrize("response", ["hang", "spin"])
def test_a_hang_ends_at_the_time_limit(build: Callable[..., Rewards], response: str) -> None:
    rewards = build("moody", time_limit=0.4)
    began = time.monotonic()
    assert score(rewards, "a", response, "b").total == [1.0, None, 1.0]
    assert time.monotonic() - began < 20
    assert [news.text for news in rewards.news()] == ["it took longer than 0.4 s and was stopped"]


def test_a_function_that_always_hangs_does_not_hold_the_rollout_for_ever(
    build: Callable[..., Rewards], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(foreign, "GIVE_UP", 2)
    rewards = build("moody", time_limit=0.2)
    assert score(rewards, *["hang"] * 40).total == [None] * 40
    assert [news.text for news in rewards.news()][1].startswith("not tried: the 2 calls before")
    assert score(rewards, "a").total == [1.0]  # the next rollout tries again


def test_prints_are_no_answers_and_go_to_the_run_folder(
    build: Callable[..., Rewards], tmp_path: Path
) -> None:
    assert score(build("talkative", batch_size=4), "a", "b", "c", "d").total == [1.0] * 4
    log = (tmp_path / "reward-import.log").read_text()
    assert "straight to the descriptor" in log and '{"scores"' in log


def test_the_log_does_not_grow_for_ever(
    build: Callable[..., Rewards], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(foreign, "LOG_BYTES", 300_000)
    score(build("talkative"), *["a"] * 9)
    assert (tmp_path / "reward-import.log").stat().st_size < 600_000


@pytest.mark.parametrize(
    ("function", "says"),
    [
        ("nothing", "no attribute 'nothing'"),
        ("not_a_function", "is a int, not a function"),
        ("unfillable", "'temperature_of_the_room', which nobody can fill; expected names among responses"),
    ],
)
def test_a_function_that_cannot_work_is_bad_input(file: Path, function: str, says: str) -> None:
    with pytest.raises(InputError, match=says):
        build_rewards([ImportReward(function=f"{file}:{function}", allow_code=True)], task())


def test_a_file_that_does_not_even_import(tmp_path: Path) -> None:
    (tmp_path / "bad.py").write_text("def f(:\n")
    with pytest.raises(InputError, match="cannot be loaded: SyntaxError"):
        build_rewards([ImportReward(function=f"{tmp_path}/bad.py:f", allow_code=True)], task())


def test_without_permission_no_code_is_run(tmp_path: Path) -> None:
    code = f"open({str(tmp_path / 'ran')!r}, 'w')\ndef f(responses): return [1]\n"
    (tmp_path / "trace.py").write_text(code)
    with pytest.raises(InputError, match="allow_code: true"):
        build_rewards([ImportReward(function=f"{tmp_path}/trace.py:f")], task())
    assert not (tmp_path / "ran").exists()


def test_a_module_function_is_imported_by_its_name() -> None:
    rewards = build_rewards([ImportReward(function="statistics:mean", allow_code=True)], DATA)
    rewards.close()


DATA = TaskData([Example("?", "", {"data": [1.0]})], [], None, lambda e: [])
"""A task whose rows have the very column that `statistics.mean` asks for."""


def test_closing_ends_the_process_and_what_it_started(build: Callable[..., Rewards]) -> None:
    rewards = build("same_process")
    child = int(score(rewards, "a").total[0] or 0)
    rewards.close()
    with pytest.raises(ProcessLookupError):
        os.kill(child, 0)
    rewards.close()  # twice is fine


def test_the_process_dies_with_its_parent_even_while_it_hangs(file: Path) -> None:
    code = f"""
import os, threading
from autotune.recipe.schema import ImportReward
from autotune.trainer.rewards import build_rewards
from autotune.trainer.tasks.base import Example, TaskData
row = Example("?", "")
section = ImportReward(function="{file}:moody", allow_code=True, time_limit=500)
rewards = build_rewards([section], TaskData([row], [], None, lambda e: []))
print(rewards.components[0].scorer._worker._child._process.pid, flush=True)
rewards.score(["hang"], [row])
"""
    parent = subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True)
    assert parent.stdout is not None
    child = int(parent.stdout.readline())
    time.sleep(0.3)
    parent.send_signal(signal.SIGKILL)
    parent.wait()
    parent.stdout.close()
    if not ends(child, seconds=5):
        os.kill(child, signal.SIGKILL)
        pytest.fail("the worker outlived its parent")
