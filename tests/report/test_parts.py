"""The parts behind the page: thinning, axes, groups, the heat map, the word of the verdict."""

from __future__ import annotations

import dataclasses
import math
import statistics
import struct
import zlib
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from autotune.report import groups, heat, read_run, verdict
from autotune.report.runs import RunData
from autotune.report.scales import Axis, asinh, linear, log
from autotune.report.thin import keep
from autotune.story import Evaluation
from tests import journal_lines as j
from tests.report.made import write_lines

VALUES = st.lists(st.one_of(st.none(), st.floats(-1e6, 1e6)), min_size=1, max_size=400)


@given(VALUES, st.integers(4, 80))
def test_thinning_keeps_ends_and_extremes(column: list[float | None], most: int) -> None:
    kept = keep([column], len(column), most)
    assert kept == sorted(set(kept))
    assert {0, len(column) - 1} <= set(kept)
    assert len(kept) <= max(most, 4) + 2
    known = [v for v in column if v is not None]
    if known:
        shown = [column[i] for i in kept if column[i] is not None]
        assert (min(shown), max(shown)) == (min(known), max(known))


def test_short_series_are_drawn_whole() -> None:
    assert keep([[1.0] * 60], 60, 60) == list(range(60))


@pytest.mark.parametrize(
    "axis",
    [linear([-3.0, 8.0]), log([1e-5, 3e-3]), asinh([0.0, 51.0], 0.02, 0.12), asinh([0.001], 0.005, 0.2)],
)
def test_axes_are_monotone_and_their_ticks_lie_inside(axis: Axis) -> None:
    ticks = axis.ticks()
    places = [axis.place(v) for v in ticks]
    assert 2 <= len(ticks) <= 6
    assert places == sorted(places)
    assert (axis.place(axis.low), axis.place(axis.high)) == (0.0, 1.0)
    assert axis.place(axis.high * 10) == 1.0


def test_the_band_is_seen_beside_zero_and_beside_an_explosion() -> None:
    for top in (0.01, 0.3, 51.0):
        axis = asinh([0.0, top], 0.02, 0.12)
        assert axis.place(0.0) == 0.0
        assert axis.place(0.08) - axis.place(0.03) > 0.09


def made(folder: Path, name: str, mode: str, seed: int, scores: float, rewards: list[float]) -> RunData:
    recipe = {
        "name": name,
        "seed": seed,
        "control": {"mode": mode},
        "task": {},
        "trainer": {"rollouts": len(rewards)},
    }
    lines = [j.header(**recipe), *(j.rollout(t, {"reward_mean": r}) for t, r in enumerate(rewards)), j.end()]
    run = read_run(write_lines(folder / f"{name}-{mode}-{seed}", lines))
    return dataclasses.replace(
        run, evaluations=[Evaluation(0, 0.1, 0.1), Evaluation(len(rewards), scores, 0.0)]
    )


def test_a_course_is_mean_and_standard_deviation_over_the_seeds_that_are_there(tmp_path: Path) -> None:
    rewards = ([0.1, 0.4, 0.6], [0.3, 0.6, 0.6], [0.2, 0.8])
    runs = [made(tmp_path, "a", "act", s, 0.9, r) for s, r in enumerate(rewards)]
    runs = [dataclasses.replace(run, base="same", control="same") for run in runs]
    (group,) = groups.group_runs(runs)
    course = groups.course(group, groups.metric("reward_mean"))
    assert course.count == [3, 3, 2]
    assert course.mean == pytest.approx([0.2, 0.6, 0.6])
    sd = statistics.stdev([0.1, 0.3, 0.2])
    assert (course.low[0], course.high[0]) == pytest.approx((0.2 - sd, 0.2 + sd))


def test_runs_of_another_control_are_another_arm_of_the_same_recipe(tmp_path: Path) -> None:
    act, off = made(tmp_path, "a", "act", 1, 0.9, [0.1]), made(tmp_path, "a", "off", 1, 0.3, [0.1])
    found = groups.group_runs([act, off])
    assert [g.label for g in found] == ["a · act", "a · off"]
    assert found[0].base == found[1].base


def decode(png: bytes) -> tuple[int, int, list[bytes]]:
    width, height = struct.unpack(">II", png[16:24])
    at, body = 8, b""
    while at < len(png):
        size = int.from_bytes(png[at : at + 4], "big")
        if png[at + 4 : at + 8] == b"IDAT":
            body += png[at + 8 : at + 8 + size]
        at += size + 12
    raw = zlib.decompress(body)
    return width, height, [raw[i * (width + 1) + 1 : (i + 1) * (width + 1)] for i in range(height)]


def test_the_heat_map_is_the_histogram(tmp_path: Path) -> None:
    counts = [[0.0] * heat.ROWS for _ in range(3)]
    counts[0][33], counts[1][33], counts[1][65], counts[2][0] = 10.0, 990.0, 10.0, 5.0
    width, height, rows = decode(heat.png([*counts, None]))
    assert (width, height) == (4, heat.ROWS)
    assert list(rows[heat.ROWS - 1 - 33]) == [255, heat.opacity(0.99), 0, 0]
    assert list(rows[0]) == [0, heat.opacity(0.01), 0, 0]
    assert list(rows[-1]) == [0, 0, 255, 0]
    assert 0 < heat.opacity(heat.FAINTEST * 1.01) < heat.opacity(0.01) < heat.opacity(0.5) < 255


def test_long_heat_maps_add_neighbours_up() -> None:
    ones = [[1.0] * heat.ROWS for _ in range(1000)]
    columns = heat.columns(ones, 100)
    assert len(columns) == 100
    assert columns[0] == [10.0] * heat.ROWS


def test_quantiles_come_from_the_bins() -> None:
    counts = [0.0] * heat.ROWS
    counts[33] = 4.0  # the first bin above a ratio of 1
    assert heat.quantile(counts, 1e-9) == pytest.approx(1.0, rel=1e-6)
    assert heat.quantile(counts, 1.0) == pytest.approx(2 ** (6 / 64))
    assert heat.quantile(None, 0.5) is None


def test_student_s_quantiles() -> None:
    t = pytest.importorskip("scipy.stats").t
    for freedom, value in enumerate(verdict.T_95, 1):
        assert value == pytest.approx(t.ppf(0.975, freedom), abs=6e-4)
    for n in (40, 100, 1000):
        low, high = verdict.t_interval([0.0, 1.0] * (n // 2))
        exact = t.ppf(0.975, n - 1) * statistics.stdev([0.0, 1.0] * (n // 2)) / math.sqrt(n)
        assert (high - low) / 2 == pytest.approx(exact, rel=5e-3)


@pytest.mark.parametrize(
    ("acting", "plain", "word"),
    [
        ((0.9, 0.91, 0.92), (0.3, 0.31, 0.35), "helped"),
        ((0.2, 0.21, 0.22), (0.6, 0.61, 0.65), "harmed"),
        ((0.5, 0.6, 0.7), (0.6, 0.5, 0.72), "no difference"),
        ((0.9,), (0.3,), "one pair"),
    ],
)
def test_the_word_follows_from_the_interval(
    tmp_path: Path, acting: tuple[float, ...], plain: tuple[float, ...], word: str
) -> None:
    runs = [made(tmp_path, "a", "act", s, v, [0.1]) for s, v in enumerate(acting)]
    runs += [made(tmp_path, "a", "off", s, v, [0.1]) for s, v in enumerate(plain)]
    (line,) = verdict.headlines(groups.group_runs(runs))
    assert line.word == word
    mean = statistics.fmean(a - b for a, b in zip(acting, plain, strict=True))
    assert f"{mean:+.3f}" in line.text
    assert f"{len(acting)} seeds in pairs" in line.detail or word == "one pair"


def test_without_a_twin_nothing_is_claimed(tmp_path: Path) -> None:
    runs = [made(tmp_path, "a", "act", s, 0.9, [0.1]) for s in (1, 2)]
    (line,) = verdict.headlines(groups.group_runs(runs))
    assert line.word == "unknown"
    assert "control.mode=off" in line.detail
    (alone,) = verdict.headlines(groups.group_runs(runs[:1]))
    assert alone.word == "alone"
    assert "0.100 → 0.900" in alone.text


def test_what_was_done_is_told_by_its_two_ends(tmp_path: Path) -> None:
    first = [j.change("X1", "kl_coef", 0.005, 0.01), j.change("A1", "ppo_epochs", 1, 2)]
    back = {
        "changes": [j.change("A1", "ppo_epochs", 2, 1)],
        "verdicts": [j.verdict("A1", "ppo_epochs", "reverted", 0)],
    }
    lines = [j.rollout(0, changes=first), j.rollout(1, changes=[j.change("B3c", "kl_coef", 0.01, 0.04)])]
    one = read_run(write_lines(tmp_path / "one", [j.header(), *lines, j.rollout(2, **back)]))
    other = read_run(write_lines(tmp_path / "other", [j.header(), lines[0], j.rollout(2, **back)]))
    assert verdict.did([one]) == "kl_coef 0.005 → 0.04 (B3c, X1)"
    assert verdict.did([one, other]) == "kl_coef 0.005 → 0.01 to 0.04 (B3c, X1, 2 of 2 runs)"
    assert "3 changes; 1 reverted" in verdict.told(one)
    assert "Moved: kl_coef 0.005 → 0.04 (B3c, X1)." in verdict.told(one)


def test_other_seeds_are_not_compared(tmp_path: Path) -> None:
    runs = [made(tmp_path, "a", "act", 1, 0.9, [0.1]), made(tmp_path, "a", "off", 2, 0.3, [0.1])]
    (line,) = verdict.headlines(groups.group_runs(runs))
    assert line.word == "unknown"
    assert "share no seed" in line.text
