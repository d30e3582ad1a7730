"""Checkpoints: whole or not there, verified before use, loadable by anybody."""

from __future__ import annotations

import errno
import json
import logging
import os
import resource
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import SafetensorError
from safetensors.torch import load_file
from tokenizers import Tokenizer, models, pre_tokenizers
from torch import Tensor
from transformers import (
    AutoModelForCausalLM,
    AutoTokenizer,
    PreTrainedTokenizerFast,
    Qwen2Config,
    Qwen2ForCausalLM,
)

from autotune.errors import CheckpointError
from autotune.trainer.checkpoint import find_checkpoints, load_checkpoint, save_checkpoint
from autotune.trainer.engine import Engine

STATE = {"knobs": {"kl_coef": 0.005}, "cursor": [1, 2], "controller": None}
BATCH = torch.randint(0, 12, (8, 6), generator=torch.Generator().manual_seed(3))  # [B, L]


class Run:
    """A model that trains and saves itself under `root`."""

    def __init__(self, root: Path, stage: int = 1, seed: int = 0, dtype: str = "auto") -> None:
        torch.manual_seed(seed)
        self.root = root
        self.model = Qwen2ForCausalLM(
            Qwen2Config(
                vocab_size=12,
                hidden_size=8,
                num_hidden_layers=1,
                num_attention_heads=2,
                num_key_value_heads=1,
                intermediate_size=12,
                max_position_embeddings=16,
                tie_word_embeddings=True,
            )
        )
        self.engine = Engine(
            self.model,
            zero_stage=stage,
            learning_rate=1e-2,
            betas=(0.9, 0.99),
            weight_decay=0.0,
            max_grad_norm=1.0,
            dtype=dtype,
        )
        words = Tokenizer(models.WordLevel({c: i for i, c in enumerate("0123456789>?")}, "?"))
        words.pre_tokenizer = pre_tokenizers.Split("", "isolated")
        self.tokenizer = PreTrainedTokenizerFast(tokenizer_object=words, unk_token="?")

    def train(self, updates: int) -> None:
        for _ in range(updates):
            loss = self.engine.module(input_ids=BATCH, labels=BATCH).loss
            self.engine.backward(loss, last=True)
            self.engine.step()

    def save(
        self,
        rollout: int,
        keep: int = 9,
        state: dict[str, Any] | None = None,
        on_phase: Callable[[str], None] | None = None,
    ) -> Path:
        return save_checkpoint(
            self.root,
            rollout,
            engine=self.engine,
            model=self.model,
            tokenizer=self.tokenizer,
            state=STATE if state is None else state,
            keep=keep,
            on_phase=on_phase,
        )


@pytest.fixture
def run(tmp_path: Path) -> Run:
    return Run(tmp_path / "checkpoints")


def names(root: Path) -> list[str]:
    return sorted(path.name for path in root.iterdir())


def assert_same(left: dict[str, Tensor], right: dict[str, Tensor]) -> None:
    assert left.keys() == right.keys()
    assert all(torch.equal(left[name], right[name]) for name in left)


# -- what is in it -----------------------------------------------------------------------------


def test_folder_holds_what_its_manifest_lists(run: Run) -> None:
    path = run.save(10)
    assert path == run.root / "rollout-00010"
    manifest = json.loads((path / "manifest.json").read_text())
    listed = set(manifest["files"])
    assert listed == {f.name for f in path.iterdir()} - {"manifest.json"}
    wanted = {"config.json", "model.safetensors", "optimizer.safetensors", "state.json"}
    assert wanted <= listed
    assert manifest["rollout"] == 10
    assert (run.root / "latest").read_text().strip() == "rollout-00010"
    assert names(run.root) == ["latest", "rollout-00010"]


def test_equal_states_are_equal_files(run: Run) -> None:
    """Eight times: with two metadata keys, safetensors swapped them in half of all files."""
    saved = [run.save(rollout) / "optimizer.safetensors" for rollout in range(8)]
    assert len({path.read_bytes() for path in saved}) == 1


def test_nothing_in_it_is_a_pickle(run: Run) -> None:
    kinds = {file.suffix for file in run.save(0).iterdir()}
    assert kinds <= {".json", ".safetensors", ".jinja", ".txt"}


@pytest.mark.parametrize(
    ("stage", "dtype"), [(0, "float32"), (1, "float32"), (1, "bfloat16"), (3, "float32"), (3, "bfloat16")]
)
def test_from_pretrained_gives_the_trained_model(tmp_path: Path, stage: int, dtype: str) -> None:
    run = Run(tmp_path, stage, dtype=dtype)
    run.train(2)
    path = run.save(1)
    model = AutoModelForCausalLM.from_pretrained(path)
    assert model.dtype == getattr(torch, dtype)
    with run.engine.whole_weights():
        trained, loaded = dict(run.model.named_parameters()), dict(model.named_parameters())
        assert_same({n: p.data for n, p in trained.items()}, {n: p.data for n, p in loaded.items()})
        assert torch.equal(model(BATCH).logits, run.model(BATCH).logits)
    tokenizer = AutoTokenizer.from_pretrained(path)
    assert tokenizer("12>")["input_ids"] == run.tokenizer("12>")["input_ids"] == [1, 2, 10]


@pytest.mark.parametrize("stage", [0, 1, 3])
def test_resume_is_bit_equal(tmp_path: Path, stage: int) -> None:
    run = Run(tmp_path, stage)
    run.train(3)
    path = run.save(3)
    run.train(3)
    other = Run(tmp_path, stage, seed=7)
    assert load_checkpoint(path, other.engine) == STATE
    assert other.engine.steps() == 3
    other.train(3)
    assert_same(run.engine.state_tensors(), other.engine.state_tensors())


def test_load_goes_back_in_place(run: Run) -> None:
    run.train(1)
    path, before = run.save(1), run.engine.state_tensors()
    run.train(2)
    load_checkpoint(path, run.engine)
    assert_same(before, run.engine.state_tensors())
    assert run.engine.steps() == 1


# -- refusals ----------------------------------------------------------------------------------


def test_non_finite_weights_are_refused(run: Run) -> None:
    run.save(0)
    tensors = run.engine.state_tensors()
    tensors["exp_avg/model.norm.weight"][3] = float("nan")
    run.engine.load_state(tensors, 1)
    with pytest.raises(CheckpointError, match=r"rollout-00001 not written.*exp_avg/model.norm"):
        run.save(1)
    assert names(run.root) == ["latest", "rollout-00000"]


@pytest.mark.parametrize("value", [float("nan"), {1, 2}, torch.zeros(1)])
def test_state_that_is_not_json_is_refused(run: Run, value: object) -> None:
    with pytest.raises(CheckpointError, match="state cannot be saved"):
        run.save(1, state={"x": value})
    assert not run.root.exists()


def test_another_model_is_refused(run: Run, tmp_path: Path) -> None:
    path = run.save(1)
    other = Run(tmp_path / "other")
    other.engine._trainable.pop("model.norm.weight")
    with pytest.raises(CheckpointError, match="does not fit this model"):
        load_checkpoint(path, other.engine)


# -- a full disk -------------------------------------------------------------------------------

NO_SPACE = OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
RUST = SafetensorError("Error while serializing: I/O error: No space left on device (os error 28)")


@pytest.mark.parametrize(
    ("place", "fault"),
    [
        ("transformers.PreTrainedModel.save_pretrained", RUST),
        ("transformers.PreTrainedTokenizerBase.save_pretrained", NO_SPACE),
        ("safetensors.torch.save_file", RUST),
        ("pathlib.Path.write_text", NO_SPACE),
        ("os.fsync", NO_SPACE),
        ("pathlib.Path.rename", NO_SPACE),
    ],
)
def test_a_full_disk_leaves_the_last_good_checkpoint(
    run: Run, monkeypatch: pytest.MonkeyPatch, place: str, fault: Exception
) -> None:
    run.train(1)
    good = run.save(1)
    run.train(1)

    def full(*args: Any, **more: Any) -> None:
        raise fault

    with monkeypatch.context() as disk:
        disk.setattr(place, full)
        with pytest.raises(CheckpointError, match=r"rollout-00002 not written: .*No space left") as caught:
            run.save(2)
    assert "rollout-00001 is the last whole checkpoint. Make room" in str(caught.value)
    assert names(run.root) == ["latest", "rollout-00001"], "nothing half-written stays and takes space"
    assert find_checkpoints(run.root) == [good]
    assert run.save(2) in find_checkpoints(run.root), "with room again it goes on"


def test_a_file_that_may_not_grow_is_noticed(run: Run) -> None:
    """The operating system's own refusal, in the middle of a file."""
    good = run.save(1)
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (1500, hard))
    try:
        with pytest.raises(CheckpointError, match=r"rollout-00002 not written: .*File too large"):
            run.save(2)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert find_checkpoints(run.root) == [good]
    assert names(run.root) == ["latest", "rollout-00001"]


def test_a_pointer_that_cannot_be_written_takes_no_checkpoint_with_it(
    run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(self: Path, target: Path) -> None:
        raise NO_SPACE

    run.save(1)
    with monkeypatch.context() as disk:
        disk.setattr(Path, "replace", full)
        with pytest.raises(CheckpointError, match="rollout-00002 is written, but not the pointer to it"):
            run.save(2)
    assert [path.name for path in find_checkpoints(run.root)] == ["rollout-00002", "rollout-00001"]


# -- damage ------------------------------------------------------------------------------------


def truncate(file: Path) -> None:
    file.write_bytes(file.read_bytes()[:-7])


def flip_a_bit(file: Path) -> None:
    content = bytearray(file.read_bytes())
    content[len(content) // 2] ^= 1
    file.write_bytes(content)


def remove(file: Path) -> None:
    file.unlink()


@pytest.mark.parametrize(
    ("damage", "reason"),
    [(truncate, "bytes, expected"), (flip_a_bit, "SHA-256"), (remove, "is missing")],
)
@pytest.mark.parametrize(
    "victim", ["model.safetensors", "optimizer.safetensors", "state.json", "tokenizer.json"]
)
def test_damaged_file_falls_back_to_the_one_before(
    run: Run,
    damage: Callable[[Path], None],
    reason: str,
    victim: str,
    caplog: pytest.LogCaptureFixture,
) -> None:
    older, newer = run.save(1), run.save(2)
    damage(newer / victim)
    with caplog.at_level(logging.WARNING):
        assert find_checkpoints(run.root) == [older]
    (message,) = [record.getMessage() for record in caplog.records]
    assert victim in message and reason in message and "rollout-00002" in message
    with pytest.raises(CheckpointError, match=reason):
        load_checkpoint(newer, run.engine)
    assert load_checkpoint(older, run.engine) == STATE


@pytest.mark.parametrize(
    "content",
    ["", "{", "[]", "null", "{}", '{"format": 1, "files": {"a": 1}}', '{"format": 1, "files": {}}'],
)
def test_damaged_manifest_falls_back(run: Run, content: str) -> None:
    older, newer = run.save(1), run.save(2)
    (newer / "manifest.json").write_text(content)
    assert find_checkpoints(run.root) == [older]


def test_a_flipped_bit_anywhere_in_the_manifest_is_harmless_or_noticed(run: Run) -> None:
    path = run.save(1)
    manifest = path / "manifest.json"
    intact = manifest.read_bytes()
    for position in range(0, len(intact), 7):
        manifest.write_bytes(intact[:position] + bytes([intact[position] ^ 4]) + intact[position + 1 :])
        if find_checkpoints(run.root):
            assert load_checkpoint(path, run.engine) == STATE


def test_a_newer_format_is_refused_by_name(run: Run) -> None:
    path = run.save(1)
    manifest = json.loads((path / "manifest.json").read_text())
    (path / "manifest.json").write_text(json.dumps(manifest | {"format": 2}))
    with pytest.raises(CheckpointError, match="format is 2"):
        load_checkpoint(path, run.engine)


def test_no_folder_means_no_checkpoints(tmp_path: Path) -> None:
    assert find_checkpoints(tmp_path / "nowhere") == []
    (tmp_path / "rollout-1").mkdir()
    (tmp_path / ".unfinished-rollout-00003").mkdir()
    assert find_checkpoints(tmp_path) == []


# -- order and kills ---------------------------------------------------------------------------


class Killed(BaseException):
    """Stands for the process ending here: nothing may catch it."""


def kill_at(phase: str) -> Callable[[str], None]:
    def on_phase(reached: str) -> None:
        if reached == phase:
            raise Killed

    return on_phase


def test_kill_before_the_rename_leaves_the_old_set(run: Run) -> None:
    older = run.save(1)
    with pytest.raises(Killed):
        run.save(2, on_phase=kill_at("save:files"))
    assert find_checkpoints(run.root) == [older]
    assert (run.root / "latest").read_text().strip() == "rollout-00001"
    newer = run.save(2)
    assert find_checkpoints(run.root) == [newer, older]
    assert names(run.root) == ["latest", "rollout-00001", "rollout-00002"]


def test_kill_after_the_rename_leaves_the_new_set(run: Run) -> None:
    older = run.save(1)
    with pytest.raises(Killed):
        run.save(2, on_phase=kill_at("save:renamed"))
    assert find_checkpoints(run.root) == [run.root / "rollout-00002", older]
    run.save(3)
    assert (run.root / "latest").read_text().strip() == "rollout-00003"


def test_everything_is_on_the_disk_before_it_is_visible(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    events: list[str] = []
    real_fsync, real_rename, real_replace = os.fsync, Path.rename, Path.replace

    def fsync(descriptor: int) -> None:
        events.append(f"fsync {Path(os.readlink(f'/proc/self/fd/{descriptor}')).name}")
        real_fsync(descriptor)

    def moved(real: Callable[[Path, Path], Path]) -> Callable[[Path, Path], Path]:
        def move(self: Path, target: Path) -> Path:
            events.append(f"move to {Path(target).name}")
            return real(self, target)

        return move

    monkeypatch.setattr(os, "fsync", fsync)
    monkeypatch.setattr(Path, "rename", moved(real_rename))
    monkeypatch.setattr(Path, "replace", moved(real_replace))
    path = run.save(5)
    visible = events.index("move to rollout-00005")
    flushed = {event.removeprefix("fsync ") for event in events[:visible]}
    assert {file.name for file in path.iterdir()} | {".unfinished-rollout-00005"} <= flushed
    assert events[visible + 1 :] == [
        "fsync checkpoints",
        "fsync .unfinished-latest",
        "move to latest",
        "fsync checkpoints",
    ]


def test_ring_keeps_the_newest_and_the_first(run: Run) -> None:
    for rollout in (0, 10, 20, 30, 40):
        run.save(rollout, keep=2)
    found = [path.name for path in find_checkpoints(run.root)]
    assert found == ["rollout-00040", "rollout-00030", "rollout-00000"]
    assert names(run.root) == ["latest", *reversed(found)]


def test_ring_of_one_keeps_one_and_the_first(run: Run) -> None:
    for rollout in (0, 1, 2):
        run.save(rollout, keep=1)
    assert [path.name for path in find_checkpoints(run.root)] == ["rollout-00002", "rollout-00000"]


def test_order_is_by_number_beyond_five_digits(run: Run) -> None:
    for rollout in (99_999, 100_000):
        run.save(rollout)
    found = [path.name for path in find_checkpoints(run.root)]
    assert found == ["rollout-100000", "rollout-99999"]


def test_a_rollout_may_be_written_anew(run: Run) -> None:
    run.save(1)
    run.train(1)
    path = run.save(1, state={"new": True})
    assert load_checkpoint(path, run.engine) == {"new": True}
    saved = load_file(path / "optimizer.safetensors")
    assert_same(saved, run.engine.state_tensors())
    assert names(run.root) == ["latest", "rollout-00001"]


def test_saving_prints_nothing(run: Run, capfd: pytest.CaptureFixture[str]) -> None:
    run.save(1)
    captured = capfd.readouterr()
    assert captured.out == captured.err == ""
