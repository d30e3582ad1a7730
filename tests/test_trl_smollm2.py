"""The parts of the TRL experiment that need neither a model nor a GPU."""

from __future__ import annotations

import tarfile
from pathlib import Path
from typing import Any

from experiments.trl_smollm2.__main__ import MODES, Case, last_number_is_right, pack, prompts, table


def test_prompts_are_sums_in_words_and_their_answers() -> None:
    rows = prompts(50, 1, chat=True)
    assert rows == prompts(50, 1, chat=True) != prompts(50, 2, chat=True)
    for row in rows:
        question = row["prompt"][0]["content"]
        terms = question.removeprefix("What is ").split("?")[0].split(" + ")
        assert len(terms) == 3 and sum(map(int, terms)) == int(row["answer"])
    assert prompts(1, 1, chat=False)[0]["prompt"].endswith("=")


def test_the_last_number_counts() -> None:
    chat = [[{"role": "assistant", "content": text}] for text in ("12, no 13", "13 or 12", "none")]
    assert last_number_is_right(chat, ["13", "13", "13"]) == [1.0, 0.0, 0.0]
    assert last_number_is_right(["13."], ["13"]) == [1.0]


def test_the_table_has_means_and_what_was_done() -> None:
    def row(mode: str, seed: int, last: float, acts: list[str]) -> dict[str, Any]:
        return {"start": "timid", "mode": mode, "seed": seed, "reward_last": last, "acts": acts,
                "restores": 0, "seconds": 100.0}  # fmt: skip

    rows = [row("off", 1, 0.1, []), row("off", 2, 0.3, []), row("act", 1, 0.5, ["3: X1 lr up"])]
    text = table(rows)
    assert "| `timid` | 0.200 (0.100 to 0.300) | – | 0.500 (0.500 to 0.500) |" in text
    assert "`timid` seed 1: 3: X1 lr up" in text and "well_set" not in text


def test_the_most_telling_runs_come_first() -> None:
    cases = [Case(s, m, n) for n in (2, 1) for s in ("well_set", "timid") for m in MODES]
    names = [case.name for case in sorted(cases, key=lambda case: case.turn)]
    assert names[:4] == ["timid-act-1", "timid-off-1", "well_set-act-1", "well_set-off-1"]
    assert {name.rsplit("-", 1)[0] for name in names[4:6]} == {"timid-shadow", "well_set-shadow"}
    assert all(name.endswith("-2") for name in names[6:])


def test_runs_that_were_cut_off_are_packed_too(tmp_path: Path) -> None:
    for name in ("results.jsonl", "timid-act-1/journal.jsonl", "timid-act-1/model.bin"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text("{}\n")
    with tarfile.open(pack(tmp_path)) as tar:
        assert sorted(tar.getnames()) == ["results.jsonl", "timid-act-1/journal.jsonl"]
