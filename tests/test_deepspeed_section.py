"""The recipe's `deepspeed` section: the table of what is supported, and a user's own JSON."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from autotune.check import check
from autotune.errors import RecipeError
from autotune.recipe import load_recipe
from autotune.recipe.deepspeed import DTYPES, OFFLOADS, STAGES, plan, refusal

ROOT = Path(__file__).resolve().parent.parent

HUGGING_FACE: dict[str, Any] = {
    "bf16": {"enabled": "auto"},
    "fp16": {"enabled": "auto", "loss_scale": 0},
    "optimizer": {"type": "AdamW", "params": {"lr": "auto", "betas": "auto"}},
    "scheduler": {"type": "WarmupLR", "params": {"warmup_num_steps": "auto"}},
    "zero_optimization": {
        "stage": 3,
        "offload_optimizer": {"device": "cpu", "pin_memory": True},
        "offload_param": {"device": "cpu", "pin_memory": True},
        "overlap_comm": True,
        "contiguous_gradients": True,
        "sub_group_size": 1e9,
        "reduce_bucket_size": "auto",
        "stage3_prefetch_bucket_size": 1000,
        "stage3_gather_16bit_weights_on_model_save": True,
    },
    "gradient_accumulation_steps": "auto",
    "gradient_clipping": 0.5,
    "steps_per_print": 2000,
    "train_batch_size": "auto",
    "train_micro_batch_size_per_gpu": "auto",
    "wall_clock_breakdown": False,
}
"""The kind of file that users bring along."""


@pytest.fixture
def recipe(tmp_path: Path):
    """A recipe beside its `ds.json`; the content may be text."""

    def write(content: Any, section: str = "{config: ds.json}", model: str = "{}") -> Path:
        text = content if isinstance(content, str) else json.dumps(content)
        (tmp_path / "ds.json").write_text(text)
        path = tmp_path / "r.yaml"
        path.write_text(f"deepspeed: {section}\nmodel: {model}\n")
        return path

    return write


def problems(path: Path) -> list[str]:
    with pytest.raises(RecipeError) as caught:
        load_recipe(path)
    return [str(problem).replace(str(path.parent) + "/", "") for problem in caught.value.problems]


def test_a_users_file_is_taken_key_by_key(recipe) -> None:
    wanted = plan(load_recipe(recipe(HUGGING_FACE)).deepspeed)
    assert (wanted.stage, wanted.offload) == (3, "all")
    assert wanted.extra == {
        "steps_per_print": 2000,
        "wall_clock_breakdown": False,
        "zero_optimization": {"sub_group_size": 1e9, "stage3_prefetch_bucket_size": 1000},
    }
    assert "gradient_clipping = 0.5 is overridden: trainer.max_grad_norm" in wanted.notes
    assert not any("train_batch_size" in note for note in wanted.notes), "`auto` asked for just that"
    assert any(note.startswith("optimizer = ") and "always AdamW" in note for note in wanted.notes)
    assert any("zero_optimization.overlap_comm = true" in note for note in wanted.notes)


def test_check_tells_what_is_overridden(recipe) -> None:
    advice = [item.text for item in check(load_recipe(recipe(HUGGING_FACE))).advice]
    assert any("gradient_clipping = 0.5 is overridden: trainer.max_grad_norm" in text for text in advice)


def test_a_file_without_zero_is_stage_0(recipe) -> None:
    wanted = plan(load_recipe(recipe({})).deepspeed)
    assert (wanted.stage, wanted.offload, wanted.extra, wanted.notes) == (0, "none", {}, ())


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ({"fp16": {"enabled": True}}, "fp16: float16 is not supported; remove the section and set model."),
        ({"amp": {"enabled": True}}, "amp: amp is not supported with this trainer; remove it"),
        ({"zero_optimization": True}, 'zero_optimization: received True; expected an object such as {"st'),
        ({"zero_optimization": {"stage": 4}}, "zero_optimization.stage: received stage 4; expected one of"),
        ({"zero_optimization": {"stage": 3, "zero_quantized_weights": True}}, "zero_quantized_weights: "),
        (
            {"zero_optimization": {"stage": 3, "offload_optimizer": {"device": "nvme"}}},
            "offload_optimizer.device: received 'nvme'; expected none or cpu",
        ),
        (
            {"zero_optimization": {"stage": 3, "offload_optimizer": {"device": "cpu", "ratio": 0.3}}},
            "offload_optimizer.ratio: ratio is not supported",
        ),
        (
            {"zero_optimization": {"stage": 3, "offload_param": {"device": "cpu"}}},
            "offload_param: weights in host memory with their optimizer on the GPU",
        ),
        (
            {"zero_optimization": {"stage": 0, "offload_optimizer": {"device": "cpu"}}},
            "offload 'optimizer' with zero_stage 0: nothing is split",
        ),
        ("{", "is not JSON"),
        ("[]", "holds list; expected a JSON object"),
    ],
)
def test_what_cannot_be_kept_is_refused_with_its_name(recipe, content: Any, message: str) -> None:
    (problem,) = problems(recipe(content))
    assert problem.startswith("r.yaml:1: deepspeed.config: ") and message in problem


def test_a_missing_file_is_told(recipe) -> None:
    (problem,) = problems(recipe({}, "{config: nowhere.json}"))
    assert "nowhere.json cannot be read: No such file" in problem


def test_the_stage_is_said_in_one_place(recipe) -> None:
    (problem,) = problems(recipe({"zero_optimization": {"stage": 3}}, "{config: ds.json, zero_stage: 2}"))
    assert "deepspeed.zero_stage: received 2, but ds.json says 3; say it in one place" in problem
    same = recipe({"zero_optimization": {"stage": 2}}, "{config: ds.json, zero_stage: 2}")
    assert plan(load_recipe(same).deepspeed).stage == 2


@pytest.mark.parametrize("stage", STAGES)
@pytest.mark.parametrize("dtype", [*DTYPES, "auto"])
@pytest.mark.parametrize("offload", OFFLOADS)
def test_check_refuses_what_the_table_does(recipe, stage: int, dtype: str, offload: str) -> None:
    path = recipe({}, f"{{zero_stage: {stage}, offload: {offload}}}", f"{{dtype: {dtype}}}")
    refused = refusal(stage, "float32" if dtype == "auto" else dtype, offload)
    assert bool(refused) == ((stage == 0 and offload != "none") or (stage < 3 and offload == "all"))
    if refused:
        (problem,) = problems(path)
        assert refused in problem and "use zero_stage" in problem
    else:
        assert plan(load_recipe(path).deepspeed).offload == offload


def test_the_documents_table_is_the_codes() -> None:
    rows = [
        line.split("|")[1:-1]
        for line in (ROOT / "docs/deepspeed.md").read_text().splitlines()
        if line.startswith(("| 0", "| 1", "| 2", "| 3"))
    ]
    told = {int(cells[0]): [cell.strip() for cell in cells[2:]] for cells in rows}
    assert set(told) == set(STAGES)
    for stage, cells in told.items():
        for offload, cell in zip(OFFLOADS, cells, strict=True):
            supported = [dtype for dtype in DTYPES if not refusal(stage, dtype, offload)]
            assert cell == (", ".join(supported) or "refused")
