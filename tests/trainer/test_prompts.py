"""Long prompts: cut, passed over and counted, or refused; never silently something else."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from autotune.errors import AdapterError, InputError
from autotune.recipe import Recipe
from autotune.trainer.order import take_prompts
from autotune.trainer.prompts import PromptStream, held_out_prompts
from autotune.trainer.records import RolloutRecord
from autotune.trainer.tasks.base import Example, TaskData

MakeRecipe = Callable[..., Recipe]


def task(*lengths: int, held_out: tuple[int, ...] = ()) -> TaskData:
    """Prompts by their lengths in tokens; a token is a letter."""
    train = [Example(f"{i}" + "x" * (length - 1), "") for i, length in enumerate(lengths)]
    held = [Example("h" * length, "") for length in held_out]
    return TaskData(train, held, None, lambda example: [ord(letter) for letter in example.prompt])


def names(stream: PromptStream, position: int, count: int, limit: int) -> tuple[list[str], int]:
    taken = stream.take(position, count, limit)
    assert [len(ids) for ids in taken.encoded] == [len(e.prompt) for e in taken.examples]
    return [e.prompt[0] for e in taken.examples], taken.dropped


def test_left_takes_every_prompt_in_the_order_of_the_seed() -> None:
    stream = PromptStream(task(3, 9, 4, 8), seed=5, cut="left", limit=4)
    for position, count in ((0, 4), (3, 2), (7, 9)):
        wanted = [str(i) for i in take_prompts(4, 5, position, count)]
        assert names(stream, position, count, 4) == (wanted, 0)
    assert stream.shortest_limit == 1


def test_drop_passes_over_and_counts_the_places() -> None:
    stream = PromptStream(task(3, 9, 4, 8, 2), seed=5, cut="drop", limit=4)
    place, seen = 0, []
    for _ in range(6):
        some, dropped = names(stream, place, 2, 4)
        seen += some
        place += 2 + dropped
    order = [str(i) for i in take_prompts(5, 5, 0, place)]
    assert seen == [i for i in order if i in "024"] and len(seen) == 12
    assert names(stream, 0, 5, 9) == (order[:5], 0)  # a higher limit, and nothing is dropped


def test_when_nothing_fits_the_run_does_not_start() -> None:
    with pytest.raises(InputError, match="even the shortest prompt, of 3 tokens, would be dropped"):
        PromptStream(task(3, 9), seed=1, cut="drop", limit=2)
    assert PromptStream(task(3, 9), seed=1, cut="drop", limit=3).shortest_limit == 3


def test_error_refuses_any_long_prompt() -> None:
    with pytest.raises(InputError, match=r"the longest prompt has 9 tokens and trainer.prompt_cut is error"):
        PromptStream(task(3, 9), seed=1, cut="error", limit=8)
    assert PromptStream(task(3, 9), seed=1, cut="error", limit=9).shortest_limit == 9


def test_held_out_prompts_follow_the_same_rule() -> None:
    data = task(1, held_out=(3, 9, 2, 4))

    def lengths(cut: str, count: int = 3) -> tuple[list[int], int]:
        taken = held_out_prompts(data, count, cut, 4)
        return [len(ids) for ids in taken.encoded], taken.dropped

    assert lengths("left") == ([3, 9, 2], 0)
    assert lengths("drop") == ([3, 2, 4], 1)
    assert lengths("error", 1) == ([3], 0)
    with pytest.raises(InputError, match="a held-out prompt has 9 tokens"):
        lengths("error")


# ------------------------------------------------------------------------------- in a real run


@pytest.fixture
def mixed(tmp_path: Path) -> Path:
    """Half of the prompts have four tokens, the others nine."""
    path = tmp_path / "mixed.jsonl"
    rows = [{"prompt": f"{i:0{3 if i % 2 else 8}d}>", "answer": str(i % 10)} for i in range(40)]
    path.write_text("\n".join(json.dumps(row) for row in rows), encoding="utf-8")
    return path


@pytest.fixture
def start(make_recipe: MakeRecipe, mixed: Path, tmp_path: Path) -> Iterator[Callable[..., Any]]:
    from autotune.trainer.loop import Trainer

    made: list[Trainer] = []

    def build(name: str, resume: bool = False, **trainer: Any) -> Trainer:
        fixed = {"train_batch_size": 4, "rollout_micro_batch_size": 16, **trainer}
        sections = {"task": {"type": "jsonl", "path": str(mixed)}, "checkpoint": {"every": 1}}
        recipe = make_recipe(sections, **fixed)
        made.append(Trainer(recipe, tmp_path / name, resume=resume))
        return made[-1]

    yield build
    for trainer in made:
        trainer.close()


def test_dropped_prompts_are_counted_and_a_resumed_run_goes_on_behind(start: Callable[..., Any]) -> None:
    whole, records = start("whole", rollouts=4, prompt_cut="drop", max_prompt_length=4), []
    whole.run(records.append)
    assert all(r.scalars["prompt_length_max"] == 4 and r.scalars["prompts_cut"] == 0 for r in records)
    assert sum(r.scalars["prompts_dropped"] for r in records) > 4
    assert whole.drawing.cursor == 4 * 4 + sum(r.scalars["prompts_dropped"] for r in records)

    class Killed(Exception):
        pass

    def kill(record: RolloutRecord) -> None:
        if record.rollout == 2:
            raise Killed

    cut = start("cut", rollouts=4, prompt_cut="drop", max_prompt_length=4)
    with pytest.raises(Killed):
        cut.run(kill)
    rest: list[RolloutRecord] = []
    start("cut", resume=True, rollouts=4, prompt_cut="drop", max_prompt_length=4).run(rest.append)
    assert [r.scalars["prompts_dropped"] for r in rest] == [r.scalars["prompts_dropped"] for r in records[2:]]
    assert rest[-1].scalars["reward_mean"] == records[-1].scalars["reward_mean"]


def test_the_live_limit_decides_what_is_dropped_and_cannot_leave_nothing(start: Callable[..., Any]) -> None:
    trainer, records = start("live", rollouts=2, prompt_cut="drop", max_prompt_length=9), []

    def on_rollout(record: RolloutRecord) -> None:
        records.append(record)
        with pytest.raises(AdapterError, match="would be dropped; expected at least 4"):
            trainer.live.set("max_prompt_length", 3)
        trainer.live.set("max_prompt_length", 5)

    trainer.run(on_rollout)
    assert [r.scalars["prompt_length_max"] for r in records] == [9, 4]
    assert records[0].scalars["prompts_dropped"] == 0 < records[1].scalars["prompts_dropped"]


def test_cut_prompts_are_counted(start: Callable[..., Any]) -> None:
    trainer, records = start("left", rollouts=1, max_prompt_length=4), []
    trainer.run(records.append)
    assert records[0].scalars["prompts_cut"] > 0 == records[0].scalars["prompts_dropped"]


def test_error_refuses_the_run_and_a_lower_live_limit(start: Callable[..., Any]) -> None:
    with pytest.raises(InputError, match="expected at least 9, or prompt_cut: left or drop"):
        start("refused", prompt_cut="error", max_prompt_length=8)
    trainer = start("error", prompt_cut="error", max_prompt_length=9)
    with pytest.raises(AdapterError, match="the longest prompt has 9 tokens"):
        trainer.live.set("max_prompt_length", 8)
    assert trainer.live["max_prompt_length"] == 9
