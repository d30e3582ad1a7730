"""Seconds per rollout beside TRL's, on one GPU: protocol, conductor and table.

    python -m experiments.throughput.run --gguf FILE        # everything that is not in the results yet
    python -m experiments.throughput.run --table            # results/*.jsonl as a table

A group is what is compared with each other; its trainers are started once and take turns, A B B A
(`turns.py`). Before a turn's rollouts count, one more runs unmeasured. A JSON line is appended as each
turn ends, or when an arm fails, which stops no other; a group whose lines are all there is not measured
again, so the script may be stopped and started. Nothing is measured unless the parity gate has passed
on this machine.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import signal
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

from experiments.throughput.turns import Worker, WorkerFailed
from experiments.throughput.work import Work, make_model

HERE = Path(__file__).resolve().parent
ROOT = HERE.parent.parent
MODULE = "experiments.throughput"
OFFLINE = {"HF_HUB_OFFLINE": "1", "TOKENIZERS_PARALLELISM": "false", "VLLM_USE_FLASHINFER_SAMPLER": "0"}


@dataclass(frozen=True)
class Arm:
    """One trainer under one setting."""

    name: str
    module: str
    options: tuple[str, ...] = ()
    env: dict[str, str] = field(default_factory=dict)


TRL_VLLM = Arm("TRL + vLLM", "arm_trl")
TRL_FED = Arm("TRL, fed", "arm_trl", ("--fed",))
OURS_FED = Arm("ours, fed", "arm_ours", ("--engine", "fed"))
SPARE = ("--set", "rollout.old_log_probs=sampler", "--set", "rollout.log_probs=all")
OURS_VLLM = Arm("ours + vLLM", "arm_ours", ("--engine", "vllm"))
OURS_SPARE = Arm("ours + vLLM, its log-probs", "arm_ours", ("--engine", "vllm", *SPARE))
SERVER = Arm("ours + server", "arm_ours", ("--engine", "server"))
OURS_HF = Arm("ours + hf", "arm_ours", ("--engine", "hf"))


def without(name: str, *settings: str, base: Arm = OURS_FED) -> Arm:
    """Ours with one technique off."""
    more = [part for setting in settings for part in ("--set", setting)]
    return Arm(f"{base.name}, {name}", base.module, (*base.options, *more))


OFF = without("one step off", "rollout.one_step_off=true", base=SERVER)
WEIGHED = without("weighed", "rollout.log_probs=all", base=OFF)
_REPLICAS = ("rollout.server.replicas=2", f"rollout.kv_cache_bytes={4 << 30}")
TWO = without("two servers", *_REPLICAS, base=WEIGHED)
PAIR = without("two servers", *_REPLICAS, base=SERVER)
PAIR_FUSED = without("compiled head", "trainer.packing.compile_head=true", base=PAIR)
FUSED = without("compiled head", "trainer.packing.compile_head=true")
PLAIN = without("no graphs", "trainer.packing.graphs=false")
ABLATIONS = (
    without(
        "padded",
        *(f"trainer.packing.{s}" for s in ("enabled=off", "tokens=null", "compile=false", "graphs=false")),
    ),
    PLAIN,
    FUSED,
    without("quiet groups trained", "trainer.packing.leave_out_quiet=off"),
    without("micro batches of 16", "trainer.packing.tokens=null", "trainer.micro_batch_size=16"),
    without("ZeRO 1", "deepspeed.zero_stage=1"),
    without("no veto snapshot", "trainer.veto_snapshot=false"),
    without("layers not compiled", "trainer.packing.compile=false"),
)


@dataclass(frozen=True)
class Group:
    """What is compared with each other, and in which order it runs."""

    name: str
    shape: str
    arms: tuple[Arm, ...]
    order: tuple[int, ...]
    rollouts: int
    """Measured, per turn."""
    warm_up: int = 3
    at_once: bool = True
    """Start all at the same time; engines that profile free memory must not."""


LARGE = ("trainer.packing.graphs=false", "trainer.packing.tokens=8192")


def smaller(arm: Arm, *options: str) -> Arm:
    """The same arm with micro batches that fit beside another trainer."""
    return replace(arm, options=(*arm.options, *options))


def each_once(ablations: Sequence[Arm]) -> tuple[int, ...]:
    """The whole at both ends, and everything that lacks something in between."""
    return (*range(len(ablations) + 1), 0)


def there_and_back(arms: int) -> tuple[int, ...]:
    """A B C C B A: what drifts with time falls on all of them alike."""
    return (*range(arms), *reversed(range(arms)))


def groups(tiny: bool) -> tuple[Group, ...]:
    """In the order of their worth, should time run out."""
    if tiny:
        # Attention on a CPU is a loop over sequences: compiling it takes minutes and shows nothing.
        ours, hf, *lacking = (
            replace(arm, options=(*arm.options, "--set", "trainer.packing.compile=false"))
            for arm in (OURS_FED, OURS_HF, *ABLATIONS)
        )
        return (
            Group("training", "tiny", (TRL_FED, ours), (0, 1, 1, 0), 2, 1),
            Group("techniques", "tiny", (ours, *lacking), each_once(lacking), 1, 1),
            Group("end to end", "tiny", (hf,), (0,), 1, 1),
        )
    abba = there_and_back(2)
    # Both sides are on the device at the same time: what a graph keeps would not fit beside the other.
    ours_large = smaller(OURS_VLLM, *(part for s in LARGE for part in ("--set", s)))
    end = {"at_once": False}
    sampled = (TRL_VLLM, OURS_VLLM, PAIR, PAIR_FUSED, OURS_HF)
    return (
        Group("training", "135m", (TRL_FED, OURS_FED, PLAIN, FUSED), (0, 1, 2, 3, 3, 2, 1, 0), 6),
        Group("end to end", "135m", sampled, there_and_back(5), 4, 2, **end),
        Group("one step off", "135m", (TRL_VLLM, SERVER, OFF, WEIGHED, TWO), there_and_back(5), 4, 2, **end),
        Group("techniques", "135m", (OURS_FED, *ABLATIONS), each_once(ABLATIONS), 6, 2),
        Group("sampling", "135m", (OURS_VLLM, OURS_SPARE), abba, 4, 2, **end),
        Group("training", "0.5b", (TRL_FED, OURS_FED), abba, 5, 2),
        Group("training", "1.5b", (smaller(TRL_FED, "--micro", "32"), PLAIN), abba, 4, 2),
        Group("end to end", "0.5b", (TRL_VLLM, OURS_VLLM), abba, 4, 2, **end),
        Group("end to end", "1.5b", (smaller(TRL_VLLM, "--micro", "16"), ours_large), abba, 4, 2, **end),
    )


class Conductor:
    """Runs groups and appends what they gave."""

    def __init__(self, options: argparse.Namespace) -> None:
        self.results, self.folder = Path(options.results), Path(options.scratch)
        self.work = Work(**json.loads(options.work))
        self.gguf, self.deadline = options.gguf, time.monotonic() + options.seconds
        self.retry, self.ungated = bool(options.retry), bool(options.ungated)
        self.folder.mkdir(parents=True, exist_ok=True)
        self.results.parent.mkdir(parents=True, exist_ok=True)

    def done(self, group: Group) -> bool:
        """Every turn is there, or its arm is known to fail."""
        rows = [row for row in read(self.results) if _key(row) == (group.name, group.shape)]
        failed = set() if self.retry else {row["arm"] for row in rows if "failed" in row and "arm" in row}
        left = {turn for turn, place in enumerate(group.order) if group.arms[place].name not in failed}
        return {row["turn"] for row in rows if "turn" in row} >= left

    def append(self, row: dict[str, Any]) -> None:
        with self.results.open("a") as sink:
            told = {"ungated": True} if self.ungated else {}
            sink.write(json.dumps({"at": round(time.time()), **told, **row}) + "\n")
            sink.flush()
            os.fsync(sink.fileno())

    def command(self, arm: Arm, shape: str) -> list[str]:
        model = make_model(shape, self.folder, self.gguf if shape == "135m" else None)
        common = ["--model", str(model), "--shape", shape, "--work", json.dumps(asdict(self.work))]
        return [sys.executable, "-m", f"{MODULE}.{arm.module}", *common, *arm.options]

    def worker(self, arm: Arm, group: Group) -> Worker:
        log = self.folder / f"{group.name}-{group.shape}-{arm.name}.log".replace(" ", "_").replace(",", "")
        return Worker(arm.name, self.command(arm, group.shape), log, {**OFFLINE, **arm.env})

    def gate(self, shape: str) -> None:
        """Raise unless both sides compute the same loss and gradient here."""
        gate = Arm("gate", "gate")
        worker = self.worker(gate, Group("gate", shape, (gate,), (0,), 1))
        try:
            answer = worker._read()
        finally:
            worker.end()
        self.append({"group": "gate", "shape": shape, **versions(), **answer})
        if not answer["passed"]:
            raise SystemExit(f"the parity gate failed, so nothing was measured: {json.dumps(answer)}")

    def run(self, group: Group) -> None:
        """All turns; an arm that fails is written down and left out from then on."""
        make_model(group.shape, self.folder, self.gguf if group.shape == "135m" else None)
        warmed: set[int] = set()
        with self.workers(group) as workers:
            for turn, place in enumerate(group.order):
                if place not in workers:
                    continue
                extra = 1 if place in warmed else group.warm_up
                try:
                    answer = workers[place].go(extra + group.rollouts)
                except WorkerFailed as failure:
                    self.drop(group, workers, place, failure)
                    continue
                warmed.add(place)
                first, rows = answer["rows"][:extra], answer["rows"][extra:]
                warm = [row["seconds"] for row in first]
                self.append({
                    **{"group": group.name, "shape": group.shape, "arm": group.arms[place].name},
                    **{"turn": turn, "warm_up": warm, "rows": rows, "peak_bytes": answer["peak_bytes"]},
                })  # fmt: skip
                print(f"{group.name} {group.shape} {group.arms[place].name}:", _short(rows), flush=True)
                if place not in group.order[turn + 1 :]:
                    workers.pop(place).end(3.0)  # what it holds of the device is the others' now

    def drop(self, group: Group, workers: dict[int, Worker], place: int, failure: Exception) -> None:
        """Write down that an arm failed, and go on without it."""
        name = group.arms[place].name
        workers.pop(place).end(0.0)
        self.append({
            **{"group": group.name, "shape": group.shape, "arm": name, "failed": str(failure)[:4000]},
        })  # fmt: skip
        print(f"{group.name} {group.shape} {name} FAILED: {str(failure)[:2000]}", flush=True)

    @contextmanager
    def workers(self, group: Group) -> Iterator[dict[int, Worker]]:
        """The arms that stand, by their place; all import at the same time."""
        workers = {place: self.worker(arm, group) for place, arm in enumerate(group.arms)}
        try:
            if group.at_once:
                for worker in workers.values():
                    worker.build()
            for place, worker in list(workers.items()):
                if not group.at_once:
                    worker.build()
                try:
                    print(f"{worker.name} stands after {worker.ready():.0f} s", flush=True)
                except WorkerFailed as failure:
                    self.drop(group, workers, place, failure)
            yield workers
        finally:
            for worker in workers.values():
                worker.end(3.0)


def _short(rows: list[dict[str, Any]]) -> str:
    return " ".join(f"{row['seconds']:.3f}" for row in rows)


def _key(row: dict[str, Any]) -> tuple[Any, Any]:
    return row.get("group"), row.get("shape")


def read(path: Path) -> list[dict[str, Any]]:
    """Whole lines only: the last may have been cut off by a kill."""
    if not path.exists():
        return []
    lines = path.read_text().split("\n")[:-1]
    return [json.loads(line) for line in lines if line]


def versions() -> dict[str, Any]:
    """What was measured with."""
    import importlib.metadata as metadata

    import torch

    names = ("torch", "transformers", "deepspeed", "trl", "vllm")
    found = {}
    for name in names:
        try:
            found[name] = metadata.version(name)
        except metadata.PackageNotFoundError:
            found[name] = None
    gpu = torch.cuda.get_device_name() if torch.cuda.is_available() else None
    return {"versions": found, "gpu": gpu, "python": platform.python_version()}


def main() -> None:
    plain = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=plain)
    parser.add_argument("--gguf", help="SmolLM2-135M-Instruct; without it 135m has random weights")
    parser.add_argument("--results", default=str(HERE / "results" / "h200.jsonl"))
    parser.add_argument("--scratch", default="runs/throughput")
    parser.add_argument("--work", default="{}", help="sizes of a rollout as JSON, see work.Work")
    parser.add_argument("--only", action="append", help="group/shape; gate/135m is the gate alone")
    parser.add_argument("--seconds", type=float, default=1e9, help="begin no further group after this")
    parser.add_argument("--retry", action="store_true", help="groups again in which an arm failed")
    parser.add_argument("--ungated", action="store_true", help="whatever the gate says; every line tells")
    parser.add_argument("--tiny", action="store_true", help="a rehearsal on a CPU")
    parser.add_argument("--table", action="store_true")
    options = parser.parse_args()
    if options.table:
        from experiments.throughput.table import render

        print(render(read(Path(options.results))))
        return
    conduct(options)


def conduct(options: argparse.Namespace) -> None:
    signal.signal(signal.SIGTERM, lambda number, frame: sys.exit(143))  # workers are ended on the way out
    os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH")]))
    conductor = Conductor(options)
    wanted = [g for g in groups(options.tiny) if not options.only or f"{g.name}/{g.shape}" in options.only]
    left = [group for group in wanted if not conductor.done(group)]
    alone = [name.partition("/")[2] for name in options.only or () if name.startswith("gate/")]
    passed = any(row.get("passed") for row in read(conductor.results))
    if (left or alone) and not (passed or conductor.ungated):
        conductor.gate([*alone, *(group.shape for group in left)][0])
    for group in left:
        if time.monotonic() > conductor.deadline:
            print(f"no time left for {group.name} {group.shape}; start again to go on", flush=True)
            return
        conductor.run(group)


if __name__ == "__main__":
    main()
