"""What the recipe's `deepspeed` section amounts to: stage, offloading, and a user's own JSON.

`refusal` is the table of what is supported; every row of it trains in a test. A user's JSON is taken
key by key: what the recipe owns is overridden, with a note that says where it is set instead; what
only changes speed, memory or logging is handed on; everything else is refused by name, because this
trainer's promises (exact gradients, undo, resume) were not tested with it.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

STAGES = (0, 1, 2, 3)
DTYPES = ("float32", "bfloat16")
OFFLOADS = ("none", "optimizer", "all")

OWNED: dict[str, str] = {
    "train_batch_size": "trainer.train_batch_size and trainer.ppo_mini_batch_size",
    "train_micro_batch_size_per_gpu": "trainer.micro_batch_size",
    "gradient_accumulation_steps": "trainer.ppo_mini_batch_size / trainer.micro_batch_size",
    "gradient_clipping": "trainer.max_grad_norm",
    "optimizer": "trainer.actor_learning_rate, adam_betas and weight_decay: always AdamW",
    "scheduler": "trainer.lr_schedule",
    "bf16": "model.dtype",
    "data_types": "model.dtype: masters and sums of gradients are float32",
    "zero_allow_untested_optimizer": "the trainer itself",
    "zero_force_ds_cpu_optimizer": "the trainer itself",
}
"""Keys that the recipe owns -> where it is said instead."""

HANDED_ON = (
    "steps_per_print",
    "wall_clock_breakdown",
    "dump_state",
    "memory_breakdown",
    "comms_logger",
    "flops_profiler",
    "activation_checkpointing",
    "timers",
)
"""Keys that change logging or memory and no number."""

ZERO_HANDED_ON = (
    "reduce_bucket_size",
    "allgather_bucket_size",
    "reduce_scatter",
    "allgather_partitions",
    "round_robin_gradients",
    "sub_group_size",
    "stage3_max_live_parameters",
    "stage3_max_reuse_distance",
    "stage3_prefetch_bucket_size",
    "stage3_param_persistence_threshold",
    "stage3_module_granularity_threshold",
)
"""Keys of `zero_optimization` that change speed and memory only."""

ZERO_OWNED: dict[str, str] = {
    "overlap_comm": "off: the trainer accumulates micro-batches itself",
    "contiguous_gradients": "set by stage",
    "stage3_gather_16bit_weights_on_model_save": "checkpoints gather the weights anyway",
    "ignore_unused_parameters": "on",
}

OFFLOAD_KEYS = ("device", "pin_memory")
"""Keys of `offload_optimizer` and `offload_param` that mean something without a disk."""

Found = Iterator[tuple[str, str]]


@dataclass(frozen=True, slots=True)
class Plan:
    """What the engine is to do."""

    stage: int
    offload: str
    extra: Mapping[str, Any] = field(default_factory=dict)
    """DeepSpeed settings of the user's file that are handed on."""
    notes: tuple[str, ...] = ()
    """What of the file was overridden, and where it is set instead."""


def refusal(stage: int, dtype: str, offload: str) -> str:
    """Why this combination is not supported, with the next move; empty when it is."""
    if stage == 0 and offload != "none":
        return (
            f"offload {offload!r} with zero_stage 0: nothing is split, so nothing can wait in host memory;"
            " use zero_stage 1, 2 or 3"
        )
    if offload == "all" and stage != 3:
        return (
            f"offload 'all' with zero_stage {stage}: every rank needs all weights at any time;"
            " use zero_stage 3, or offload: optimizer"
        )
    return ""


def plan(section: Any) -> Plan:
    """The plan of a valid `deepspeed` section.

    Raises:
        ValueError: its file cannot be used; `problems` says why.
    """
    if section.config is None:
        return Plan(section.zero_stage, section.offload)
    data = read_config(section.config)
    if wrong := [message for _, message in problems(data)]:
        raise ValueError("; ".join(wrong))
    zero = {key: data.get("zero_optimization", {}).get(key) for key in ZERO_HANDED_ON}
    extra = {key: data[key] for key in HANDED_ON if key in data}
    kept = {key: value for key, value in zero.items() if value not in (None, "auto")}
    return Plan(
        stage=stage_of(data),
        offload=offload_of(data),
        extra=extra | ({"zero_optimization": kept} if kept else {}),
        notes=tuple(_notes(data)),
    )


def read_config(path: str | Path) -> dict[str, Any]:
    """A DeepSpeed JSON file.

    Raises:
        ValueError: it cannot be read, or is no JSON object.
    """
    try:
        data = json.loads(Path(path).expanduser().read_text("utf-8"))
    except OSError as error:
        raise ValueError(f"{path} cannot be read: {error.strerror}; expected a JSON file") from error
    except (ValueError, RecursionError) as error:
        raise ValueError(f"{path} is not JSON: {error}") from error
    if not isinstance(data, dict):
        raise ValueError(f"{path} holds {type(data).__name__}; expected a JSON object of DeepSpeed settings")
    return data


def stage_of(data: Mapping[str, Any]) -> Any:
    """The file's ZeRO stage; 0 where it says none, as in DeepSpeed."""
    return data.get("zero_optimization", {}).get("stage", 0)


def offload_of(data: Mapping[str, Any]) -> str:
    """The file's offloading in the recipe's words."""
    zero = data.get("zero_optimization", {})
    devices = {name: _device(zero, name) for name in ("offload_optimizer", "offload_param")}
    if devices["offload_param"] == "cpu":
        return "all"
    return "optimizer" if devices["offload_optimizer"] == "cpu" else "none"


def problems(data: Mapping[str, Any]) -> Found:
    """(key, message) for everything in a user's file that is refused."""
    zero = data.get("zero_optimization", {})
    if not isinstance(zero, dict):
        yield "zero_optimization", f'received {zero!r}; expected an object such as {{"stage": 2}}'
        return
    yield from _unknown(data)
    yield from _zero_problems(zero)


def _unknown(data: Mapping[str, Any]) -> Found:
    for key, value in data.items():
        if key == "fp16":
            if isinstance(value, dict) and value.get("enabled") is True:
                yield key, "float16 is not supported; remove the section and set model.dtype: bfloat16"
        elif key not in (*OWNED, *HANDED_ON, "zero_optimization"):
            yield key, f"{key} is not supported with this trainer; remove it"


def _zero_problems(zero: Mapping[str, Any]) -> Found:
    stage = zero.get("stage", 0)
    if stage not in STAGES or isinstance(stage, bool):
        yield "zero_optimization.stage", f"received stage {stage!r}; expected one of {STAGES}"
    for name in zero:
        if name in ("offload_optimizer", "offload_param"):
            yield from _offload_problems(zero, name)
        elif name not in ("stage", *ZERO_HANDED_ON, *ZERO_OWNED):
            yield f"zero_optimization.{name}", f"{name} is not supported with this trainer; remove it"
    if _device(zero, "offload_param") == "cpu" and _device(zero, "offload_optimizer") != "cpu":
        message = "weights in host memory with their optimizer on the GPU; set offload_optimizer to cpu too"
        yield "zero_optimization.offload_param", message


def _offload_problems(zero: Mapping[str, Any], name: str) -> Found:
    key, section = f"zero_optimization.{name}", zero[name]
    if section is not None and not isinstance(section, dict):
        yield key, f'received {section!r}; expected an object such as {{"device": "cpu"}}'
    elif _device(zero, name) not in ("none", "cpu"):
        yield f"{key}.device", f"received {_device(zero, name)!r}; expected none or cpu"
    else:
        for extra in [k for k in section or {} if k not in OFFLOAD_KEYS]:
            yield f"{key}.{extra}", f"{extra} is not supported with this trainer; remove it"


def _device(zero: Mapping[str, Any], name: str) -> Any:
    section = zero.get(name)
    return section.get("device", "none") if isinstance(section, dict) else "none"


def _notes(data: Mapping[str, Any]) -> Iterator[str]:
    """What is overridden; `auto` asked for exactly that, so it is not worth a word."""
    zero = data.get("zero_optimization", {})
    pairs = [(key, data.get(key), where) for key, where in OWNED.items()]
    pairs += [(f"zero_optimization.{key}", zero.get(key), where) for key, where in ZERO_OWNED.items()]
    for key, value, where in pairs:
        if value not in (None, "auto"):
            shown = json.dumps(value)
            yield f"{key} = {shown if len(shown) <= 40 else '…'} is overridden: {where}"


def merged(config: Mapping[str, Any], extra: Mapping[str, Any]) -> dict[str, Any]:
    """`config` with `extra` on top, section by section."""
    both = dict(config)
    for key, value in extra.items():
        old = both.get(key)
        both[key] = merged(old, value) if isinstance(old, dict) and isinstance(value, dict) else value
    return both
