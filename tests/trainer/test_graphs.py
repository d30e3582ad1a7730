"""Recorded passes give what plain packed passes give, padding and repetition included.

Recording itself needs a CUDA device (`test_gpu.py`). Here a recording is the pass itself, run again on the
same buffers: whatever a graph would read from a buffer, it reads from there.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from transformers import PreTrainedModel

from autotune.trainer.engine import StepResult
from autotune.trainer.flat import FlatAdamW
from autotune.trainer.graphs import Body, Graphs, Shape, Slots, hindrance
from autotune.trainer.loop import Trainer
from autotune.trainer.losses import LossKnobs
from autotune.trainer.meters import Measured, Meters
from autotune.trainer.packing import Packing, make_layout
from autotune.trainer.ranks import Ranks
from autotune.trainer.update import (
    BatchKnobs,
    Experience,
    MiniBatch,
    Updater,
    first_epoch,
    make_plan,
    score_samples,
)
from tests.trainer.test_packing import CPU, GROUP, KNOBS, LEFT, SILENT, TOTAL, WIDTH, Scene


class Recordings:
    """Counts what is recorded and what is repeated."""

    def __init__(self, fails: bool = False) -> None:
        self.made, self.repeated, self._fails = 0, 0, fails

    def __call__(self, body: Body) -> Body:
        if self._fails:
            try:
                raise RuntimeError("operation not permitted when stream is capturing")
            finally:  # as `torch.cuda.graph` ends
                raise RuntimeError("operation failed due to a previous error during capture")
        self.made += 1

        def repeat() -> tuple[torch.Tensor, ...]:
            self.repeated += 1
            return body()

        return repeat


class FlatEngine:
    """The engine's shape around the flat optimizer: keeps every update's gradient and moves nothing."""

    world_size = 1

    def __init__(self, model: Any, optimizer: FlatAdamW) -> None:
        self.module, self._optimizer = model, optimizer
        self.gradients: list[torch.Tensor] = []

    def backward(self, loss: torch.Tensor, *, last: bool) -> None:
        loss.backward()
        self._optimizer.gather()

    def added(self, *, last: bool) -> None:
        pass

    def step(self) -> StepResult:
        self.gradients.append(self._optimizer.gather().clone())
        self._optimizer.zero_grad()
        return StepResult(self.gradients[-1].norm(), True)


@pytest.fixture
def scene() -> Scene:
    return Scene()


def plan_of(scene: Scene, mini: int = 2) -> list[MiniBatch]:
    packing = Packing(scene.prompt_lengths.numpy(), LEFT, WIDTH, None, 7, whole_width=True)
    knobs = BatchKnobs(GROUP, mini, 1, 4)
    return make_plan(scene.lengths, scene.advantages, knobs, (1, 2), Ranks(), CPU, packing)


def trained(
    model: Any, data: Experience, plan: list[MiniBatch], knobs: LossKnobs, record: Recordings | None
) -> tuple[FlatEngine, Measured]:
    optimizer = FlatAdamW([p for p in model.parameters() if p.requires_grad], lr=1e-3)
    graphs = None if record is None else Graphs(optimizer, record)
    engine, meters = FlatEngine(model, optimizer), Meters(len(plan), 0.1, 0.1, True, CPU, ratio=knobs.ratio)
    list(Updater(engine, data, knobs, 0.8, None, graphs).run(plan, meters))  # type: ignore[arg-type]
    return engine, meters.finish(Ranks())


@pytest.mark.parametrize(
    "knobs",
    [
        KNOBS,
        SILENT,
        LossKnobs(0.1, 0.1, 0.05, "k2", 0.0, ratio="sequence", average="responses"),
        LossKnobs(0.1, 0.1, 0.0, "k3", 0.0, average="length", longest=WIDTH),
    ],
)
@pytest.mark.parametrize("weighted", [False, True])
def test_recorded_updates_equal_plain_ones(
    tiny_model: PreTrainedModel, scene: Scene, knobs: LossKnobs, weighted: bool
) -> None:
    plan = plan_of(scene)
    old, _ = score_samples(tiny_model, scene.batch, first_epoch(plan, 1), 0.8, Ranks())
    weights = scene.noise.exp() if weighted else None
    data = Experience(
        scene.batch, scene.advantages, old + scene.noise, old - scene.noise, importance=weights
    )
    plain, measured = trained(tiny_model, data, plan, knobs, None)
    record = Recordings()
    engine, recorded = trained(tiny_model, data, plan, knobs, record)
    assert record.made >= 1
    assert record.repeated >= len(plan)  # two micro batches each, and few shapes
    for mine, wanted in zip(engine.gradients, plain.gradients, strict=True):
        torch.testing.assert_close(mine, wanted, rtol=1e-4, atol=1e-7)
    assert recorded.scalars == pytest.approx(measured.scalars, rel=1e-5, abs=1e-7, nan_ok=True)
    assert recorded.histograms == measured.histograms


def test_recorded_scores_equal_plain_ones(tiny_model: PreTrainedModel, scene: Scene) -> None:
    micro, record = first_epoch(plan_of(scene), 1), Recordings()
    graphs = Graphs(FlatAdamW(list(tiny_model.parameters()), lr=1e-3), record)
    wanted = score_samples(tiny_model, scene.batch, micro, 0.8, Ranks(), True)
    for _ in range(2):
        got = score_samples(tiny_model, scene.batch, micro, 0.8, Ranks(), True, graphs)
        torch.testing.assert_close(got, wanted, rtol=1e-5, atol=1e-6)
    assert record.made < len(micro)
    assert record.repeated > len(micro)


def test_a_moved_knob_is_recorded_anew(tiny_model: PreTrainedModel, scene: Scene) -> None:
    plan = plan_of(scene)
    data = Experience(scene.batch, scene.advantages, scene.noise, None)
    optimizer, record = FlatAdamW(list(tiny_model.parameters()), lr=1e-3), Recordings()
    graphs, seen = Graphs(optimizer, record), []
    for knobs in (SILENT, SILENT, LossKnobs(0.2, 0.1, 0.0, "k3", 0.0)):
        updater = Updater(FlatEngine(tiny_model, optimizer), data, knobs, 0.8, None, graphs)  # type: ignore[arg-type]
        list(updater.run(plan, Meters(len(plan), 0.1, 0.1, False, CPU)))
        seen.append(record.made)
    assert seen[0] == seen[1] < seen[2]


def test_without_a_recording_all_goes_on(tiny_model: PreTrainedModel, scene: Scene) -> None:
    plan = plan_of(scene)
    data = Experience(scene.batch, scene.advantages, scene.noise, None)
    optimizer = FlatAdamW(list(tiny_model.parameters()), lr=1e-3)
    graphs = Graphs(optimizer, Recordings(fails=True))
    engine = FlatEngine(tiny_model, optimizer)
    list(
        Updater(engine, data, SILENT, 0.8, None, graphs).run(  # type: ignore[arg-type]
            plan, Meters(len(plan), 0.1, 0.1, False, CPU)
        )
    )
    plain, _ = trained(tiny_model, data, plan, SILENT, None)
    torch.testing.assert_close(torch.stack(engine.gradients), torch.stack(plain.gradients))
    assert "not permitted" in graphs.news()
    assert graphs.news() == ""


def test_graphs_that_were_dropped_leave_their_pool_behind(
    tiny_model: PreTrainedModel, scene: Scene, monkeypatch: pytest.MonkeyPatch
) -> None:
    """torch refuses a pool's handle once its last graph is gone: recording would end for good."""
    pools, used = itertools.count(), []  # type: ignore[var-annotated]

    def record_into(pool: int) -> Callable[[Body], Body]:
        def record(body: Body) -> Body:
            used.append(pool)
            return body

        return record

    monkeypatch.setattr(torch.cuda, "graph_pool_handle", lambda: next(pools))
    monkeypatch.setattr("autotune.trainer.graphs.record_cuda", record_into)
    monkeypatch.setattr("autotune.trainer.graphs.MOST", 2)
    graphs, micro = Graphs(FlatAdamW(list(tiny_model.parameters()), lr=1e-3)), first_epoch(plan_of(scene), 1)
    for temperature in (1.0, 0.9, 0.8):  # each is a pass of its own
        for _ in range(2):
            score_samples(tiny_model, scene.batch, micro[:1], temperature, Ranks(), False, graphs)
    assert used == [0, 0, 1]


def test_graphs_that_do_not_pay_are_told_of_once(
    tiny_model: PreTrainedModel, scene: Scene, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("autotune.trainer.graphs.MOST", 2)
    graphs = Graphs(FlatAdamW(list(tiny_model.parameters()), lr=1e-3), Recordings())
    micro = first_epoch(plan_of(scene), 1)[:1]

    def passes(temperatures: tuple[float, ...], times: int) -> str:
        for temperature in temperatures:
            for _ in range(times):
                score_samples(tiny_model, scene.batch, micro, temperature, Ranks(), False, graphs)
        return graphs.news()

    assert passes((1.0, 0.9), 4) == ""
    assert passes((0.8, 0.7), 1) == ""  # the first two were used four times each
    assert "2 CUDA graphs were dropped after 2 passes" in passes((0.6,), 1)
    assert passes((0.5, 0.4, 0.3), 1) == ""


def test_padding_is_sequences_of_its_own(scene: Scene) -> None:
    packing = Packing(scene.prompt_lengths.numpy(), LEFT, WIDTH, None, 7, whole_width=True)
    layout = make_layout(np.arange(TOTAL), scene.lengths, packing, CPU)
    slots = Slots(Shape(512, 256, 32, WIDTH, 128, 7, False, False), CPU)
    slots.fill(scene.batch, layout)
    used, starts = len(layout.fed), slots.layout.starts
    assert torch.equal(starts[: TOTAL + 1], layout.starts)
    assert starts[-1] == 512
    gaps = starts.diff()
    assert (gaps >= 0).all()
    assert gaps[TOTAL:].max() <= 128  # what attention was told is the longest
    assert gaps[TOTAL:].sum() == 512 - used
    assert (slots.layout.places[len(layout.kept) :] == 32 * WIDTH).all()


def test_a_shape_is_used_again_while_little_is_wasted() -> None:
    shape = Shape(8000, 6000, 64, 256, 384, 4096, True, True).roomier()
    assert (shape.tokens, shape.kept, shape.samples) == (9216, 6912, 64)
    assert shape.holds(Shape(9200, 6900, 60, 256, 384, 4096, True, True))
    assert not shape.holds(Shape(9217, 6000, 60, 256, 384, 4096, True, True))
    assert not shape.holds(Shape(4000, 3000, 60, 256, 384, 4096, True, True))
    assert not shape.holds(Shape(9200, 6900, 60, 128, 384, 4096, True, True))


def test_a_run_with_recorded_passes_learns_the_same(
    make_recipe: Callable[..., Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    sections = {"deepspeed": {"zero_stage": 0}, "model": {"dtype": "bfloat16"}}

    def run(name: str, record: Recordings | None) -> list[Any]:
        recipe = make_recipe(rollouts=3, packing={"enabled": "on", "tokens": 60}, kl_coef=0.01)
        data = recipe.model_dump()
        data["deepspeed"]["zero_stage"] = sections["deepspeed"]["zero_stage"]
        data["model"]["dtype"] = sections["model"]["dtype"]
        trainer, records = Trainer(type(recipe).model_validate(data), tmp_path / name), []  # type: ignore[var-annotated]
        optimizer = trainer.parts.engine.flat_optimizer
        assert optimizer is not None
        trainer._graphs = None if record is None else Graphs(optimizer, record)
        trainer.run(records.append)
        trainer.close()
        return records

    record = Recordings()
    plain, recorded = run("plain", None), run("recorded", record)
    assert record.repeated > record.made > 0
    for mine, wanted in zip(recorded[:1], plain[:1], strict=True):  # later ones sample other responses
        for name in ("reward_mean", "loss", "grad_norm", "entropy", "kl_ref"):
            assert mine.scalars[name] == pytest.approx(wanted.scalars[name], rel=2e-2, abs=1e-3), name
    assert all(np.isfinite(r.scalars["grad_norm"]) for r in recorded)


def test_a_run_that_cannot_record_says_so(make_recipe: Callable[..., Any], tmp_path: Path) -> None:
    told: list[tuple[str, str]] = []

    def hear(name: str, payload: dict[str, Any]) -> None:
        if name == "note":
            told.append((payload["about"], payload["text"]))

    trainer = Trainer(make_recipe(rollouts=1, packing={"graphs": True}), tmp_path, on_event=hear)
    trainer.run(lambda record: None)
    trainer.close()
    assert told == [("packing/graphs", "nothing is recorded: there is no CUDA device")]


def test_what_keeps_a_run_from_recording(tiny_model: PreTrainedModel) -> None:
    optimizer, gpu = FlatAdamW(list(tiny_model.parameters()), lr=1e-3), torch.device("cuda")
    assert hindrance(optimizer, True, gpu) == ""
    assert "no CUDA device" in hindrance(optimizer, True, CPU)
    assert "cannot be packed" in hindrance(optimizer, False, gpu)
    assert "one rank at ZeRO 0 in bfloat16" in hindrance(None, True, gpu)
