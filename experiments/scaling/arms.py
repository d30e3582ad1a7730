"""Which runs are compared: recipes as overrides, how many ranks, and who starts them."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

ROLLOUTS = 12


@dataclass(frozen=True, slots=True)
class Arm:
    """One run of `autotune run`."""

    name: str
    shape: str
    ranks: int = 1
    fields: dict[str, Any] = field(default_factory=dict)
    by_torchrun: bool = False
    commands: tuple[str, ...] = ()
    """`autotune ctl` words that are given while it runs."""
    gpus: int = 1
    """Devices that it needs: ranks, and servers of their own."""

    @property
    def stage(self) -> int:
        return int(self.fields.get("deepspeed.zero_stage", 2))


def _zero(stage: int, **more: Any) -> dict[str, Any]:
    return {"deepspeed.zero_stage": stage, **{k.replace("__", "."): v for k, v in more.items()}}


_SERVED = {
    "rollout.engine": "vllm_server",
    "rollout.server.devices": [1],
    "rollout.server.transfer": "broadcast",
}
_SET = ("set actor_learning_rate=1e-6", "set clip_range=0.15")
_BY_HAND = {"control.mode": "act", "control.profile": "fixed"}


_TOO_FAST = {"trainer.actor_learning_rate": 3e-2, "control.mode": "act", "control.pace": 0.1}
"""A learning rate whose first updates must be taken back."""


def arms(tiny: bool) -> list[Arm]:
    """In the order of their worth, should time run out."""
    small, large = ("tiny", "tiny") if tiny else ("135m", "1.5b")
    # The commands must find it running: a tiny rollout takes a tenth of a second.
    by_hand = _zero(2) | _BY_HAND | ({"trainer.rollouts": 60} if tiny else {})
    found = [
        Arm("one GPU, ZeRO 2", small, 1, _zero(2)),
        Arm("two GPUs, ZeRO 2", small, 2, _zero(2), gpus=2),
        Arm("two GPUs, ZeRO 3", small, 2, _zero(3), gpus=2),
        Arm("two GPUs, ZeRO 2, knobs set by hand, torchrun", small, 2, by_hand, True, _SET, gpus=2),
        Arm("two GPUs, ZeRO 2, too fast on purpose", small, 2, _zero(2) | _TOO_FAST, gpus=2),
        Arm("one trains, one serves", small, 1, _zero(2) | _SERVED, gpus=2),
        Arm("one trains, one serves, one step off", small, 1, _one_step_off(), gpus=2),
        Arm("one GPU, ZeRO 2", large, 1, _zero(2)),
        Arm("two GPUs, ZeRO 2", large, 2, _zero(2), gpus=2),
        Arm("two GPUs, ZeRO 3", large, 2, _zero(3), gpus=2),
    ]
    return found[:5] if tiny else found


def _one_step_off() -> dict[str, Any]:
    return _zero(2) | _SERVED | {"rollout.one_step_off": True}


def fields(arm: Arm, model: str, tiny: bool) -> dict[str, Any]:
    """Every field of its recipe that is not a default: the same global batch everywhere."""
    prompts, group, longest = (32, 8, 8) if tiny else (64, 8, 256)
    micro = 32 if arm.shape != "1.5b" else 8
    task = {"type": "sums", "terms": 2, "largest": 99, "prompts": 4096}
    common = {
        "model.path": model,
        "model.dtype": "float32" if tiny else "bfloat16",
        **({} if tiny else {"task": task, "rewards": [{"type": "regex", "pattern": r"(\d+)"}]}),
        "seed": 11,
        "eval.every": 0,
        "eval.prompts": 8,
        "tracking.mlflow.enabled": False,
        "checkpoint.every": 4,
        "control.mode": "shadow",
        "trainer.rollouts": ROLLOUTS,
        "trainer.train_batch_size": prompts,
        "trainer.rollout_n": group,
        "trainer.ppo_mini_batch_size": prompts // 4,
        "trainer.micro_batch_size": micro,
        "trainer.rollout_micro_batch_size": prompts * group // arm.ranks,
        "trainer.kl_coef": 0.0,
        "trainer.actor_learning_rate": 3e-4 if tiny else 2e-6,
        "trainer.max_prompt_length": 16 if tiny else 64,
        "trainer.max_response_length": longest,
    }
    sampling = {"rollout.engine": "hf"} if tiny else _vllm()
    return common | sampling | arm.fields


def _vllm() -> dict[str, Any]:
    return {
        "rollout.engine": "vllm",
        "rollout.request_seeds": False,
        "rollout.kv_cache_bytes": 16 << 30,
        "rollout.max_model_len": 320,
    }
