"""The plant does what real runs did: the scan's numbers, and the shapes between them."""

from __future__ import annotations

import csv
import math
import statistics
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest

from autotune.errors import CheckpointError, InputError
from autotune.testing import HEALTHY, Constants, FakeTrainer, RolloutRecord
from autotune.testing.plant import flat_group_share, outside_share

SCAN = Path(__file__).parents[2] / "experiments" / "plant" / "scan.csv"
SEEDS = range(5)

Row = dict[str, float]


def read_scan() -> dict[str, Row]:
    with SCAN.open(encoding="utf-8") as file:
        return {
            row["name"]: {k: float(v) for k, v in row.items() if k != "name"} for row in csv.DictReader(file)
        }


SCANNED = read_scan()


def records(rollouts: int = 60, seed: int = 0, **knobs: float) -> list[RolloutRecord]:
    seen: list[RolloutRecord] = []
    FakeTrainer(knobs, seed, rollouts).run(seen.append)
    return seen


def column(run: list[RolloutRecord], metric: str) -> list[float]:
    return [record.scalars[metric] or 0.0 for record in run]


def of_row(row: Row, seed: int) -> list[RolloutRecord]:
    per_epoch = int(row["updates"] / row["epochs"])
    return records(
        int(row["rollouts"]),
        seed,
        train_batch_size=row["prompts"],
        ppo_mini_batch_size=row["prompts"] // per_epoch,
        ppo_epochs=row["epochs"],
        kl_coef=row["kl_coef"],
        clip_range=row["clip_range"],
        actor_learning_rate=row["learning_rate"],
    )


def over_seeds(row: Row, value: object) -> float:
    return statistics.median(value(of_row(row, seed)) for seed in SEEDS)  # type: ignore[operator]


def last_reward(run: list[RolloutRecord]) -> float:
    return statistics.fmean(column(run, "reward_mean")[-10:])


LIVING = [name for name, row in SCANNED.items() if not row["dead"]]
DEAD = [name for name, row in SCANNED.items() if row["dead"]]


@pytest.mark.parametrize("name", LIVING)
def test_reward_after_the_run_is_the_scans(name: str) -> None:
    row = SCANNED[name]
    assert over_seeds(row, last_reward) == pytest.approx(row["reward"], abs=0.13)


@pytest.mark.parametrize("name", LIVING)
def test_drift_is_the_scans_within_half(name: str) -> None:
    row = SCANNED[name]
    drift = over_seeds(row, lambda run: statistics.median(column(run, "kl_step")))
    assert abs(math.log(drift / row["kl_step"])) < math.log(1.6)


@pytest.mark.parametrize("name", [n for n in LIVING if SCANNED[n]["clip_active_pct"] >= 1])
def test_clipping_is_the_scans_within_a_factor_of_two(name: str) -> None:
    row = SCANNED[name]
    active = over_seeds(row, lambda run: 100 * statistics.median(column(run, "clip_ratio")))
    assert row["clip_active_pct"] / 2 < active < row["clip_active_pct"] * 2


@pytest.mark.parametrize("name", [n for n in LIVING if SCANNED[n]["kl_coef"] > 0])
def test_reference_kl_is_the_scans_within_a_half(name: str) -> None:
    row = SCANNED[name]
    kl = over_seeds(row, lambda run: statistics.median(column(run, "kl_ref")))
    assert abs(math.log(kl / row["kl_ref_median"])) < math.log(1.6)


@pytest.mark.parametrize("name", DEAD)
def test_what_died_in_the_scan_dies_here_and_looks_like_it(name: str) -> None:
    for seed in SEEDS:
        run = of_row(SCANNED[name], seed)
        last = run[-1].scalars
        assert column(run, "reward_mean")[1:] == [0.0] * (len(run) - 1)
        assert last["zero_std_fraction"] == 1.0 and last["clip_ratio"] == 0.0
        assert last["entropy"] is not None and last["entropy"] > 1.0
        assert last["grad_norm"] is not None and last["grad_norm"] < 0.05


def test_the_first_rollouts_drift_three_to_five_times_as_much() -> None:
    runs = [column(records(20, seed), "kl_step") for seed in range(20)]
    steady = statistics.median(v for run in runs for v in run[5:])
    first, second = (statistics.median(run[t] for run in runs) for t in (0, 1))
    assert 3 < first / steady < 5
    assert 1.5 < second / steady < 3.5


def test_the_healthy_run_reaches_the_scans_milestones() -> None:
    """0.5 after 19-24 rollouts, 0.7 after 27-39."""
    for level, low, high in ((0.5, 15, 27), (0.7, 25, 45)):
        reached = [
            next(t for t, reward in enumerate(column(records(60, s), "reward_mean")) if reward >= level)
            for s in SEEDS
        ]
        assert low <= statistics.median(reached) <= high


def test_learning_is_fastest_at_a_drift_of_about_four_hundredths() -> None:
    by_rate = {
        rate: statistics.fmean(
            column(records(25, seed, actor_learning_rate=rate), "reward_mean")[-1] for seed in SEEDS
        )
        for rate in (3e-5, 1e-4, 3e-4, 6e-4, 1.5e-3)
    }
    assert max(by_rate, key=by_rate.__getitem__) == 6e-4, by_rate  # a drift of 0.046
    assert by_rate[3e-5] < by_rate[1e-4] < by_rate[3e-4] > by_rate[1.5e-3]


def test_a_strong_reference_pins_kl_and_holds_reward_back() -> None:
    """kl_coef 1 sits inside the documented band and is one of the bad runs."""
    run = records(60, kl_coef=1.0)
    assert all(0.02 < kl < 0.06 for kl in column(run, "kl_ref")[20:])
    assert last_reward(run) < 0.5 < last_reward(records(60))


def test_reward_noise_is_that_of_prompts_and_samples() -> None:
    """var = v_between / P + v_within / (P G); twice the group hardly helps, twice the prompts do."""

    def spread(**knobs: float) -> float:
        frozen = {"actor_learning_rate": 1e-12, **knobs}
        return statistics.stdev(column(records(2000, 3, **frozen), "reward_mean"))

    concentration, p = Constants().concentration, Constants().start
    between = p * (1 - p) / (concentration + 1)
    expected = math.sqrt(between / 64 + between * concentration / 512)
    assert spread() == pytest.approx(expected, rel=0.06)
    assert spread(train_batch_size=128) == pytest.approx(expected / math.sqrt(2), rel=0.06)
    assert spread(rollout_n=16) > 0.75 * expected


def test_flat_groups_match_drawing_them() -> None:
    rng = np.random.default_rng(0)
    p, group, concentration = 0.6, 8, 3.0
    q = rng.beta(p * concentration, (1 - p) * concentration, size=200_000)
    drawn = np.mean(q**group + (1 - q) ** group)
    assert flat_group_share(p, group, concentration) == pytest.approx(drawn, abs=0.005)


def test_shares_and_histograms_agree() -> None:
    for record in records(5, ppo_mini_batch_size=8, clip_range=0.1):
        s = {name: record.scalars[name] or 0.0 for name in ("ratio_low", "ratio_in", "ratio_high")}
        assert sum(s.values()) == pytest.approx(1.0)
        per_update = record.per_update
        assert per_update["clip_ratio"][0] == 0.0, "the first update meets a ratio of 1"
        assert statistics.fmean(per_update["ratio_low"]) == pytest.approx(s["ratio_low"])
        counts = record.histograms["policy_ratio"]
        assert len(counts) == 66
        edges = np.exp((np.arange(66) - 0.5 - 32) * 2 * math.log(8) / 64)
        low = sum(c for c, x in zip(counts, edges, strict=True) if x < 0.9) / sum(counts)
        assert low == pytest.approx(s["ratio_low"], abs=1e-9)


def test_one_update_has_no_clipping_and_no_drift_has_none_either() -> None:
    assert set(column(records(5, ppo_mini_batch_size=64), "clip_ratio")) == {0.0}
    assert outside_share(Constants(), 0.0, 0.2) == 0.0


def test_the_response_cap_cuts_and_costs_reward() -> None:
    constants = Constants(length_median=100.0, length_sigma=0.4)

    def run(cap: int) -> dict[str, float | None]:
        knobs = {"max_response_length": cap, "actor_learning_rate": 1e-12}
        return FakeTrainer(knobs, 1, constants=constants).advance().scalars

    wide, narrow = run(1000), run(100)
    assert wide["truncated_fraction"] == pytest.approx(0.0, abs=1e-6)
    assert narrow["truncated_fraction"] == pytest.approx(0.5, abs=0.05)
    assert narrow["response_length_max"] == 100
    assert (narrow["response_length_mean"] or 0) < (wide["response_length_mean"] or 0)
    assert (narrow["reward_mean"] or 0) < 0.7 * (wide["reward_mean"] or 0)


def test_entropy_falls_as_reward_rises() -> None:
    run = records(60)
    assert column(run, "entropy")[-1] < 0.6 * column(run, "entropy")[0]


# ------------------------------------------------------------------------------ the fake trainer


def test_equal_seeds_are_equal_and_others_differ() -> None:
    assert records(30, 5) == records(30, 5)
    assert records(30, 5) != records(30, 6)


def test_noise_belongs_to_the_rollout_and_not_to_the_path() -> None:
    """A restored run meets new data: the same weights, another noise."""
    trainer = FakeTrainer(seed=4)
    first = trainer.advance()
    trainer.undo_rollout()
    again = trainer.advance()
    assert first.scalars["kl_step"] != again.scalars["kl_step"]
    straight = FakeTrainer(seed=4)
    straight.advance()
    assert straight.advance().times == again.times  # rollout 1's noise in both


def test_undo_reverses_a_death_and_lower_rates_avoid_the_next() -> None:
    trainer = FakeTrainer({"actor_learning_rate": 3e-3}, seed=1)
    assert (trainer.advance().scalars["kl_step"] or 0) > 1
    assert not trainer.state.alive
    trainer.undo_rollout()
    trainer.live.set("actor_learning_rate", 3e-4)
    assert (trainer.advance().scalars["reward_mean"] or 0) > 0.1
    assert trainer.state.alive


def test_a_dead_model_stays_dead_at_any_rate() -> None:
    trainer = FakeTrainer({"actor_learning_rate": 3e-3}, seed=1)
    trainer.advance()
    trainer.live.set("actor_learning_rate", 1e-6)
    assert [trainer.advance().scalars["reward_mean"] for _ in range(20)] == [0.0] * 20


def test_checkpoints_are_a_ring_that_keeps_the_first() -> None:
    trainer = FakeTrainer(rollouts=75, checkpoint_every=10, keep=3)
    start = trainer.state
    trainer.run(lambda record: None)
    assert list(trainer.checkpoints) == [0, 50, 60, 70]
    assert trainer.restore_checkpoint(65) == 60
    assert trainer.restore_checkpoint(49) == 0 and trainer.state == start
    with pytest.raises(CheckpointError, match="up to rollout -1"):
        trainer.restore_checkpoint(-1)


def test_a_restore_brings_adams_age_back() -> None:
    trainer = FakeTrainer(rollouts=20, checkpoint_every=10)
    trainer.run(lambda record: None)
    assert trainer.state.steps == 80
    trainer.restore_checkpoint(10)
    assert trainer.state.steps == 40


def test_warm_up_scales_the_rate_that_the_optimizer_uses() -> None:
    trainer = FakeTrainer(rollouts=6, lr_warmup=3)
    rates = [trainer.advance().scalars["learning_rate"] or 0 for _ in range(5)]
    assert rates == pytest.approx([f * 3e-4 for f in (0.25, 0.5, 0.75, 1.0, 1.0)])
    assert trainer.facts().lr_warmup == 3


def test_an_off_lattice_recipe_is_refused() -> None:
    with pytest.raises(InputError, match="ppo_mini_batch_size"):
        FakeTrainer({"ppo_mini_batch_size": 48})


def test_clip_range_is_both_sides_and_defaults_are_the_healthy_recipe() -> None:
    assert FakeTrainer().knobs() == HEALTHY
    knobs = FakeTrainer({"clip_range": 0.1}).knobs()
    assert knobs["clip_range_low"] == knobs["clip_range_high"] == 0.1


def test_five_thousand_rollouts_a_second() -> None:
    """Processor time, so that a busy machine does not fail it; about 20 000 on an idle core."""
    trainer = FakeTrainer(rollouts=3000)
    started = time.process_time()
    trainer.run(lambda record: None)
    assert 3000 / (time.process_time() - started) > 5000


def test_it_loads_nothing_heavier_than_numpy() -> None:
    code = "import sys, autotune.testing; print(sorted({'torch', 'scipy', 'pytest'} & set(sys.modules)))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"
