"""vLLM as the sampler, in process and as a server: its weights, its log-probs, its seeds, its manners.

Runs where vLLM is installed (`scripts/vllm.sh`). One engine serves all tests in process, since its start
takes longer than everything that is asked of it here.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from ruamel.yaml import YAML

from autotune.recipe import Recipe
from autotune.trainer.forward import response_log_probs
from autotune.trainer.loop import Trainer
from autotune.trainer.ranks import Ranks
from autotune.trainer.records import RolloutRecord
from autotune.trainer.rollout.base import Draw, Prompts, Responses, pad_prompts
from tests.tiny_model import tiny_folder

pytest.importorskip("vllm", reason="vLLM is not installed: scripts/vllm.sh makes an environment with it")
pytestmark = [pytest.mark.vllm, pytest.mark.slow]

DRAW = Draw(seed=7, rollout=3, temperature=0.7, max_response_length=8)
GROUP = 4
CLOSE, APART = 1e-4, 0.05
"""Nats: what rounding makes of one token's log-prob, and far more than that."""


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A random model that vLLM's CPU attention accepts: heads of 32 numbers."""
    return tiny_folder(tmp_path_factory.mktemp("model") / "tiny", hidden=64, layers=2, context=64)


@pytest.fixture(scope="module")
def sections(folder: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    path = tmp_path_factory.mktemp("prompts") / "prompts.jsonl"
    rows = [{"prompt": f"{'a' * (i % 3)}{i % 10}{i // 10}>", "answer": str(i % 10)} for i in range(40)]
    path.write_text("\n".join(json.dumps(row) for row in rows), encoding="utf-8")
    return {
        "name": "vllm",
        "seed": 3,
        "model": {"path": str(folder)},
        "task": {"type": "jsonl", "path": str(path)},
        "rewards": [{"type": "regex", "pattern": r"(\d)"}],
        "eval": {"every": 0, "prompts": 4},
        "rollout": {"engine": "vllm"},
        "control": {"mode": "off"},
        "tracking": {"mlflow": {"enabled": False}},
        "trainer": {
            "rollouts": 4,
            "train_batch_size": 8,
            "rollout_n": GROUP,
            "ppo_mini_batch_size": 4,
            "actor_learning_rate": 0.02,
            "temperature": DRAW.temperature,
            "max_response_length": DRAW.max_response_length,
        },
    }


@pytest.fixture(scope="module")
def trainer(sections: dict[str, Any], tmp_path_factory: pytest.TempPathFactory) -> Iterator[Trainer]:
    threads, state = torch.get_num_threads(), torch.get_rng_state()
    trainer = Trainer(Recipe.model_validate(sections), tmp_path_factory.mktemp("run"))
    torch.set_num_threads(threads)  # allowed again, once the engine stands
    assert torch.equal(torch.get_rng_state(), state)
    yield trainer
    trainer.close()
    assert torch.distributed.is_initialized(), "the engine took the trainer's process group with it"


@pytest.fixture
def prompts() -> Prompts:
    return pad_prompts([[3, 4, 5], [6, 7], [8, 9, 10, 11], [3, 4, 5]], 16, 0)


def places(prompts: Prompts) -> tuple[torch.Tensor, torch.Tensor]:
    rows = torch.arange(len(prompts.ids) * GROUP)
    return rows // GROUP, rows % GROUP


def drawn(trainer: Trainer, prompts: Prompts, draw: Draw = DRAW) -> Responses:
    with trainer.parts.sampler.ready():
        return trainer.parts.sampler.sample(prompts, *places(prompts), draw)


def of_trainer(trainer: Trainer, prompts: Prompts, responses: Responses, draw: Draw = DRAW) -> torch.Tensor:
    """The trainer's log-probs of the same tokens, [B, R]."""
    from autotune.trainer.collect import _batch

    batch = _batch(prompts, GROUP, responses.ids, responses.mask)
    with torch.no_grad():
        return response_log_probs(trainer.parts.model.eval(), batch, draw.temperature)


def distance(a: torch.Tensor, b: torch.Tensor, mask: torch.Tensor) -> float:
    return float((a - b)[mask].abs().max())


def train(trainer: Trainer, until: int, between: Callable[[RolloutRecord], None] = lambda r: None) -> None:
    """Go on to `until` rollouts altogether."""

    def on_rollout(record: RolloutRecord) -> None:
        records.append(record)
        between(record)

    records: list[RolloutRecord] = []
    while trainer.rollout < until:
        trainer._one_rollout(on_rollout)
    trainer.records = records  # type: ignore[attr-defined]


def test_log_probs_are_those_of_the_sampled_distribution(trainer: Trainer, prompts: Prompts) -> None:
    responses = drawn(trainer, prompts)
    assert responses.log_probs is not None
    own = of_trainer(trainer, prompts, responses)
    assert distance(responses.log_probs, own, responses.mask) < CLOSE
    wrong = of_trainer(trainer, prompts, responses, Draw(7, 3, 1.0, 8))
    assert distance(responses.log_probs, wrong, responses.mask) > APART  # the temperature is in them


def test_some_log_probs_are_those_that_all_would_be(trainer: Trainer, prompts: Prompts) -> None:
    every, sampler = drawn(trainer, prompts), trainer.parts.sampler
    sampler._log_probs_of = 2  # type: ignore[attr-defined]
    try:
        some = drawn(trainer, prompts)
    finally:
        sampler._log_probs_of = 1  # type: ignore[attr-defined]
    assert every.log_probs is not None and some.log_probs is not None
    asked = places(prompts)[0] % 2 == 0  # [B]
    assert torch.equal(some.ids, every.ids)
    assert distance(some.log_probs[asked], every.log_probs[asked], every.mask[asked]) < CLOSE
    assert some.log_probs[~asked][every.mask[~asked]].isnan().all()


def test_rows_are_padded_and_masked_as_everywhere(trainer: Trainer, prompts: Prompts) -> None:
    responses = drawn(trainer, prompts, Draw(7, 3, 2.0, 30))  # hot and long: some end, some do not
    end = trainer.parts.tokenizer.eos_token_id
    assert responses.ids.shape == (16, 30)
    for ids, mask, truncated in zip(responses.ids, responses.mask, responses.truncated, strict=True):
        length = int(mask.sum())
        assert mask[:length].all() and not mask[length:].any()
        assert (ids[length:] == trainer.parts.pad_id).all()
        assert bool(ids[length - 1] == end) != bool(truncated)
        assert not (ids[: length - 1] == end).any()
    assert 0 < int(responses.truncated.sum()) < 16


def test_a_seed_belongs_to_a_place_and_not_to_a_call(trainer: Trainer, prompts: Prompts) -> None:
    """The same rows one by one, and a second time: float32 on one CPU draws the same tokens."""
    whole, sampler = drawn(trainer, prompts), trainer.parts.sampler
    assert torch.equal(drawn(trainer, prompts).ids, whole.ids)
    prompt_of, sample_of = places(prompts)
    with sampler.ready():
        cut = [
            sampler.sample(prompts, p, s, DRAW)
            for p, s in zip(prompt_of.split(3), sample_of.split(3), strict=True)
        ]
    assert torch.equal(torch.cat([part.ids for part in cut]), whole.ids)
    assert not torch.equal(whole.ids[:GROUP], whole.ids[-GROUP:])  # one prompt, two places
    assert len({tuple(row.tolist()) for row in whole.ids}) > 12
    assert not torch.equal(drawn(trainer, prompts, Draw(7, 4, 0.7, 8)).ids, whole.ids)


def test_greedy_takes_the_likeliest_token(trainer: Trainer, prompts: Prompts) -> None:
    responses = drawn(trainer, prompts, Draw(7, 3, 0.7, 8, greedy=True))
    assert responses.log_probs is None
    assert torch.equal(responses.ids[0], responses.ids[1])
    model = trainer.parts.model.eval()
    with torch.no_grad():
        expected = model(prompts.ids[2:3][:, prompts.mask[2]]).logits[0, -1].argmax()
    assert responses.ids[2 * GROUP, 0] == expected


def test_an_update_reaches_the_engine(trainer: Trainer, prompts: Prompts) -> None:
    """After it the engine's log-probs are the trainer's new ones and far from the old ones."""
    before = drawn(trainer, prompts)
    old = of_trainer(trainer, prompts, before)
    train(trainer, until=1)
    after = drawn(trainer, prompts)
    assert after.log_probs is not None and before.log_probs is not None
    new = of_trainer(trainer, prompts, after)
    assert distance(after.log_probs, new, after.mask) < CLOSE
    assert distance(of_trainer(trainer, prompts, before), old, before.mask) > APART
    assert trainer.records[-1].scalars["kl_mismatch"] < 1e-6  # type: ignore[attr-defined]
    assert trainer.records[-1].times["weight_sync"] > 0  # type: ignore[attr-defined]


def test_what_is_taken_back_reaches_the_engine_too(trainer: Trainer, prompts: Prompts) -> None:
    start = drawn(trainer, prompts)
    train(trainer, until=2)
    assert not torch.equal(drawn(trainer, prompts).ids, start.ids)
    trainer.undo_rollout()
    again = drawn(trainer, prompts)
    assert torch.equal(again.ids, start.ids)
    assert again.log_probs is not None and start.log_probs is not None
    assert distance(again.log_probs, start.log_probs, start.mask) < CLOSE


def test_knobs_are_obeyed_in_mid_run(trainer: Trainer) -> None:
    train(trainer, until=3)
    sampled: list[tuple[int, Draw]] = []
    sample = trainer.parts.sampler.sample

    def spy(prompts: Prompts, prompt_of: Any, sample_of: Any, draw: Draw) -> Responses:
        sampled.append((len(prompt_of), draw))
        return sample(prompts, prompt_of, sample_of, draw)

    trainer.live.set_many(
        {"temperature": 1.3, "max_response_length": 5, "train_batch_size": 4, "rollout_n": 6}
    )
    trainer.parts.sampler.sample = spy  # type: ignore[method-assign]
    try:
        train(trainer, until=4)
    finally:
        del trainer.parts.sampler.sample
    (count, draw) = sampled[0]
    assert (count, draw.temperature, draw.max_response_length) == (24, 1.3, 5)
    record = trainer.records[-1]  # type: ignore[attr-defined]
    assert record.scalars["response_length_max"] <= 5
    assert record.scalars["kl_mismatch"] < 1e-6  # log-probs at the new temperature, on both sides


def test_what_the_engine_cannot_do_is_refused_by_the_knobs(trainer: Trainer) -> None:
    from autotune.errors import AdapterError

    with pytest.raises(AdapterError, match="samples at 2 at most"):
        trainer.live.set_many({"temperature": 2.5})
    with pytest.raises(AdapterError, match="context is 64"):
        trainer.live.set_many({"max_response_length": 60})


def test_out_of_memory_leaves_an_engine_that_goes_on(
    trainer: Trainer, prompts: Prompts, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The third step of a call finds the device full; the same call then works."""
    from autotune.trainer.collect import Room, sample_all

    expected = drawn(trainer, prompts)
    engine = trainer.parts.sampler._engine._llm.llm_engine  # type: ignore[attr-defined]
    step, steps = engine.step, []

    def full(*args: Any) -> Any:
        steps.append(1)
        if len(steps) == 3:
            raise torch.OutOfMemoryError("the device is full")
        return step(*args)

    monkeypatch.setattr(engine, "step", full)
    room = Room()
    with trainer.parts.sampler.ready():
        samples = sample_all(trainer.parts.sampler, prompts, DRAW, GROUP, 16, Ranks(), room)
    assert room.limit == 8
    assert torch.equal(samples.batch.response_ids, expected.ids)


def test_a_run_with_two_servers(sections: dict[str, Any], tmp_path: Path) -> None:
    """From the command line: weights by file, log-probs that fit, and no process left behind."""
    rollout = {"engine": "vllm_server", "server": {"replicas": 2}}
    recipe = {**sections, "run_dir": str(tmp_path / "run"), "rollout": rollout}
    recipe["trainer"] = {**recipe["trainer"], "rollouts": 2}
    with (tmp_path / "server.yaml").open("w", encoding="utf-8") as stream:
        YAML().dump(recipe, stream)
    command = [sys.executable, "-m", "autotune", "run", str(tmp_path / "server.yaml")]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stdout + done.stderr
    rows = [json.loads(line) for line in (tmp_path / "run" / "journal.jsonl").read_text().splitlines()]
    found = [metrics for row in rows for metrics in _metrics(row)]
    assert len(found) == 2
    assert all(metrics["kl_mismatch"] < 1e-6 for metrics in found)
    assert all(metrics["kl_step"] > 1e-3 for metrics in found)  # so weights did change in between
    assert not _servers_in(tmp_path)


def test_one_step_off_with_a_server(sections: dict[str, Any], tmp_path: Path) -> None:
    """The mismatch of a rollout drawn ahead is the drift in between; one drawn anew has none, so the weights
    that were broadcast are the trainer's.
    """
    rollout = {"engine": "vllm_server", "one_step_off": True, "server": {"transfer": "broadcast"}}
    recipe = {**sections, "rollout": rollout}
    sizes = {"micro_batch_size": 16, "rollout_micro_batch_size": 32}
    recipe["trainer"] = {**recipe["trainer"], "rollouts": 4, **sizes}
    records: list[Any] = []
    trainer = Trainer(Recipe.model_validate(recipe), tmp_path / "run")

    def on_rollout(record: Any) -> None:
        records.append(record.scalars)
        if record.rollout == 1:
            trainer.live.set_many({"temperature": 0.9})

    try:
        trainer.run(on_rollout)
    finally:
        trainer.close()
    assert [scalars["data_age"] for scalars in records] == [0, 1, 0, 1]
    mismatch = [scalars["kl_mismatch"] for scalars in records]
    assert max(mismatch[0], mismatch[2]) < 1e-6 and min(mismatch[1], mismatch[3]) > 1e-5


def _metrics(row: dict[str, Any]) -> Iterator[dict[str, float]]:
    """Metrics of a rollout, wherever a journal row keeps its snapshot."""
    for value in row.values():
        if isinstance(value, dict):
            if isinstance(value.get("metrics"), dict) and "kl_mismatch" in value["metrics"]:
                yield value["metrics"]
            else:
                yield from _metrics(value)


def _servers_in(folder: Path) -> list[str]:
    """Command lines of sampling servers that live and were started for a model of these tests."""
    lines = []
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit() and int(entry.name) != os.getpid():
            try:
                line = (entry / "cmdline").read_bytes().replace(b"\0", b" ").decode()
            except OSError:
                continue
            if "autotune.trainer.rollout.server" in line and str(folder.parent.parent) in line:
                lines.append(line)
    return lines
