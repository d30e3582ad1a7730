"""What is known beside the rows, what stays silent, the command, and a log that grows."""

from __future__ import annotations

import json
import math
import threading
import time
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from autotune.advise import Kind, advise, follow, prepare, report, verdict
from autotune.advise.known import READS
from autotune.cli import app
from autotune.controller import ControlSettings
from autotune.errors import InputError
from autotune.policies import POLICIES
from autotune.recipe import load_recipe
from autotune.testing.twins import Twin, write

RECIPE = Path(__file__).resolve().parents[2] / "experiments" / "quickstart" / "well_set.yaml"


def jsonl(path: Path, rows: list[dict[str, Any]]) -> Path:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def healthy(count: int = 24, **more: Any) -> list[dict[str, Any]]:
    return [
        {"step": k, "reward": 0.3 + 0.02 * k + 0.003 * (-1) ** k, "reward_std": 0.4, "kl": 0.01 * k, **more}
        for k in range(1, count + 1)
    ]


# ------------------------------------------------------------------------------------ what is known


def test_every_rule_that_reads_a_knob_is_a_rule() -> None:
    assert set(READS) <= set(POLICIES)


def test_rules_without_their_knobs_are_silent_and_say_which(tmp_path: Path) -> None:
    shadow = advise(jsonl(tmp_path / "a.jsonl", healthy()))
    data = report(shadow, verdict(shadow))
    assert "ppo_mini_batch_size" in data["silent"]["A3"] and "kl_coef" in data["silent"]["B3c"]
    assert "X1" in data["silent"] and "kl_step" in data["silent"]["X1"]
    assert "X2" not in data["silent"]  # a collapse is seen without any knob
    assert set(data["not_known"]) >= {"train_batch_size", "rollout_n", "kl_coef", "actor_learning_rate"}
    assert "assumption" in data["noise"]


def test_knobs_come_from_the_log_the_recipe_and_the_user_in_this_order(tmp_path: Path) -> None:
    path = jsonl(tmp_path / "a.jsonl", healthy(learning_rate=3e-6))
    assert prepare(path).known.known == {"actor_learning_rate": 3e-6}
    recipe = load_recipe(RECIPE, [])
    with_recipe = prepare(path, recipe=recipe).known
    assert with_recipe.known["rollout_n"] == recipe.trainer.rollout_n and "A3" not in with_recipe.silent
    assert "prompts x" in with_recipe.noise_words and "assumption" not in with_recipe.noise_words
    told = prepare(path, recipe=recipe, knobs={"clip_range": 0.3, "rollout_n": 4}).known.known
    assert (told["clip_range_low"], told["clip_range_high"], told["rollout_n"]) == (0.3, 0.3, 4)
    with pytest.raises(InputError, match="--knob batch: expected one of train_batch_size"):
        prepare(path, knobs={"batch": 4})


def test_the_controller_is_the_same_one_in_shadow(tmp_path: Path) -> None:
    settings = prepare(jsonl(tmp_path / "a.jsonl", healthy())).controller.settings
    assert settings.mode == "shadow" and settings.profile == ControlSettings().profile


def test_a_clip_ratio_that_is_exactly_zero_is_structural(tmp_path: Path) -> None:
    path = jsonl(tmp_path / "a.jsonl", healthy(**{"clip_ratio/region_mean": 0.0}))
    assert advise(path).known.facts.metric_capability["clip_ratio"].state == "structural_zero"
    path = jsonl(tmp_path / "b.jsonl", healthy(**{"clip_ratio/region_mean": 0.001}))
    assert advise(path).known.facts.metric_capability["clip_ratio"].state == "valid"


def test_a_known_cap_and_cut_answers_make_a_proposal_and_an_unknown_one_does_not(tmp_path: Path) -> None:
    rows = healthy(**{"completions/clipped_ratio": 0.3, "completions/mean_length": 400.0})
    path = jsonl(tmp_path / "a.jsonl", rows)
    assert advise(path).of("action") == []
    first = advise(path, knobs={"max_response_length": 512}).of("action")[0]
    assert (first.rule, first.knob, first.before, first.after) == ("X3", "max_response_length", 512, 640)


def test_negative_kl_holds_and_is_never_low_kl(tmp_path: Path) -> None:
    rows = healthy()
    for row in rows[10:14]:
        row["kl"] = -0.18
    path = jsonl(tmp_path / "a.jsonl", rows)
    assert any("kl_ref is -0.18" in line for line in verdict(advise(path)).evidence)
    holds = advise(path, knobs={"kl_coef": 0.04, "train_batch_size": 8, "rollout_n": 8}).of("hold")
    assert len(holds) == 1 and "kl_ref is -0.18" in holds[0].reason and holds[0].step == 11


def test_an_exporter_that_stopped_is_noticed_and_rounded_numbers_are_not(tmp_path: Path) -> None:
    stuck = healthy(entropy=0.5134159265)
    faults = advise(jsonl(tmp_path / "a.jsonl", stuck)).faults
    assert list(faults) == ["entropy"] and faults["entropy"][0] == 5 and "exactly" in faults["entropy"][1]
    rounded = healthy(entropy=0.513)
    assert advise(jsonl(tmp_path / "b.jsonl", rounded)).faults == {}


# --------------------------------------------------------------------------------------- verdicts


def test_too_few_rollouts_and_no_reward_cannot_be_judged(tmp_path: Path) -> None:
    few = verdict(advise(jsonl(tmp_path / "a.jsonl", healthy(15))))
    assert few.kind is Kind.CANNOT_TELL and few.headline.startswith("15 rollouts are too few")
    assert verdict(advise(jsonl(tmp_path / "b.jsonl", healthy(16)))).kind is Kind.HEALTHY
    blind = verdict(
        advise(jsonl(tmp_path / "c.jsonl", [{"step": k, "loss": 0.1, "kl": 0.1} for k in range(30)]))
    )
    assert blind.kind is Kind.CANNOT_TELL and "--map reward_mean" in blind.headline


def test_numbers_that_are_not_finite_at_the_end_are_a_collapse(tmp_path: Path) -> None:
    rows = healthy(grad_norm=1.0)
    for row in rows[-3:]:
        row["grad_norm"] = math.nan
    found = verdict(advise(jsonl(tmp_path / "a.jsonl", rows)))
    assert found.title == "collapsing since step 22" and "not finite" in found.headline


def test_a_reward_that_sinks_slowly_is_not_called_anything(tmp_path: Path) -> None:
    rows = [{"step": k, "reward": 0.9 - 0.008 * k, "reward_std": 0.4, "kl": 0.1} for k in range(60)]
    found = verdict(advise(jsonl(tmp_path / "a.jsonl", rows)))
    assert found.kind is Kind.CANNOT_TELL and "neither a rise nor a collapse" in found.headline


# --------------------------------------------------------------------------------------- growing


def test_a_growing_log_gives_news_as_they_come_and_ends_with_the_run(tmp_path: Path) -> None:
    twin = write(Twin("collapse_entropy_up", 3, "printed"), tmp_path)
    lines = twin.read_text().splitlines(keepends=True)
    path = tmp_path / "growing.log"

    def trainer() -> None:
        for start in range(0, len(lines), 6):
            with path.open("a") as file:
                file.write("".join(lines[start : start + 6]))
            time.sleep(0.02)

    writer = threading.Thread(target=trainer)
    writer.start()
    said: list[str] = []
    titles: list[str] = []
    shadow = follow(path, lambda s: said.append(s.kind), lambda v: titles.append(v.title), {}, poll=0.01)
    writer.join()
    assert said[:2] == ["alarm", "emergency"]
    assert titles[0].startswith("cannot tell") and titles[-1].startswith("collapsing since")
    assert len(shadow.steps) == sum(line.startswith("{'loss") for line in lines)


LINE = '{"step": 1, "points": 0.2, "kl": 0.01}\n'


@pytest.mark.parametrize(
    ("begun", "why"),
    [
        (None, "there is no log"),
        ("", "is empty"),
        ("\n  \n", "is empty"),
        ("INFO starting\n", "has no metric lines yet"),
    ],
)
def test_a_log_is_waited_for_until_its_first_row(tmp_path: Path, begun: str | None, why: str) -> None:
    """Every reason is told once, and the log's first row may come between two looks at the file."""
    path = tmp_path / "a.jsonl"
    if begun is not None:
        path.write_text(begun)
    asked: list[str] = []

    def at_end() -> bool:
        asked.append("")
        if len(asked) == 3:
            with path.open("a") as file:
                file.write(LINE * 3)
        return len(asked) > 3

    waits: list[str] = []
    shadow = follow(path, print, print, {}, poll=0.001, stop_when=at_end, on_wait=waits.append)
    assert shadow.survey.rows == 3
    assert len(waits) == 1 and why in waits[0]


def test_a_mapped_key_is_waited_for_as_long_as_there_are_no_rows(tmp_path: Path) -> None:
    path = tmp_path / "a.jsonl"
    path.write_text("INFO starting\n")
    options = {"mapping": {"reward_mean": "points"}}

    def begin(why: str) -> None:
        assert "no row has 'points'; there are no rows" in why
        path.write_text(LINE)

    def mapped() -> bool:
        return "points" in path.read_text()

    shadow = follow(path, print, print, options, poll=0.001, stop_when=mapped, on_wait=begin)
    assert "points" in shadow.survey.plan


def test_what_is_no_log_is_not_waited_for(tmp_path: Path) -> None:
    (tmp_path / "model.bin").write_bytes(b"\0" * 64)
    for path in (tmp_path / "model.bin", tmp_path):
        with pytest.raises(InputError, match=r"binary file|holds no log"):
            follow(path, print, print, {}, poll=0.01)


def test_following_a_log_that_never_comes_can_be_ended(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="there is no log"):
        follow(tmp_path / "none", print, print, {}, poll=0.01, stop_when=lambda: True)


# --------------------------------------------------------------------------------------- command


def call(*arguments: str) -> Any:
    return CliRunner().invoke(app, ["advise", *arguments])


def test_the_verdict_is_the_first_line(tmp_path: Path) -> None:
    done = call(str(write(Twin("timid", 5, "csv"), tmp_path)))
    assert done.exit_code == 0
    assert done.stdout.splitlines()[0].startswith("▽ too timid: the reward does not rise")
    assert "What it could not see" in done.stdout


def test_json_for_programs_and_options(tmp_path: Path) -> None:
    path = jsonl(
        tmp_path / "a.jsonl", [{"it": k, "points": 50 + k % 3, "kl": 0.1, "entropy": 0.4} for k in range(20)]
    )
    done = call(
        str(path), "--json", "--map", "reward_mean=points*0.01", "--map", "step=it", "--knob", "rollout_n=8"
    )
    data = json.loads(done.stdout)
    assert data["verdict"]["kind"] == "healthy" and data["log"]["rollouts"] == 20
    assert data["knobs"] == {"rollout_n": 8.0} and data["unknown_keys"] == []
    assert data["log"]["metrics"]["reward_mean"] == {
        "key": "points",
        "scale": 0.01,
        "estimator": "mapped by you",
    }


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["none.log"], "there is no log at none.log"),
        ([str(RECIPE), "--knob", "rollout_n"], "expected --knob NAME=VALUE"),
        ([str(RECIPE), "--knob", "rollout_n=x"], "'x' is not a number"),
    ],
)
def test_bad_input_is_exit_code_2(arguments: list[str], message: str) -> None:
    done = call(*arguments)
    assert done.exit_code == 2 and message in done.output


# -------------------------------------------------------------------------------------- long logs


def long_log(path: Path, count: int = 2600) -> Path:
    rows: list[dict[str, Any]] = []
    for k in range(count):
        row = {"step": k + 1, "reward": 0.3 + 0.5 * k / count, "reward_std": 0.4, "kl": 0.05, "loss": 0.01}
        rows.append(row | {"entropy": 0.9 if k < 16 else 0.5})
    rows[1200]["kl"], rows[1300]["loss"] = -0.5, math.nan
    return jsonl(path, rows)


def test_only_the_newest_rows_of_a_long_log_are_decided_on_and_it_is_said(tmp_path: Path) -> None:
    path = long_log(tmp_path / "a.jsonl")
    late, whole = advise(path, newest=400), advise(path, newest=0)
    assert (late.in_passing, whole.in_passing) == (2200, 0)
    assert late.controller.ledger.last_rollout == whole.controller.ledger.last_rollout == 2599
    assert all(s.index >= 2200 for s in late.said)
    data = report(late, verdict(late))
    told = data["log"]
    assert (told["rollouts"], told["decided"], told["decided_from_step"]) == (2600, 400, 2201)
    assert any("looked at the newest 400 rows only, from step 2201 on" in note for note in data["notes"])
    assert not any("newest" in note for note in report(whole, verdict(whole))["notes"])


def test_the_figures_are_of_the_whole_log_either_way(tmp_path: Path) -> None:
    path = long_log(tmp_path / "a.jsonl")
    late, whole = advise(path, newest=400), advise(path, newest=0)
    assert late.steps == whole.steps and late.not_finite_at == whole.not_finite_at == 1300
    for name, column in whole.columns.items():
        assert str(late.columns[name]) == str(column), name  # NaN is not equal to itself
    assert [late.faults[n] for n in ("kl_ref", "loss")] == [whole.faults[n] for n in ("kl_ref", "loss")]
    assert "healed by itself" in verdict(whole).headline, "the emergency of step 1301"
    assert "no harm is seen in the newest 400 rows" in verdict(late).headline


def test_the_runs_own_start_stays_the_baseline_of_a_late_controller(tmp_path: Path) -> None:
    late = advise(long_log(tmp_path / "a.jsonl"), newest=400)
    assert [s.values["entropy"] for s in late.controller.history.head] == [0.9] * 16
    assert [s.rollout for s in late.controller.history.head] == list(range(16))
    assert min(s.rollout for s in late.controller.history.samples(10**6)) >= 2200


def test_a_log_that_grows_decides_on_all_that_is_new(tmp_path: Path) -> None:
    path = long_log(tmp_path / "a.jsonl", 1500)
    looks = iter([True])

    def grow() -> bool:
        with path.open("a") as file:
            for k in range(30):
                file.write(json.dumps({"step": 1501 + k, "reward": 0.8, "kl": 0.05}) + "\n")
        return next(looks, False)

    shadow = prepare(path, newest=100).run(grow)
    assert shadow.in_passing == 1400 and len(shadow.steps) > 1500


def test_the_command_says_how_much_was_decided_on(tmp_path: Path) -> None:
    path = long_log(tmp_path / "a.jsonl")
    said = call(str(path), "--newest", "50").output
    assert "2600 rollouts, of which the rules saw the newest 50" in said
    assert "--newest 0 decides on all" in " ".join(said.split())
