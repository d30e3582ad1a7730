"""The quickstart's table: does the controller rescue what it should, and leave alone what is well?

    python experiments/quickstart_table.py --seeds 11 12 13 14 15 --jobs 2

Every arm is one of three recipes under one of three controls, with equal rollouts and seeds:

    off          control.mode=off: the recipe as it stands
    act          control.mode=act: the controller, profile `recommended`
    documented   control.mode=act control.profile=documented: the documented rules alone

Each run is a subprocess of one thread. A finished run appends one JSON line to `results.jsonl`, so
the script can be stopped and started again; a run is repeated only when its recipe file changed.
All numbers are read from the journals. The score of a run is the mean reward of its last 10
rollouts, its start the reward of rollout 0, which was sampled before any update.

What is asked, seed by seed where it says so (`acceptance`):

    bad enough   timid, aggressive off:  score <= start + 0.5 (well-set off - start)
    rescued      timid, aggressive act:  score >= 0.9 (well-set off of the same seed), 4 of 5 seeds
    no harm      well-set act - off:     mean paired difference >= -0.02, 95 % t interval printed
"""

from __future__ import annotations

import argparse
import hashlib
import json
import math
import os
import shutil
import statistics
import subprocess
import sys
import time
from collections.abc import Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from autotune.journal import read_journal, winning_lines
from autotune.story import Story, What, acts_of

ROOT = Path(__file__).resolve().parent.parent
RECIPES = ("well_set", "timid", "aggressive")
CONTROLS: dict[str, tuple[str, ...]] = {
    "off": ("control.mode=off",),
    "act": ("control.mode=act", "control.profile=recommended"),
    "documented": ("control.mode=act", "control.profile=documented"),
}
STOPPED = 3
"""Exit code of a run that the controller stopped: a result, not a failure."""
LAST = 10
"""Rollouts at the end whose mean reward is the score."""
GOAL, WINDOW = 0.7, 5
"""`reached` is the first rollout whose mean reward over the last WINDOW rollouts is >= GOAL."""
BAD_ENOUGH, RESCUED, RESCUED_SHARE, HARM = 0.5, 0.9, 0.8, -0.02
ROUNDING = 1e-9
"""Slack of every limit: 0.72 is 90 % of 0.8, though not in binary."""


@dataclass(frozen=True, slots=True)
class Arm:
    recipe: str
    control: str
    seed: int

    @property
    def name(self) -> str:
        return f"{self.recipe}-{self.control}-{self.seed}"


@dataclass(frozen=True, slots=True)
class Result:
    """One finished run, as one line of `results.jsonl`."""

    recipe: str
    control: str
    seed: int
    recipe_sha256: str
    exit_code: int
    seconds: float
    rollouts: int
    start: float
    score: float
    greedy: float
    sampled: float
    reached: int | None
    actions: int
    """Interventions, emergencies and engagements of a regulator, as the run's own summary counts."""
    moves: int
    """Single knob changes: an engagement is several."""
    restores: int

    @property
    def key(self) -> tuple[str, str, int, str]:
        return self.recipe, self.control, self.seed, self.recipe_sha256


# From a journal to numbers.


def running_goal(rewards: Sequence[float], goal: float = GOAL, window: int = WINDOW) -> int | None:
    """First rollout whose mean over itself and the `window - 1` before it reaches `goal`."""
    for end in range(window, len(rewards) + 1):
        if statistics.fmean(rewards[end - window : end]) >= goal:
            return end - 1
    return None


def numbers(journal: Path) -> dict[str, Any]:
    """What the table needs of one run.

    Raises:
        ValueError: if the journal has no rollout, no evaluation, or a rollout without its reward.
    """
    lines = list(winning_lines(read_journal(journal)))
    story = Story()
    for line in lines:
        story.add(line)
    if not story.rows or not story.evaluations:
        raise ValueError(
            f"{journal}: expected rollouts and evaluations, got {len(story.rows)} and "
            f"{len(story.evaluations)}; run the arm again"
        )
    rewards = reward_series(story, journal)
    acts = [act for act in acts_of(story.events()) if act.event.what is What.CHANGE]
    return {
        "rollouts": len(rewards),
        "start": rewards[0],
        "score": statistics.fmean(rewards[-LAST:]),
        "greedy": story.evaluations[-1].greedy,
        "sampled": story.evaluations[-1].sampled,
        "reached": running_goal(rewards),
        "actions": len(acts),
        "moves": sum(act.moves for act in acts),
        "restores": sum(line.get("restored") is not None for line in lines),
    }


def reward_series(story: Story, journal: Path) -> list[float]:
    rewards = story.series("reward_mean")
    if None in rewards:
        hole = sorted(story.rows)[rewards.index(None)]
        raise ValueError(f"{journal}: rollout {hole} has no valid reward_mean")
    return [reward for reward in rewards if reward is not None]


# Runs.


def recipe_file(recipe: str) -> Path:
    return ROOT / "experiments" / "quickstart" / f"{recipe}.yaml"


def sha256(path: Path) -> str:
    return hashlib.sha256(path.read_bytes()).hexdigest()


def command(arm: Arm, folder: Path, extra: Sequence[str]) -> list[str]:
    overrides = [f"seed={arm.seed}", f"run_dir={folder}", "tracking.mlflow.enabled=false"]
    recipe = str(recipe_file(arm.recipe))
    return [
        sys.executable,
        "-m",
        "autotune",
        "run",
        recipe,
        *overrides,
        *CONTROLS[arm.control],
        *extra,
    ]


def run_arm(arm: Arm, out: Path, extra: Sequence[str] = ()) -> Result:
    """Runs one arm from its beginning; what an interrupted attempt left is removed first.

    Raises:
        RuntimeError: if the run failed; its output is in `<arm>.log`.
    """
    folder, log = out / "runs" / arm.name, out / "runs" / f"{arm.name}.log"
    shutil.rmtree(folder, ignore_errors=True)
    log.parent.mkdir(parents=True, exist_ok=True)
    threads = {"OMP_NUM_THREADS": "1", "MKL_NUM_THREADS": "1"}
    began = time.monotonic()
    with log.open("w", encoding="utf-8") as stream:
        done = subprocess.run(
            command(arm, folder, extra),
            cwd=ROOT,
            stdin=subprocess.DEVNULL,
            stdout=stream,
            stderr=subprocess.STDOUT,
            env=os.environ | threads,
        )
    if done.returncode not in (0, STOPPED):
        raise RuntimeError(f"{arm.name} ended with exit code {done.returncode}; see {log}")
    return Result(
        **asdict(arm),
        recipe_sha256=sha256(recipe_file(arm.recipe)),
        exit_code=done.returncode,
        seconds=round(time.monotonic() - began, 1),
        **numbers(folder / "journal.jsonl"),
    )


def load_results(path: Path) -> list[Result]:
    """Every finished run; the last line of the same run wins, a line torn by a kill is dropped."""
    results: dict[tuple[str, str, int], Result] = {}
    for line in path.read_text(encoding="utf-8").splitlines() if path.exists() else []:
        try:
            result = Result(**json.loads(line))
        except json.JSONDecodeError:
            continue
        results[result.key[:3]] = result
    return list(results.values())


def pending(arms: Iterable[Arm], finished: Iterable[Result]) -> list[Arm]:
    """Arms that have no result for the recipe file as it is now."""
    known = {result.key for result in finished}
    return [
        arm
        for arm in arms
        if (arm.recipe, arm.control, arm.seed, sha256(recipe_file(arm.recipe))) not in known
    ]


def run_all(arms: Sequence[Arm], out: Path, jobs: int, extra: Sequence[str]) -> list[str]:
    """Runs what is pending, `jobs` at a time; returns what failed, in words."""
    failures = []
    with ThreadPoolExecutor(jobs) as pool:
        futures = {pool.submit(run_arm, arm, out, extra): arm for arm in arms}
        for future in as_completed(futures):
            try:
                result = future.result()
            except (RuntimeError, ValueError) as error:
                failures.append(str(error))
                print(f"FAILED  {error}", file=sys.stderr, flush=True)
                continue
            append(out / "results.jsonl", result)
            print(
                f"{futures[future].name:28} score {result.score:.3f}  {result.seconds:.0f} s",
                file=sys.stderr,
                flush=True,
            )
    return failures


def append(path: Path, result: Result) -> None:
    torn = path.exists() and not path.read_bytes().endswith(b"\n") and path.stat().st_size > 0
    with path.open("a", encoding="utf-8") as stream:
        stream.write("\n" * torn + json.dumps(asdict(result)) + "\n")


# The table.


def select(results: Iterable[Result], recipe: str, control: str) -> dict[int, Result]:
    """Seed -> result of one arm, by ascending seed."""
    chosen = [r for r in results if (r.recipe, r.control) == (recipe, control)]
    return {r.seed: r for r in sorted(chosen, key=lambda r: r.seed)}


def spread(values: Sequence[float]) -> str:
    return f"{statistics.fmean(values):.3f} ({min(values):.3f} to {max(values):.3f})"


def goal_cell(results: Sequence[Result]) -> str:
    reached = [r.reached for r in results if r.reached is not None]
    share = f"{len(reached)} of {len(results)}"
    return f"{statistics.fmean(reached):.0f} ({share})" if reached else f"never ({share})"


def row(recipe: str, control: str, results: Sequence[Result]) -> str:
    cells = [
        recipe,
        control,
        str(len(results)),
        spread([r.score for r in results]),
        spread([r.sampled for r in results]),
        spread([r.greedy for r in results]),
        goal_cell(results),
        f"{statistics.fmean(r.actions for r in results):.1f}",
        f"{statistics.fmean(r.moves for r in results):.1f}",
        f"{statistics.fmean(r.restores for r in results):.1f}",
        str(sum(r.exit_code == STOPPED for r in results)),
    ]
    return "| " + " | ".join(cells) + " |"


def table(results: Sequence[Result]) -> str:
    """One row per arm that has results."""
    head = (
        "recipe",
        "control",
        "seeds",
        f"reward of the last {LAST}",
        "held-out, sampled",
        "held-out, greedy",
        f"rollouts to {GOAL}",
        "actions",
        "moves",
        "restores",
        "stopped",
    )
    lines = ["| " + " | ".join(head) + " |", "|" + "---|" * len(head)]
    for recipe in RECIPES:
        for control in CONTROLS:
            if chosen := select(results, recipe, control):
                lines.append(row(recipe, control, list(chosen.values())))
    return "\n".join(lines)


@dataclass(frozen=True, slots=True)
class Check:
    """One line of the acceptance arithmetic; `passed` is None while a run is missing."""

    name: str
    passed: bool | None
    figures: str

    def __str__(self) -> str:
        word = {True: "met", False: "MISSED", None: "open"}[self.passed]
        return f"- **{word}** {self.name}: {self.figures}"


def t_interval(values: Sequence[float], confidence: float = 0.95) -> tuple[float, float]:
    """Two-sided Student interval of the mean; infinitely wide below two values."""
    if len(values) < 2:
        return -math.inf, math.inf
    from scipy.stats import t

    centre = statistics.fmean(values)
    error = statistics.stdev(values) / math.sqrt(len(values))
    reach = float(t.ppf(0.5 + confidence / 2, len(values) - 1)) * error
    return centre - reach, centre + reach


def paired(first: dict[int, Result], second: dict[int, Result]) -> list[tuple[Result, Result]]:
    return [(first[seed], second[seed]) for seed in first if seed in second]


def halfway(start: float, well: float) -> float:
    return start + BAD_ENOUGH * (well - start)


def bad_enough(recipe: str, results: Sequence[Result]) -> Check:
    """Left alone, the recipe makes at most half of the way that the well-set one makes."""
    pairs = paired(select(results, recipe, "off"), select(results, "well_set", "off"))
    name = f"{recipe} off is bad enough"
    if not pairs:
        return Check(name, None, "no seed has both runs")
    start = statistics.fmean(bad.start for bad, _ in pairs)
    well = statistics.fmean(good.score for _, good in pairs)
    score = statistics.fmean(bad.score for bad, _ in pairs)
    limit = halfway(start, well)
    seeds = sum(b.score <= halfway(b.start, g.score) + ROUNDING for b, g in pairs)
    figures = (
        f"mean {score:.3f}, limit {limit:.3f} = {start:.3f} + {BAD_ENOUGH} x "
        f"({well:.3f} - {start:.3f}); {seeds} of {len(pairs)} seeds on their own"
    )
    return Check(name, score <= limit + ROUNDING, figures)


def rescued(recipe: str, results: Sequence[Result]) -> Check:
    """With the controller it comes to at least 90 % of the well-set run of the same seed."""
    pairs = paired(select(results, recipe, "act"), select(results, "well_set", "off"))
    name = f"{recipe} act is rescued"
    if not pairs:
        return Check(name, None, "no seed has both runs")
    shares = [act.score / good.score if good.score > 0 else math.nan for act, good in pairs]
    hits = sum(share >= RESCUED - ROUNDING for share in shares)
    listed = ", ".join(f"{act.seed}: {share:.0%}" for (act, _), share in zip(pairs, shares, strict=True))
    figures = f"{hits} of {len(pairs)} seeds at >= {RESCUED:.0%} of well-set off ({listed})"
    return Check(name, hits >= RESCUED_SHARE * len(pairs) - ROUNDING, figures)


def no_harm(results: Sequence[Result]) -> Check:
    """A recipe that is well set loses at most 0.02 by having the controller on."""
    pairs = paired(select(results, "well_set", "act"), select(results, "well_set", "off"))
    name = "well_set act does no harm"
    if not pairs:
        return Check(name, None, "no seed has both runs")
    differences = [act.score - off.score for act, off in pairs]
    low, high = t_interval(differences)
    mean = statistics.fmean(differences)
    figures = (
        f"mean paired difference {mean:+.3f}, 95 % t interval [{low:+.3f}, {high:+.3f}], "
        f"{len(pairs)} seeds, limit {HARM:+.2f}"
    )
    return Check(name, mean >= HARM - ROUNDING, figures)


def acceptance(results: Sequence[Result]) -> list[Check]:
    bad = [recipe for recipe in RECIPES if recipe != "well_set"]
    return [
        *(bad_enough(recipe, results) for recipe in bad),
        *(rescued(recipe, results) for recipe in bad),
        no_harm(results),
    ]


def report(results: Sequence[Result]) -> str:
    hashes = {r.recipe: r.recipe_sha256 for r in results}
    listed = "\n".join(f"- `{recipe}.yaml` sha256 {hashes[recipe]}" for recipe in sorted(hashes))
    checks = "\n".join(str(check) for check in acceptance(results))
    return (
        f"{table(results)}\n\nMean (lowest to highest) over seeds; rollouts to {GOAL} over the "
        f"seeds that got there.\n\n{checks}\n\n{listed}\n"
    )


def arguments(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--seeds", type=int, nargs="+", required=True)
    parser.add_argument("--recipes", nargs="+", choices=RECIPES, default=RECIPES)
    parser.add_argument("--controls", nargs="+", choices=[*CONTROLS], default=[*CONTROLS])
    parser.add_argument("--jobs", type=int, default=2, help="runs at a time, one thread each")
    parser.add_argument(
        "--out",
        type=Path,
        default=ROOT / "runs" / "quickstart_table",
        help="folder of results.jsonl, table.md and the run folders",
    )
    parser.add_argument(
        "--set",
        nargs="*",
        default=[],
        metavar="KEY=VALUE",
        help="further overrides for every run; use a folder of its own then",
    )
    parser.add_argument("--only-table", action="store_true", help="run nothing")
    return parser.parse_args(argv)


def main(argv: Sequence[str] | None = None) -> int:
    """0 when every run finished, whatever the table says; 1 when a run failed."""
    chosen = arguments(argv)
    out: Path = chosen.out.resolve()
    out.mkdir(parents=True, exist_ok=True)
    # Seeds outermost: whole rows of the comparison are there early.
    arms = [Arm(r, c, s) for s in chosen.seeds for c in chosen.controls for r in chosen.recipes]
    todo = [] if chosen.only_table else pending(arms, load_results(out / "results.jsonl"))
    failures = run_all(todo, out, chosen.jobs, chosen.set)
    wanted = {(arm.recipe, arm.control, arm.seed) for arm in arms}
    results = [r for r in load_results(out / "results.jsonl") if r.key[:3] in wanted]
    text = report(results) if results else "no results yet\n"
    (out / "table.md").write_text(text, encoding="utf-8")
    print(text)
    return 1 if failures else 0


if __name__ == "__main__":
    sys.exit(main())
