"""The DeepSpeed engine against plain torch, against itself, and in processes of its own."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor
from torch.distributed.elastic.utils.distributed import get_free_port
from transformers import Qwen2Config, Qwen2ForCausalLM

from autotune.errors import AdapterError, CheckpointError, InputError, TrainingError
from autotune.recipe.deepspeed import DTYPES, OFFLOADS, refusal
from autotune.recipe.deepspeed import STAGES as STAGE_NUMBERS
from autotune.trainer.engine import Engine

ROOT = Path(__file__).resolve().parents[2]
LR, BETAS, DECAY, CLIP = 3e-3, (0.9, 0.99), 0.01, 0.5
STAGES = pytest.mark.parametrize("stage", [0, 1, 3])
KINDS = pytest.mark.parametrize(
    ("stage", "dtype"),
    [(0, "float32"), (1, "float32"), (3, "float32"), (0, "bfloat16"), (1, "bfloat16")],
)
SUPPORTED = [
    (stage, dtype, offload)
    for stage in STAGE_NUMBERS
    for dtype in DTYPES
    for offload in OFFLOADS
    if not refusal(stage, dtype, offload)
]
"""The whole table of `docs/deepspeed.md`."""


def small_model(seed: int = 0, tied: bool = True) -> Qwen2ForCausalLM:
    torch.manual_seed(seed)
    config = Qwen2Config(
        vocab_size=23,
        hidden_size=16,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=1,
        intermediate_size=24,
        max_position_embeddings=32,
        tie_word_embeddings=tied,
        initializer_range=0.3,
    )
    model = Qwen2ForCausalLM(config)
    for layer in model.model.layers:
        # Softmax all but ignores it: its gradient is rounding, and Adam makes whole steps of rounding.
        layer.self_attn.k_proj.bias = None
    return model


def make_engine(
    model: torch.nn.Module | None = None,
    *,
    stage: int = 1,
    dtype: str = "auto",
    offload: str = "none",
    max_grad_norm: float = CLIP,
    config: dict[str, Any] | None = None,
) -> Engine:
    return Engine(
        model if model is not None else small_model(),
        zero_stage=stage,
        learning_rate=LR,
        betas=BETAS,
        weight_decay=DECAY,
        max_grad_norm=max_grad_norm,
        dtype=dtype,
        offload=offload,
        config=config,
    )


@pytest.fixture
def batch() -> Tensor:
    return torch.randint(0, 23, (32, 9), generator=torch.Generator().manual_seed(5))  # [B, L]


def token_loss(module: torch.nn.Module, rows: Tensor, total: int) -> Tensor:
    """Sum over these rows' tokens, divided by the token count of the whole mini-batch."""
    logits = module(input_ids=rows).logits[:, :-1].float()  # [b, L-1, V]
    flat = logits.reshape(-1, logits.shape[-1])
    return torch.nn.functional.cross_entropy(flat, rows[:, 1:].reshape(-1), reduction="sum") / total


def update(engine: Engine, batch: Tensor, micro: int = 32) -> tuple[float, bool]:
    total = batch[:, 1:].numel()
    rows = batch.split(micro)
    for index, part in enumerate(rows):
        engine.backward(token_loss(engine.module, part, total), last=index == len(rows) - 1)
    result = engine.step()
    return float(result.grad_norm), result.stepped


def poisoned_update(engine: Engine, batch: Tensor, bad: float) -> tuple[float, bool]:
    """An update whose first micro-batch is fine and whose second one is not."""
    engine.backward(token_loss(engine.module, batch[:16], 100), last=False)
    engine.backward(token_loss(engine.module, batch[16:], 100) * bad, last=True)
    result = engine.step()
    return float(result.grad_norm), result.stepped


def bare(engine: Engine) -> Any:
    """The model itself: alone at ZeRO 0 in bfloat16 nothing is around it."""
    return getattr(engine.module, "module", engine.module)


def weights(holder: Engine | torch.nn.Module) -> dict[str, Tensor]:
    """Copies of all weights, gathered where they are split."""
    if isinstance(holder, Engine):
        with holder.whole_weights():
            return weights(bare(holder))
    return {n: p.detach().clone() for n, p in holder.named_parameters()}


def assert_same(left: dict[str, Tensor], right: dict[str, Tensor]) -> None:
    assert left.keys() == right.keys()
    different = [name for name in left if not torch.equal(left[name], right[name])]
    assert not different


def differs(left: dict[str, Tensor], right: dict[str, Tensor]) -> bool:
    return any(not torch.equal(left[name], right[name]) for name in left)


# -- against plain torch ---------------------------------------------------------------------------


class PlainTorch:
    """The reference: torch's AdamW and clipping, gradients of the whole mini-batch at once."""

    def __init__(self) -> None:
        self.model = small_model()
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=LR, betas=BETAS, weight_decay=DECAY)

    def update(self, batch: Tensor) -> float:
        self.optimizer.zero_grad()
        token_loss(self.model, batch, batch[:, 1:].numel()).backward()
        norm = torch.nn.utils.clip_grad_norm_(self.model.parameters(), CLIP)
        self.optimizer.step()
        return float(norm)


@STAGES
@pytest.mark.parametrize("micro", [1, 4, 32])
def test_many_micro_batches_equal_plain_torch(stage: int, micro: int, batch: Tensor) -> None:
    engine, plain = make_engine(stage=stage), PlainTorch()
    for _ in range(3):
        norm, stepped = update(engine, batch, micro)
        expected = plain.update(batch)
        assert stepped
        assert expected > CLIP  # so that clipping is compared too
        assert norm == pytest.approx(expected, rel=1e-4)
    wanted = weights(plain.model)
    for name, value in weights(engine).items():
        torch.testing.assert_close(value, wanted[name], rtol=1e-4, atol=2e-5)
    assert engine.steps() == 3


def test_all_stages_give_the_same_weights(batch: Tensor) -> None:
    engines = [make_engine(stage=stage) for stage in STAGE_NUMBERS]
    for engine in engines:
        for _ in range(3):
            update(engine, batch, 8)
    first, *others = (engine.state_tensors() for engine in engines)
    for other in others:
        for name in first:
            torch.testing.assert_close(first[name], other[name], rtol=1e-4, atol=5e-5)


@pytest.mark.parametrize(("stage", "dtype", "offload"), SUPPORTED)
def test_every_supported_kind_trains_drops_undoes_and_resumes(
    stage: int, dtype: str, offload: str, batch: Tensor
) -> None:
    engine, plain = make_engine(stage=stage, dtype=dtype, offload=offload), PlainTorch()
    for micro in (16, 4, 1):
        norm, stepped = update(engine, batch, micro)
        assert stepped
        assert norm == pytest.approx(plain.update(batch), rel=1e-4 if dtype == "float32" else 0.02)
    state, live, snapshot = engine.state_tensors(), weights(engine), engine.snapshot()
    for name, value in weights(plain.model).items():
        near = 1e-4 if dtype == "float32" else 0.03
        torch.testing.assert_close(state[f"model/{name}"], value, rtol=near, atol=near)
    assert not poisoned_update(engine, batch, float("nan"))[1]
    assert_same(state, engine.state_tensors())
    first = [update(engine, batch, micro) for micro in (8, 4)]
    assert all(stepped for _, stepped in first), "the dropped update leaves nothing behind"
    after = engine.state_tensors()
    engine.backward(token_loss(engine.module, batch, 10), last=False)
    engine.restore(snapshot)
    assert_same(state, engine.state_tensors())
    assert_same(live, weights(engine))
    assert [update(engine, batch, micro) for micro in (8, 4)] == first
    assert_same(after, engine.state_tensors())
    engine.load_state(state, 3)
    assert_same(live, weights(engine))
    assert [update(engine, batch, micro) for micro in (8, 4)] == first
    assert_same(after, engine.state_tensors())
    engine.close()


def test_whole_weights_are_the_models_own_and_training_goes_on(batch: Tensor) -> None:
    """Inside, the plain model answers as one process's would; outside it trains as if never asked."""
    engine, other = (make_engine(stage=3) for _ in range(2))
    model = bare(engine)
    with engine.whole_weights(), engine.whole_weights(), torch.no_grad():
        sampled = model.generate(input_ids=batch[:2, :3], max_new_tokens=3, do_sample=False)
        plain = small_model().generate(input_ids=batch[:2, :3], max_new_tokens=3, do_sample=False)
    assert torch.equal(sampled, plain)
    for each in (engine, other):
        update(each, batch, 8)
    assert_same(engine.state_tensors(), other.state_tensors())


@pytest.mark.parametrize("stage", [1, 2, 3])
def test_settings_of_a_users_file_change_no_number(stage: int, batch: Tensor) -> None:
    """Small buckets and, at ZeRO 3, many groups of masters."""
    sizes = {"reduce_bucket_size": 400, "allgather_bucket_size": 300, "sub_group_size": 500}
    sizes |= {"stage3_prefetch_bucket_size": 10, "stage3_param_persistence_threshold": 20}
    extra = {"zero_optimization": sizes, "steps_per_print": 1000}
    engine, plain = make_engine(stage=stage, config=extra), make_engine(stage=stage)
    assert stage < 3 or len(engine._masters()) > 3
    snapshot, start = engine.snapshot(), engine.state_tensors()
    for each in (engine, plain):
        for micro in (8, 32):
            update(each, batch, micro)
    got, wanted = engine.state_tensors(), plain.state_tensors()
    for name in wanted:
        torch.testing.assert_close(got[name], wanted[name], rtol=1e-4, atol=5e-5)
    engine.restore(snapshot)
    assert_same(start, engine.state_tensors())
    engine.load_state(got, 2)
    assert_same(got, engine.state_tensors())
    assert engine.steps() == 2


@pytest.mark.parametrize(
    ("stage", "offload", "reason"),
    [(0, "optimizer", "nothing is split"), (1, "all", "use zero_stage 3"), (1, "disk", "use none")],
)
def test_unsupported_offloading_is_refused(stage: int, offload: str, reason: str) -> None:
    with pytest.raises(InputError, match=reason):
        make_engine(stage=stage, offload=offload)


@STAGES
def test_the_number_of_micro_batches_may_change_from_update_to_update(stage: int, batch: Tensor) -> None:
    engine, plain = make_engine(stage=stage), PlainTorch()
    for micro in (32, 2, 16, 1):
        update(engine, batch, micro)
        plain.update(batch)
    wanted = weights(plain.model)
    for name, value in weights(engine).items():
        torch.testing.assert_close(value, wanted[name], rtol=2e-4, atol=5e-5)


@STAGES
def test_no_clipping_at_zero(stage: int, batch: Tensor) -> None:
    free, clipped = make_engine(stage=stage, max_grad_norm=0.0), make_engine(stage=stage)
    for engine in (free, clipped):
        update(engine, batch)
    ratio = (free.state_tensors()["exp_avg/model.norm.weight"].norm()) / (
        clipped.state_tensors()["exp_avg/model.norm.weight"].norm()
    )
    assert ratio > 1.5


# -- learning rate ---------------------------------------------------------------------------------


@STAGES
def test_learning_rate_is_obeyed_and_read_back(stage: int, batch: Tensor) -> None:
    engine = make_engine(stage=stage)
    assert engine.learning_rate() == LR
    engine.set_learning_rate(0.0)
    before = weights(engine)
    update(engine, batch)
    assert_same(before, weights(engine))
    engine.set_learning_rate(0.125)
    assert engine.learning_rate() == 0.125
    update(engine, batch)
    assert differs(before, weights(engine))


def test_learning_rate_refusals() -> None:
    engine = make_engine()
    for value in (-1e-3, float("nan"), float("inf")):
        with pytest.raises(AdapterError, match="refused"):
            engine.set_learning_rate(value)
    assert engine.learning_rate() == LR
    optimizer = engine.module.basic_optimizer
    optimizer.add_param_group({"params": [torch.nn.Parameter(torch.zeros(1))], "lr": 1.0})
    with pytest.raises(AdapterError, match="different learning rates"):
        engine.learning_rate()


# -- non-finite gradients --------------------------------------------------------------------------


@KINDS
@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_non_finite_gradients_reach_nothing(stage: int, dtype: str, bad: float, batch: Tensor) -> None:
    engine = make_engine(stage=stage, dtype=dtype)
    update(engine, batch)
    before, live = engine.state_tensors(), weights(engine)
    norm, stepped = poisoned_update(engine, batch, bad)
    assert not stepped
    assert norm != norm or norm == float("inf")
    assert_same(before, engine.state_tensors())
    assert_same(live, weights(engine))
    assert engine.steps() == 1


@KINDS
def test_training_goes_on_after_a_dropped_update(stage: int, dtype: str, batch: Tensor) -> None:
    hit, spared = (make_engine(stage=stage, dtype=dtype) for _ in range(2))
    for engine in (hit, spared):
        update(engine, batch)
    poisoned_update(hit, batch, float("nan"))
    for engine in (hit, spared):
        assert update(engine, batch, 8)[1]
    assert_same(hit.state_tensors(), spared.state_tensors())
    assert hit.steps() == spared.steps() == 2


# -- taking back -----------------------------------------------------------------------------------


@KINDS
def test_restore_brings_back_weights_moments_and_step(stage: int, dtype: str, batch: Tensor) -> None:
    engine = make_engine(stage=stage, dtype=dtype)
    for _ in range(2):
        update(engine, batch)
    snapshot, before, live = engine.snapshot(), engine.state_tensors(), weights(engine)
    first = [update(engine, batch, 8) for _ in range(3)]
    after = engine.state_tensors()
    assert differs(before, after)
    engine.restore(snapshot)
    assert_same(before, engine.state_tensors())
    assert_same(live, weights(engine))
    assert engine.steps() == 2
    assert [update(engine, batch, 8) for _ in range(3)] == first
    assert_same(after, engine.state_tensors())


@KINDS
def test_restore_to_before_the_first_update(stage: int, dtype: str, batch: Tensor) -> None:
    engine, fresh = (make_engine(stage=stage, dtype=dtype) for _ in range(2))
    snapshot = engine.snapshot()
    update(engine, batch)
    engine.restore(snapshot)
    assert engine.steps() == 0
    for other in (engine, fresh):
        update(other, batch)
    assert_same(engine.state_tensors(), fresh.state_tensors())


@STAGES
def test_restore_drops_half_accumulated_gradients(stage: int, batch: Tensor) -> None:
    engine, clean = (make_engine(stage=stage) for _ in range(2))
    snapshot = engine.snapshot()
    engine.backward(token_loss(engine.module, batch, 10), last=False)
    engine.restore(snapshot)
    for other in (engine, clean):
        update(other, batch)
    assert_same(engine.state_tensors(), clean.state_tensors())


def test_snapshot_buffers_are_reused_and_an_old_one_is_refused(batch: Tensor) -> None:
    engine = make_engine()
    old = engine.snapshot()
    places = [buffer.data_ptr() for buffer in engine._buffers]
    update(engine, batch)
    new = engine.snapshot()
    assert [buffer.data_ptr() for buffer in engine._buffers] == places
    with pytest.raises(TrainingError, match="newest snapshot"):
        engine.restore(old)
    engine.restore(new)


# -- leaving and coming back -----------------------------------------------------------------------


@KINDS
def test_three_steps_save_three_steps_equals_load_three_steps(stage: int, dtype: str, batch: Tensor) -> None:
    engine = make_engine(stage=stage, dtype=dtype)
    for _ in range(3):
        update(engine, batch, 8)
    tensors, steps = engine.state_tensors(), engine.steps()
    resumed = make_engine(small_model(seed=9), stage=stage, dtype=dtype)
    resumed.load_state(tensors, steps)
    assert_same(tensors, resumed.state_tensors())
    for _ in range(3):
        assert update(engine, batch, 8) == update(resumed, batch, 8)
    assert_same(engine.state_tensors(), resumed.state_tensors())
    assert_same(weights(engine), weights(resumed))
    assert resumed.steps() == 6


@STAGES
def test_state_is_named_by_parameter_and_float32(stage: int, batch: Tensor) -> None:
    model = small_model()
    engine = make_engine(model, stage=stage, dtype="bfloat16")
    update(engine, batch)
    tensors = engine.state_tensors()
    names = {name for name, _ in model.named_parameters()}
    kinds = ("model", "exp_avg", "exp_avg_sq")
    assert tensors.keys() == {f"{kind}/{name}" for kind in kinds for name in names}
    assert all(tensor.dtype == torch.float32 for tensor in tensors.values())
    for name, parameter in model.named_parameters():
        assert parameter.dtype == torch.bfloat16
        assert torch.equal(tensors[f"model/{name}"].bfloat16(), parameter.detach())
    # Masters hold more than bfloat16 can, else small updates would be lost.
    assert differs(tensors, {k: v.bfloat16().float() for k, v in tensors.items()})


@pytest.mark.parametrize(("before", "after"), [(0, 1), (1, 3), (3, 0)])
def test_a_moved_stage_continues_the_same_run(before: int, after: int, batch: Tensor) -> None:
    first = make_engine(stage=before)
    update(first, batch)
    second = make_engine(stage=after)
    second.load_state(first.state_tensors(), first.steps())
    assert_same(first.state_tensors(), second.state_tensors())
    for engine in (first, second):
        update(engine, batch)
    one, other = first.state_tensors(), second.state_tensors()
    for name in one:
        torch.testing.assert_close(one[name], other[name], rtol=1e-4, atol=5e-5)


def test_load_refuses_another_model(batch: Tensor) -> None:
    engine = make_engine()
    before = engine.state_tensors()
    tensors = dict(before)
    tensors["model/model.norm.weight"] = torch.zeros(17)
    with pytest.raises(CheckpointError, match=r"'model/model.norm.weight'.*\(17,\).*\(16,\)"):
        engine.load_state(tensors, 1)
    del tensors["model/model.norm.weight"]
    with pytest.raises(CheckpointError, match="found None"):
        engine.load_state(tensors, 1)
    assert_same(before, engine.state_tensors())
    assert engine.steps() == 0


@STAGES
def test_untied_models_and_frozen_parameters(stage: int, batch: Tensor) -> None:
    model = small_model(tied=False)
    model.model.embed_tokens.weight.requires_grad_(False)
    frozen = model.model.embed_tokens.weight.detach().clone()
    engine = make_engine(model, stage=stage)
    head = model.lm_head.weight.detach().clone()
    update(engine, batch)
    assert torch.equal(model.model.embed_tokens.weight, frozen)
    assert not torch.equal(model.lm_head.weight, head)
    assert "model/lm_head.weight" in engine.state_tensors()
    assert "model/model.embed_tokens.weight" not in engine.state_tensors()


# -- misuse ----------------------------------------------------------------------------------------


def test_step_without_gradients_is_refused(batch: Tensor) -> None:
    engine = make_engine()
    with pytest.raises(TrainingError, match="last=True"):
        engine.step()
    engine.backward(token_loss(engine.module, batch, 10), last=False)
    with pytest.raises(TrainingError, match="last=True"):
        engine.step()


@pytest.mark.parametrize(("stage", "dtype"), [(4, "auto"), (1, "float8")])
def test_unknown_stage_and_dtype_are_refused(stage: int, dtype: str) -> None:
    with pytest.raises(InputError, match="use"):
        make_engine(stage=stage, dtype=dtype)


def test_close_gives_the_model_back(batch: Tensor) -> None:
    model = small_model()
    engine = make_engine(model)
    update(engine, batch)
    engine.close()
    assert torch.isfinite(model(input_ids=batch).logits).all()
    again = make_engine(model)
    assert update(again, batch)[1]


# -- processes of their own ------------------------------------------------------------------------

SCRIPT = """
import sys
import torch
from safetensors.torch import save_file
from tests.trainer.test_engine import make_engine, token_loss

batch = torch.randint(0, 23, (32, 9), generator=torch.Generator().manual_seed(5))
for stage in (0, 1, 3):
    for micro in (1, 4, 16):
        engine = make_engine(stage=stage, max_grad_norm=0.0)
        parts = batch.chunk(engine.world_size)[engine.rank].split(micro)
        for index, part in enumerate(parts):
            loss = token_loss(engine.module, part, batch[:, 1:].numel())
            engine.backward(loss, last=index == len(parts) - 1)
        assert engine.step().stepped
        tensors = engine.state_tensors()  # after one step the first moment is 0.1 of the gradient
        if engine.rank == 0:
            first = {n: t for n, t in tensors.items() if n.startswith("exp_avg/")}
            save_file(first, f"{sys.argv[1]}/gradient{stage}-{micro}.safetensors")
        engine.close()
    engine = make_engine(stage=stage)
    rows = batch.chunk(engine.world_size)[engine.rank]
    for _ in range(3):
        parts = rows.split(4)
        for index, part in enumerate(parts):
            loss = token_loss(engine.module, part, batch[:, 1:].numel())
            engine.backward(loss, last=index == len(parts) - 1)
        assert engine.step().stepped
    tensors, snapshot = engine.state_tensors(), engine.snapshot()
    engine.load_state(tensors, engine.steps())
    engine.restore(snapshot)
    again = engine.state_tensors()
    assert all(torch.equal(tensors[name], again[name]) for name in tensors)
    if engine.rank == 0:
        save_file(tensors, f"{sys.argv[1]}/stage{stage}.safetensors")
    # One rank's gradients are not finite: no rank may step.
    factor = float("nan") if engine.rank == engine.world_size - 1 else 1.0
    engine.backward(token_loss(engine.module, rows, 9) * factor, last=True)
    assert not engine.step().stepped
    again = engine.state_tensors()
    assert all(torch.equal(tensors[name], again[name]) for name in tensors)
    assert engine.steps() == 3
    engine.close()
if engine.world_size > 1:
    from autotune.trainer.group import leave_now

    leave_now(0)
"""


def start(out: Path, **launched: str) -> subprocess.Popen[str]:
    """Run SCRIPT in a process whose PATH holds no program at all, a compiler least of all."""
    launcher = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT")
    inherited = {k: v for k, v in os.environ.items() if k not in launcher}
    (out / "bin").mkdir(exist_ok=True)
    own = {
        "PATH": str(out / "bin"),
        "PYTHONPATH": str(ROOT),
        "TORCH_EXTENSIONS_DIR": str(out / "extensions"),
    }
    return subprocess.Popen(
        [sys.executable, "-c", SCRIPT, str(out)],
        env=inherited | own | launched,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        cwd=ROOT,
    )


def assert_gradients_and_weights_equal_plain_torch(folder: Path) -> None:
    """For every stage, and the gradient for every micro batch too."""
    batch = torch.randint(0, 23, (32, 9), generator=torch.Generator().manual_seed(5))
    model = small_model()
    token_loss(model, batch, batch[:, 1:].numel()).backward()
    plain = PlainTorch()
    for _ in range(3):
        plain.update(batch)
    for stage in (0, 1, 3):
        for micro in (1, 4, 16):
            moments = load_file(folder / f"gradient{stage}-{micro}.safetensors")
            for name, parameter in model.named_parameters():
                gradient = moments[f"exp_avg/{name}"] / (1 - BETAS[0])
                torch.testing.assert_close(gradient, parameter.grad, rtol=1e-4, atol=1e-6)
        tensors = load_file(folder / f"stage{stage}.safetensors")
        for name, value in plain.model.named_parameters():
            torch.testing.assert_close(tensors[f"model/{name}"], value.detach(), rtol=1e-4, atol=2e-5)


@pytest.mark.slow
def test_one_rank_starts_without_a_compiler_and_in_silence(tmp_path: Path) -> None:
    process = start(tmp_path)
    out, err = process.communicate(timeout=240)
    assert process.returncode == 0, err
    assert out == ""
    assert "DeepSpeed" not in err and "[INFO]" not in err
    assert not (tmp_path / "extensions").exists()  # where an op would have been compiled
    assert_gradients_and_weights_equal_plain_torch(tmp_path)


@pytest.mark.slow
def test_two_ranks_equal_plain_torch(tmp_path: Path) -> None:
    common = {"WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(get_free_port())}
    ranks = [start(tmp_path, RANK=str(r), LOCAL_RANK=str(r), **common) for r in range(2)]
    for process in ranks:
        _, err = process.communicate(timeout=240)
        assert process.returncode == 0, err
    assert_gradients_and_weights_equal_plain_torch(tmp_path)
