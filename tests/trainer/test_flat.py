"""The flat optimizer steps like torch's AdamW on a float32 copy of every weight."""

from __future__ import annotations

import torch

from autotune.trainer.flat import FlatAdamW

ADAMW = {"lr": 1e-2, "betas": (0.9, 0.99), "weight_decay": 0.1}


def weights() -> list[torch.nn.Parameter]:
    g = torch.Generator().manual_seed(1)
    return [torch.nn.Parameter(torch.randn(s, generator=g).bfloat16()) for s in ((3, 4), (5,), (2, 2, 2))]


def test_three_steps_equal_plain_adamw_on_masters() -> None:
    g, mine = torch.Generator().manual_seed(2), weights()
    masters = [torch.nn.Parameter(w.detach().float()) for w in mine]
    plain, flat = torch.optim.AdamW(masters, **ADAMW), FlatAdamW(mine, **ADAMW)  # type: ignore[arg-type]
    for _ in range(3):
        for weight, master in zip(mine, masters, strict=True):
            weight.grad = torch.randn(weight.shape, generator=g).bfloat16()
            master.grad = weight.grad.float()
        flat.gather()
        flat.step()
        plain.step()
    for index, (weight, master) in enumerate(zip(mine, masters, strict=True)):
        torch.testing.assert_close(flat.part(index, "model"), master.detach())
        torch.testing.assert_close(flat.part(index, "exp_avg"), plain.state[master]["exp_avg"])
        assert torch.equal(weight.detach(), master.detach().bfloat16())


def test_micro_batches_accumulate_in_float32() -> None:
    """256 + 1 + 1 + ... rounds back to 256 in bfloat16."""
    mine = weights()
    flat = FlatAdamW(mine, **ADAMW)  # type: ignore[arg-type]
    for size in (256.0, *[1.0] * 8):
        mine[1].grad = torch.full_like(mine[1], size)
        total = flat.gather()
        assert mine[1].grad is None
    assert total.max() == 264.0
    assert total.count_nonzero() == 5  # weights without a gradient add nothing


def test_what_was_gathered_can_be_dropped() -> None:
    mine = weights()
    flat = FlatAdamW(mine, **ADAMW)  # type: ignore[arg-type]
    mine[0].grad = torch.ones_like(mine[0])
    flat.gather()
    flat.zero_grad()
    assert flat.gather().count_nonzero() == 0
