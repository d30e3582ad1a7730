"""This project's trainer as a worker: on its own rollouts (vLLM or transformers) or on fed ones."""

from __future__ import annotations

import argparse
import json
import os
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from experiments.throughput.task import REWARD, TASK
from experiments.throughput.turns import Turns, TurnsOver
from experiments.throughput.work import SHAPES, Fed, Work, fed_rollout

_VLLM = {
    **{"request_seeds": False, "log_probs": "some"},
    # Room for 256 sequences of 320 tokens; without it the engine would take a share of the device.
    **{"gpu_memory_utilization": 0.3, "kv_cache_bytes": 8 << 30},
}
ENGINES: dict[str, dict[str, Any]] = {
    "vllm": {"engine": "vllm", **_VLLM},
    "server": {"engine": "vllm_server", **_VLLM},
    "hf": {"engine": "hf"},
}


def recipe(options: argparse.Namespace, work: Work, folder: str) -> Any:
    """The run; `--set` changes single fields, which is how techniques are switched off."""
    from autotune.recipe.schema import Recipe

    rollout = dict(ENGINES["hf" if options.engine == "fed" else options.engine])
    if options.engine in ("vllm", "server"):
        rollout["max_model_len"] = work.prompt_limit + work.longest
    data: dict[str, Any] = {
        "name": "throughput",
        "run_dir": folder,
        "model": {"path": options.model},
        "task": TASK,
        "rewards": [REWARD],
        "deepspeed": {"zero_stage": 0},
        "eval": {"every": 0, "prompts": 8},
        "checkpoint": {"every": 1_000_000, "keep": 2},
        "tracking": {"mlflow": {"enabled": False}},
        "rollout": rollout,
        "trainer": {
            "rollouts": 1_000_000,
            "train_batch_size": work.prompts,
            "rollout_n": work.group,
            "ppo_mini_batch_size": work.prompts // work.updates,
            "micro_batch_size": work.samples // work.updates,
            "rollout_micro_batch_size": work.samples,
            "kl_coef": 0.0,
            "actor_learning_rate": 2e-6,
            "adam_betas": (0.9, 0.999),
            "max_prompt_length": work.prompt_limit,
            "max_response_length": work.longest,
            "packing": {
                **{"enabled": "on", "tokens": 32768, "leave_out_quiet": "on", "compile": True},
                "graphs": True,
            },
        },
    }
    for setting in options.set:
        _put(data, *setting.split("=", 1))
    return Recipe.model_validate(data)


def _put(data: dict[str, Any], path: str, value: str) -> None:
    *sections, name = path.split(".")
    for section in sections:
        data = data.setdefault(section, {})
    try:
        data[name] = json.loads(value)
    except json.JSONDecodeError:
        data[name] = value


class FedRollouts:
    """Sampler, prompts and rewards of made rollouts, in place of the run's own."""

    def __init__(self, work: Work, vocabulary: int, device: Any) -> None:
        self._work, self._vocabulary, self._device = work, vocabulary, device
        self._number = 0
        self._fed: Fed | None = None
        self.shortest_limit, self.why_not_shorter = 1, ""
        self.has_own_weights = False

    def take(self, position: int, count: int, limit: int) -> Any:
        from autotune.trainer.prompts import Taken
        from autotune.trainer.tasks import Example

        self._fed = fed_rollout(self._number, self._work, self._vocabulary)
        self._number += 1
        return Taken([Example("", "")] * count, self._fed.prompts, 0)

    def sample(self, prompts: Any, prompt_of: Any, sample_of: Any, draw: Any) -> Any:
        import numpy as np
        import torch

        from autotune.trainer.rollout.base import Responses

        assert self._fed is not None
        width, rows = draw.max_response_length, self._fed.responses
        padded = np.zeros((len(rows), width), dtype=np.int64)  # [N, R]
        for place, row in enumerate(rows):
            padded[place, : len(row)] = row
        ids = torch.from_numpy(padded).to(self._device)
        lengths = torch.tensor([len(row) for row in rows], device=self._device)
        mask = torch.arange(width, device=self._device)[None, :] < lengths[:, None]
        return Responses(ids, mask, torch.ones_like(lengths, dtype=torch.bool), None)

    def score(self, responses: Sequence[str], examples: Sequence[Any]) -> Any:
        from autotune.trainer.rewards.base import RewardTable

        assert self._fed is not None
        return RewardTable(list(self._fed.rewards), {"fed": list(self._fed.rewards)})

    def news(self) -> list[Any]:
        return []

    def state_dict(self) -> dict[str, Any]:
        return {}

    def close(self) -> None:
        pass


def make_trainer(options: argparse.Namespace, work: Work, folder: Path) -> Any:
    from autotune.trainer.loop import Trainer

    trainer = Trainer(recipe(options, work, str(folder)), folder)
    if options.engine == "fed":
        fed = FedRollouts(work, SHAPES[options.shape].vocabulary, trainer.parts.engine.device)
        trainer.replace_parts(sampler=fed, prompts=fed, rewards=fed, held_out=None)
    return trainer


def _import_all(engine: str) -> None:
    """What takes its time before anything touches the device."""
    import autotune.trainer.loop  # noqa: F401
    from autotune.trainer.group import import_deepspeed

    import_deepspeed()
    if engine == "vllm":
        from autotune.trainer.rollout.vllm_engine import _SETTINGS

        for name, value in _SETTINGS.items():
            os.environ.setdefault(name, value)
        import vllm  # noqa: F401


def facts(record: Any, work: Work) -> dict[str, Any]:
    scalars = record.scalars
    mean = scalars["response_length_mean"] + scalars["prompt_length_mean"]
    wanted = ("loss", "grad_norm", "entropy", "kl_mismatch", "zero_std_fraction", "updates_skipped")
    return {
        **{name: scalars.get(name) for name in wanted},
        "tokens": round(mean * work.samples),
        "reward": scalars["reward_mean"],
        "length": scalars["response_length_mean"],
        "times": record.times,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", required=True)
    parser.add_argument("--shape", required=True)
    parser.add_argument("--work", required=True)
    parser.add_argument("--engine", choices=("fed", *ENGINES), required=True)
    parser.add_argument("--set", action="append", default=[])
    parser.add_argument("--profile", help="write a table of the costliest operations of one rollout here")
    options = parser.parse_args()
    turns, work = Turns(), Work(**json.loads(options.work))
    try:
        with tempfile.TemporaryDirectory() as out:
            run(options, turns, work, Path(out))
    except TurnsOver:
        pass
    except BaseException as error:
        turns.fail(error)
        raise


def run(options: argparse.Namespace, turns: Turns, work: Work, folder: Path) -> None:
    _import_all(options.engine)
    turns.may_build()
    trainer = make_trainer(options, work, folder)
    trainer.evaluate = dict  # type: ignore[method-assign]  # nothing but rollouts is measured
    trainer._save = lambda: None  # nor a checkpoint before the first
    profiler = _profiler() if options.profile else None
    turns.boundary()

    def on_rollout(record: Any) -> None:
        if profiler is not None:
            _step_profile(profiler, record.rollout, Path(options.profile))
        turns.boundary(facts(record, work))

    trainer.run(on_rollout)


def _profiler() -> Any:
    from torch.profiler import ProfilerActivity, profile

    return profile(activities=[ProfilerActivity.CPU, ProfilerActivity.CUDA])


def _step_profile(profiler: Any, rollout: int, path: Path) -> None:
    """Rollout 3 is profiled: everything has been laid out and compiled by then."""
    if rollout == 2:
        profiler.start()
    elif rollout == 3:
        profiler.stop()
        averages = profiler.key_averages()
        tables = [averages.table(sort_by=f"self_{kind}_time_total", row_limit=25) for kind in ("cpu", "cuda")]
        path.write_text("\n\n".join(tables))


if __name__ == "__main__":
    main()
