"""Trainers without an adapter: their own files, as they write them, through the readers and `advise`.

The key lists are facts about the trainers' releases, typed here; the numbers are made up.
"""

from __future__ import annotations

import json
import struct
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path

import pytest

from autotune.advise import advise, verdict
from autotune.advise.verdict import Kind
from autotune.logs import Reader, open_log, survey
from autotune.logs.rollouts import Observed

Rows = list[dict[str, float]]

PRIME_TRAINER = [
    {"perf/throughput": 9000.0, "perf/mfu": 30.0, "perf/peak_memory": 40.0},
    {"optim/lr": 1e-6, "optim/grad_norm": 0.2},
    {"loss/mean": 0.01, "entropy/all/mean": 0.4, "mismatch_kl/all/mean": 0.001, "is_masked/mean": 0.02},
    {"time/step": 30.0, "time/forward_backward": 20.0},
]
"""prime-rl's trainer writes four rows a step, and none of them has a reward."""
PRIME_ORCHESTRATOR = {
    "train/agg/all/agent/reward/mean": 0.5,
    "train/agg/effective/agent/reward/mean": 0.6,
    "train/agg/all/agent/num_output_tokens/mean": 120.0,
    "train/agg/all/agent/is_truncated/mean": 0.1,
    "off_policy/mean": 1.0,
    "progress/tokens": 1e5,
}
EASYR1 = {
    "actor/pg_loss": 0.01,
    "actor/ppo_kl": 0.001,
    "actor/entropy_loss": 0.7,
    "actor/pg_clipfrac_higher": 0.02,
    "actor/pg_clipfrac_lower": 0.001,
    "actor/kl_loss": 0.05,
    "actor/kl_coef": 0.01,
    "actor/grad_norm": 0.4,
    "actor/lr": 1e-6,
    "reward/overall": 0.5,
    "critic/score/mean": 0.5,
    "critic/score/max": 1.0,
    "critic/score/min": 0.0,
    "response_length/mean": 200.0,
    "response_length/max": 512.0,
    "response_length/clip_ratio": 0.1,
    "perf/mfu_actor": 0.3,
    "perf/throughput": 4000.0,
    "timing_s/gen": 10.0,
}
SKYRL = {
    "reward/avg_raw_reward": 0.5,
    "policy/loss_metrics/clip_ratio": 0.02,
    "policy/policy_kl": 0.05,
    "policy/policy_entropy": 0.4,
    "policy/grad_norm": 0.3,
    "policy/policy_loss": 0.01,
    "policy/policy_lr": 1e-6,
    "generate/avg_num_tokens": 120.0,
    "trainer/tokens_per_second_per_gpu": 900.0,
    "timing/step": 30.0,
}
NEMO = {
    "train/loss": 0.01,
    "train/grad_norm": 0.3,
    "train/reward": 0.5,
    "train/lr": 1e-6,
    "train/probs_ratio": 1.0,
    "train/kl_penalty": 0.05,
    "train/approx_entropy": 0.4,
    "train/mean_gen_tokens_per_sample": 120.0,
    "train/truncation_rate": 0.1,
    "train/baseline_reward/pct_mixed": 0.75,
    "timing/train/total_step_time": 30.0,
}
AREAL = {
    "ppo_actor/task_reward/avg": 0.5,
    "ppo_actor/kl_rewards/avg": 0.05,
    "ppo_actor/update/clip_ratio/avg": 0.02,
    "ppo_actor/update/entropy/avg": 0.4,
    "ppo_actor/update/grad_norm": 0.3,
    "ppo_actor/update/lr": 1e-6,
    "ppo_actor/seq_len/avg": 220.0,
    "ppo_actor/no_eos_ratios/avg": 0.1,
    "timeperf/train_step": 30.0,
}
SLIME_ROLLOUT = {
    "rollout/raw_reward": 0.5,
    "rollout/response_len/mean": 120.0,
    "rollout/response_len/max": 512.0,
    "rollout/truncated_ratio": 0.1,
    "perf/step_time": 30.0,
}
SLIME_UPDATE = {
    "train/loss": 0.01,
    "train/pg_loss": 0.01,
    "train/pg_clipfrac": 0.02,
    "train/ppo_kl": 0.001,
    "train/kl_loss": 0.05,
    "train/entropy_loss": 0.4,
    "train/grad_norm": 0.3,
    "train/lr-pg_0": 1e-6,
}
OPENRLHF = {
    "train/ppo_clip_ratio": 0.02,
    "train/ppo_kl": 0.001,
    "train/policy_loss": 0.01,
    "train/actor_lr": 1e-6,
    "train/actor_grad_norm": 0.3,
    "train/kl": 0.05,
    "train/rollout/reward_mean": 0.5,
    "train/rollout/reward_std": 0.4,
    "train/rollout/response_length_mean": 120.0,
    "train/rollout/truncated_rate": 0.1,
    "train/timing/step_total": 30.0,
}
COMMON = {"reward_mean": 0.5, "kl_ref": 0.05, "grad_norm": 0.3, "learning_rate": 1e-6}


def read(path: Path, run: str = "") -> tuple[str, list[Observed], list[str]]:
    found = survey(open_log(path, run))
    return found.trainer, list(Reader(found).rollouts()), found.unknown


# -------------------------------------------------------------------------------- TensorBoard


def varint(value: int) -> bytes:
    low, rest = value & 127, value >> 7
    return bytes([low | 128]) + varint(rest) if rest else bytes([low])


def field(number: int, kind: int, data: bytes) -> bytes:
    return varint(number << 3 | kind) + (varint(len(data)) if kind == 2 else b"") + data


def event(step: int, tag: str, value: float) -> bytes:
    one = field(1, 2, tag.encode()) + field(2, 5, struct.pack("<f", value))
    message = field(2, 0, varint(step)) + field(5, 2, field(1, 2, one))
    return struct.pack("<Q", len(message)) + b"crc!" + message + b"crc!"


def events(folder: Path, points: Iterable[tuple[int, Mapping[str, float]]]) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    data = b"".join(event(step, tag, value) for step, row in points for tag, value in row.items())
    (folder / "events.out.tfevents.1.host").write_bytes(data)
    return folder


@pytest.mark.parametrize(
    ("trainer", "row", "expected"),
    [
        ("skyrl", SKYRL, {**COMMON, "clip_ratio": 0.02, "response_length_mean": 120.0}),
        ("nemo-rl", NEMO, {**COMMON, "truncated_fraction": 0.1, "zero_std_fraction": 0.25}),
        ("areal", AREAL, {**COMMON, "clip_ratio": 0.02, "truncated_fraction": 0.1}),
        ("openrlhf", OPENRLHF, {**COMMON, "clip_ratio": 0.02, "reward_std": 0.4}),
    ],
)
def test_an_event_folder_of_each_trainer(
    trainer: str, row: dict[str, float], expected: dict[str, float], tmp_path: Path
) -> None:
    folder = events(tmp_path / "tb" / "run", ((step, row) for step in (1, 2, 300)))
    found, rollouts, unknown = read(tmp_path)
    assert folder.is_dir() and found == trainer and unknown == []
    assert [r.step for r in rollouts] == [1, 2, 300]
    got = {name: rollouts[0].scalars[name] for name in expected}
    assert got == pytest.approx(expected)


def test_slimes_two_clocks_become_one(tmp_path: Path) -> None:
    """`train/...` is written at the update's number: two updates a rollout, six for three rollouts."""
    updates = [(k, {**SLIME_UPDATE, "train/grad_norm": float(k)}) for k in range(6)]
    rollouts = [(k, SLIME_ROLLOUT) for k in range(3)]
    events(tmp_path, [*updates, *rollouts])
    trainer, seen, unknown = read(tmp_path)
    assert trainer == "slime" and unknown == [] and len(seen) == 3
    assert [r.scalars["grad_norm"] for r in seen] == [0.5, 2.5, 4.5]
    assert [r.step for r in seen] == [0, 1, 2]


def test_a_real_summary_writer_is_read(tmp_path: Path) -> None:
    tensorboard = pytest.importorskip("torch.utils.tensorboard")
    with tensorboard.SummaryWriter(str(tmp_path)) as writer:
        for step in range(3):
            for key, value in SKYRL.items():
                writer.add_scalar(key, value, step)
    trainer, rollouts, _ = read(tmp_path)
    assert trainer == "skyrl" and len(rollouts) == 3


def test_a_followed_event_folder_holds_its_newest_step_back(tmp_path: Path) -> None:
    """Scalars of one step are written one by one: the newest step may still lack some."""
    events(tmp_path, [(1, SKYRL), (2, {"reward/avg_raw_reward": 0.5})])
    answers = iter([True, False])

    def wait() -> bool:
        events(tmp_path, [(1, SKYRL), (2, SKYRL)])
        return next(answers)

    rows = list(open_log(tmp_path).rows(wait))
    assert [row["step"] for row in rows] == [1, 2]
    assert rows[1]["policy/grad_norm"] == pytest.approx(0.3)


# ---------------------------------------------------------------------------------------- JSONL


def jsonl(path: Path, rows: Iterable[Mapping[str, object]]) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    return path


def nested(row: Mapping[str, float]) -> dict[str, object]:
    """EasyR1 splits its keys at every slash."""
    tree: dict[str, object] = {}
    for key, value in row.items():
        *folders, leaf = key.split("/")
        at = tree
        for folder in folders:
            at = at.setdefault(folder, {})  # type: ignore[assignment]
        at[leaf] = value
    return tree


def test_easyr1_is_not_taken_for_verl(tmp_path: Path) -> None:
    rows = ({"step": step, **nested(EASYR1)} for step in (1, 2))
    jsonl(tmp_path / "experiment_log.jsonl", rows)
    for place in (tmp_path, tmp_path / "experiment_log.jsonl"):
        trainer, (first, second), unknown = read(place)
        assert trainer == "easyr1" and unknown == [] and second.step == 2
        assert first.scalars["clip_ratio"] == 0.02 and "entropy" not in first.scalars
        assert first.scalars["truncated_fraction"] == 0.1


def test_verls_file_logger_wraps_its_metrics(tmp_path: Path) -> None:
    metrics = {"critic/score/mean": 0.5, "actor/grad_norm": 0.3, "actor/pg_clipfrac": 0.02, "actor/lr": 1e-6}
    path = jsonl(tmp_path / "run.jsonl", ({"step": step, "data": metrics} for step in (1, 2)))
    trainer, rollouts, unknown = read(path)
    assert trainer == "verl" and unknown == [] and [r.step for r in rollouts] == [1, 2]
    assert rollouts[0].scalars["reward_mean"] == 0.5


def prime(folder: Path, steps: int) -> Path:
    rows = ({"step": s, "time": 1e9, **row} for s in range(steps) for row in PRIME_TRAINER)
    jsonl(folder / "trainer" / "metrics.jsonl", rows)
    rows = ({"step": s, "time": 1e9, **PRIME_ORCHESTRATOR} for s in range(steps))
    jsonl(folder / "orchestrator" / "metrics.jsonl", rows)
    return folder


def test_prime_rls_two_files_and_four_rows_a_step_are_one_rollout(tmp_path: Path) -> None:
    trainer, rollouts, _ = read(prime(tmp_path, 3))
    assert trainer == "prime-rl" and [r.step for r in rollouts] == [0, 1, 2]
    assert rollouts[0].scalars["reward_mean"] == 0.5, "all responses, not those that were trained on"
    assert rollouts[0].scalars["grad_norm"] == 0.2 and rollouts[0].scalars["kl_mismatch"] == 0.001


def test_one_file_of_prime_rl_alone_is_still_one_rollout_a_step(tmp_path: Path) -> None:
    prime(tmp_path, 3)
    trainer, rollouts, _ = read(tmp_path / "trainer" / "metrics.jsonl")
    assert trainer == "prime-rl" and len(rollouts) == 3 and "reward_mean" not in rollouts[0].scalars


# ----------------------------------------------------------------------------------- wandb CSV

TRL = {"train/reward": 0.5, "train/kl": 0.05, "train/grad_norm": 0.3, "train/learning_rate": 1e-6}


def csv(path: Path, header: list[str], rows: list[list[object]]) -> Path:
    quoted = [",".join(f'"{name}"' for name in header)]
    path.write_text("\n".join([*quoted, *(",".join(map(str, row)) for row in rows)]) + "\n", "utf-8")
    return path


def test_a_history_saved_from_wandb(tmp_path: Path) -> None:
    header = ["", "_step", "_runtime", "_timestamp", *TRL]
    values = list(TRL.values())
    # the middle row is another update of the same rollout: no reward was logged there
    rows = [[k, k, 9.5, 1.7e9, "" if k == 1 else values[0], *values[1:]] for k in range(3)]
    trainer, rollouts, unknown = read(csv(tmp_path / "h.csv", header, rows))
    assert trainer == "trl" and unknown == [] and [r.updates for r in rollouts] == [2, 1]
    assert rollouts[0].scalars["reward_mean"] == 0.5


def test_a_panel_exported_from_wandb_and_its_runs(tmp_path: Path) -> None:
    header = ["Step", "a - b - train/reward", "a - b - train/reward__MIN", "a - b - train/reward__MAX"]
    header += ["other - train/reward", "other - train/reward__MIN", "other - train/reward__MAX"]
    header += ["a - b - train/kl", "other - train/kl"]
    path = csv(tmp_path / "p.csv", header, [[k, 0.5, 0.5, 0.5, 0.25, 0.25, 0.25, 0.05, 0.07] for k in (1, 2)])
    for run, reward in (("", 0.5), ("a - b", 0.5), ("other", 0.25)):
        log = open_log(path, run)
        found = survey(log)
        first, _ = Reader(found).rollouts()
        assert found.trainer == "trl" and found.unknown == []
        assert first.scalars["reward_mean"] == reward, run
        assert any("2 runs" in remark for remark in log.hints.remarks)


# ---------------------------------------------------------------------------------------- advise


def easyr1(folder: Path) -> Path:
    rows = ({"step": s, **nested({**EASYR1, "actor/grad_norm": 0.3 + s % 7 / 100})} for s in range(40))
    return jsonl(folder / "experiment_log.jsonl", rows)


def skyrl(folder: Path) -> Path:
    return events(folder, ((s, {**SKYRL, "policy/grad_norm": 0.3 + s % 7 / 100}) for s in range(40)))


def slime(folder: Path) -> Path:
    updates = ((s, {**SLIME_UPDATE, "train/grad_norm": 0.3 + s % 7 / 100}) for s in range(80))
    return events(folder, [*updates, *((s, SLIME_ROLLOUT) for s in range(40))])


@pytest.mark.parametrize("make", [lambda f: prime(f, 40), easyr1, skyrl, slime])
def test_advise_judges_each_of_them(make: Callable[[Path], Path], tmp_path: Path) -> None:
    shadow = advise(make(tmp_path))
    assert len(shadow.steps) == 40
    assert verdict(shadow).kind is not Kind.CANNOT_TELL
