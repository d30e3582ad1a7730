"""Tasks: right answers, a held-out part that stays apart, errors that name the line."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from autotune.errors import InputError
from autotune.recipe.schema import DigitsTask, JsonlTask, ParquetTask, ReasoningGymTask, SumsTask
from autotune.trainer import builtin
from autotune.trainer.tasks import TASKS, Example, TaskData, is_held_out, load_task
from autotune.trainer.tasks.digits import solve

TEMPLATE = (
    "{% for m in messages %}{{ m.role[0] }}:{{ m.content }}<end>{% endfor %}"
    "{% if add_generation_prompt %}a:{% endif %}"
)


@pytest.fixture(scope="module")
def tokenizer() -> Any:
    return builtin.character_tokenizer()


@pytest.fixture
def chat_tokenizer() -> Any:
    made = builtin.character_tokenizer()
    made.chat_template = TEMPLATE
    return made


def apart(data: TaskData) -> bool:
    return not {e.prompt for e in data.train} & {e.prompt for e in data.heldout}


# -- the held-out part ------------------------------------------------------------------------


def test_an_eighth_of_all_prompts_is_held_out_by_the_hash_of_the_prompt() -> None:
    share = sum(is_held_out(f"a{i:06d}>") for i in range(20_000)) / 20_000
    assert share == pytest.approx(1 / 8, abs=0.01)
    # Their md5 begin with the bytes 0x1f and 0x20: the border is 32.
    assert is_held_out("a000101>") and not is_held_out("a000168>")


# -- digits -----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("prompt", "answer"),
    [("a724915>", "124579"), ("d724915>", "975421"), ("s700070>", "000077"), ("d000001>", "100000"),
     ("u727915>", "72915"), ("u000000>", "0"), ("u123456>", "123456")],
)  # fmt: skip
def test_the_letter_decides_what_is_asked(prompt: str, answer: str) -> None:
    assert solve(prompt) == answer


@pytest.mark.parametrize(
    ("variant", "letters"), [("ops6x2", {"a", "d"}), ("sort6", {"s"}), ("unique6", {"u"})]
)
def test_digits_have_many_distinct_prompts_of_one_length(
    variant: Any, letters: set[str], tokenizer: Any
) -> None:
    data = load_task(DigitsTask(variant=variant), tokenizer)
    prompts = [e.prompt for e in [*data.train, *data.heldout]]
    assert len(set(prompts)) == len(prompts) == 32768 + 2048
    assert {len(p) for p in prompts} == {8} and {p[0] for p in prompts} == letters
    assert apart(data) and all(is_held_out(e.prompt) for e in data.heldout)
    assert all(e.answer == solve(e.prompt) for e in data.train)


def test_digits_are_the_same_at_every_call(tokenizer: Any) -> None:
    first, second = (load_task(DigitsTask(), tokenizer) for _ in range(2))
    assert first.train == second.train and first.heldout == second.heldout


def test_a_digit_prompt_is_eight_tokens_and_reads_back(tokenizer: Any) -> None:
    data = load_task(DigitsTask(), tokenizer)
    ids = data.prompt_ids(Example("a724915>", "124579"))
    assert len(ids) == 8 and tokenizer.decode(ids) == "a724915>"


# -- sums -------------------------------------------------------------------------------------


def test_sums_are_right_distinct_and_split(tokenizer: Any) -> None:
    data = load_task(SumsTask(), tokenizer)
    examples = [*data.train, *data.heldout]
    assert len(examples) == len({e.prompt for e in examples}) == 9**3
    assert apart(data) and len(data.heldout) > 50
    for example in examples:
        assert example.prompt.endswith("? Reply with only the number.")
        terms = example.prompt.removeprefix("What is ").split("?")[0].split(" + ")
        assert len(terms) == 3 and all(1 <= int(t) <= 9 for t in terms)
        assert example.answer == str(sum(map(int, terms)))


def test_sums_give_as_many_prompts_as_asked_for(tokenizer: Any) -> None:
    data = load_task(SumsTask(terms=2, largest=99, prompts=100), tokenizer)
    assert len(data.train) == 100 and apart(data)


def test_sums_too_few_to_hold_some_out_are_refused(tokenizer: Any) -> None:
    with pytest.raises(InputError, match=r"raise task\.largest"):
        load_task(SumsTask(terms=2, largest=1), tokenizer)


def test_a_chat_model_gets_the_question_as_a_user_message(chat_tokenizer: Any) -> None:
    data = load_task(SumsTask(), chat_tokenizer)
    ids = data.prompt_ids(Example("1+2", "3"))
    assert chat_tokenizer.decode(ids) == "u:1+2<end>a:"


# -- reasoning-gym ----------------------------------------------------------------------------

CHAIN = {"min_terms": 2, "max_terms": 2, "min_digits": 1, "max_digits": 2}


def test_reasoning_gym_prompts_are_split_and_scored_by_their_own_task(tokenizer: Any) -> None:
    pytest.importorskip("reasoning_gym")
    data = load_task(ReasoningGymTask(name="chain_sum", size=64, config=CHAIN), tokenizer)
    assert len(data.train) == 64 and len(data.heldout) > 400 and apart(data)
    assert data.score is not None
    example = data.heldout[0]
    assert data.score(f" {example.answer}\n", example) == 1.0
    assert data.score("I do not know", example) < 0.5


def test_reasoning_gym_settings_reach_the_generator(tokenizer: Any) -> None:
    pytest.importorskip("reasoning_gym")
    config = {"min_terms": 4, "max_terms": 4, "min_digits": 1, "max_digits": 1}
    data = load_task(ReasoningGymTask(name="chain_sum", size=8, config=config), tokenizer)
    assert all(len(e.meta["entry"]["metadata"]["expression"].split()) == 7 for e in data.train)


def test_reasoning_gym_difficulty_is_the_level_of_its_own_curriculum(tokenizer: Any) -> None:
    pytest.importorskip("reasoning_gym")

    def terms(**fields: Any) -> set[tuple[int, int]]:
        """(terms, digits of the longest one) of all training prompts."""
        data = load_task(ReasoningGymTask(name="chain_sum", size=64, **fields), tokenizer)
        parts = [e.meta["entry"]["metadata"]["expression"].split()[::2] for e in data.train]
        return {(len(some), max(map(len, some))) for some in parts}

    assert terms(difficulty={"num_digits": 1}) <= {(2, 1), (2, 2)}
    assert max(terms(difficulty=2)) == (4, 3)  # levels 0 to 2: two to four terms of one to three digits
    assert {n for n, _ in terms(difficulty=2, config={"min_terms": 4})} == {4}


@pytest.mark.parametrize(
    ("name", "config", "message"),
    [
        ("chain_sun", {}, "chain_sum"),
        ("chain_sum", {"nope": 1}, "nope"),
        ("chain_sum", {"min_terms": 5, "max_terms": 2}, "max_terms must be >= min_terms"),
    ],
)
def test_reasoning_gym_faults_are_input_errors(
    name: str, config: dict[str, Any], message: str, tokenizer: Any
) -> None:
    pytest.importorskip("reasoning_gym")
    with pytest.raises(InputError, match=message):
        load_task(ReasoningGymTask(name=name, config=config), tokenizer)


# -- jsonl ------------------------------------------------------------------------------------

Write = Callable[..., str]


@pytest.fixture
def write(tmp_path: Path) -> Write:
    def file(*rows: Any, name: str = "data.jsonl") -> str:
        lines = [row if isinstance(row, str) else json.dumps(row) for row in rows]
        (tmp_path / name).write_text("\n".join(lines) + "\n", encoding="utf-8")
        return str(tmp_path / name)

    return file


def rows(count: int) -> list[dict[str, Any]]:
    return [{"prompt": f"p{i}", "answer": i} for i in range(count)]


def test_jsonl_holds_out_the_asked_share_whatever_the_order(write: Write, tokenizer: Any) -> None:
    first = load_task(JsonlTask(path=write(*rows(40)), eval_fraction=0.25), tokenizer)
    again = load_task(JsonlTask(path=write(*rows(40)[::-1]), eval_fraction=0.25), tokenizer)
    assert len(first.train) == 30 and len(first.heldout) == 10 and apart(first)
    assert {e.prompt for e in first.heldout} == {e.prompt for e in again.heldout}
    assert first.train[0].answer == first.train[0].prompt[1:]


def test_a_tiny_jsonl_file_still_holds_one_prompt_out(write: Write, tokenizer: Any) -> None:
    data = load_task(JsonlTask(path=write(*rows(2)), eval_fraction=0.01), tokenizer)
    assert len(data.train) == len(data.heldout) == 1


def test_a_repeated_prompt_is_on_one_side_only(write: Write, tokenizer: Any) -> None:
    data = load_task(JsonlTask(path=write(*rows(5), *rows(5)), eval_fraction=0.4), tokenizer)
    assert len(data.train) == 6 and len(data.heldout) == 4 and apart(data)


def test_columns_blank_lines_and_byte_order_mark(write: Write, tokenizer: Any) -> None:
    path = write("\ufeff" + json.dumps({"q": "a?", "a": "å"}), "", {"q": "b?", "a": 2.5})
    data = load_task(JsonlTask(path=path, prompt_column="q", answer_column="a"), tokenizer)
    assert sorted(e.answer for e in [*data.train, *data.heldout]) == ["2.5", "å"]


def test_prompts_of_a_held_out_file_are_dropped_from_training(write: Write, tokenizer: Any) -> None:
    path, held = write(*rows(6)), write(*rows(2), name="eval.jsonl")
    data = load_task(JsonlTask(path=path, eval_path=held), tokenizer)
    assert [e.prompt for e in data.heldout] == ["p0", "p1"] and len(data.train) == 4


def test_the_chat_template_is_used_only_when_asked_for(write: Write, chat_tokenizer: Any) -> None:
    path = write(*rows(4))
    plain = load_task(JsonlTask(path=path), chat_tokenizer)
    chat = load_task(JsonlTask(path=path, chat_template=True), chat_tokenizer)
    assert chat_tokenizer.decode(plain.prompt_ids(Example("p1", "1"))) == "p1"
    assert chat_tokenizer.decode(chat.prompt_ids(Example("p1", "1"))) == "u:p1<end>a:"


@pytest.mark.parametrize(
    ("lines", "message"),
    [
        (['{"prompt": "a", "answer": 1}', "{oops"], r"data\.jsonl:2: .*one JSON object"),
        (["[1, 2]"], r"data\.jsonl:1: received '\[1, 2\]'"),
        (['{"question": "a", "answer": 1}'], "no column 'prompt'; columns there: question, answer"),
        (['{"prompt": "a"}'], "no column 'answer'"),
        (['{"prompt": ["a"], "answer": 1}'], r"column 'prompt' is \['a'\]; expected text"),
        (['{"prompt": "a", "answer": true}'], "column 'answer' is True"),
        ([""], "has no rows"),
        (['{"prompt": "a", "answer": 1}'], "at least two different prompts"),
    ],
)
def test_faults_of_a_file_name_their_line(
    lines: list[str], message: str, write: Write, tokenizer: Any
) -> None:
    with pytest.raises(InputError, match=message):
        load_task(JsonlTask(path=write(*lines)), tokenizer)


def test_a_missing_file_is_named(tokenizer: Any) -> None:
    with pytest.raises(InputError, match=r"no file nowhere\.jsonl"):
        load_task(JsonlTask(path="nowhere.jsonl"), tokenizer)


def test_repeated_prompts_are_kept_and_told(write: Write, tokenizer: Any) -> None:
    path = write(*rows(5), *rows(3), {"prompt": "p4", "answer": "other"})
    held = write({"prompt": "h", "answer": "h"}, name="eval.jsonl")
    data = load_task(JsonlTask(path=path, eval_path=held), tokenizer)
    assert len(data.train) == 9
    assert data.notes == (
        "4 of 9 training prompts repeat an earlier one; they are kept",
        "1 training prompts occur with different answers; at most one of them can be right",
    )
    assert load_task(JsonlTask(path=write(*rows(5)), eval_path=held), tokenizer).notes == ()


def test_without_an_answer_column_answers_are_empty(write: Write, tokenizer: Any) -> None:
    data = load_task(JsonlTask(path=write({"prompt": "a"}, {"prompt": "b"}), answer_column=None), tokenizer)
    assert [e.answer for e in (*data.train, *data.heldout)] == ["", ""]


def spoken(*contents: str, system: str | None = None) -> list[dict[str, str]]:
    roles = [{"role": "user", "content": text} for text in contents]
    return roles if system is None else [{"role": "system", "content": system}, *roles]


def test_the_system_prompt_comes_first_unless_the_messages_have_their_own(
    write: Write, chat_tokenizer: Any
) -> None:
    path = write(
        {"prompt": "p", "answer": "1"},
        {"prompt": spoken("q", "r"), "answer": "2"},
        {"prompt": spoken("s", system="own"), "answer": "3"},
    )
    data = load_task(JsonlTask(path=path, chat_template=True, system_prompt="z"), chat_tokenizer)
    texts = {e.answer: chat_tokenizer.decode(data.prompt_ids(e)) for e in (*data.train, *data.heldout)}
    assert texts["1"] == "s:z<end>u:p<end>a:"
    assert texts["2"] == "s:z<end>u:q<end>u:r<end>a:"
    assert texts["3"] == "s:own<end>u:s<end>a:"
    assert {e.prompt for e in (*data.train, *data.heldout)} == {"p", "q\n\nr", "own\n\ns"}


@pytest.mark.parametrize(
    ("prompt", "chat", "message"),
    [
        (spoken("p"), False, r"column 'prompt' holds chat messages; .*task.chat_template: true"),
        ([{"role": "user"}], True, "expected role and content, both text"),
        ([], True, "is an empty list"),
    ],
)
def test_messages_that_cannot_be_used(
    write: Write, chat_tokenizer: Any, prompt: Any, chat: bool, message: str
) -> None:
    section = JsonlTask(path=write({"prompt": prompt, "answer": "1"}), chat_template=chat)
    with pytest.raises(InputError, match=message):
        load_task(section, chat_tokenizer)


@pytest.mark.parametrize("section", [SumsTask(system_prompt="S"), "jsonl"])
def test_a_system_prompt_without_a_template_is_not_dropped_silently(
    write: Write, tokenizer: Any, section: Any
) -> None:
    if section == "jsonl":
        section = JsonlTask(path=write(*rows(3)), chat_template=True, system_prompt="S")
    with pytest.raises(InputError, match="no chat template to put it into"):
        load_task(section, tokenizer)


# -- parquet ----------------------------------------------------------------------------------


def test_a_parquet_file_is_the_same_task_as_its_lines(write: Write, tmp_path: Path, tokenizer: Any) -> None:
    arrow, parquet = pytest.importorskip("pyarrow"), pytest.importorskip("pyarrow.parquet")
    nested = [{"prompt": f"p{i}", "more": {"answer": str(i)}, "level": i} for i in range(3000)]
    parquet.write_table(arrow.Table.from_pylist(nested), tmp_path / "d.parquet", row_group_size=700)
    fields = {"answer_column": "more.answer", "eval_fraction": 0.2}
    stored = load_task(ParquetTask(path=str(tmp_path / "d.parquet"), **fields), tokenizer)
    lines = load_task(JsonlTask(path=write(*nested), **fields), tokenizer)
    assert stored.train == lines.train and stored.heldout == lines.heldout
    assert len(stored.heldout) == 600 and stored.train[7].meta["level"] == int(stored.train[7].answer)


def test_faults_of_a_parquet_file_name_their_row(tmp_path: Path, tokenizer: Any) -> None:
    arrow, parquet = pytest.importorskip("pyarrow"), pytest.importorskip("pyarrow.parquet")
    section = ParquetTask(path=str(tmp_path / "d.parquet"))
    parquet.write_table(arrow.table({"prompt": ["a", "b"], "answer": ["1", None]}), tmp_path / "d.parquet")
    with pytest.raises(InputError, match=r"d\.parquet: row 2: column 'answer' is None"):
        load_task(section, tokenizer)
    parquet.write_table(arrow.table({"prompt": [], "answer": []}), tmp_path / "d.parquet")
    with pytest.raises(InputError, match="has no rows"):
        load_task(section, tokenizer)
    (tmp_path / "d.parquet").write_text("no")
    with pytest.raises(InputError, match="cannot be read as Parquet"):
        load_task(section, tokenizer)


def test_every_task_type_of_the_recipe_is_in_the_table() -> None:
    sections = (DigitsTask, SumsTask, ReasoningGymTask, JsonlTask, ParquetTask)
    assert list(TASKS) == [section.model_fields["type"].default for section in sections]
