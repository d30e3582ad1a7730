"""TRL 1.16's GRPOTrainer as a worker: on its own rollouts (vLLM in its process) or on fed ones.

`SETTINGS` were fixed before anything was measured. They are TRL's tuned side: weights and optimizer
states in bfloat16 (the fastest it has, and less than the float32 masters of the other side), no
gradient checkpointing, the whole update as one micro batch where it fits, no reference (beta 0, its
default), one log line per rollout.
"""

from __future__ import annotations

import argparse
import json
import os
import tempfile
from pathlib import Path
from typing import Any

from experiments.throughput.turns import Turns, TurnsOver
from experiments.throughput.work import SHAPES, Work, fed_rollout

SETTINGS: dict[str, Any] = {
    "gradient_checkpointing": False,
    "beta": 0.0,
    "num_iterations": 1,
    "learning_rate": 2e-6,
    "lr_scheduler_type": "constant",
    "warmup_steps": 0,
    "temperature": 1.0,
    "max_grad_norm": 1.0,
    "optim": "adamw_torch_fused",
    "report_to": [],
    "save_strategy": "no",
    "disable_tqdm": True,
}
VLLM = {"use_vllm": True, "vllm_mode": "colocate", "vllm_gpu_memory_utilization": 0.3}
TRAIN_STEPS = 1_000_000


def config(work: Work, micro: int | None, vllm: bool, out: str, bf16: bool | None = None) -> Any:
    """The GRPOConfig of one arm."""
    import torch
    from trl import GRPOConfig

    gpu = torch.cuda.is_available()
    per_update = work.samples // work.updates
    micro = micro or per_update
    engine = {**VLLM, "vllm_max_model_length": work.prompt_limit + work.longest} if vllm else {}
    return GRPOConfig(
        **SETTINGS,
        **engine,
        output_dir=out,
        max_steps=TRAIN_STEPS,
        per_device_train_batch_size=micro,
        gradient_accumulation_steps=per_update // micro,
        generation_batch_size=work.samples,
        num_generations=work.group,
        max_completion_length=work.longest,
        logging_steps=work.updates,
        bf16=gpu if bf16 is None else bf16,
        **({} if gpu else {"use_cpu": True}),
    )


class Counts:
    """What a rollout consisted of, read where the rewards are given."""

    def __init__(self) -> None:
        self.tokens, self.reward, self.length = 0, 0.0, 0.0

    def see(self, prompt_tokens: int, completions: list[list[int]], rewards: list[float]) -> None:
        response = sum(map(len, completions))
        self.tokens, self.length = prompt_tokens + response, response / len(completions)
        self.reward = sum(rewards) / len(rewards)


def make_trainer(options: argparse.Namespace, work: Work, counts: Counts, out: str) -> Any:
    """A trainer that is ready to train."""
    import torch
    from datasets import Dataset
    from transformers import AutoModelForCausalLM, AutoTokenizer
    from trl import GRPOTrainer

    tokenizer = AutoTokenizer.from_pretrained(options.model, padding_side="left")
    dtype = torch.bfloat16 if torch.cuda.is_available() else torch.float32
    model = AutoModelForCausalLM.from_pretrained(options.model, dtype=dtype)
    if options.fed:
        rows, reward, more = _fed(options, work, counts)
    else:
        rows, reward, more = _sums(options, tokenizer, counts)
    return GRPOTrainer(
        model=model,
        reward_funcs=reward,
        args=config(work, options.micro, not options.fed, out),
        train_dataset=Dataset.from_list(rows),
        processing_class=tokenizer,
        **more,
    )


def _fed(options: argparse.Namespace, work: Work, counts: Counts) -> tuple[list[Any], Any, dict[str, Any]]:
    """Made rollouts through `rollout_func`: what is left is the training loop."""
    vocabulary, state = SHAPES[options.shape].vocabulary, {"number": 0}

    def rollout(prompts: list[Any], trainer: Any) -> dict[str, Any]:
        fed = fed_rollout(state["number"], work, vocabulary)
        state["fed"] = fed  # type: ignore[assignment]
        state["number"] += 1
        return {
            "prompt_ids": [ids for ids in fed.prompts for _ in range(work.group)],
            "completion_ids": fed.responses,
            "logprobs": [[-1.0] * len(ids) for ids in fed.responses],
        }

    def reward(completions: list[Any], **columns: Any) -> list[float]:
        fed = state["fed"]
        counts.see(fed.tokens - sum(map(len, fed.responses)), fed.responses, fed.rewards)  # type: ignore[attr-defined]
        return fed.rewards  # type: ignore[attr-defined,no-any-return]

    return [{"prompt": "1"}] * 4096, reward, {"rollout_func": rollout}


def _sums(
    options: argparse.Namespace, tokenizer: Any, counts: Counts
) -> tuple[list[Any], Any, dict[str, Any]]:
    """The prompts, text and rewards of the other side's task, as text."""
    from experiments.throughput.task import answered, prompts

    rows = [{"prompt": text, "answer": a, "size": size} for text, a, size in prompts(tokenizer)]

    def reward(
        completions: list[str], completion_ids: list[list[int]], answer: list[str], size: list[int], **_: Any
    ) -> list[float]:
        scores = [answered(text, a) for text, a in zip(completions, answer, strict=True)]
        counts.see(sum(size), completion_ids, scores)
        return scores

    return rows, reward, {}


def callback(turns: Turns, work: Work, counts: Counts) -> Any:
    """Rollout boundaries lie before every `updates`-th step."""
    from transformers import TrainerCallback

    class Boundary(TrainerCallback):  # type: ignore[misc]
        def on_step_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
            if state.global_step % work.updates == 0:
                logged = next((row for row in reversed(state.log_history) if "loss" in row), {})
                facts = {n: logged.get(n) for n in ("loss", "grad_norm", "entropy")}
                facts |= {"tokens": counts.tokens, "reward": counts.reward, "length": counts.length}
                turns.boundary(facts)

    return Boundary()


def _import_all(with_vllm: bool) -> None:
    """What takes its time before anything touches the device."""
    import datasets  # noqa: F401
    import trl.trainer.grpo_trainer  # noqa: F401

    if with_vllm:
        import vllm  # noqa: F401


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", required=True)
    parser.add_argument("--shape", required=True)
    parser.add_argument("--work", required=True)
    parser.add_argument("--micro", type=int, help="samples; a whole update without it")
    parser.add_argument("--fed", action="store_true")
    options = parser.parse_args()
    os.environ.setdefault("TRL_EXPERIMENTAL_SILENCE", "1")
    turns, work, counts = Turns(), Work(**json.loads(options.work)), Counts()
    try:
        _import_all(with_vllm=not options.fed)
        turns.may_build()
        with tempfile.TemporaryDirectory() as out:
            trainer = make_trainer(options, work, counts, str(Path(out)))
            trainer.add_callback(callback(turns, work, counts))
            trainer.train()
    except TurnsOver:
        pass
    except BaseException as error:
        turns.fail(error)
        raise


if __name__ == "__main__":
    main()
