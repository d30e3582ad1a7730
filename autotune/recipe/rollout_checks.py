"""What `rollout:` says together with the rest of a recipe: fields of the other engine, limits, servers."""

from __future__ import annotations

from collections.abc import Iterator

from autotune.recipe import explain
from autotune.recipe.schema import Recipe, RolloutSection, ServerSection
from autotune.recipe.source import Key

Found = Iterator[tuple[Key, str]]

OF_VLLM = (
    "gpu_memory_utilization",
    "kv_cache_bytes",
    "max_num_seqs",
    "max_model_len",
    "max_num_batched_tokens",
    "enforce_eager",
    "request_seeds",
    "sleep",
)

UNREAD = {
    "hf": (*OF_VLLM, "server", "one_step_off"),
    "vllm": ("static_cache", "server", "one_step_off"),
    "vllm_server": ("static_cache",),
}
"""Engine -> fields that mean nothing to it."""


def check_rollout(recipe: Recipe) -> Found:
    """Problems of the `rollout` section."""
    yield from _of_another_engine(recipe.rollout)
    if recipe.rollout.engine != "hf":
        yield from _limits(recipe)
    if recipe.rollout.engine == "vllm_server":
        yield from _server(recipe.rollout.server)
        if recipe.rollout.one_step_off:
            yield from _one_step_off(recipe.rollout)


def _one_step_off(rollout: RolloutSection) -> Found:
    if rollout.sleep:
        yield (
            ("rollout", "sleep"),
            f"received {rollout.sleep} with one_step_off: the server works while the trainer does; use 0",
        )
    if rollout.old_log_probs == "sampler":
        yield (
            ("rollout", "old_log_probs"),
            "received sampler with one_step_off: its log-probs are those of the weights before; expected"
            " recompute",
        )


def _of_another_engine(rollout: RolloutSection) -> Found:
    """Fields that the chosen engine does not read; a resolved recipe names every field."""
    for name in UNREAD[rollout.engine]:
        value = getattr(rollout, name)
        if value != RolloutSection.model_fields[name].default:
            shown = "its fields" if name == "server" else explain.shown(value)
            yield (
                ("rollout", name),
                f"received {shown}; engine {rollout.engine} does not read it; remove it or change engine",
            )


def _limits(recipe: Recipe) -> Found:
    rollout, trainer = recipe.rollout, recipe.trainer
    longest = trainer.max_prompt_length + trainer.max_response_length
    if rollout.max_model_len is not None and rollout.max_model_len < longest:
        yield (
            ("rollout", "max_model_len"),
            f"received {rollout.max_model_len}; expected at least {longest}, which is max_prompt_length +"
            " max_response_length",
        )
    if trainer.temperature > rollout.highest_temperature():
        yield (
            ("trainer", "temperature"),
            f"received {trainer.temperature:g}; expected at most {rollout.highest_temperature():g} with"
            f" engine {rollout.engine}",
        )


def _server(server: ServerSection) -> Found:
    if not server.start and server.port == 0:
        yield (
            ("rollout", "server", "port"),
            "received 0 with start: false; expected the port on which the server listens",
        )
    if server.devices and len(server.devices) < server.replicas:
        yield (
            ("rollout", "server", "devices"),
            f"received {len(server.devices)} for {server.replicas} replicas; expected one device per server",
        )
    if server.transfer == "ipc" and server.devices:
        yield (
            ("rollout", "server", "transfer"),
            "received ipc with devices of the servers' own; CUDA handles work on one device; use auto",
        )
