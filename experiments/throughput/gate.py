"""Parity before speed: one fed batch through both sides, in float32 and in what is measured.

In float32, loss and gradient norm must be TRL's: within 1e-5 on a CPU, 1e-4 on a GPU. In bfloat16 they
must be within 1e-2 of TRL's; where they are not, because TRL's own rounding is larger than that, our
log-probs and our whole gradient must be as near to the float32 result as TRL's are (a quarter more is
allowed, for one batch is one draw). TRL's side is its own `_compute_loss` in a real trainer.
"""

from __future__ import annotations

import argparse
import json
import tempfile
from dataclasses import dataclass
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
    # Around 1, of both signs: with a mean of 0 nearly all of the gradient would cancel, and what is
    # left of it in bfloat16 is a third rounding.
    advantages = 1 + torch.randn(some, generator=torch.Generator().manual_seed(3)).to(device)
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
    torch.manual_seed(5)
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
    return flat_gradient(model).norm()


def flat_gradient(model: Any) -> torch.Tensor:
    """Every gradient in one float32 vector, in the order of the parameters."""
    return torch.cat([p.grad.float().flatten() for p in model.parameters() if p.grad is not None])


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


@dataclass
class Side:
    """One way of computing the batch."""

    loss: float
    grad_norm: float
    log_probs: torch.Tensor
    """Float32, [samples, width]."""
    gradient: torch.Tensor
    """Float32, [parameters]."""


def trl_side(options: argparse.Namespace, work: Work, data: Any, old: Any, dtype: torch.dtype) -> Side:
    """TRL's own loss; without `old`, its log-probs with seeded noise take that place."""
    from datasets import Dataset
    from transformers import AutoModelForCausalLM, AutoTokenizer
    from trl import GRPOTrainer

    with tempfile.TemporaryDirectory() as out:
        settings = config(work, work.samples // work.updates, False, out, bf16=dtype == torch.bfloat16)
        trainer = GRPOTrainer(
            model=AutoModelForCausalLM.from_pretrained(options.model, dtype=dtype),
            reward_funcs=lambda completions, **kwargs: [0.0] * len(completions),
            args=settings,
            train_dataset=Dataset.from_list([{"prompt": "1"}] * 64),
            processing_class=AutoTokenizer.from_pretrained(options.model, padding_side="left"),
        )
        expected = "bf16" if dtype == torch.bfloat16 else "no"
        assert trainer.accelerator.mixed_precision == expected, "an earlier trainer's precision is in force"
        found = log_probs(trainer, data)
        numbers = theirs(trainer, data, noisy(found) if old is None else old)
        return Side(**numbers, log_probs=found, gradient=flat_gradient(trainer.model))


def noisy(log_probs: torch.Tensor) -> torch.Tensor:
    """Old log-probs that put ratios inside and outside the clip range, the same on every machine.

    None is near its edge (0.2 is 0.18 up and 0.22 down in log-probs): there, rounding alone would decide
    which tokens have a gradient: a tenth of them with ratios spread evenly, a fifth of the gradient.
    """
    steps = torch.tensor([-0.6, -0.04, 0.0, 0.04, 0.6])
    picked = torch.randint(0, len(steps), log_probs.shape, generator=torch.Generator().manual_seed(4))
    return log_probs + steps[picked].to(log_probs.device)


def our_sides(options: argparse.Namespace, data: Any, old: torch.Tensor, dtype: torch.dtype) -> Any:
    """Padded and packed; log-probs are those of the packed forward for both."""
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(options.model, dtype=dtype).to(old.device)
    found, sides = our_log_probs(model, data), {}
    for name, packed in (("padded", False), ("packed", True)):
        model.zero_grad()
        numbers = ours(model, data, old, packed)
        sides[name] = Side(**numbers, log_probs=found, gradient=flat_gradient(model))
    return sides


def measure(options: argparse.Namespace, work: Work) -> dict[str, Any]:
    gpu = torch.cuda.is_available()
    device = torch.device("cuda" if gpu else "cpu")
    torch.backends.cuda.matmul.allow_tf32 = False
    sampling = torch.bfloat16 if gpu else torch.float32
    data = batch_of(work, rollout_of(options, work, device, sampling), device)
    mask = data[0].response_mask
    truth = trl_side(options, work, data, None, torch.float32)
    old = noisy(truth.log_probs)
    exact = off(our_sides(options, data, old, torch.float32), truth, mask)
    limit = 1e-4 if gpu else 1e-5
    answer = {"float32": exact, "limit": limit, "passed": within(exact, limit)}
    if gpu:
        answer |= short(options, work, data, old, truth)
        answer["passed"] = answer["passed"] and answer["bfloat16_passed"]
    return answer


def short(options: argparse.Namespace, work: Work, data: Any, old: Any, truth: Side) -> dict[str, Any]:
    """The same in bfloat16."""
    mask = data[0].response_mask
    trl = trl_side(options, work, data, old, torch.bfloat16)
    sides = our_sides(options, data, old, torch.bfloat16)
    from_trl, from_truth = off(sides, trl, mask), off({"trl": trl, **sides}, truth, mask)
    return {
        "bfloat16_from_trl": from_trl,
        "bfloat16_from_float32": from_truth,
        "bfloat16_passed": all(as_good(from_trl[n], from_truth[n], from_truth["trl"]) for n in sides),
    }


def off(sides: dict[str, Side], other: Side, mask: torch.Tensor) -> dict[str, dict[str, float]]:
    """How far each is from `other`: loss, norm and gradient relative, log-probs in nats a token."""

    def one(side: Side) -> dict[str, float]:
        return {
            "loss": abs(side.loss / other.loss - 1),
            "grad_norm": abs(side.grad_norm / other.grad_norm - 1),
            "gradient": float((side.gradient - other.gradient).norm() / other.gradient.norm()),
            "log_probs": float((side.log_probs - other.log_probs)[mask].abs().mean()),
        }

    return {name: one(side) for name, side in sides.items()}


def within(sides: dict[str, dict[str, float]], limit: float) -> bool:
    return all(side[what] < limit for side in sides.values() for what in ("loss", "grad_norm", "log_probs"))


def as_good(from_trl: dict[str, float], mine: dict[str, float], trl: dict[str, float]) -> bool:
    """Loss and norm within 1e-2 of TRL's; or else log-probs and gradient as near to float32 as TRL's are."""
    if from_trl["loss"] < 1e-2 and from_trl["grad_norm"] < 1e-2:
        return True
    return all(mine[what] <= 1.25 * trl[what] for what in ("log_probs", "gradient"))


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
