"""The real model's experiment: which runs it makes, and what it shows of rows."""

from __future__ import annotations

import json
from collections import Counter
from dataclasses import asdict
from pathlib import Path

import pytest

from experiments.rescue import suite
from experiments.rescue.runs import Row
from experiments.smollm2 import __main__ as smollm2

COMMIT = "0123456789abcdef0123456789abcdef01234567"


def test_every_start_runs_off_and_acting_with_three_seeds_and_once_in_shadow() -> None:
    arms = Counter((job.start, job.arm) for job in smollm2.jobs(COMMIT))
    shadow = arms.pop(("well_set", "shadow"))
    assert shadow == 1 and set(arms.values()) == {3}
    starts = ("well_set", "timid", "aggressive")
    assert set(arms) == {(start, arm) for start in starts for arm in ("fixed", "recommended")}


def test_table_and_curves_come_from_the_rows_of_the_freeze(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    seed = suite.reporting_seeds(COMMIT, "sums", 1)[0]

    def made(arm: str, score: float, start: str = "timid", seed: int = seed) -> Row:
        row = Row("report", "sums", start, arm, seed, "", "", 0, 100.0, 90.0, score=score)
        row.curve = [0.1, score]
        return row

    rows = [made("fixed", 0.05), made("recommended", 0.55), made("recommended", 0.9, "lr_x30")]
    rows.append(made("recommended", 0.99, seed=101))  # of no freeze
    given = ["table", "--rows", str(tmp_path), "--out", str(tmp_path / "shown")]
    monkeypatch.setattr(smollm2.rescue, "FREEZE", tmp_path / "freeze.json")
    (tmp_path / "results.jsonl").write_text("".join(json.dumps(asdict(row)) + "\n" for row in rows))
    assert smollm2.main(given) == 0 and not (tmp_path / "shown").exists()
    (tmp_path / "freeze.json").write_text(json.dumps([{"commit": COMMIT}]))
    assert smollm2.main(given) == 0
    assert "| timid | act | 1 | 0.550" in capsys.readouterr().out
    curves = (tmp_path / "shown" / "curves.svg").read_text("utf-8")
    assert curves.count("<polyline") == 2 and ">timid<" in curves and ">well_set<" not in curves
