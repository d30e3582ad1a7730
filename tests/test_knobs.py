"""The batch algebra: what divides what, and that no proposal can leave the lattice."""

from __future__ import annotations

import pytest
from hypothesis import assume, example, given
from hypothesis import strategies as st

from autotune.decisions import Kind, Proposal
from autotune.guards import bounded, real_values
from autotune.knobs import (
    ALIASES,
    KNOBS,
    Capability,
    Liveness,
    batch_problems,
    divisors,
    expand,
    fit_micro_batch,
    mini_batch_lattice,
    updates_per_rollout,
)
from tests.series import QUICK, context, facts, snapshot

SMALL = st.integers(1, 24)


def vector(train: int, n: int, mini: int, micro: int, rollout_micro: int, **more: float) -> dict[str, float]:
    return {
        "train_batch_size": train,
        "rollout_n": n,
        "ppo_mini_batch_size": mini,
        "micro_batch_size": micro,
        "rollout_micro_batch_size": rollout_micro,
        "ppo_epochs": 1,
        **more,
    }


@st.composite
def legal(draw: st.DrawFn) -> tuple[dict[str, float], int]:
    """A vector that satisfies every equation, and its number of ranks."""
    ranks = draw(st.integers(1, 4))
    n = draw(st.integers(1, 8))
    train = draw(SMALL)
    lattice = mini_batch_lattice(train, n, ranks)
    assume(lattice)
    mini = draw(st.sampled_from(lattice))
    micro = draw(st.sampled_from(divisors(mini * n // ranks)))
    share = train * n // ranks
    rollout_micro = draw(st.sampled_from(divisors(share)))
    knobs = vector(train, n, mini, micro, rollout_micro, num_rollout_batches=share // rollout_micro)
    return knobs, ranks


@given(st.integers(1, 5000))
def test_divisors_are_all_divisors_in_order(n: int) -> None:
    assert divisors(n) == tuple(d for d in range(1, n + 1) if n % d == 0)


@QUICK
@given(SMALL, st.integers(1, 8), st.integers(1, 4), SMALL, SMALL, SMALL)
def test_batch_problems_are_exactly_the_broken_equations(
    train: int, n: int, ranks: int, mini: int, micro: int, rollout_micro: int
) -> None:
    whole = train % mini == 0 and (mini * n) % ranks == 0
    fits = whole and (mini * n) % (micro * ranks) == 0
    sampled = (train * n) % (rollout_micro * ranks) == 0
    assume(train * n >= ranks)
    problems = batch_problems(vector(train, n, mini, micro, rollout_micro), ranks)
    assert (problems == []) == (fits and sampled)
    named = {knob for knob, _ in problems}
    assert ("ppo_mini_batch_size" in named) == (not whole)
    assert ("rollout_micro_batch_size" in named) == (not sampled)


@pytest.mark.parametrize(
    ("mini", "micro", "rollout_micro", "knob", "says"),
    [
        (128, 8, 8, "ppo_mini_batch_size", "128 prompts is more than train_batch_size 64"),
        (24, 8, 8, "ppo_mini_batch_size", "use 1, 2, 4, 8, 16, 32, 64"),
        (16, 48, 8, "micro_batch_size", "the nearest legal value is 32"),
        (16, 8, 100, "rollout_micro_batch_size", "the nearest legal value is 64"),
    ],
)
def test_a_problem_names_units_and_the_next_move(
    mini: int, micro: int, rollout_micro: int, knob: str, says: str
) -> None:
    problems = dict(batch_problems(vector(64, 8, mini, micro, rollout_micro), 1))
    assert says in problems[knob]


@pytest.mark.parametrize("knob", ["ppo_mini_batch_size", "micro_batch_size", "rollout_micro_batch_size"])
def test_a_batch_size_of_zero_is_a_problem(knob: str) -> None:
    assert batch_problems(vector(64, 8, 16, 8, 8) | {knob: 0}, 1)


def test_the_number_of_sampling_batches_must_add_up() -> None:
    assert batch_problems(vector(64, 8, 16, 8, 64, num_rollout_batches=3), 1)


def test_a_mini_batch_that_does_not_split_over_the_ranks_says_so() -> None:
    (_, message), *_ = batch_problems(vector(8, 1, 1, 1, 1), 2)
    assert "rank" in message and "does not divide train_batch_size" not in message


@QUICK
@given(legal())
def test_the_lattice_is_every_mini_batch_that_can_be_made_legal(drawn: tuple[dict[str, float], int]) -> None:
    knobs, ranks = drawn
    train, n = int(knobs["train_batch_size"]), int(knobs["rollout_n"])
    for mini in range(1, train + 1):
        candidate = knobs | {"ppo_mini_batch_size": mini, "micro_batch_size": 1}
        on_lattice = mini in mini_batch_lattice(train, n, ranks)
        assert (batch_problems(candidate, ranks) == []) == on_lattice


@QUICK
@given(legal(), st.integers(1, 300))
def test_fit_micro_batch_is_the_largest_that_fits(drawn: tuple[dict[str, float], int], wanted: int) -> None:
    knobs, ranks = drawn
    mini, n = int(knobs["ppo_mini_batch_size"]), int(knobs["rollout_n"])
    best = fit_micro_batch(mini, n, ranks, wanted)
    fitting = [m for m in range(1, wanted + 1) if mini * n % (m * ranks) == 0]
    assert best == max(fitting)


# --------------------------------------------------------------- what the controller can produce

PROPOSED = ("ppo_mini_batch_size", "ppo_epochs", "rollout_micro_batch_size", "kl_coef", "clip_range")


@QUICK
@given(
    legal(),
    st.sampled_from([*PROPOSED, "actor_learning_rate", "max_response_length", "temperature"]),
    st.floats(-1e6, 1e6, allow_subnormal=False),
)
def test_whatever_is_proposed_the_result_is_legal(
    drawn: tuple[dict[str, float], int], knob: str, value: float
) -> None:
    knobs, ranks = drawn
    of = facts(knobs=knobs, world_size=ranks)
    ctx = context([snapshot(0, of.knobs)], of=of)
    inside = bounded(Proposal("T", knob, value, "test"), ctx)
    after = dict(of.knobs) | real_values(knob, inside, ctx)
    assert batch_problems(after, ranks) == []
    share = after["train_batch_size"] * after["rollout_n"]
    assert share == after["rollout_micro_batch_size"] * after["num_rollout_batches"] * ranks
    assert updates_per_rollout(after) >= 1
    for real in expand(knob):
        spec = KNOBS[real]
        assert min(spec.low, of.knobs[real]) <= after[real] <= max(spec.high, of.knobs[real])
        assert not spec.integer or after[real] == int(after[real])


@pytest.mark.parametrize(("knob", "value"), [("train_batch_size", 128), ("num_rollout_batches", 4)])
def test_a_new_amount_of_data_is_the_same_in_every_equation(knob: str, value: float) -> None:
    of = facts(knobs={"rollout_micro_batch_size": 64, "num_rollout_batches": 8})
    ctx = context([snapshot(0, of.knobs)], of=of)
    after = dict(of.knobs) | real_values(knob, value, ctx)
    share = after["train_batch_size"] * after["rollout_n"]
    assert share == after["rollout_micro_batch_size"] * after["num_rollout_batches"]


@QUICK
@example(0.03125, 0.03741449870392663, 1.0)  # rounds to 1 ulp above the bound
@given(st.floats(0.02, 0.3), st.floats(0.02, 0.3), st.floats(0.001, 1.0))
def test_clip_range_moves_both_sides_alike(low: float, high: float, value: float) -> None:
    ctx = context([snapshot(0, {"clip_range_low": low, "clip_range_high": high})])
    inside = bounded(Proposal("T", "clip_range", value, "test"), ctx)
    after = real_values("clip_range", inside, ctx)
    assert max(after.values()) == pytest.approx(inside) and 0.02 <= inside <= 0.3
    assert all(0.02 <= side <= 0.3 for side in after.values())
    assert after["clip_range_low"] * high == pytest.approx(after["clip_range_high"] * low)


def test_neither_side_of_the_clip_range_leaves_its_bounds() -> None:
    ctx = context([snapshot(0, {"clip_range_low": 0.02, "clip_range_high": 0.2})])
    inside = bounded(Proposal("B4b", "clip_range", 0.2 / 1.2, "narrower"), ctx)
    after = real_values("clip_range", inside, ctx)
    assert all(KNOBS[real].low <= value <= KNOBS[real].high for real, value in after.items())


@pytest.mark.parametrize(
    ("now", "wanted", "expected"),
    [
        (0.005, 5.0, 2.0),
        (0.005, 1e-9, 1e-5),
        (5.0, 9.0, 5.0),  # a recipe may start outside the table: never pushed further out
        (5.0, 4.0, 4.0),
        (1e-6, 1e-7, 1e-6),
    ],
)
def test_bounds_are_the_tables_or_the_recipes_own(now: float, wanted: float, expected: float) -> None:
    ctx = context([snapshot(0, {"kl_coef": now})])
    assert bounded(Proposal("T", "kl_coef", wanted, "test"), ctx) == pytest.approx(expected)


@pytest.mark.parametrize(
    ("wanted", "anchor", "expected"),
    [
        (1.0, None, 1.5e-2),  # 50 x the recipe's 3e-4
        (1e-7, None, 6e-6),
        (1.0, 2e-4, 4e-4),  # healthy: [0.1, 2] x where it came to rest
        (1e-7, 2e-4, 2e-5),
        (3e-4, 2e-4, 3e-4),
    ],
)
def test_learning_rates_have_a_wide_range_for_rescue_and_a_narrow_one_once_healthy(
    wanted: float, anchor: float | None, expected: float
) -> None:
    proposal = Proposal("X1", "actor_learning_rate", wanted, "test", kind=Kind.REGULATOR)
    assert bounded(proposal, context([snapshot(0)]), anchor) == pytest.approx(expected)


# ------------------------------------------------------------------------------------ the table


def test_the_table_is_consistent() -> None:
    for name, spec in KNOBS.items():
        assert spec.name == name and spec.low < spec.high and spec.conservative in (-1, 0, 1)
        assert spec.clip(spec.low - 1) == spec.low and spec.clip(spec.high + 1) == spec.high
    assert all(real in KNOBS for sides in ALIASES.values() for real in sides)
    assert expand("clip_range") == ("clip_range_low", "clip_range_high")
    assert expand("kl_coef") == ("kl_coef",)


@pytest.mark.parametrize(
    ("state", "acts"),
    [
        (Liveness.LIVE, True),
        (Liveness.NEXT_ROLLOUT, True),
        (Liveness.RESTART, False),
        (Liveness.UNAVAILABLE, False),
        (Liveness.PINNED, False),
    ],
)
def test_only_a_live_knob_acts(state: Liveness, acts: bool) -> None:
    assert Capability(state).acts == acts


@pytest.mark.parametrize(("mini", "epochs", "updates"), [(64, 1, 1), (16, 1, 4), (16, 2, 8), (1, 1, 64)])
def test_updates_per_rollout(mini: int, epochs: int, updates: int) -> None:
    assert updates_per_rollout(vector(64, 8, mini, 8, 8) | {"ppo_epochs": epochs}) == updates
