"""What only a CUDA device can show: flash attention in packs, and how little the sensing costs.

What sensing and deciding add to a rollout is counted by the profiler, in three windows of one rollout
each over the same fed responses: without meters and without the controller, with the meters, and with
both. They may add no wait for the device and one copy to the host, which is the meters'. The step is a
real one: SmolLM2-135M's shape with random weights, 256 responses, packed and compiled.

The figures are printed (`-s` shows them), whether they hold or not.
"""

from __future__ import annotations

import argparse
import json
import logging
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import closing
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from statistics import median, quantiles
from typing import Any

import pytest
import torch
from transformers.integrations.sdpa_attention import sdpa_attention_forward

from autotune.controller import Controller, ControlSettings
from autotune.hooks.loop import ControlLoop
from autotune.hooks.native import NativeAdapter
from autotune.journal import Journal
from autotune.trainer import attention
from autotune.trainer.loop import Trainer
from autotune.trainer.meters import Measured, Meters
from autotune.trainer.ranks import Ranks
from autotune.trainer.rewards.base import Rewards, RewardTable
from autotune.trainer.rollout.choice import CompiledChoice, choose
from autotune.trainer.rollout.grouped import attend
from autotune.trainer.rollout.noise import places, token_steps
from experiments.throughput import arm_ours
from experiments.throughput.work import Work, make_model

pytestmark = pytest.mark.gpu
logging.getLogger("torch.__trace").propagate = False  # the compiler's own diary, megabytes of it

SHAPE, WORK = "135m", Work()
WARM = 3
"""Rollouts before anything is counted: layers are compiled, memory is laid out."""
TIMED = 40
"""Rollouts whose hook is timed."""
ADDERS = ("add_sampled", "add_micro_batch", "add_left_out", "add_step", "add_after_updates", "send")
WAITS = ("cudaStreamSynchronize", "cudaDeviceSynchronize", "cudaEventSynchronize")


def test_flash_attention_sees_its_own_sequence_only() -> None:
    """Both operators against plain attention in float32, one sequence at a time."""
    g, lengths = torch.Generator().manual_seed(1), [40, 1, 55]
    q, k, v = (torch.randn(96, h, 64, generator=g).cuda().bfloat16() for h in (4, 2, 2))
    starts = torch.tensor([0, 40, 41, 96], dtype=torch.int32, device="cuda")
    k_all, v_all = attention._repeated(k, v, 4)
    wanted = attention._one_by_one(q.float(), k_all.float(), v_all.float(), starts, None, 0.0)
    torch.testing.assert_close(
        attention._public(q, k_all, v_all, starts, max(lengths), None).float(), wanted, rtol=2e-2, atol=2e-2
    )
    if attention.native_proven(q.device):
        native = attention._native(q, k, v, starts, max(lengths), None)
        torch.testing.assert_close(native.float(), wanted, rtol=2e-2, atol=2e-2)


# -- no wait ---------------------------------------------------------------------------------------


def unwaiting(function: Callable[..., Any]) -> Callable[..., Any]:
    """Any wait for the device is an error while `function` runs."""

    def call(*args: Any, **kwargs: Any) -> Any:
        torch.cuda.set_sync_debug_mode("error")
        try:
            return function(*args, **kwargs)
        finally:
            torch.cuda.set_sync_debug_mode("default")

    return call


def test_the_guard_sees_a_wait() -> None:
    with pytest.raises(RuntimeError, match="synchroniz"):
        unwaiting(lambda: torch.ones(3, device="cuda").cpu())()


def test_meters_do_not_wait(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever is added, and the one copy that is sent; only `finish` may."""
    for name in ADDERS:
        monkeypatch.setattr(Meters, name, unwaiting(getattr(Meters, name)))
    g, device = torch.Generator().manual_seed(3), torch.device("cuda")
    new, old, ref = (torch.randn(8, 5, generator=g).to(device) for _ in range(3))
    mask = torch.ones(8, 5, dtype=torch.bool, device=device)
    meters, advantages = Meters(2, 0.2, 0.2, True, device), torch.ones(8, device=device)
    meters.add_sampled(old, old.abs(), ref, old, mask)
    for update in range(2):
        meters.add_micro_batch(update, new, old, ref, advantages, mask, new.sum())
        meters.add_left_out(update, mask)
        meters.add_step(update, new.norm(), 1)
    meters.add_after_updates(new, old, mask)
    meters.send(Ranks())
    measured = meters.finish(Ranks())
    assert measured.scalars["entropy"] == pytest.approx(float(old.abs().mean()), rel=1e-5)
    assert measured.per_update["grad_norm"] == pytest.approx([float(new.norm())] * 2, rel=1e-5)


# -- a decoding step of `hf` -----------------------------------------------------------------------


def milliseconds(work: Callable[[], Any], times: int = 20) -> float:
    """Of one call, after two that are not counted."""
    work(), work()
    begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    begin.record()
    for _ in range(times):
        work()
    end.record()
    torch.cuda.synchronize()
    return begin.elapsed_time(end) / times


def test_the_compiled_choice_of_a_token_is_believed_here_and_faster() -> None:
    g = torch.Generator().manual_seed(1)
    scores = torch.randn(256, 49152, generator=g).cuda()
    where = places(torch.randint(-(2**62), 2**62, (256,), generator=g).cuda(), torch.tensor(3, device="cuda"))
    given = scores, where, token_steps(49152, scores.device), torch.tensor(0.8, device="cuda")
    compiled = CompiledChoice()
    compiled(*given)
    assert list(compiled._agreed.values()) == [True]
    plain, made = milliseconds(lambda: choose(*given)), milliseconds(lambda: compiled(*given))
    print(f"\nchoice of 256 tokens: {plain:.2f} ms, compiled {made:.2f} ms")
    assert made < plain


def test_a_shared_cache_is_read_once_with_the_same_numbers() -> None:
    g = torch.Generator().manual_seed(1)
    shapes = ((256, 9, 1, 64), (256, 3, 384, 64), (256, 3, 384, 64))
    query, key, value = (torch.randn(shape, generator=g).cuda().bfloat16() for shape in shapes)
    mask = (torch.rand(256, 1, 1, 384, generator=g) < 0.5).cuda()
    layer = argparse.Namespace(num_key_value_groups=3, is_causal=True)
    usual, _ = sdpa_attention_forward(layer, query, key, value, mask)
    torch.testing.assert_close(attend(layer, query, key, value, mask)[0], usual, rtol=2e-2, atol=2e-2)  # type: ignore[arg-type]
    copied = milliseconds(lambda: sdpa_attention_forward(layer, query, key, value, mask))
    once = milliseconds(lambda: attend(layer, query, key, value, mask))  # type: ignore[arg-type]
    print(f"\nattention of one layer: {copied:.3f} ms, read once {once:.3f} ms")
    assert once < copied


# -- recorded passes -------------------------------------------------------------------------------


def test_graphs_train_as_plain_passes_do(model_folder: Path, tmp_path: Path) -> None:
    """Four rollouts of the same responses: the first pass of a shape is plain, later ones are replayed."""
    found = {}
    for name, on in (("plain", "false"), ("graphs", "true")):
        settings = (f"trainer.packing.graphs={on}", "trainer.packing.compile=false")
        trainer, records = make_trainer(model_folder, tmp_path / name, "fed", *settings), []  # type: ignore[var-annotated]
        with closing(trainer):
            for _ in range(4):
                trainer.parts.prompts._number = 0  # type: ignore[attr-defined]
                trainer._one_rollout(records.append)
            if trainer._graphs is not None:
                assert trainer._graphs.failure == ""
                graphs = [made.graph for made in trainer._graphs._passes.values()]
                assert any(graphs), "nothing was recorded"
        found[name] = records
    print("\nseconds", {name: [round(r.times["total"], 3) for r in rows] for name, rows in found.items()})
    for plain, recorded in zip(found["plain"], found["graphs"], strict=True):
        assert recorded.per_update["loss"] == pytest.approx(plain.per_update["loss"], rel=2e-2, abs=2e-4)
        assert recorded.per_update["grad_norm"] == pytest.approx(plain.per_update["grad_norm"], rel=3e-2)
        assert recorded.scalars["entropy"] == pytest.approx(plain.scalars["entropy"], rel=1e-3)


# -- what a rollout costs with and without ---------------------------------------------------------


@dataclass
class Run:
    """One training run over the same responses again and again, and who is called after a rollout."""

    trainer: Trainer
    hook: Callable[[Any], Any]
    metered: bool = True
    last: Measured | None = None
    loop: ControlLoop | None = None
    seconds: list[float] = field(default_factory=list)

    def rollouts(self, count: int, metered: bool = True, hooked: bool = True) -> None:
        """So many more, with the meters and the controller or without."""
        self.metered = metered

        def after(record: Any) -> None:
            self.seconds.append(record.times["total"])
            if hooked:
                self.hook(record)

        for _ in range(count):
            if isinstance(self.trainer.parts.prompts, arm_ours.FedRollouts):
                self.trainer.parts.prompts._number = 0  # the same responses
            self.trainer._one_rollout(after)
        torch.cuda.synchronize()


def every_other(rewards: Rewards, responses: Sequence[str], examples: Sequence[Any]) -> RewardTable:
    """1 for every second response: random weights earn nothing for what they say, and would not move."""
    given = [float(place % 2) for place in range(len(responses))]
    return RewardTable(given, {"every other": given})


def test_a_server_on_the_same_gpu_draws_ahead_from_weights_that_it_reads_in_place(
    model_folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """CUDA handles, made once: drawn anew after eight transfers a rollout has the first one's mismatch."""
    pytest.importorskip("vllm")
    settings = ("one_step_off=true", "log_probs=all", "server.transfer=ipc")
    more = ("trainer.rollouts=10", "trainer.actor_learning_rate=1e-4")
    settings = (*(f"rollout.{setting}" for setting in settings), *more)
    found: list[dict[str, float | None]] = []
    with closing(make_trainer(model_folder, tmp_path / "served", "server", *settings)) as trainer:
        monkeypatch.setattr(Rewards, "score", every_other)

        def on_rollout(record: Any) -> None:
            found.append(record.scalars)
            if record.rollout == 7:
                trainer.live.set_many({"temperature": 0.9})

        trainer.run(on_rollout)
    ages, mismatch = ([row[name] or 0.0 for row in found] for name in ("data_age", "kl_mismatch"))
    print("one step off: kl_mismatch by rollout", [f"{value:.2g}" for value in mismatch])
    assert ages == [0, *[1] * 7, 0, 1]
    on_policy, ahead = max(mismatch[0], mismatch[8]), median(mismatch[1:8])
    assert on_policy < 0.01 and ahead > 2 * on_policy


def metered_or_not(run: Run, name: str) -> Callable[..., Any]:
    """A method of the meters that does nothing, or gives what it last gave, in windows without them."""
    real = getattr(Meters, name)

    def call(self: Meters, *args: Any, **kwargs: Any) -> Any:
        if not run.metered:
            return run.last
        if name != "finish":
            return unwaiting(real)(self, *args, **kwargs)
        run.last = real(self, *args, **kwargs)
        return run.last

    return call


@pytest.fixture(scope="module")
def model_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_model(SHAPE, tmp_path_factory.mktemp("models"), None)


def make_trainer(model: Path, folder: Path, engine: str, *settings: str) -> Trainer:
    options = argparse.Namespace(
        model=str(model), shape=SHAPE, engine=engine, set=list(settings), profile=None
    )
    trainer: Trainer = arm_ours.make_trainer(options, WORK, folder)
    trainer.evaluate = dict  # type: ignore[method-assign]
    trainer._save = lambda: None  # type: ignore[method-assign]
    return trainer


EVEN = ("trainer.packing.leave_out_quiet=off", "trainer.packing.graphs=false")
"""Every rollout is cut into as many micro batches, and none records: their waits can be compared."""


@pytest.fixture
def run(
    request: pytest.FixtureRequest, model_folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> Iterator[Run]:
    """Warmed up, in shadow: the controller sees and decides all, and moves nothing."""
    trainer = make_trainer(model_folder, tmp_path / "run", "fed", *getattr(request, "param", ()))
    adapter = NativeAdapter(trainer)
    with closing(trainer), closing(Journal(tmp_path / "journal.jsonl")) as journal:
        loop = ControlLoop(adapter, Controller(ControlSettings(mode="shadow"), adapter.facts()), journal)
        made = Run(trainer, unwaiting(loop.on_rollout), loop=loop)
        for name in (*ADDERS, "finish"):
            monkeypatch.setattr(Meters, name, metered_or_not(made, name))
        made.rollouts(WARM)
        yield made


def counted(work: Callable[[], None]) -> Counter[str]:
    """Waits and copies to the host that the profiler sees while `work` goes, none of its own."""
    from torch.autograd import DeviceType
    from torch.profiler import ProfilerActivity, profile, record_function

    kinds = [ProfilerActivity.CPU, ProfilerActivity.CUDA]
    with profile(activities=kinds) as profiler, record_function("window"):
        work()
    events = profiler.events()
    window = next(e for e in events if e.name == "window" and e.device_type == DeviceType.CPU).time_range
    names = [str(e.name) for e in events if window.start <= e.time_range.start <= window.end]
    found = Counter(name for name in names if name in WAITS)
    found["copies to the host"] = sum(name.startswith("Memcpy DtoH") for name in names)
    return found


@pytest.mark.parametrize("run", [EVEN], indirect=True)
def test_sensing_adds_no_wait_and_one_copy(run: Run) -> None:
    windows = {"bare": (False, False), "metered": (True, False), "hooked": (True, True)}
    counts = [{name: counted(partial(run.rollouts, 1, *w)) for name, w in windows.items()} for _ in range(2)]
    print("\nin a rollout", *map(json.dumps, counts), sep="\n")
    bare, metered, hooked = counts[1].values()  # whatever comes once has come in the first three
    assert bare["copies to the host"] > 0, "the profiler saw no copy at all"
    assert hooked["copies to the host"] - bare["copies to the host"] == 1
    assert hooked["copies to the host"] == metered["copies to the host"]
    assert {name: hooked[name] - bare[name] for name in WAITS} == dict.fromkeys(WAITS, 0)


def test_the_hook_takes_a_thousandth_of_a_rollout(run: Run, model_folder: Path, tmp_path: Path) -> None:
    """p50 on the path within 1 ms and 0.1 % of a rollout that samples its responses on this GPU."""
    run.rollouts(TIMED)
    assert run.loop is not None
    hook = run.loop.hook_seconds[-TIMED:]
    p50, p99 = median(hook), quantiles(hook, n=100, method="inclusive")[98]
    whole = seconds_of_a_rollout(model_folder, tmp_path)
    training = median(run.seconds[-TIMED:])
    print(
        f"\nhook p50 {1e3 * p50:.3f} ms, p99 {1e3 * p99:.3f} ms; {p50 / whole:.4%} of a rollout of"
        f" {whole:.3f} s, {p50 / training:.4%} of its training part of {training:.3f} s"
    )
    assert p50 <= 1e-3
    assert p50 / whole <= 1e-3


def seconds_of_a_rollout(model: Path, tmp_path: Path) -> float:
    """Sampling by transformers' compiled decoding, the fastest way without a second program."""
    trainer = make_trainer(model, tmp_path / "sampled", "hf")
    sampled = Run(trainer, lambda record: None)
    with closing(trainer):
        sampled.rollouts(WARM)
    return min(sampled.seconds)
