"""Advice on synthetic twins: calm on healthy logs, quick on collapsing ones, whatever the style."""

from __future__ import annotations

from functools import cache
from pathlib import Path
from statistics import median

import pytest

from autotune.advise import Kind, Shadow, advise, verdict
from autotune.testing.twins import COLLAPSING, FORMATS, HEALTHY, STORIES, Twin, rows, write

SEEDS = (21, 22)

EXPECTED: dict[str, Kind] = {
    **dict.fromkeys(HEALTHY, Kind.HEALTHY),
    "timid": Kind.TIMID,
    "collapse_entropy_up": Kind.COLLAPSING,
    "collapse_entropy_zero": Kind.COLLAPSING,
    "collapse_short": Kind.COLLAPSING,
    "heals": Kind.HEALTHY,
    "saturates": Kind.HEALTHY,
    "all_truncated": Kind.HEALTHY,
    "no_signal": Kind.NO_SIGNAL,
    "sawtooth": Kind.AGGRESSIVE,
}


@cache
def _read(twin: Twin, folder: Path) -> Shadow:
    return advise(write(twin, folder))


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """One for all tests, so that a twin is read once."""
    return tmp_path_factory.mktemp("twins")


def read(twin: Twin, folder: Path) -> Shadow:
    return _read(twin, folder)


def first_below_half(rewards: list[float]) -> int | None:
    """Index of the first reward below half of the median of those before it."""
    return next((i for i in range(2, len(rewards)) if rewards[i] < 0.5 * median(rewards[:i])), None)


def test_every_story_is_expected_something_of() -> None:
    assert set(EXPECTED) == set(STORIES)


def test_a_twin_is_made_again_bit_for_bit(tmp_path: Path) -> None:
    first = write(Twin("heals", 7), tmp_path).read_bytes()
    assert write(Twin("heals", 7), tmp_path).read_bytes() == first
    assert write(Twin("heals", 8, Twin("heals", 7).style.format), tmp_path).read_bytes() != first


@pytest.mark.parametrize("kind", STORIES)
@pytest.mark.parametrize("form", FORMATS)
def test_the_verdict_is_the_story(kind: str, form: str, folder: Path) -> None:
    for seed in SEEDS:
        shadow = read(Twin(kind, seed, form), folder)
        found = verdict(shadow)
        assert found.kind is EXPECTED[kind], f"seed {seed}: {found}"
        assert shadow.survey.unknown == []


@pytest.mark.parametrize("kind", HEALTHY)
@pytest.mark.parametrize("form", FORMATS)
def test_healthy_logs_are_left_alone(kind: str, form: str, folder: Path) -> None:
    """At most one tuning action in 500 trainer steps and no emergency."""
    steps = actions = 0
    for seed in SEEDS:
        shadow = read(Twin(kind, seed, form), folder)
        assert shadow.of("emergency") == []
        actions += len(shadow.of("action"))
        steps += len(shadow.steps) * shadow.survey.steps_per_row
    assert actions <= steps / 500


@pytest.mark.parametrize("kind", COLLAPSING)
@pytest.mark.parametrize("form", FORMATS)
def test_a_fall_below_half_is_an_alarm_at_once_and_an_emergency_next(
    kind: str, form: str, folder: Path
) -> None:
    for seed in SEEDS:
        twin = Twin(kind, seed, form)
        shadow = read(twin, folder)
        fall = first_below_half([row["reward"] for row in rows(twin)])
        assert fall is not None
        signs = [s.index for s in shadow.said if s.kind in ("alarm", "emergency")]
        assert signs and signs[0] <= fall, f"seed {seed}: first sign at {signs[:1]}, fall at {fall}"
        assert shadow.of("emergency")[0].index <= fall + 1


@pytest.mark.parametrize("seed", SEEDS)
def test_a_saw_is_seen_within_its_first_teeth(seed: int, folder: Path) -> None:
    """The fall stands at half of the run, and the teeth are four rollouts wide."""
    falls = read(Twin("sawtooth", seed, "verl"), folder).of("emergency")
    assert falls and falls[0].index <= STORIES["sawtooth"].rows // 2 + 12


def test_a_collapse_is_dated_in_the_trainers_own_steps(tmp_path: Path) -> None:
    twin = Twin("collapse_short", 3, "trainer_state")
    found = verdict(read(twin, tmp_path))
    onset = twin.style.every * (0.28 * STORIES[twin.kind].rows)
    assert found.since is not None and found.since % twin.style.every == 0
    assert abs(found.since - onset) <= 6 * twin.style.every
    assert found.title == f"collapsing since step {found.since:g}"


def test_a_fall_that_healed_is_told_but_not_the_verdict(tmp_path: Path) -> None:
    found = verdict(read(Twin("heals", 4), tmp_path))
    assert found.kind is Kind.HEALTHY and "healed by itself" in found.headline and found.since is None


def test_cut_answers_are_told_beside_a_healthy_reward(tmp_path: Path) -> None:
    assert "cut at the cap" in verdict(read(Twin("saturates", 5), tmp_path)).headline


def test_a_prefix_of_a_log_gets_the_same_decisions_as_the_whole(tmp_path: Path) -> None:
    """Nothing is decided from rows that come later."""
    path = write(Twin("collapse_entropy_up", 9, "verl"), tmp_path)
    whole = advise(path).said
    lines = path.read_text().splitlines(keepends=True)
    half = tmp_path / "half.log"
    half.write_text("".join(lines[: len(lines) // 2]))
    known = advise(half).said
    assert known and known == whole[: len(known)]
