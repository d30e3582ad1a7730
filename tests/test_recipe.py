"""The recipe: YAML's traps, all problems at once, overrides, cross checks, facts."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

from autotune.decisions import to_json
from autotune.errors import RecipeError
from autotune.knobs import KNOBS, batch_problems
from autotune.recipe import (
    Recipe,
    explain,
    facts_from_json,
    knob_vector,
    load_recipe,
    recipe_facts,
)


@pytest.fixture
def write(tmp_path: Path):
    def file(text: str | bytes, name: str = "r.yaml") -> Path:
        path = tmp_path / name
        path.write_bytes(text if isinstance(text, bytes) else text.encode())
        return path

    return file


def problems(path: Path, *overrides: str) -> list[str]:
    with pytest.raises(RecipeError) as caught:
        load_recipe(path, overrides)
    return [str(p).replace(f"{path.parent}/", "") for p in caught.value.problems]


def only(path: Path, *overrides: str) -> str:
    found = problems(path, *overrides)
    assert len(found) == 1, found
    return found[0]


# ------------------------------------------------------------------------------- reading YAML


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("1e-6", 1e-6), ("1.0E-6", 1e-6), ("1E-6", 1e-6), ("+1e-6", 1e-6), (".5", 0.5),
        ("0", 0.0), ("1_0", 10.0), ("0x1", 1.0),
    ],
)  # fmt: skip
def test_every_way_to_write_a_number(write, text: str, value: float) -> None:
    assert load_recipe(write(f"trainer: {{kl_coef: {text}}}")).trainer.kl_coef == value
    assert load_recipe(write("seed: 1"), [f"trainer.kl_coef={text}"]).trainer.kl_coef == value


def test_off_is_text(write) -> None:
    recipe = load_recipe(write("control: {mode: off, policies: {B4b: off, A4: on, A3: false}}"))
    assert recipe.control.mode == "off"
    assert recipe.control.policies == {"B4b": "off", "A4": "on", "A3": False}


@pytest.mark.parametrize("text", ["60.0", "6e1", "60"])
def test_whole_numbers_may_be_written_as_floats(write, text: str) -> None:
    rollouts = load_recipe(write(f"trainer: {{rollouts: {text}}}")).trainer.rollouts
    assert rollouts == 60 and type(rollouts) is int


def test_a_byte_order_mark_is_read_over(write) -> None:
    assert load_recipe(write(b"\xef\xbb\xbfseed: 3\n")).seed == 3


def test_json_is_yaml(write) -> None:
    recipe = load_recipe(write("seed: 3\ncontrol: {pin: [kl_coef]}"))
    assert load_recipe(write(recipe.model_dump_json(indent=2), "resolved.json")) == recipe


def test_the_file_name_gives_the_run_its_name(write) -> None:
    assert load_recipe(write("seed: 1", "my run(2).yaml")).folder() == "runs/my-run-2-1"
    assert load_recipe(write("name: x", "r.yaml")).name == "x"


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", r"r\.yaml:1: the file is empty; expected"),
        ("# only words\n", "the file is empty"),
        ("- a\n", "expected `field: value` lines"),
        ("seed: 1\ntrainer:\n\tkl_coef: 1\n", r"r\.yaml:3: is not YAML: a tab indents"),
        ("seed: 1\nname: 'x\n", r"r\.yaml:\d: is not YAML"),
        ("seed: 1\nseed: 2\n", r"r\.yaml:2: seed: appears twice; it was already set in line 1"),
        ("---\nseed: 1\n---\nseed: 2\n", "is not YAML: .*document"),
        ("name: !!python/object:os.system x\n", r"r\.yaml:1: name: tag .*os.system is not allowed"),
        ("trainer: !mine {kl_coef: 1}\n", "trainer: tag !mine is not allowed"),
        ("rewards: &a [*a]\n", r"rewards\.0: an alias contains itself"),
        ("trainer:\n  <<: {kl_coef: 1}\n", "`<<` is not part of YAML 1.2"),
        ("1: 2\n", "expected a field name, received 1"),
        ("seed: 1e400\n", r"seed: received \.inf; expected a whole number"),
        (f"seed: {'9' * 5000}\n", "seed: '9+.* cannot be read as number"),
        ('run_dir: "\\ud800"\n', "cannot be read as text"),
        (b"seed: \xff\n", r"r\.yaml:1: is not UTF-8"),
        (b"seed: 1\nname: \x00\n", r"r\.yaml:2: is not YAML"),
        (b"\xff\xfes\x00e\x00", "is not UTF-8"),
        ("x: " + "[" * 5000, "is nested too deeply"),
    ],
)  # fmt: skip
def test_text_that_is_no_recipe(write, text: str | bytes, message: str) -> None:
    assert re.search(message, only(write(text)))


def test_an_alias_bomb_costs_nothing(write) -> None:
    lines = ["a0: &a0 [x, x, x, x, x, x, x, x, x]"]
    lines += [f"a{i}: &a{i} [{', '.join([f'*a{i - 1}'] * 9)}]" for i in range(1, 30)]
    assert "expands to more than" in "\n".join(problems(write("\n".join(lines))))


def test_files_that_are_not_there(tmp_path: Path, write) -> None:
    write("seed: 1", "quickstart.yaml")
    assert "did you mean" in only(tmp_path / "quikstart.yaml")
    assert "is a folder" in only(tmp_path)
    assert "cannot be read" in only(Path("a\0b"))
    assert "larger than" in only(write("#" * 1_100_000))


# ------------------------------------------------------------------------- all problems at once

BAD = """\
seed: true
nmae: x
model: {path: ./models/mine}
rewards: [{type: exact_mach}, {type: exact_match, weight: "2"}]
trainer:
  rollouts: "60"
  train_batch_size: 64
  ppo_mini_batch_size: 24
  kl_coef: -.inf
  klcoef: 1e-6
  lr: 3
  lr: 4
control:
  mode: acts
  pace: 3
  pin: [klcoef]
  policies: {A4: {threshhold: 0.2}, a3: on, Q9: off}
run_dir: ../x
"""

EXPECTED = """\
r.yaml:1: seed: received true; expected a whole number
r.yaml:2: nmae: unknown field; received "x"; did you mean name?
r.yaml:3: model.path: there is no folder './models/mine'; give a model folder or a hub id
r.yaml:4: rewards.0: received {"type": "exact_mach"}; expected type: one of exact_match, regex, \
task, math_verify, model, import; did you mean exact_match?
r.yaml:4: rewards.1.weight: received "2"; expected a number; remove the quotes
r.yaml:6: trainer.rollouts: received "60"; expected a whole number; remove the quotes
r.yaml:8: trainer.ppo_mini_batch_size: 24 prompts does not divide train_batch_size 64; use 1, 2, \
4, 8, 16, 32, 64
r.yaml:9: trainer.kl_coef: received -.inf; expected a finite number
r.yaml:10: trainer.klcoef: unknown field; received 1e-06; did you mean kl_coef?
r.yaml:11: trainer.lr: unknown field; received 3; did you mean trainer.actor_learning_rate?
r.yaml:12: trainer.lr: appears twice; it was already set in line 11; keep one of them
r.yaml:14: control.mode: received "acts"; expected off, shadow or act; did you mean act?
r.yaml:15: control.pace: received 3; expected auto or at most 1
r.yaml:16: control.pin.0: received 'klcoef', which is no knob; did you mean kl_coef?
r.yaml:17: control.policies.A4.threshhold: received 0.2; A4 has no `threshhold`; did you mean \
threshold?
"""


def test_all_problems_come_at_once_with_their_lines(write) -> None:
    found = problems(write(BAD))
    assert found[: EXPECTED.count("\n")] == EXPECTED.splitlines()
    rest = "\n".join(found[EXPECTED.count("\n") :])
    assert "r.yaml:17: control.policies.Q9: unknown rule 'Q9'" in rest
    assert "r.yaml:17: control.policies.a3: unknown rule 'a3'; did you mean A3?" in rest
    assert 'r.yaml:18: run_dir: received "../x"; expected a path without `..`' in rest
    assert len(found) == EXPECTED.count("\n") + 3


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("trainer: {kl_coef: -1}", "received -1; expected at least 0"),
        ("trainer: {kl_coef: .nan}", r"received \.nan; expected a finite number"),
        ("trainer: {actor_learning_rate: 0}", "received 0; expected more than 0"),
        ("trainer: {actor_learning_rate: 3e4}", "expected at most 1"),
        ("trainer: {train_batch_size: 100000000000000000000000}", "at most 1,048,576 prompts"),
        ("trainer: {rollouts: 1.5}", "received 1.5; expected a whole number"),
        ("trainer: {rollout_n: 1}", "received 1; expected at least 2"),
        ("trainer: {clip_range: 1.5}", "expected less than 1"),
        ("trainer: {adam_betas: [0.9]}", r"adam_betas\.1: is missing"),
        ("trainer: {adam_betas: [0.9, 1]}", r"adam_betas\.1: received 1; expected within"),
        ("trainer: 3", "received 3; expected a section"),
        ("trainer: {num_rollout_batches: 8}", "there is no such field: it follows from"),
        ("trainer: {beta: 0.1}", r"did you mean trainer\.kl_coef\?"),
        ("kl_coef: 0.1", r"did you mean trainer\.kl_coef\?"),
        ("model: {trust_remote_code: true}", "code that comes with a model is never run"),
        ("model: {lora: {rank: 0}}", "received 0; expected at least 1"),
        ('model: {lora: {targets: [""]}}', "expected a layer's name"),
        ("trainer: {algorithm: grpoo}", "did you mean grpo?"),
        ("trainer: {algorithm: rloo, rollout_n: 1}", "rloo compares the responses to one prompt"),
        ("trainer: {critic_learning_rate: 1e-5}", "grpo has no critic; set algorithm: ppo"),
        ("trainer: {algorithm: dapo, critic: {gamma: 0.9}}", "dapo has no critic"),
        ("trainer: {algorithm: ppo, critic_learning_rate: 2}", "expected at most 1"),
        ("trainer: {algorithm: ppo, dynamic_sampling: 2}", "expected 0 with algorithm: ppo"),
        ("trainer: {kl: {placement: reward, estimator: k3}}", "expected k1, the only one"),
        ("trainer: {kl: {placement: both}}", "loss|reward"),
        ("trainer: {packing: {enabled: maybe}}", "auto|on|off"),
        ("trainer: {packing: {enabled: off, tokens: 4096}}", "cut by micro_batch_size"),
        ("trainer: {packing: {enabled: off, compile: true}}", "only packed layers are compiled"),
        ("{deepspeed: {zero_stage: 3}, trainer: {packing: {compile: true}}}", "gathers weights by hooks"),
        ("trainer: {packing: {enabled: off, head_tokens: 64}}", "received 64 with enabled: off; only packed"),
        ("rollout: {mismatch_bound: 0.01}", "old_log_probs: recompute, which asks nobody"),
        ("rollout: {log_probs: some}", "whose log-probs cost nothing"),
        ("rollout: {engine: vllm, log_probs: some, old_log_probs: sampler}", "most responses have none"),
        ("rollout: {engine: vllm, log_probs: some, importance_cap: 3}", "could not be weighted"),
        ("trainer: {packing: {enabled: off, compile_head: true}}", "only packed logits are chunked"),
        ("trainer: {packing: {enabled: off, graphs: true}}", "only packed passes are recorded"),
        ("trainer: {packing: {graphs: true}}", "received true with zero_stage 1; passes are recorded at"),
        ("{deepspeed: {zero_stage: 0}, model: {dtype: float32}, trainer: {packing: {graphs: true}}}",
         "passes are recorded in bfloat16 alone"),
        ("trainer: {packing: {leave_out_quiet: on}}", "whose terms act on every token"),
        ("trainer: {packing: {leave_out_quiet: on}, algorithm: ppo}", "a critic learns from every response"),
        ("model: {path: builtin:digit}", "unknown built-in model"),
        ("model: {path: gguf:no.gguf}", r"no GGUF file 'no\.gguf'"),
        ("task: {variant: sort6}", "expected a `type:` line, one of digits"),
        ("task: {type: digit}", "did you mean digits?"),
        ("task: {type: jsonl}", r"task\.path: is missing"),
        ("rewards: []", "expected at least 1 item"),
        ("rewards: [{type: exact_match, weight: 0}]", "every weight is 0"),
        ("rewards: [{type: task}]", r"rewards\.0\.type: a digits task has no scorer"),
        ('rewards: [{type: regex, pattern: "("}]', "is not a regular expression"),
        ("run_dir: ~/x", "are replaced; write the rest out"),
        ("run_dir: runs/${nmae}", "are replaced; write the rest out"),
        ('run_dir: "a\\0b"', "without control characters"),
        ("run_dir: /", "a folder of the run's own"),
        (f"run_dir: {'x' * 300}", "longer than 255 bytes"),
        ("control: {policies: {A4: {threshold: x}}}", 'received "x"; expected a finite number'),
        ("control: {policies: {A1: {low: 3.5}}}", "expected a whole number"),
        ("name: a/b", "expected letters, digits"),
    ],
)  # fmt: skip
def test_one_problem_is_one_line(write, text: str, message: str) -> None:
    assert re.search(message, only(write(text)))


def test_the_stage_in_a_deepspeed_file_counts(write, tmp_path) -> None:
    (tmp_path / "ds.json").write_text('{"zero_optimization": {"stage": 3}}')
    path = write("{deepspeed: {config: ds.json}, trainer: {packing: {compile: true}}}")
    assert "gathers weights by hooks" in only(path)
    (tmp_path / "ds.json").write_text("{}")  # ZeRO 0
    load_recipe(write("{deepspeed: {config: ds.json}, trainer: {packing: {compile: true, graphs: true}}}"))


def test_a_misspelt_batch_size_is_not_also_called_off_the_lattice(write) -> None:
    text = "trainer: {train_batchsize: 96, ppo_mini_batch_size: 96}"
    assert "did you mean train_batch_size?" in only(write(text))


def test_off_lattice_batches_name_the_nearest_legal_values(write) -> None:
    text = "trainer: {train_batch_size: 60, rollout_n: 8, ppo_mini_batch_size: 15, micro_batch_size: 32, rollout_micro_batch_size: 500}"  # noqa: E501
    found = problems(write(text))
    assert len(found) == 2
    assert "micro_batch_size: 32 samples" in found[0] and "nearest legal value is 30" in found[0]
    assert "nearest legal value is 480" in found[1]


@pytest.mark.parametrize("batches", [(64, 8, 8), (30, 4, 6), (7, 3, 7), (1, 2, 1), (4096, 16, 4)])
def test_sizes_that_were_not_given_follow_from_the_rest(write, batches) -> None:
    train, n, mini = batches
    text = f"trainer: {{train_batch_size: {train}, rollout_n: {n}, ppo_mini_batch_size: {mini}}}"
    recipe = load_recipe(write(text))
    assert batch_problems(knob_vector(recipe), 1) == []
    assert recipe.trainer.micro_batch_size <= 128


# ------------------------------------------------------------------------------------ overrides


def test_overrides_win_and_are_read_like_the_file(write) -> None:
    path = write("seed: 1\nrewards: [{type: exact_match}]\n")
    changed = (
        "seed=3", "trainer.kl_coef=1e-3", "control.mode=off", "control.pin=[kl_coef, clip_range]",
        "control.policies.B4b=off", "rewards.0.weight=2", "tracking.mlflow.uri=http://x:1/?a=b",
        "rollout.n=4", "trainer.rollout_micro_batch_size=64", "trainer.micro_batch_size=64",
    )  # fmt: skip
    recipe = load_recipe(path, changed)
    assert recipe.folder() == "runs/r-3"
    assert recipe.trainer.kl_coef == 1e-3 and recipe.trainer.rollout_n == 4
    assert recipe.control.pin == ("kl_coef", "clip_range")
    assert recipe.control.policies == {"B4b": "off"}
    assert recipe.rewards[0].weight == 2 and recipe.tracking.mlflow.uri == "http://x:1/?a=b"


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("seed", "expected key.path=value"),
        ("=3", "expected key.path=value"),
        ("trainer..kl_coef=3", "expected key.path=value"),
        ("trainer.klcoef=3", r"^trainer\.klcoef: unknown field; received 3; did you mean kl_coef"),
        ("seed.x=3", "would be inside the value 1"),
        ("rewards.7.weight=1", "would be inside a list of 1"),
        ("control.pin=[a", "which is not YAML"),
        ("seed=!!python/name:os.system x", "is not allowed"),
        ("seed=", "received null; expected a whole number"),
        ("seed=abc", 'received "abc"; expected a whole number'),
    ],
)
def test_bad_overrides(write, override: str, message: str) -> None:
    path = write("seed: 1\nrewards: [{type: exact_match}]\n")
    assert re.search(message, only(path, override))


def test_rollout_n_given_twice(write) -> None:
    assert "is another name of" in only(write("rollout: {n: 4}\ntrainer: {rollout_n: 4}"))


# ---------------------------------------------------------------------------- models and data


def test_model_folders(write, tmp_path: Path) -> None:
    folder = tmp_path / "m"
    folder.mkdir()
    path = write("model: {path: m}")
    assert "has no config.json" in only(path)
    (folder / "config.json").write_text('{"auto_map": {}}')
    assert any("auto_map" in p for p in problems(path))
    (folder / "config.json").write_text("{}")
    assert "safetensors" in only(path)
    (folder / "model.safetensors").touch()
    assert load_recipe(path).model.path == str(folder.resolve())


def test_a_missing_folder_is_told_from_a_hub_id(write, tmp_path: Path, monkeypatch) -> None:
    monkeypatch.chdir(tmp_path)
    assert load_recipe(write("model: {path: owner/name}")).model.path == "owner/name"
    (tmp_path / "models" / "mine").mkdir(parents=True)
    assert "did you mean models/mine?" in only(write("model: {path: models/nine}"))
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    monkeypatch.setenv("HF_HOME", str(tmp_path / "hub"))
    assert "the hub is switched off" in only(write("model: {path: owner/name}"))


JSONL = "task: {type: jsonl, path: d.jsonl}"


@pytest.mark.parametrize(
    ("data", "message"),
    [
        ('{"prompt": "p", "answr": "a"}', r"answer_column: d\.jsonl:1: missing reward column "
         r"'answer' .*did you mean answr"),
        ('{"prompt": "p", "answer": "a"}\n\n{"answer": "a"}', r"prompt_column: d\.jsonl:3: miss"),
        ('{"prompt": ["p"], "answer": "a"}', "column 'prompt' is .*; expected text"),
        ("[1]", "expected a JSON object"),
        ("{'prompt': 1}", "d.jsonl:1: is not JSON"),
        ("\n", "has no rows"),
    ],
)  # fmt: skip
def test_data_files(write, data: str, message: str) -> None:
    write(data, "d.jsonl")
    assert re.search(message, only(write(JSONL)))


def test_data_files_are_found_beside_the_recipe(write, tmp_path: Path) -> None:
    data = write('\ufeff{"prompt": "p", "answer": 3}\n', "d.jsonl")
    assert load_recipe(write(JSONL)).task.path == str(data.resolve())
    assert "cannot be read" in only(write("task: {type: jsonl, path: none.jsonl}"))


# ------------------------------------------------------------------------------------------ facts


def test_every_knob_is_known_and_stated(write) -> None:
    vector = knob_vector(load_recipe(write("seed: 1")))
    assert set(KNOBS) - set(vector) == {"critic_learning_rate"}
    assert vector["num_rollout_batches"] == 1 and vector["clip_range_low"] == 0.2


def test_facts_survive_json(write) -> None:
    facts = recipe_facts(load_recipe(write("trainer: {lr_schedule: {warmup: 3}}")))
    assert facts_from_json(json.loads(json.dumps(to_json(facts)))) == facts
    assert facts.lr_warmup == 3 and facts.has_reference and facts.reward_maximum == 1.0


def test_without_kl_there_is_no_reference_and_the_facts_say_why(write) -> None:
    facts = recipe_facts(load_recipe(write("trainer: {kl_coef: 0}")))
    assert not facts.has_reference and not facts.can_move("kl_coef")
    assert "no reference" in facts.metric_capability["kl_ref"].reason
    assert "no reference" in facts.knob_capability["kl_coef"].reason


def test_every_field_path_is_real() -> None:
    assert "trainer.kl_coef" in explain.field_paths() and "task.path" in explain.field_paths()
    targets = set(explain.FOREIGN.values())
    assert targets <= set(explain.field_paths())
    assert all(name not in Recipe.model_fields for name in explain.FOREIGN)
