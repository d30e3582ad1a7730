"""Blocks of regular JSONL say exactly what row by row says, and whatever is not regular is no block."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from autotune.logs import Reader, Stretch, open_log, survey
from autotune.logs import sniff as sniff_module
from autotune.logs.blocks import Block, read_block
from autotune.logs.lines import json_line
from tests.series import QUICK

REGULAR = [json.dumps({"step": k, "reward": 0.1 * k, "kl": 1e-3}) for k in range(5)]


def test_regular_lines_are_a_block() -> None:
    block = read_block([line + "\n" for line in REGULAR])
    assert block is not None and block.keys == ("step", "reward", "kl") and len(block) == 5
    assert list(block.rows()) == [json_line(line) for line in REGULAR]
    assert block.column("reward").tolist() == [0.1 * k for k in range(5)]
    first, rest = block.split(2)
    assert [*first.rows(), *rest.rows()] == list(block.rows()) and len(first) == 2


@pytest.mark.parametrize(
    "other",
    [
        '{"step": 5, "reward": null, "kl": 0.1}',
        '{"step": 5, "reward": "0.5", "kl": 0.1}',
        '{"step": 5, "reward": true, "kl": 0.1}',
        '{"step": 5, "reward": [1], "kl": 0.1}',
        '{"step": 5, "reward": {"mean": 1}, "kl": 0.1}',
        '{"step": 5, "reward": 0.5}',
        '{"step": 5, "kl": 0.5, "reward": 0.5}',
        '{"step": 5, "reward": 0.5, "kl": 0.1, "more": 1}',
        '{"step": 5, "reward": 0.5, "kl": 0.1}, {"step": 6, "reward": 0.5, "kl": 0.1}',
        '{"step": 5, "reward": 0.5, "k',
        "[1, 2]",
        "Saving a checkpoint",
        "",
        f'{{"step": 5, "reward": 1{"0" * 400}, "kl": 0.1}}',
    ],
)
def test_a_line_that_is_different_makes_it_no_block(other: str) -> None:
    assert read_block([*REGULAR, other]) is None
    assert read_block([other, *REGULAR]) is None


def test_lines_that_only_together_are_json_are_no_block() -> None:
    assert read_block(['{"a": {"b": 1}', '"c": {"d": 2}}']) is None
    assert read_block(['{"a": 1', '{"b": 2}}']) is None
    assert read_block(["{}", "{}"]) is None


def same(one: list[dict[str, Any]], two: list[dict[str, Any]]) -> bool:
    """Equal, where NaN equals NaN and 1 equals 1.0."""
    return repr([{k: _plain(v) for k, v in r.items()} for r in one]) == repr(
        [{k: _plain(v) for k, v in r.items()} for r in two]
    )


def _plain(value: object) -> object:
    return float(value) if isinstance(value, (int, float)) and not isinstance(value, bool) else value


def spread(log: sniff_module.Log) -> list[dict[str, Any]]:
    return [row for part in log.parts() for row in (part.rows() if isinstance(part, Block) else [part])]


LINE = st.one_of(
    st.builds(
        lambda reward, kl: json.dumps({"reward": reward, "kl": kl}),
        st.floats(allow_nan=True, allow_infinity=True),
        st.one_of(st.floats(allow_nan=False), st.none(), st.integers(-9, 9)),
    ),
    st.sampled_from(
        ['{"reward": 1', "text", "", '{"reward": "0.5", "kl": {"a": 1}}', '{"train_runtime": 3.0}']
    ),
)


@QUICK
@given(lines=st.lists(LINE, min_size=1, max_size=30))
def test_parts_say_what_rows_say(lines: list[str], tmp_path_factory: pytest.TempPathFactory) -> None:
    path = tmp_path_factory.mktemp("log") / "a.jsonl"
    path.write_text("\n".join(['{"reward": 0.5, "kl": 0.1}', *lines]) + "\n")
    rows = list(open_log(path).rows())
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sniff_module, "LINES", 4)
        log = open_log(path)
        assert same(spread(log), rows)
        assert same(spread(log), rows), "what was kept is the same"
        patch.setattr(sniff_module, "KEPT", 3)
        log = open_log(path)
        assert same(spread(log), rows) and log._kept is None
        assert same(spread(log), rows), "what was too much to keep is read again"


def long_log(path: Path, count: int = 3000) -> Path:
    rows = [
        {"step": 2 * k, "reward": k / count, "kl": 0.05, "entropy": 1.0, "loss": 0.1} for k in range(count)
    ]
    rows[1200]["reward"], rows[1300]["loss"], rows[1400]["kl"] = float("nan"), float("inf"), -1.0
    rows[1500]["step"] = 7
    del rows[2100]["reward"]  # one more update of the rollout before it
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def test_stretches_hold_the_numbers_of_their_rollouts(tmp_path: Path) -> None:
    found = survey(open_log(long_log(tmp_path / "a.jsonl")))
    slow, quick = Reader(found), Reader(found)
    one_by_one = list(slow.rollouts())
    parts = list(quick.rollouts(in_passing=2500))
    stretches = [part for part in parts if isinstance(part, Stretch)]
    assert len(stretches) == 1 and stretches[0].index == 1000 and len(stretches[0].steps) == 999
    index = 0
    for part in parts:
        for k in range(len(part.steps) if isinstance(part, Stretch) else 1):
            told = one_by_one[index]
            step = part.steps[k] if isinstance(part, Stretch) else part.step
            scalars = (
                {n: v[k] for n, v in part.scalars.items()} if isinstance(part, Stretch) else part.scalars
            )
            assert step == told.step and scalars.keys() == told.scalars.keys()
            np.testing.assert_equal([*scalars.values()], [*told.scalars.values()])
            index += 1
    assert index == len(one_by_one) == 2999
    assert (quick.restarts, quick.rows) == (slow.restarts, slow.rows) == (1, 3000)
