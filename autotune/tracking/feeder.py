"""The process that delivers a run's journal to MLflow: `python -m autotune.tracking.feeder RUN`.

    spool (journal.jsonl) -> payload (pure) -> store (MLflow) -> receipt (RUN/mlflow.json)

With `--follow PID` it lives as long as more lines can come, retrying a store that is down for as
long as the run lasts: the journal keeps everything meanwhile. Without it (`autotune sync`) it
delivers what is there. Once nothing more can come it gives up after `--patience` seconds without
a success, says what is missing, and exits 1; running it again continues where it stopped.

A run that is resumed continues its MLflow run. One feeder per run folder, held by a file lock.
"""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import json
import os
import signal
import sys
import time
import uuid
from collections.abc import Callable, Iterator, Mapping, Sequence
from datetime import datetime
from pathlib import Path
from typing import Any

from autotune.errors import InputError
from autotune.metrics import RATIO_BINS
from autotune.story import Line, Story
from autotune.tracking import payload
from autotune.tracking.figures import policy_ratio_png
from autotune.tracking.names import METRICS_PER_CALL, chunks, params_of
from autotune.tracking.patience import POLL_SECONDS, GaveUp, only_one, persist
from autotune.tracking.payload import Point
from autotune.tracking.receipt import URI_VARIABLE, Receipt, read_receipt, write_receipt
from autotune.tracking.spool import Spool, parent_alive
from autotune.tracking.store import Store, local_uri, safe_uri
from autotune.tracking.system import FILE as SYSTEM
from autotune.tracking.system import Sampler, sample_points

TABLE_SECONDS = 20.0
"""Least seconds between two uploads of the decision table while the run goes on."""
ARTIFACTS = ("journal.jsonl", "recipe.resolved.json", "environment.json")
DECISIONS, FIGURE = "decisions.json", "figures/policy_ratio.png"
SAMPLES_PER_CALL = 40
LOCK = ".mlflow.lock"


@dataclasses.dataclass(frozen=True, slots=True)
class Told:
    """The points of one journal line."""

    kind: str
    """`rollout` or `eval`."""
    rollout: int
    line: int
    points: list[Point]


@dataclasses.dataclass
class Feeder:
    """Delivers one journal to one store."""

    folder: Path
    uri: str
    spool: Spool
    patience: float
    story: Story = dataclasses.field(default_factory=Story)

    def __post_init__(self) -> None:
        known = read_receipt(self.folder)
        store = safe_uri(self.uri)
        fresh = Receipt(store, key=uuid.uuid4().hex)
        self.receipt = known if known is not None and known.store == store else fresh
        self._seen = 0
        self._after = 0.0
        self._told: list[Told] = []
        self._sent = 0
        self._store: Store | None = None
        self._table_rows, self._table_time = -1, 0.0
        self._ratios: dict[int, list[float]] = {}
        self._system = Spool(self.folder / SYSTEM, lambda: False)
        self._samples: list[tuple[int, Line | None]] = []
        """Samples of the machine, counted; delivered ones but for the last are dropped."""

    def feed(self) -> None:
        """Deliver until nothing more can come, then close the run.

        Raises:
            GaveUp: if the store stays out of reach after the journal's end.
        """
        more = True
        while more:
            more = self.spool.open
            for line in self.spool.take():
                self._fold(line)
            self._patiently(self._deliver)
            if more:
                time.sleep(POLL_SECONDS)

    def close(self, status: str | None) -> None:
        """Deliver the artifacts; with a status, end the MLflow run."""
        self._patiently(lambda: self._finish(status))

    def _fold(self, line: Line | None) -> None:
        """Take one line into the story and keep its points."""
        self._seen += 1
        if line is None:
            print(f"line {self._seen} of the journal is not JSON; passed over", file=sys.stderr)
            return
        self._after += payload.seconds_of(line)
        kind, rollout = line.get("type"), int(line.get("rollout") or 0)
        if kind == "rollout":
            self._tell(kind, rollout, payload.rollout_points(line, self._after))
            self._keep_histogram(line, rollout)
        elif kind == "eval":
            self._tell(kind, rollout, payload.eval_points(line, self._after))
        self.story.add(line)

    def _keep_histogram(self, line: Line, rollout: int) -> None:
        counts = ((line.get("snapshot") or {}).get("histograms") or {}).get("policy_ratio")
        if counts and len(counts) == RATIO_BINS + 2:
            self._ratios[rollout] = counts

    def _tell(self, kind: str, rollout: int, points: list[Point]) -> None:
        """Keep points unless an earlier line told of the same rollout: a resume repeats some."""
        if rollout > max((t.rollout for t in self._told if t.kind == kind), default=-1):
            self._told.append(Told(kind, rollout, self._seen, points))

    def _deliver(self) -> None:
        if not self.story.header:
            return
        store = self._opened()
        while self._sent < len(self._told):
            self._deliver_some(store)
        if self.receipt.lines < self._seen:
            self._sign(lines=self._seen)
        self._send_system(store)
        self._send_table(store, always=False)

    def _send_system(self, store: Store) -> None:
        """Samples of the machine that are not delivered yet."""
        self._samples += enumerate(self._system.take(), self._samples[-1][0] + 1 if self._samples else 0)
        waiting = [(at, line) for at, line in self._samples if at >= self.receipt.system]
        for some in chunks(waiting, SAMPLES_PER_CALL):
            start = store.start_ms / 1000
            store.log_points([p for at, line in some if line for p in sample_points(line, at, start)])
            self._sign(system=some[-1][0] + 1)
        self._samples = self._samples[-1:]

    def _deliver_some(self, store: Store) -> None:
        """About one call's worth of points, whole lines only, then the receipt for them."""
        upto, points, receipt = self._sent, list[Point](), self.receipt
        while upto < len(self._told) and len(points) < METRICS_PER_CALL // 2:
            told, upto = self._told[upto], upto + 1
            if told.kind == "rollout" and told.rollout > receipt.rollout:
                receipt = dataclasses.replace(receipt, rollout=told.rollout)
                points += told.points
            elif told.kind == "eval" and told.rollout > receipt.eval:
                receipt = dataclasses.replace(receipt, eval=told.rollout)
                points += told.points
        if points:
            store.log_points(points)
            lines = max(receipt.lines, self._told[upto - 1].line)
            self._sign(lines=lines, rollout=receipt.rollout, eval=receipt.eval)
        self._sent = upto

    def _opened(self) -> Store:
        """The store with this journal's run in it; opened at the first use."""
        if self._store is not None:
            return self._store
        recipe = self.story.recipe or _json_file(self.folder / "recipe.resolved.json")
        environment = self.story.header.get("environment") or _json_file(self.folder / "environment.json")
        store = Store(self.uri, self.folder)
        self._sign()
        settings = (recipe.get("tracking") or {}).get("mlflow") or {}
        experiment, group = settings.get("experiment", "autotune"), settings.get("group") or ()
        start_ms = round(_moment(self.story.header, self._written() - self._after) * 1000)
        tags = payload.tags_of(recipe, environment)
        if store.open_run(self.receipt.run_id, experiment, self.receipt.key, start_ms, tags, group):
            self.receipt, self._sent = (
                Receipt(self.receipt.store, self.receipt.key),
                0,
            )  # nothing is there yet
        self._sign(run_id=store.run_id, experiment_id=store.experiment_id, finished=False)
        store.log_params(params_of(recipe))
        self._store = store
        return store

    def _written(self) -> float:
        return (self.folder / "journal.jsonl").stat().st_mtime

    def _send_table(self, store: Store, *, always: bool) -> None:
        table = payload.decision_table(self.story)
        rows, now = len(table["data"]), time.monotonic()
        due = rows != self._table_rows and now - self._table_time > TABLE_SECONDS
        if always or (rows and due):
            store.log_table(table, DECISIONS)
            self._table_rows, self._table_time = rows, now

    def _send_figure(self, store: Store) -> None:
        """The policy ratio over the rollouts, where there is what to draw and matplotlib to draw it."""
        if not self._ratios:
            return
        knobs = {t: row.knobs for t, row in self.story.rows.items()}
        ranges = {t: (k.get("clip_range_low"), k.get("clip_range_high")) for t, k in knobs.items()}
        clip = {t: (1 - low, 1 + high) for t, (low, high) in ranges.items() if None not in (low, high)}
        with contextlib.suppress(ImportError):
            store.log_bytes(policy_ratio_png(self._ratios, clip), FIGURE)

    def _finish(self, status: str | None) -> None:
        if not self.story.header:
            return
        store = self._opened()
        self._send_table(store, always=True)
        self._send_system(store)
        self._send_figure(store)
        store.remove_twins(self.receipt.key)
        store.set_tag("mlflow.note.content", payload.note(self.story))
        for name in ARTIFACTS:
            if (self.folder / name).exists():
                store.log_file(self.folder / name)
        if status is not None:
            end_ms = round(_moment(self.story.end or {}, self._written()) * 1000)
            store.terminate(status, end_ms)
            store.end_groups(status, end_ms)
        self._sign(finished=status is not None)

    def _sign(self, **changes: Any) -> None:
        self.receipt = dataclasses.replace(self.receipt, **changes)
        write_receipt(self.folder, self.receipt)

    def _patiently(self, act: Callable[[], None]) -> None:
        persist(act, self.spool, self.uri, self.patience, self._missing)

    def _missing(self, why: str) -> str:
        return (
            f"MLflow at {safe_uri(self.uri)} did not take the run ({why}); "
            f"{self.receipt.lines} journal lines are delivered, the rest is safe in the journal. "
            f"Deliver it later with: autotune sync {self.folder}"
        )


def _moment(line: Line, otherwise: float) -> float:
    """When a line was written, in seconds since 1970, as far as it says so."""
    with contextlib.suppress(KeyError, TypeError, ValueError):
        return datetime.fromisoformat(line["at"]).timestamp()
    return otherwise


def _json_file(path: Path) -> Mapping[str, Any]:
    with contextlib.suppress(OSError, ValueError):
        data = json.loads(path.read_text(encoding="utf-8"))
        return data if isinstance(data, dict) else {}
    return {}


def resolve_uri(folder: Path, uri: str | None) -> str:
    """The store asked for (option, then environment), else the recipe's, else the local one."""
    recipe = _json_file(folder / "recipe.resolved.json")
    wanted = ((recipe.get("tracking") or {}).get("mlflow") or {}).get("uri")
    return uri or os.environ.get(URI_VARIABLE) or wanted or local_uri(folder)


def busy(folder: Path) -> bool:
    """Whether a feeder is delivering this run at the moment."""
    try:
        with only_one(folder / LOCK, wait=0.0):
            return False
    except InputError:
        return True


def main(arguments: Sequence[str] | None = None) -> int:
    """Command line of the feeder; 0 when everything is delivered, 1 when not, 2 on bad input."""
    options = _options(arguments)
    folder: Path = options.run
    if not (options.follow or (folder / "journal.jsonl").is_file()):
        print(f"{folder} has no journal.jsonl; give the folder of a run", file=sys.stderr)
        return 2
    if options.follow:
        with contextlib.suppress(OSError):
            os.nice(15)
        signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is the run's; its `end` line ends us
    try:
        return deliver(folder, resolve_uri(folder, options.uri), options.follow, options.patience)
    except (GaveUp, InputError) as error:
        print(error, file=sys.stderr)
        return error.exit_code


def deliver(folder: Path, uri: str, follow: int | None, patience: float) -> int:
    """Deliver one run folder, following its writer when there is one."""
    alive = parent_alive(follow) if follow else lambda: False
    with only_one(folder / LOCK, wait=30.0 if follow else 2.0):
        feeder = Feeder(folder, uri, Spool(folder / "journal.jsonl", alive), patience)
        with sampled(folder, follow):
            feeder.feed()
        ended = feeder.story.end is not None
        feeder.close(payload.status_of(feeder.story.end) if ended or follow else None)
    print(f"{feeder.receipt.lines} journal lines delivered to {safe_uri(uri)}, run {feeder.receipt.run_id}")
    return 0


@contextlib.contextmanager
def sampled(folder: Path, follow: int | None) -> Iterator[None]:
    """The machine is sampled while a live run is followed, as often as its recipe wants."""
    recipe = _json_file(folder / "recipe.resolved.json")
    every = ((recipe.get("tracking") or {}).get("mlflow") or {}).get("system_metrics") or 0.0
    if not (follow and every):
        yield
        return
    sampler = Sampler(folder, float(every))
    sampler.start()
    try:
        yield
    finally:
        sampler.stop()


def _options(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="autotune.tracking.feeder", description=__doc__)
    parser.add_argument("run", type=Path, help="folder of the run")
    parser.add_argument("--uri", help="MLflow tracking URI; default: the recipe's, else local SQLite")
    parser.add_argument("--follow", type=int, metavar="PID", help="parent process that writes the journal")
    parser.add_argument("--patience", type=float, default=20.0, help="seconds of retrying at the end")
    return parser.parse_args(arguments)


if __name__ == "__main__":
    sys.exit(main())
