"""Parity before speed: one fed batch through both sides, in the precision that is measured.

Loss and gradient norm within 1e-2 of TRL's and log-probs within 0.01 on average (bfloat16 on a GPU), or
within 1e-5 (float32 on a CPU). TRL's side is its own `_compute_loss` in a real trainer.
"""

from __future__ import annotations

import argparse
import json
import tempfile
from typing import Any

import numpy as np
import torch

from experiments.throughput.arm_trl import config
from experiments.throughput.turns import Turns
from experiments.throughput.work import SHAPES, Fed, Work, fed_rollout


def batch_of(work: Work, fed: Fed, device: torch.device) -> tuple[Any, Any, Any, Any]:
    """(TokenBatch, prompt lengths [N], response lengths [N], advantages [N]) of one update."""
    from autotune.trainer.forward import TokenBatch
    from autotune.trainer.rollout.base import pad_prompts

    some = work.samples // work.updates
    prompts = pad_prompts(fed.prompts[: some // work.group], work.prompt_limit, 0)
    lengths = np.array([len(row) for row in fed.responses[:some]])
    width = int(lengths.max())
    ids = torch.tensor([row + [0] * (width - len(row)) for row in fed.responses[:some]])
    mask = torch.arange(width)[None, :] < torch.from_numpy(lengths)[:, None]
    batch = TokenBatch(
        prompts.ids.repeat_interleave(work.group, dim=0).to(device),
        prompts.mask.repeat_interleave(work.group, dim=0).to(device),
        ids.to(device),
        mask.to(device),
    )
    advantages = torch.randn(some, generator=torch.Generator().manual_seed(3)).to(device)
    return batch, prompts.lengths.repeat_interleave(work.group).numpy(), lengths, advantages


def rollout_of(options: argparse.Namespace, work: Work, device: torch.device, dtype: torch.dtype) -> Fed:
    """A made rollout; for real weights, text that the model itself gives: noise would put it where
    its log-probs are of order -20 and rounding shows more than in any training."""
    fed = fed_rollout(0, work, SHAPES[options.shape].vocabulary)
    if not options.model.endswith("-real"):
        return fed
    from transformers import AutoModelForCausalLM, AutoTokenizer

    from experiments.throughput.task import prompts

    tokenizer = AutoTokenizer.from_pretrained(options.model, padding_side="left")
    model = AutoModelForCausalLM.from_pretrained(options.model, dtype=dtype).to(device)
    texts = [text for text, _, _ in prompts(tokenizer)[: work.prompts // work.updates]]
    encoded = tokenizer(texts, return_tensors="pt", padding=True).to(device)
    with torch.no_grad():
        ids = model.generate(
            **encoded, do_sample=True, max_new_tokens=64, num_return_sequences=work.group, eos_token_id=-1
        )
    drawn = ids[:, encoded["input_ids"].shape[1] :].tolist()
    kept = [row[: max(1, min(len(made), 64))] for row, made in zip(drawn, fed.responses, strict=False)]
    asked = [tokenizer(text)["input_ids"] for text in texts]
    return Fed(asked, kept, fed.rewards[: len(kept)])


class Recorder:
    """The engine's shape: gradients stay where they are."""

    world_size = 1

    def __init__(self, module: Any) -> None:
        self.module = module

    def backward(self, loss: torch.Tensor, *, last: bool) -> None:
        loss.backward()

    def step(self) -> Any:
        from autotune.trainer.engine import StepResult

        return StepResult(norm(self.module), True)


def norm(model: Any) -> torch.Tensor:
    return torch.stack([p.grad.float().norm() for p in model.parameters() if p.grad is not None]).norm()


def ours(model: Any, data: tuple[Any, Any, Any, Any], old: torch.Tensor, packed: bool) -> dict[str, float]:
    from autotune.trainer.losses import LossKnobs
    from autotune.trainer.meters import Meters
    from autotune.trainer.packing import Packing
    from autotune.trainer.ranks import Ranks
    from autotune.trainer.update import BatchKnobs, Experience, Updater, make_plan

    batch, prompts, lengths, advantages = data
    widths = batch.prompt_ids.shape[1], batch.response_ids.shape[1]
    packing = Packing(prompts, *widths, 8192, 4096) if packed else None
    knobs = BatchKnobs(8, len(lengths) // 8, 1, 32)
    plan = make_plan(lengths, advantages.cpu(), knobs, (1, 2), Ranks(), old.device, packing)
    meters = Meters(1, 0.2, 0.2, False, old.device)
    loss = LossKnobs(0.2, 0.2, 0.0, "k3", 0.0)
    updater = Updater(Recorder(model), Experience(batch, advantages, old, None), loss, 1.0)  # type: ignore[arg-type]
    list(updater.run(plan, meters))
    measured = meters.finish(Ranks())
    return {"loss": measured.scalars["loss"], "grad_norm": measured.scalars["grad_norm"]}


def theirs(trainer: Any, data: tuple[Any, Any, Any, Any], old: torch.Tensor) -> dict[str, float]:
    batch, _, _, advantages = data
    trainer.loss_type = "bnpo"  # every token weighs the same, as on the other side
    trainer.current_gradient_accumulation_steps = trainer.args.steps_per_generation = 1
    trainer.model.train()
    trainer.model.zero_grad()
    mask = batch.response_mask.long()
    loss = trainer._compute_loss(
        trainer.model,
        {
            "prompt_ids": batch.prompt_ids,
            "prompt_mask": batch.prompt_mask.long(),
            "completion_ids": batch.response_ids,
            "completion_mask": mask,
            "advantages": advantages,
            "old_per_token_logps": old,
            "num_items_in_batch": mask.sum(),
        },
    )
    loss.backward()
    return {"loss": float(loss), "grad_norm": float(norm(trainer.model))}


def log_probs(trainer: Any, data: tuple[Any, Any, Any, Any]) -> torch.Tensor:
    batch = data[0]
    ids = torch.cat([batch.prompt_ids, batch.response_ids], dim=1)
    mask = torch.cat([batch.prompt_mask, batch.response_mask], dim=1).long()
    width = batch.response_ids.shape[1]
    with torch.no_grad():
        found: torch.Tensor = trainer._get_per_token_logps_and_entropies(trainer.model, ids, mask, width)[0]
    return found.float()


def our_log_probs(model: Any, data: tuple[Any, Any, Any, Any]) -> torch.Tensor:
    from autotune.trainer.packing import Packing, make_layout, packed_log_probs

    batch, prompts, lengths, _ = data
    packing = Packing(prompts, batch.prompt_ids.shape[1], batch.response_ids.shape[1], None, 4096)
    layout = make_layout(np.arange(len(lengths)), lengths, packing, batch.response_ids.device)
    with torch.no_grad():
        return packed_log_probs(model, batch, layout, 1.0, False)[0]


def measure(options: argparse.Namespace, work: Work) -> dict[str, Any]:
    from datasets import Dataset
    from transformers import AutoModelForCausalLM, AutoTokenizer
    from trl import GRPOTrainer

    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
    data = batch_of(work, rollout_of(options, work, device, dtype), device)
    with tempfile.TemporaryDirectory() as out:
        trainer = GRPOTrainer(
            model=AutoModelForCausalLM.from_pretrained(options.model, dtype=dtype),
            reward_funcs=lambda completions, **kwargs: [0.0] * len(completions),
            args=config(work, work.samples // work.updates, False, out),
            train_dataset=Dataset.from_list([{"prompt": "1"}] * 64),
            processing_class=AutoTokenizer.from_pretrained(options.model, padding_side="left"),
        )
        their_log_probs = log_probs(trainer, data)
        mask = data[0].response_mask
        noise = 0.3 * torch.randn(mask.shape, generator=torch.Generator().manual_seed(4)).to(device)
        old = their_log_probs + noise
        reference = theirs(trainer, data, old)
    model = AutoModelForCausalLM.from_pretrained(options.model, dtype=dtype).to(device)
    gap = (our_log_probs(model, data) - their_log_probs)[mask].abs().mean()
    sides = {"trl": reference}
    for name, packed in (("padded", False), ("packed", True)):
        model.zero_grad()
        sides[name] = ours(model, data, old, packed)
    return judged(sides, float(gap), 1e-2 if device.type == "cuda" else 1e-5)


def judged(sides: dict[str, dict[str, float]], gap: float, limit: float) -> dict[str, Any]:
    off = {
        f"{name}_{what}": abs(sides[name][what] / sides["trl"][what] - 1)
        for name in ("padded", "packed")
        for what in ("loss", "grad_norm")
    }
    passed = max(off.values()) < limit and gap < max(limit, 1e-2 if limit > 1e-4 else limit)
    return {"sides": sides, "relative": off, "log_prob_gap": gap, "limit": limit, "passed": passed}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", required=True)
    parser.add_argument("--shape", required=True)
    parser.add_argument("--work", required=True)
    options = parser.parse_args()
    turns = Turns()
    try:
        turns._out.write(json.dumps(measure(options, Work(**json.loads(options.work)))) + "\n")
    except BaseException as error:
        turns.fail(error)
        raise


if __name__ == "__main__":
    main()
