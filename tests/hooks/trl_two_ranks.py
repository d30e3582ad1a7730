"""One rank of a real TRL run under DDP on CPU; started twice by `test_trl_ranks.py`."""

from __future__ import annotations

import json
import sys
from pathlib import Path

from tests.hooks.trl_runs import make_trainer, weights


def main(model: str, out: str, rollouts: int) -> None:
    from autotune.hooks.trl import AutotuneCallback

    prompts = [{"prompt": f"{i}>"} for i in range(300)]
    trainer = make_trainer(
        Path(model), Path(out), rollouts, prompts=prompts, learning_rate=6e-2, num_iterations=2,
        per_device_train_batch_size=4, gradient_accumulation_steps=1,
    )  # fmt: skip
    callback = AutotuneCallback(trainer, {"mode": "act"})
    trainer.add_callback(callback)
    trainer.train()
    rank = trainer.accelerator.process_index
    told = {
        "knobs": callback.adapter.knobs(),
        "weights": weights(trainer),
        "rollout": callback.guest.rollout,
        "epoch": callback.adapter.epoch,
        "broken": callback.guest.broken or callback.failed,
        "ranks": trainer.accelerator.num_processes,
        "facts": callback.adapter.facts().world_size,
    }
    Path(out, f"rank-{rank}.json").write_text(json.dumps(told), "utf-8")


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2], int(sys.argv[3]))
