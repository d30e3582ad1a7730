"""The table of algorithms. A new one: a file here, a row here, and its name in the recipe's schema."""

from autotune.trainer.algorithms.base import Algorithm
from autotune.trainer.algorithms.grpo import DAPO, DR_GRPO, GRPO
from autotune.trainer.algorithms.gspo import GSPO
from autotune.trainer.algorithms.ppo import PPO
from autotune.trainer.algorithms.rloo import RLOO

ALGORITHMS: dict[str, Algorithm] = {
    "grpo": GRPO,
    "dr_grpo": DR_GRPO,
    "dapo": DAPO,
    "gspo": GSPO,
    "rloo": RLOO,
    "ppo": PPO,
}

__all__ = ["ALGORITHMS", "Algorithm"]
