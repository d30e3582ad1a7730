"""The journal: chain, torn lines, numbers that are not finite, locks, winning lines, cost."""

from __future__ import annotations

import errno
import hashlib
import itertools
import json
import math
import subprocess
import sys
import time
from pathlib import Path
from statistics import median

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from autotune.errors import JournalError
from autotune.journal import (
    Journal,
    comparable,
    inspect_journal,
    is_written,
    plain,
    read_journal,
    winning_lines,
)


def write(path: Path, count: int = 4) -> Path:
    with Journal(path) as journal:
        journal.append("header", -1, {"recipe": {"name": "x"}})
        for t in range(count - 1):
            journal.append("rollout", t, {"reward": t / 3})
    return path


def test_a_journal_is_written_while_it_is_held(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with Journal(tmp_path / "j") as journal:
        assert is_written(journal.path)
    assert not is_written(journal.path) and not is_written(tmp_path / "none")

    def no_locks_here(handle: int, operation: int) -> None:
        raise OSError(errno.ENOLCK, "no locks available")

    monkeypatch.setattr("autotune.journal.fcntl.flock", no_locks_here)
    assert is_written(journal.path)  # who cannot tell does not call a live run dead


def test_lines_come_back_as_they_were_written(tmp_path: Path) -> None:
    with Journal(tmp_path / "j") as journal:
        written = [journal.append("rollout", t, {"x": [0.1 + t, "ü", None]}) for t in range(3)]
    assert read_journal(tmp_path / "j") == written
    assert [line["v"] for line in written] == [1, 1, 1]
    assert len({line["prev"] for line in written}) == 3


def test_prev_is_the_hash_of_the_line_before(tmp_path: Path) -> None:
    raw = write(tmp_path / "j").read_bytes().splitlines()
    for before, after in itertools.pairwise(raw):
        assert json.loads(after)["prev"] == hashlib.sha256(before).hexdigest()


@pytest.mark.parametrize("change", ["edit", "remove", "swap", "insert"])
def test_tampering_is_found(tmp_path: Path, change: str) -> None:
    path = write(tmp_path / "j")
    lines = path.read_text().splitlines(keepends=True)
    if change == "edit":
        lines[1] = lines[1].replace("0.0", "0.5")
    elif change == "remove":
        del lines[1]
    elif change == "swap":
        lines[1], lines[2] = lines[2], lines[1]
    else:
        lines.insert(2, lines[1])
    path.write_text("".join(lines))
    with pytest.raises(JournalError, match="altered"):
        read_journal(path)
    with pytest.raises(JournalError, match="cannot be continued"):
        Journal(path, resume=True)


def test_every_cut_of_the_last_line_is_recovered(tmp_path: Path) -> None:
    whole = write(tmp_path / "j").read_bytes()
    start = whole.rstrip(b"\n").rindex(b"\n") + 1
    for cut in range(start + 1, len(whole)):
        path = tmp_path / f"cut{cut}"
        path.write_bytes(whole[:cut])
        assert len(read_journal(path)) == 3
        with Journal(path, resume=True) as journal:
            assert "torn" in journal.recovered
            journal.append("end", 2, {})
        assert [line["type"] for line in read_journal(path)][-1] == "end"


def test_a_last_line_of_zero_bytes_with_a_newline_is_recovered(tmp_path: Path) -> None:
    path = write(tmp_path / "j")
    with path.open("ab") as stream:
        stream.write(b"\0" * 40 + b"\n")
    with Journal(path, resume=True) as journal:
        assert "unreadable" in journal.recovered
    assert len(read_journal(path)) == 4


def test_damage_before_the_last_line_is_an_error_with_its_place(tmp_path: Path) -> None:
    path = write(tmp_path / "j")
    lines = path.read_bytes().splitlines(keepends=True)
    path.write_bytes(lines[0] + b"garbage\n" + b"".join(lines[2:]))
    with pytest.raises(JournalError, match=":2: not a journal line"):
        read_journal(path)


def test_numbers_that_are_not_finite_never_become_bare_tokens(tmp_path: Path) -> None:
    with Journal(tmp_path / "j") as journal:
        values = [math.nan, math.inf, -math.inf, np.float32("nan"), np.float64(0.5), np.int64(3)]
        line = journal.append("rollout", 0, {"x": values, "y": {"z": (math.nan,)}})
    raw = (tmp_path / "j").read_text()

    def refuse(token: str) -> None:
        raise AssertionError(token)

    assert json.loads(raw, parse_constant=refuse) == line
    assert line["x"] == ["nan", "inf", "-inf", "nan", 0.5, 3]
    assert line["y"] == {"z": ["nan"]}


json_values = st.recursive(
    st.none() | st.booleans() | st.integers(-(2**60), 2**60) | st.floats() | st.text(),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(), inner, max_size=4),
    max_leaves=20,
)


@settings(max_examples=60, deadline=None)
@given(payload=json_values)
def test_anything_json_like_survives(tmp_path_factory: pytest.TempPathFactory, payload) -> None:
    path = tmp_path_factory.mktemp("journal") / "j"
    with Journal(path) as journal:
        journal.append("rollout", 0, {"x": payload})
        journal.append("rollout", 1, {})
    assert read_journal(path)[0]["x"] == plain(payload)


def test_a_type_that_json_does_not_know_is_refused_and_leaves_nothing(tmp_path: Path) -> None:
    with Journal(tmp_path / "j") as journal:
        with pytest.raises(TypeError, match="received object"):
            journal.append("rollout", 0, {"x": object()})
        with pytest.raises(ValueError, match="RESERVED"):
            journal.append("rollout", 0, {"prev": "mine"})
        with pytest.raises(ValueError, match="TYPES"):
            journal.append("rolout", 0, {})
    assert read_journal(tmp_path / "j") == []


def test_a_journal_is_new_unless_resumed(tmp_path: Path) -> None:
    path = write(tmp_path / "j")
    with pytest.raises(JournalError, match="--resume"):
        Journal(path)
    with pytest.raises(JournalError, match="cannot be opened"):
        Journal(tmp_path / "missing", resume=True)


def test_a_second_writer_is_refused(tmp_path: Path) -> None:
    with Journal(tmp_path / "j"), pytest.raises(JournalError, match="another process"):
        Journal(tmp_path / "j", resume=True)


def test_the_lock_ends_with_a_killed_process(tmp_path: Path) -> None:
    program = (
        "import os, sys; from autotune.journal import Journal;"
        "j = Journal(sys.argv[1]); j.append('rollout', 0, {'x': 1}); os.kill(os.getpid(), 9)"
    )
    done = subprocess.run([sys.executable, "-c", program, str(tmp_path / "j")], check=False)
    assert done.returncode == -9
    with Journal(tmp_path / "j", resume=True) as journal:
        assert journal.recovered == ""
    assert len(read_journal(tmp_path / "j")) == 1


def test_a_full_disk_stops_with_words_and_leaves_no_half_line(tmp_path: Path) -> None:
    program = """
import resource, sys
from autotune.errors import JournalError
from autotune.journal import Journal
resource.setrlimit(resource.RLIMIT_FSIZE, (500, 500))
journal = Journal(sys.argv[1])
try:
    for t in range(9):
        journal.append("rollout", t, {"x": "y" * 80})
except JournalError as error:
    print(t, error)
"""
    command = [sys.executable, "-c", program, str(tmp_path / "j")]
    done = subprocess.run(command, check=True, capture_output=True, text=True)
    assert "2 the journal" in done.stdout and "cannot be written" in done.stdout
    raw = (tmp_path / "j").read_bytes()
    assert raw.endswith(b"\n") and len(read_journal(tmp_path / "j")) == 2


def test_another_version_is_named(tmp_path: Path) -> None:
    path = tmp_path / "j"
    path.write_text('{"v": 2, "type": "header", "rollout": -1, "prev": "0"}\n')
    with pytest.raises(JournalError, match="version 2"):
        inspect_journal(path)


def line(type: str, rollout: int, **payload: object) -> dict[str, object]:
    return {"type": type, "rollout": rollout, "prev": str(payload), **payload}


def straight_run() -> list[dict[str, object]]:
    lines = [line("header", -1), line("eval", 0), line("checkpoint", 0)]
    lines += [line("rollout", t, value=t) for t in range(3)]
    return [*lines, line("checkpoint", 3), line("rollout", 3, value=3), line("end", 4)]


def test_winning_lines_read_like_an_uninterrupted_run() -> None:
    straight = straight_run()
    ahead = [*straight[:7], line("rollout", 3, value=-1), line("eval", 4), line("end", 4)]
    broken = [*ahead, line("resumed", 3, **{"from": 3}), *straight[7:]]
    assert winning_lines(broken) == straight


def test_a_checkpoint_line_that_a_kill_left_out_may_be_written_by_the_resumed_run() -> None:
    straight = straight_run()
    broken = [*straight[:6], line("resumed", 3, **{"from": 3}), *straight[6:]]
    assert winning_lines(broken) == straight
    twice = [*straight[:7], line("resumed", 3, **{"from": 3}), *straight[6:]]
    assert winning_lines(twice) == straight


def test_two_interruptions_in_a_row() -> None:
    straight = straight_run()
    resumed = line("resumed", 0, **{"from": 0})
    assert (
        winning_lines([*straight[:5], resumed, *straight[3:4], resumed, *straight[3:]]) == straight
    )


def test_comparable_lines_leave_out_times_hashes_and_throughput() -> None:
    def rollout(speed: float, reward: float) -> dict[str, object]:
        metrics = {"reward_mean": reward, "tokens_per_second": speed, "time/update": speed}
        return line("rollout", 0, times={"total": speed}, snapshot={"metrics": metrics})

    assert comparable([rollout(1.0, 0.5)]) == comparable([rollout(2.0, 0.5)])
    assert comparable([rollout(1.0, 0.5)]) != comparable([rollout(1.0, 0.6)])


def test_a_line_of_usual_size_costs_less_than_a_millisecond(tmp_path: Path) -> None:
    payload = {
        "snapshot": {"metrics": {f"metric_{i}": i / 7 for i in range(40)}},
        "histograms": {"policy_ratio": [float(i) for i in range(66)]},
        "decision": {"changes": [{"rule": "X1", "values": {"actor_learning_rate": 1e-4}}] * 3},
    }
    seconds = []
    with Journal(tmp_path / "j") as journal:
        for t in range(100):
            started = time.perf_counter()
            journal.append("rollout", t, payload)
            seconds.append(time.perf_counter() - started)
    assert median(seconds) < 1e-3
