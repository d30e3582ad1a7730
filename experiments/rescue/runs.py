"""Runs a job as a user would, in a process of its own, and reads one row of numbers from its journal.

A row is appended as soon as its run has ended, whatever its end was; a run that failed has a row with its
exit code and no score. What has a row for the same recipe is not run again, so any interruption is harmless.
"""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import subprocess
import sys
import threading
import time
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from autotune.errors import AutotuneError
from autotune.journal import read_journal, winning_lines
from autotune.story import Row as StoryRow
from autotune.story import Story, What, acts_of
from experiments.rescue.start import ROOT, Ended, start
from experiments.rescue.suite import Job

LAST = 1 / 6
"""Share of a run's tokens, at its end, whose mean reward is the score: 10 of 60 rollouts."""


@dataclass(slots=True)
class Row:
    """One run. `score` is J: mean reward over the last sixth of its tokens, on prompts not trained on."""

    purpose: str
    task: str
    start: str
    arm: str
    seed: int
    recipe: str
    """Hash of all its fields."""
    commit: str
    exit_code: int
    seconds: float
    core_seconds: float
    score: float | None = None
    untrained: float | None = None
    """Mean reward of rollout 0, which was sampled before any update."""
    greedy: float | None = None
    sampled: float | None = None
    """Held-out accuracy at the end."""
    tokens: float = 0.0
    rollouts: int = 0
    curve: list[float] = field(default_factory=list)
    """Mean reward of each sixtieth of the tokens spent."""
    actions: int = 0
    kept: int = 0
    reverted: int = 0
    restores: int = 0
    rules: dict[str, int] = field(default_factory=dict)
    """Actions by rule."""
    decisions: list[list[Any]] = field(default_factory=list)
    """Every action: rollout, rule, knob, value before, value after its last move, verdict."""
    error: str = ""

    @property
    def key(self) -> tuple[str, str, str, str, int, str]:
        return self.purpose, self.task, self.start, self.arm, self.seed, self.recipe

    def take(self, found: Mapping[str, Any]) -> None:
        """Fields by name."""
        for name, value in found.items():
            setattr(self, name, value)


def recipe_hash(job: Job, extra: Sequence[str] = ()) -> str:
    text = json.dumps([job.fields(), sorted(extra)], sort_keys=True)
    return hashlib.sha256(text.encode()).hexdigest()[:16]


def commit() -> str:
    """The commit that is running, with a + where files of the package differ from it."""

    def git(*words: str) -> str:
        done = subprocess.run(["git", *words], cwd=ROOT, capture_output=True, text=True)
        return done.stdout.strip() if done.returncode == 0 else ""

    head = git("rev-parse", "HEAD") or os.environ.get("RESCUE_COMMIT", "unknown")
    return head + ("+" if git("status", "--porcelain", "--", "autotune") else "")


# -- one journal ---------------------------------------------------------------------------------


def tokens_of(row: StoryRow) -> float:
    """Tokens that one rollout sampled."""
    return row.metrics.get("tokens_per_second", 0.0) * row.times.get("total", 0.0)


def numbers(journal: Path) -> dict[str, Any]:
    """What a row needs of one run.

    Raises:
        ValueError: the journal has no rollout.
    """
    story = Story()
    for line in winning_lines(read_journal(journal)):
        story.add(line)
    if not story.rows:
        raise ValueError(f"{journal}: expected rollouts, found none; its log says why")
    rows = [story.rows[t] for t in sorted(story.rows)]
    rewards = [row.metrics.get("reward_mean", 0.0) for row in rows]
    weights = [max(tokens_of(row), 1.0) for row in rows]
    last = story.evaluations[-1] if story.evaluations else None
    return {
        "score": tail_mean(rewards, weights),
        "untrained": rewards[0],
        "greedy": last and last.greedy,
        "sampled": last and last.sampled,
        "tokens": round(sum(weights)),
        "rollouts": len(rows),
        "curve": [round(x, 4) for x in by_tokens(rewards, weights, 60)],
        "restores": sum(1 for e in story.events() if e.what is What.RESTORE),
        **acted(story),
    }


def acted(story: Story) -> dict[str, Any]:
    acts = [act for act in acts_of(story.events()) if act.event.what is What.CHANGE]
    verdicts = Counter(act.verdict for act in acts)
    return {
        "actions": len(acts),
        "kept": verdicts["kept"],
        "reverted": verdicts["reverted"],
        "rules": dict(Counter(act.event.rule for act in acts)),
        "decisions": [
            [act.first, act.event.rule, act.event.knob, act.event.before, act.after, act.verdict]
            for act in acts
        ],
    }


def tail_mean(values: Sequence[float], weights: Sequence[float], share: float = LAST) -> float:
    """Mean of the values over the last `share` of all weight; the rollout at the border counts in part."""
    left = whole = share * sum(weights)
    total = 0.0
    for value, weight in zip(reversed(values), reversed(weights), strict=True):
        taken = min(weight, left)
        total, left = total + taken * value, left - taken
        if left <= 0:
            break
    return total / whole


def by_tokens(values: Sequence[float], weights: Sequence[float], parts: int) -> list[float]:
    """The values on an even grid of tokens: the value in force at the middle of each part."""
    whole, at, seen = sum(weights), 0, weights[0]
    out = []
    for part in range(parts):
        place = (part + 0.5) / parts * whole
        while seen < place and at < len(values) - 1:
            at += 1
            seen += weights[at]
        out.append(values[at])
    return out


# -- one run -------------------------------------------------------------------------------------


def overrides(fields: dict[str, Any]) -> list[str]:
    """`key=value` words of the command line; JSON is YAML."""
    return [f"{name}={json.dumps(value)}" for name, value in fields.items()]


def launch(fields: dict[str, Any], folder: Path, log: Path, fresh: bool | None = None) -> Ended:
    """`autotune run` of an empty recipe and these fields, with one thread."""
    log.parent.mkdir(parents=True, exist_ok=True)
    recipe = log.with_suffix(".yaml")
    recipe.write_text("name: rescue\n", "utf-8")
    words = ["run", str(recipe), *overrides(fields), f"run_dir={folder}"]
    return start(words, log, fresh, up=lambda: has_header(folder / "journal.jsonl"))


def has_header(journal: Path) -> bool:
    """Whether the run's first line is written: by then its model and engine stand."""
    return journal.is_file() and journal.stat().st_size > 0


def setting(word: str) -> tuple[str, Any]:
    """`key=value` of the command line, the value as JSON where it is some."""
    name, _, text = word.partition("=")
    try:
        return name, json.loads(text)
    except json.JSONDecodeError:
        return name, text


def run_job(job: Job, out: Path, extra: Sequence[str] = (), keep: bool = False) -> Row:
    """Run one job from its beginning and read its row."""
    from experiments.rescue import pbt

    folder, log = out / "runs" / job.name, out / "logs" / f"{job.name}.log"
    shutil.rmtree(folder, ignore_errors=True)
    row = Row(job.purpose, job.task, job.start, job.arm, job.seed, recipe_hash(job, extra), commit(), 1, 0, 0)
    fields = {**job.fields(), **dict(map(setting, extra))}
    try:
        if job.arm == "pbt":
            ended, found = pbt.run(fields, folder, log)
            row.take(asdict(ended) | found)
        else:
            row.take(asdict(launch(fields, folder, log)))
            row.take(numbers(folder / "journal.jsonl"))
    except (AutotuneError, ValueError, OSError) as error:  # without a journal, say: a row all the same
        row.error = f"{type(error).__name__}: {error}; {last_line(log)}"
    if not keep:
        shutil.rmtree(folder / "checkpoints", ignore_errors=True)
    return row


def last_line(log: Path) -> str:
    """What a run that broke off said at the end."""
    said = log.read_text("utf-8", errors="replace").split("\n") if log.exists() else []
    return next((line.strip() for line in reversed(said) if line.strip()), "it printed nothing")


def load(path: Path) -> list[Row]:
    """Finished runs; a line torn by a kill is dropped, the last of the same run wins."""
    rows: dict[Any, Row] = {}
    for line in path.read_text("utf-8").splitlines() if path.exists() else []:
        try:
            row = Row(**json.loads(line))
        except (json.JSONDecodeError, TypeError):
            continue
        rows[row.key] = row
    return list(rows.values())


def run_all(jobs: Iterable[Job], out: Path, workers: int, extra: Sequence[str] = (), until: float = 0) -> int:
    """Run what has no row yet; returns how many were run. After `until` seconds no further one is begun."""
    results, lock, began = out / "results.jsonl", threading.Lock(), time.monotonic()
    out.mkdir(parents=True, exist_ok=True)
    done = {row.key for row in load(results)}
    todo = [j for j in jobs if (j.purpose, j.task, j.start, j.arm, j.seed, recipe_hash(j, extra)) not in done]

    def one(job: Job) -> int:
        if until and time.monotonic() - began > until:
            return 0
        row = run_job(job, out, extra)
        with lock, results.open("a", encoding="utf-8") as stream:
            stream.write(json.dumps(asdict(row)) + "\n")
        shown = "failed" if row.score is None else f"{row.score:.3f}"
        print(f"{job.name:48} {shown}  {row.seconds:.0f} s", file=sys.stderr, flush=True)
        return 1

    with ThreadPoolExecutor(workers) as pool:
        return sum(pool.map(one, todo))
