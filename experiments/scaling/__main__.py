"""One and two GPUs: the same run on both, who serves whom, and what more GPUs would cost.

    python -m experiments.scaling run --gguf SmolLM2-135M-Instruct.Q4_1.gguf    on a machine with two GPUs
    python -m experiments.scaling table                                         table, agreement, cost model
    python -m experiments.scaling run --tiny                                    two gloo ranks on a CPU

Every run is `autotune run`, as a user types it. A row is appended as a run ends, failed ones too, and what
has a row is not run again; where there are fewer GPUs than a run needs it is left out, and the table says so.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import subprocess
import sys
import threading
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from experiments.scaling import cost, rows
from experiments.scaling.arms import Arm, arms, fields
from experiments.throughput.work import SHAPES, make_model

HERE = Path(__file__).resolve().parent
ROOT = HERE.parents[1]
SIZES = (8, 16, 32, 64)
TINY = "builtin:digits"
"""A model that learns within a minute on a CPU."""
ORDERLY = (0, 3)
"""Exit codes of a run that was done or that its controller stopped; no other run is a measurement."""
PATIENCE = 540.0
"""Seconds for a run."""


def command(arm: Arm, folder: Path, model: str, tiny: bool) -> list[str]:
    """What a user would type."""
    recipe = folder.with_suffix(".yaml")
    recipe.parent.mkdir(parents=True, exist_ok=True)
    recipe.write_text("name: scaling\n", "utf-8")
    words = [f"{name}={json.dumps(value)}" for name, value in fields(arm, model, tiny).items()]
    run = ["run", str(recipe), *words, f"run_dir={folder}"]
    if arm.by_torchrun:
        launcher = ["-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={arm.ranks}"]
        return [sys.executable, *launcher, "-m", "autotune", *run]
    more = ["--nproc", str(arm.ranks)] if arm.ranks > 1 else []
    return [sys.executable, "-m", "autotune", run[0], *more, *run[1:]]


def make(arm: Arm, out: Path, model: str, tiny: bool) -> dict[str, Any]:
    """Run it from its beginning; its row."""
    folder = out / "runs" / f"{arm.shape} {arm.name}".replace(",", "").replace(" ", "-")
    shutil.rmtree(folder, ignore_errors=True)
    row: dict[str, Any] = {
        **{"shape": arm.shape, "arm": arm.name, "ranks": arm.ranks, "gpus": arm.gpus, "stage": arm.stage},
        **{"commit": _commit(), "at": round(time.time())},
    }
    log = folder.with_suffix(".log")
    words = command(arm, folder, model, tiny)
    with log.open("wb") as stream, Memory() as memory:
        child = subprocess.Popen(words, cwd=ROOT, stdout=stream, stderr=stream, env=_environment())
        told = _tell(arm, folder, child)
        try:
            code = child.wait(timeout=PATIENCE)
        except subprocess.TimeoutExpired:
            child.terminate()
            code = child.wait()
    try:
        row |= rows.read(folder / "journal.jsonl")
        row |= {"exit_code": code, "told": told, "peak_gib": memory.peaks[: arm.gpus]}
    except (OSError, ValueError, KeyError) as error:
        tail = log.read_text("utf-8", errors="replace")[-1500:]
        row["failed"] = f"exit code {code}: {type(error).__name__}: {error}; {tail}"
    if code not in ORDERLY and "failed" not in row:
        row["failed"] = f"exit code {code}; {log.read_text('utf-8', errors='replace')[-1500:]}"
    return row


def _tell(arm: Arm, folder: Path, child: subprocess.Popen[bytes]) -> list[dict[str, Any]]:
    """Give the arm's `autotune ctl` commands as soon as the run has a rollout, one after the other."""
    told: list[dict[str, Any]] = []
    journal = folder / "journal.jsonl"
    while arm.commands and child.poll() is None:
        if journal.is_file() and '"type":"rollout"' in journal.read_text("utf-8").replace(" ", ""):
            break
        time.sleep(0.2)
    for words in arm.commands:
        line = [sys.executable, "-m", "autotune", "ctl", str(folder), *words.split()]
        done = subprocess.run(line, cwd=ROOT, capture_output=True, text=True, env=_environment())
        told.append({"words": words, "exit_code": done.returncode})
    return told


class Memory:
    """The most memory that each GPU had in use meanwhile, GiB, as the driver tells it."""

    def __enter__(self) -> Memory:
        self.peaks: list[float] = []
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._watch, daemon=True)
        self._thread.start()
        return self

    def __exit__(self, *raised: object) -> None:
        self._over.set()
        self._thread.join()

    def _watch(self) -> None:
        ask = ["nvidia-smi", "--query-gpu=memory.used", "--format=csv,noheader,nounits"]
        while shutil.which(ask[0]) and not self._over.wait(1.0):
            done = subprocess.run(ask, capture_output=True, text=True)
            now = [float(line) / 1024 for line in done.stdout.split()] if done.returncode == 0 else []
            self.peaks = [max(pair) for pair in zip(now, self.peaks or [0.0] * len(now), strict=True)]


def _environment() -> dict[str, str]:
    path = f"{ROOT}{os.pathsep}{os.environ.get('PYTHONPATH', '')}"
    return {"OMP_NUM_THREADS": "1", **os.environ, "PYTHONPATH": path}


def _commit() -> str:
    done = subprocess.run(["git", "rev-parse", "HEAD"], cwd=ROOT, capture_output=True, text=True)
    return done.stdout.strip() if done.returncode == 0 else "unknown"


def _devices() -> int:
    import torch

    return torch.cuda.device_count()


def load(path: Path) -> list[dict[str, Any]]:
    """Rows, the last of the same run."""
    lines = path.read_text("utf-8").splitlines() if path.exists() else []
    found = {(row["shape"], row["arm"]): row for row in map(json.loads, lines)}
    return list(found.values())


def run(options: argparse.Namespace, out: Path) -> None:
    """Everything that has no row yet and for which there are devices."""
    done = {(row["shape"], row["arm"]) for row in load(out / "results.jsonl") if "failed" not in row}
    here = 10**6 if options.tiny else _devices()
    began = time.monotonic()
    for arm in arms(options.tiny):
        if (arm.shape, arm.name) in done or (options.only and options.only not in arm.name):
            continue
        if arm.gpus > here or (options.minutes and time.monotonic() - began > 60 * options.minutes):
            print(f"left out: {arm.shape}, {arm.name} ({arm.gpus} GPUs, here {here})", flush=True)
            continue
        model = TINY if options.tiny else str(make_model(arm.shape, out / "models", options.gguf))
        row = make(arm, out, model, options.tiny)
        with (out / "results.jsonl").open("a", encoding="utf-8") as stream:
            stream.write(json.dumps(row) + "\n")
        print(f"{arm.shape}, {arm.name}: {row.get('failed', row.get('seconds'))}", flush=True)


def show(found: Sequence[dict[str, Any]], tiny: bool) -> str:
    """The table, whether ranks agreed, which runs are missing, and the cost model."""
    there = {(row["shape"], row["arm"]) for row in found if "failed" not in row}
    missing = [f"{a.shape}, {a.name}" for a in arms(tiny) if (a.shape, a.name) not in there]
    parts = [rows.table(found), *_agreement(found), *_mismatch(found), *_model(found)]
    if missing:
        parts.append("Not run, or failed: " + "; ".join(missing) + ".\n")
    return "\n".join(parts)


def _agreement(found: Sequence[dict[str, Any]]) -> Iterator[str]:
    for row in found:
        if "failed" in row or row["ranks"] < 2:
            continue
        moved = [f"{i['knob']} {i['read_back']:g} at {i['rollout']}" for i in row["applied"]]
        told = f"knobs read back on every rank: {', '.join(moved) or 'none moved'}"
        undone = f"; weights brought back after rollouts {row['restores']}" if row["restores"] else ""
        same = [r for r in found if r["shape"] == row["shape"] and r["gpus"] == 1 and "rewards" in r]
        alone = same[0] if same else None
        differ = f"; **ranks differed**: {row['disagreed']}" if row["disagreed"] else ""
        yield f"- {row['shape']}, {row['arm']}: {told}{undone}{differ}{_beside(row, alone)}\n"


def _mismatch(found: Sequence[dict[str, Any]]) -> Iterator[str]:
    """How far the sampler's log-probs were from the trainer's: the proof that it had the weights."""
    for row in found:
        known = [value for value in row.get("kl_mismatch", ()) if value is not None]
        if known:
            yield f"- {row['shape']}, {row['arm']}: kl_mismatch at most {max(known):.2g} nats/token\n"


def _beside(row: dict[str, Any], alone: dict[str, Any] | None) -> str:
    """The reward of the last rollouts, beside that of the run on one GPU, where both learnt alike."""
    moved = row["applied"] or row["restores"]
    if alone is None or moved or len(alone["rewards"]) != len(row["rewards"]):
        return ""
    last = [sum(r["rewards"][-4:]) / 4 for r in (row, alone)]
    return f"; reward of the last four rollouts {last[0]:.3f}, on one GPU {last[1]:.3f}"


ALONE, BOTH = "one GPU, ZeRO 2", "two GPUs, ZeRO 2"


def _model(found: Sequence[dict[str, Any]]) -> Iterator[str]:
    """Where one GPU was measured: 8 to 64 GPUs, and the runs on two as predicted and as measured."""
    by_arm = {(row["shape"], row["arm"]): row for row in found if "failed" not in row}
    for shape in dict.fromkeys(row["shape"] for row in found):
        one, two = by_arm.get((shape, ALONE)), by_arm.get((shape, BOTH))
        if one is None or shape == "tiny":  # ranks that share the cores of one machine scale in no way
            continue
        alone = cost.fit([rows.point(one)])
        yield f"Cost model, {shape}, from one GPU alone, s a rollout on N GPUs: {_sizes(alone, shape)}\n"
        for arm, guess in _predicted(alone, shape).items():
            if row := by_arm.get((shape, arm)):
                truth = row["seconds"]["total"]
                yield f"- {arm}: predicted {guess:.2f}, measured {truth:.2f} ({guess / truth - 1:+.0%})\n"
        if two is not None:
            both = cost.fit([rows.point(one), rows.point(two)])
            yield f"From one GPU and two: {_sizes(both, shape)}\n"


def _sizes(costs: cost.Costs, shape: str) -> str:
    return ", ".join(f"{n}: {cost.rollout(costs, _traffic(shape, 2), n):.2f}" for n in SIZES)


def _predicted(costs: cost.Costs, shape: str) -> dict[str, float]:
    """Seconds of a rollout of the runs on two GPUs, by their names."""
    zero = {f"two GPUs, ZeRO {stage}": cost.rollout(costs, _traffic(shape, stage), 2) for stage in (2, 3)}
    ahead = cost.overlapped(costs, _traffic(shape, 2), trainers=1, servers=1)
    return zero | {"one trains, one serves, one step off": ahead}


def _traffic(shape: str, stage: int) -> cost.Run:
    """What decides a run's traffic, from its recipe."""
    sizes, recipe = SHAPES[shape], fields(Arm("", shape), "", False)
    samples = recipe["trainer.ppo_mini_batch_size"] * recipe["trainer.rollout_n"]
    return cost.Run(
        parameters=sizes.body + sizes.hidden * sizes.vocabulary,
        updates=recipe["trainer.train_batch_size"] // recipe["trainer.ppo_mini_batch_size"],
        micro_batches=samples // recipe["trainer.micro_batch_size"],
        stage=stage,
    )


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        prog="python -m experiments.scaling", description=(__doc__ or "").split("\n")[0]
    )
    parser.add_argument("command", choices=["run", "table"])
    parser.add_argument("--gguf", help="SmolLM2-135M-Instruct; without it 135m has random weights")
    parser.add_argument("--tiny", action="store_true", help="a rehearsal on a CPU, two gloo ranks")
    parser.add_argument("--only", default="", help="runs whose name holds this")
    parser.add_argument("--minutes", type=float, default=0, help="begin no further run after so many")
    parser.add_argument("--out", type=Path, default=HERE / "results")
    options = parser.parse_args(argv)
    out = options.out.resolve()
    out.mkdir(parents=True, exist_ok=True)
    if options.command == "run":
        run(options, out)
    found = load(out / "results.jsonl")
    if found:
        text = show(found, options.tiny)
        (out / "table.md").write_text(text, "utf-8")
        print(text)
    return 0


if __name__ == "__main__":
    sys.exit(main())
