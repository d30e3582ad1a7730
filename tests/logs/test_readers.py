"""Every log format and quirk -> rows, metrics and rollouts; unknown keys are listed, never guessed."""

from __future__ import annotations

import json
import math
import sqlite3
import struct
import time
from pathlib import Path

import pytest

from autotune.errors import InputError
from autotune.logs import Reader, Survey, open_log, survey
from autotune.logs.lines import dict_line, json_line, number, swift_line, verl_line
from autotune.logs.rollouts import Observed

TRL_ROW = {"loss": 0.01, "reward": 0.5, "reward_std": 0.25, "kl": 0.04, "completions/mean_length": 100.0}


def log(tmp_path: Path, text: str, name: str = "a.log") -> Path:
    path = tmp_path / name
    path.write_text(text, encoding="utf-8")
    return path


def read(path: Path, **options: object) -> tuple[Survey, list[Observed]]:
    found = survey(open_log(path), **options)  # type: ignore[arg-type]
    return found, list(Reader(found).rollouts())


def scalars(path: Path) -> dict[str, float | None]:
    """The only rollout of a log."""
    _, (only,) = read(path)
    return only.scalars


# ----------------------------------------------------------------------------------------- lines


@pytest.mark.parametrize(
    ("line", "expected"),
    [
        ("{'reward': 0.5, 'kl': 1e-05}", {"reward": 0.5, "kl": 1e-5}),
        ("{'reward': '0.5', 'kl': 'nan'}", {"reward": 0.5, "kl": math.nan}),
        ("  5%|▌ | 10/200 [00:10<01:00] {'reward': -1.5}", {"reward": -1.5}),
        ("{'reward': None, 'loss': inf}", {"reward": None, "loss": math.inf}),
        ("{'reward': np.float64(0.5), 'n': 3}", {"reward": 0.5, "n": 3}),
        ("{'a': {'b': 1.0}, 'text': 'hello'}", {"a/b": 1.0, "text": "hello"}),
        ("{'it': 'nan, but text', 'x': 1.0}", {"it": "nan, but text", "x": 1.0}),
    ],
)
def test_a_printed_dict_is_read_whatever_its_values(line: str, expected: dict[str, object]) -> None:
    found = dict_line(line)
    assert found is not None
    assert {k: str(v) for k, v in found.items()} == {k: str(v) for k, v in expected.items()}


@pytest.mark.parametrize("line", ["", "no dict", "{'open': 1.0", "{'call': print()}", "{'a', 'b'}"])
def test_what_is_no_dict_is_no_row(line: str) -> None:
    assert dict_line(line) is None


def test_nothing_in_a_log_is_executed() -> None:
    assert dict_line("{'x': [__import__('os').system('true')]}") is None


def test_the_quick_and_the_safe_reading_agree() -> None:
    import ast

    line = str({f"key/{k}": (-1) ** k * 10.0 ** (k - 12) for k in range(24)})
    assert dict_line(line) == ast.literal_eval(line)


def test_json_lines_nest_with_slashes_and_take_a_bare_nan() -> None:
    found = json_line('{"actor": {"lr": 1e-6, "kl_loss": NaN}, "step": 3, "tags": ["x"]}')
    assert found is not None and found["actor/lr"] == 1e-6 and math.isnan(found["actor/kl_loss"])
    assert found["step"] == 3 and "tags" not in found


def test_a_verl_line_with_ray_prefix_scaled_keys_and_numpy_numbers() -> None:
    line = "(main_task pid=1) step:7 - actor/lr(1e-4):0.010 - critic/kl:-0.001 - x:np.float64(2.5) - y:nan"
    found = verl_line(line)
    assert found is not None and found["step"] == 7 and found["actor/lr(1e-4)"] == 0.01
    assert found["critic/kl"] == -0.001 and found["x"] == 2.5 and math.isnan(found["y"])


def test_a_swift_line_has_keys_with_spaces() -> None:
    line = (
        " [2026-01-01] iteration    7/   2174 | reward: 7.6E-01 | grad norm: 0.016 | elapsed time: 17m 33s |"
    )
    found = swift_line(line)
    assert found is not None and found["iteration"] == 7 and found["_total_steps"] == 2174
    assert found["grad norm"] == 0.016 and found["reward"] == 0.76


@pytest.mark.parametrize(
    ("text", "expected"), [("1e-5", 1e-5), (" 3 ", 3.0), ("7/2174", 7.0), ("", None), ("a/b", "a/b"), (4, 4)]
)
def test_numbers_in_text(text: object, expected: object) -> None:
    assert number(text) == expected


# --------------------------------------------------------------------------------------- formats


def test_trainer_state_gives_its_totals_and_drops_the_run_summary(tmp_path: Path) -> None:
    rows = [{**TRL_ROW, "step": 5}, {**TRL_ROW, "step": 10}, {"train_runtime": 3.0, "step": 10}]
    path = log(tmp_path, json.dumps({"max_steps": 200, "log_history": rows}), "trainer_state.json")
    found, rollouts = read(path)
    assert (found.log.format, found.trainer, found.steps_per_row) == ("JSON", "trl", 5)
    assert found.log.hints.total_steps == 200 and found.log.hints.finished
    assert [r.step for r in rollouts] == [5, 10] and rollouts[0].scalars["kl_ref"] == 0.04
    assert open_log(tmp_path).path == path


def test_a_console_log_with_header_progress_and_metric_lines(tmp_path: Path) -> None:
    text = (
        "  Total train batch size (w. parallel, distributed & accumulation) = 8\n"
        "  Total optimization steps = 1,000\n"
        "  0%|  | 0/1000 [00:00<?]\r  1%|  | 10/1000 [00:01<?]\n"
        f"{TRL_ROW}\n{TRL_ROW}\n"
    )
    found, rollouts = read(log(tmp_path, text))
    assert found.log.hints.total_steps == 1000 and found.log.hints.responses == 8 and len(rollouts) == 2


def test_a_notebook_table_and_a_csv(tmp_path: Path) -> None:
    head = "Step | Training Loss | reward | rewards / x\n-- | -- | -- | --\n"
    table = head + "1 | 0.0 | 0.5 | 0.25\n2 | 0.0 | 0.6 | 0.3\n"
    found, rollouts = read(log(tmp_path, table, "a.md"))
    assert found.trainer == "trl" and [r.scalars["reward/x"] for r in rollouts] == [0.25, 0.3]
    path = log(tmp_path, 'step,reward,kl,"a, note"\n1,0.5,0.01,x\n2,,0.02,y\n', "a.csv")
    found, rollouts = read(path)
    assert found.log.format == "table (CSV)"
    assert [r.scalars["reward_mean"] for r in rollouts] == [0.5, None]


def test_an_mlflow_run_folder_with_its_params(tmp_path: Path) -> None:
    (tmp_path / "metrics" / "completions").mkdir(parents=True)
    (tmp_path / "params").mkdir()
    params = {
        "num_generations": "8",
        "per_device_train_batch_size": "8",
        "gradient_accumulation_steps": "2",
        "beta": "0.04",
        "epsilon": "0.2",
    }
    for name, value in params.items():
        (tmp_path / "params" / name).write_text(value)
    (tmp_path / "metrics" / "reward").write_text("1700 0.5 1\n1701 0.6 2\n")
    (tmp_path / "metrics" / "kl").write_text("1700 nan 1\n1701 0.02 2\n")
    (tmp_path / "metrics" / "completions" / "mean_length").write_text("1700 100 1\n1701 101 2\n")
    found, rollouts = read(tmp_path)
    assert (found.log.format, found.trainer) == ("MLflow run folder", "trl")
    assert math.isnan(rollouts[0].scalars["kl_ref"] or 0.0)
    knobs = found.log.hints.knobs
    assert knobs["rollout_n"] == 8 and knobs["kl_coef"] == 0.04 and knobs["train_batch_size"] == 2
    assert knobs["clip_range_low"] == knobs["clip_range_high"] == 0.2


def test_an_mlflow_database_by_name_and_the_newest_run(tmp_path: Path) -> None:
    path = tmp_path / "mlflow.db"
    with sqlite3.connect(path) as db:
        db.execute("create table runs (run_uuid text, name text, start_time bigint)")
        db.execute("create table params (key text, value text, run_uuid text)")
        db.execute(
            "create table metrics"
            " (key text, value double, timestamp bigint, run_uuid text, step bigint, is_nan boolean)"
        )
        db.executemany("insert into runs values (?, ?, ?)", [("aa", "old", 1), ("bb", "new", 2)])
        points = [("reward", 0.1, 1, "aa", 1, 0), ("reward", 0.7, 1, "bb", 1, 0), ("kl", 0.0, 1, "bb", 1, 1)]
        db.executemany("insert into metrics values (?, ?, ?, ?, ?, ?)", points)
    only = scalars(path)
    assert only["reward_mean"] == 0.7 and math.isnan(only["kl_ref"] or 0.0)
    _, (old,) = read_run(path, "old")
    assert old.scalars["reward_mean"] == 0.1
    with pytest.raises(InputError, match=r"no run 'none'.*new \(bb\), old \(aa\)"):
        read_run(path, "none")


def read_run(path: Path, run: str) -> tuple[Survey, list[Observed]]:
    found = survey(open_log(path, run), trainer="trl")
    return found, list(Reader(found).rollouts())


def field(number: int, kind: int, payload: bytes) -> bytes:
    size = bytes([len(payload)]) if kind == 2 else b""
    return bytes([number << 3 | kind]) + size + payload


def event(step: int, tag: str, value: bytes) -> bytes:
    summary = field(1, 2, field(1, 2, tag.encode()) + value)
    message = field(1, 1, struct.pack("<d", 1.0)) + field(2, 0, bytes([step])) + field(5, 2, summary)
    return struct.pack("<Q", len(message)) + b"crc!" + message + b"crc!"


def test_tensorboard_events_both_kinds_of_scalar_and_a_torn_end(tmp_path: Path) -> None:
    simple = field(2, 5, struct.pack("<f", 0.5))
    tensor = field(8, 2, field(1, 0, b"\x01") + field(5, 2, struct.pack("<f", 0.25)))
    content = field(8, 2, field(1, 0, b"\x02") + field(4, 2, struct.pack("<d", 0.125)))
    whole = (
        event(3, "train/reward", simple) + event(3, "train/kl", tensor) + event(3, "train/entropy", content)
    )
    (tmp_path / "events.out.tfevents.1").write_bytes(whole + event(4, "train/reward", simple)[:-6])
    found, (only,) = read(tmp_path)
    assert (found.log.format, found.trainer, only.step) == ("TensorBoard events", "trl", 3)
    assert (only.scalars["reward_mean"], only.scalars["kl_ref"], only.scalars["entropy"]) == (
        0.5,
        0.25,
        0.125,
    )


def test_our_own_journal_is_a_log_too(tmp_path: Path) -> None:
    snapshot = {
        "rollout": 4,
        "metrics": {"reward_mean": 0.5, "kl_step": 0.01},
        "invalid": {"loss": ["non_finite", ""]},
    }
    lines = [
        '{"v":1,"type":"header","rollout":-1,"prev":"0"}',
        f'{{"v":1,"type":"rollout","rollout":4,"prev":"1","snapshot":{json.dumps(snapshot)}}}',
    ]
    found, (only,) = read(log(tmp_path, "\n".join(lines), "journal.jsonl"))
    assert (found.log.format, found.trainer, only.step) == ("autotune journal", "autotune", 4)
    assert only.scalars["kl_step"] == 0.01 and math.isnan(only.scalars["loss"] or 0.0)


# ---------------------------------------------------------------------------------------- quirks


def test_rows_without_reward_are_updates_of_the_rollout_before_them(tmp_path: Path) -> None:
    update = {"loss": 0.02, "clip_ratio/region_mean": 0.04, "entropy": 0.3}
    first = {**TRL_ROW, "clip_ratio/region_mean": 0.0, "entropy": 0.5}
    text = "\n".join(map(str, [update, first, update, update, first, update]))
    path = log(tmp_path, text)
    reader = Reader(survey(open_log(path)))
    one, two = reader.rollouts()
    assert (one.updates, two.updates, reader.orphans) == (3, 2, 1)
    assert one.scalars["clip_ratio"] == pytest.approx(0.08 / 3) and one.scalars["reward_mean"] == 0.5
    assert one.lists["clip_ratio"] == [0.0, 0.04, 0.04]


def test_a_verl_row_without_reward_is_still_a_rollout(tmp_path: Path) -> None:
    line = "step:{} - actor/kl_loss:nan - actor/grad_norm:{} - actor/pg_loss:0.1"
    _, rollouts = read(log(tmp_path, "\n".join([line.format(1, "nan"), line.format(2, "1.0")])))
    assert [r.step for r in rollouts] == [1, 2]


def test_a_kl_that_is_a_sum_over_the_answer_becomes_one_per_token(tmp_path: Path) -> None:
    row = {
        "objective/kl": 6.0,
        "objective/entropy": 100.0,
        "policy/entropy_avg": 1.0,
        "objective/scores": 2.0,
        "lr": 1e-5,
    }
    assert scalars(log(tmp_path, str(row)))["kl_ref"] == pytest.approx(0.06)


def test_a_rate_printed_as_zero_is_rounded_away_and_a_scaled_one_is_not(tmp_path: Path) -> None:
    text = "step:1 - critic/score/mean:0.5 - actor/grad_norm:1.0 - actor/lr{}"
    found, (only,) = read(log(tmp_path, text.format(":0.000")))
    assert "learning_rate" not in only.scalars and found.rounded_away == {"learning_rate": "actor/lr"}
    assert scalars(log(tmp_path, text.format("(1e-4):0.010")))["learning_rate"] == pytest.approx(1e-6)


@pytest.mark.parametrize(
    ("rows", "expected"),
    [
        ([{"clip_ratio": 8.9}, {"clip_ratio": 0.5}], 0.089),  # a share cannot be 8.9: percent, and said
        ([{"clip_ratio": 0.9}, {"clip_ratio": 1.0}], 0.9),
        ([{"clip_ratio (%)": 0.9}], 0.009),
        ([{"clip_ratio_pct": 0.9}], 0.009),
    ],
)
def test_percent_and_share(rows: list[dict[str, float]], expected: float, tmp_path: Path) -> None:
    text = "\n".join(json.dumps({"step": k, "reward": 0.5, **row}) for k, row in enumerate(rows))
    found, rollouts = read(log(tmp_path, text, "a.jsonl"))
    assert rollouts[0].scalars["clip_ratio"] == pytest.approx(expected)
    assert bool(found.notes) == (expected == 0.089)


def test_verls_truncation_is_no_truncation_when_the_longest_answer_is_short(tmp_path: Path) -> None:
    line = "step:{} - critic/score/mean:0.5 - response_length/max:{} - response_length/clip_ratio:0.25"
    _, rollouts = read(log(tmp_path, "\n".join([line.format(1, 512), line.format(2, 300)])))
    assert [r.scalars["truncated_fraction"] for r in rollouts] == [0.25, 0.0]


def test_a_reward_std_is_bounded_by_what_verl_prints(tmp_path: Path) -> None:
    line = "step:1 - critic/score/mean:0.2 - critic/score/max:1.0 - critic/score/min:0.0 - actor/grad_norm:1"
    assert scalars(log(tmp_path, line))["reward_std"] == pytest.approx(0.4)  # exact for 0/1


def test_unknown_keys_are_listed_and_a_mapping_takes_them(tmp_path: Path) -> None:
    path = log(tmp_path, '{"it": 1, "fancy_score": 40, "kl": 0.1, "entropy": 0.5}\n', "a.jsonl")
    found, rollouts = read(path)
    assert set(found.unknown) == {"it", "fancy_score"}
    assert not rollouts  # without a reward there is no rollout
    found, (only,) = read(path, mapping={"reward_mean": "fancy_score*0.01", "step": "it"})
    assert only.scalars["reward_mean"] == 0.4 and only.step == 1 and found.unknown == []


@pytest.mark.parametrize(
    ("mapping", "message"),
    [
        ({"reward": "kl"}, "none of our metrics"),
        ({"reward_mean": "nope"}, "no row has 'nope'"),
        ({"reward_mean": "kl*x"}, "'x' is not a number"),
    ],
)
def test_a_wrong_mapping_says_why(mapping: dict[str, str], message: str, tmp_path: Path) -> None:
    with pytest.raises(InputError, match=message):
        read(log(tmp_path, str(TRL_ROW)), mapping=mapping)


def test_text_where_a_number_should_be_is_a_fault_and_never_zero(tmp_path: Path) -> None:
    text = "\n".join(json.dumps({"reward": 0.5, "kl": kl, "loss": 0.1}) for kl in (0.1, "broken"))
    _, rollouts = read(log(tmp_path, text, "a.jsonl"))
    assert math.isnan(rollouts[1].scalars["kl_ref"] or 0.0)


def test_a_counter_that_runs_backwards_is_noticed(tmp_path: Path) -> None:
    text = "\n".join(json.dumps({"step": k, "reward": 0.5, "kl": 0.1}) for k in (1, 2, 1))
    reader = Reader(survey(open_log(log(tmp_path, text, "a.jsonl"))))
    assert len(list(reader.rollouts())) == 3 and reader.restarts == 1


def test_a_configuration_dump_that_was_cut_off_still_gives_its_knobs(tmp_path: Path) -> None:
    text = (
        "(TaskRunner pid=9) {'actor_rollout_ref': {'actor': {'clip_ratio': 0.2,\n"
        "(TaskRunner pid=9)                                  'kl_loss_coef': 0.01,\n"
        "(TaskRunner pid=9)                                  'ppo_mini_batch_size': 256,\n"
        "(TaskRunner pid=9)                                  'use_kl_loss': True},\n"
        "(TaskRunner pid=9)                        'rollout': {'n': 8}},\n"
        "(TaskRunner pid=9)  'data': {'train_batch_size': 64,\n"
        "WARNING something else\n"
        "Training Progress:   0%|          | 5/1000 [26:48<289:19:46, 66.76s/it]\n"
    )
    found, rollouts = read(log(tmp_path, text))
    hints = found.log.hints
    assert rollouts == [] and hints.progress == 1 and hints.total_steps == 1000
    assert hints.knobs["rollout_n"] == 8 and hints.knobs["kl_coef"] == 0.01
    assert hints.knobs["train_batch_size"] == hints.knobs["ppo_mini_batch_size"] == 64
    assert "256 prompts > train_batch_size 64" in hints.remarks[0]


# ---------------------------------------------------------------------------------------- errors


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("empty.log", b"", "is empty"),
        ("model.bin", b"\x00\x01\x02", "is a binary file"),
        ("broken.json", b"[{", "is not JSON"),
    ],
)
def test_what_is_no_log_says_so(name: str, content: bytes, message: str, tmp_path: Path) -> None:
    path = tmp_path / name
    path.write_bytes(content)
    with pytest.raises(InputError, match=message):
        read(path)


def test_a_path_that_is_not_there_and_a_folder_without_a_log(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="there is no log at"):
        open_log(tmp_path / "none")
    with pytest.raises(InputError, match="holds no log that can be read"):
        open_log(tmp_path)


def test_a_growing_file_gives_whole_lines_only(tmp_path: Path) -> None:
    row = json.dumps({"step": 1, "reward": 0.5, "kl": 0.1})
    path = log(tmp_path, row + "\n" + row[:10], "a.jsonl")
    found = survey(open_log(path))
    looks = iter([True, True, False])

    def follow() -> bool:
        with path.open("a") as file:
            file.write(row[10:] + "\n" if path.read_text().endswith(row[:10]) else "")
        return next(looks)

    assert len(list(Reader(found).rollouts(follow))) == 2


# ----------------------------------------------------------------------------------------- speed


def test_long_logs_are_read_in_a_stream(tmp_path: Path) -> None:
    """Ten times the usual cost is allowed: a million JSONL rows take 16 s, 100,000 printed dicts 7 s."""
    rows = 10_000
    row = {"step": 1, **TRL_ROW, "entropy": 0.4, "grad_norm": 1.25, "learning_rate": 1e-6, "epoch": 0.1}
    lines = json.dumps(row) + "\n"
    start = time.process_time()
    found, rollouts = read(log(tmp_path, lines * rows, "a.jsonl"))
    assert found.rows == len(rollouts) == rows and time.process_time() - start < 2.0
    start = time.process_time()
    assert len(read(log(tmp_path, f"{row}\n" * (rows // 10)))[1]) == rows // 10
    assert time.process_time() - start < 1.0
