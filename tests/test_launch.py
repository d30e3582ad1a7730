"""`--nproc`: what the ranks are told, and their endings as one, with small programs in their place."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import textwrap
import threading
import time
from pathlib import Path

import pytest

from autotune import launch as launcher
from autotune.errors import InputError
from autotune.launch import launch
from tests.processes import ends


@pytest.fixture(autouse=True)
def no_launcher(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(launcher, "PATIENCE", 0.3)
    monkeypatch.setattr(launcher, "LAST_WORDS", 0.3)


def ranks_run(monkeypatch: pytest.MonkeyPatch, program: str) -> None:
    start = "import os, signal, sys, time\nrank = int(os.environ['RANK'])\n"
    monkeypatch.setattr(launcher, "COMMAND", (sys.executable, "-c", start + textwrap.dedent(program)))


def test_each_rank_is_told_its_place_and_the_command(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    ranks_run(
        monkeypatch,
        """
        names = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "MASTER_ADDR", "OMP_NUM_THREADS")
        told = [os.environ[n] for n in names] + sys.argv[2:]
        open(f"{sys.argv[1]}/{rank}", "w").write(" ".join(told) + " " + os.environ["MASTER_PORT"])
        """,
    )
    assert launch(2, [str(tmp_path), "run", "r.yaml"]) == 0
    first, second = ((tmp_path / str(rank)).read_text().split() for rank in range(2))
    threads = str(max((os.cpu_count() or 1) // 2, 1))
    assert first[:-1] == ["0", "0", "2", "127.0.0.1", threads, "run", "r.yaml"]
    assert second[:-1] == ["1", "1", "2", "127.0.0.1", threads, "run", "r.yaml"]
    assert first[-1] == second[-1]


@pytest.mark.parametrize(
    ("program", "code"),
    [
        ("sys.exit(3)", 3),
        ("sys.exit(130)", 130),
        ("sys.exit(2)", 2),
        ("time.sleep(1) if rank == 0 else None; sys.exit(3)", 3),
        ("sys.exit(1 if rank == 1 else 0)", 1),
        ("os.kill(os.getpid(), signal.SIGKILL) if rank == 1 else None", 137),
    ],
)
def test_exit_codes_pass_through(monkeypatch: pytest.MonkeyPatch, program: str, code: int) -> None:
    ranks_run(monkeypatch, program)
    assert launch(2, []) == code


def test_a_rank_that_ends_badly_takes_the_waiting_ones_along(
    monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    """The waiting one does not even listen to SIGTERM."""
    ranks_run(
        monkeypatch,
        """
        if rank == 1: sys.exit(7)
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        time.sleep(60)
        """,
    )
    started = time.monotonic()
    assert launch(2, []) == 7
    assert time.monotonic() - started < 20
    assert "rank 1 ended with exit code 7; the others cannot go on" in capfd.readouterr().err


def test_ctrl_c_reaches_every_rank_once(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    ranks_run(
        monkeypatch,
        """
        caught = []
        signal.signal(signal.SIGINT, lambda *_: caught.append(1))
        open(f"{sys.argv[1]}/ready{rank}", "w").close()
        while not caught: time.sleep(0.02)
        time.sleep(0.3)
        open(f"{sys.argv[1]}/caught{rank}", "w").write(str(len(caught)))
        sys.exit(130)
        """,
    )

    def press() -> None:
        while not all((tmp_path / f"ready{rank}").exists() for rank in range(2)):
            time.sleep(0.02)
        os.kill(os.getpid(), signal.SIGINT)

    threading.Thread(target=press, daemon=True).start()
    assert launch(2, [str(tmp_path)]) == 130
    assert [(tmp_path / f"caught{rank}").read_text() for rank in range(2)] == ["1", "1"]
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler


def test_the_third_ctrl_c_does_not_ask(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    ranks_run(
        monkeypatch,
        """
        signal.signal(signal.SIGINT, signal.SIG_IGN)
        open(f"{sys.argv[1]}/ready{rank}", "w").close()
        time.sleep(60)
        """,
    )

    def press() -> None:
        while not all((tmp_path / f"ready{rank}").exists() for rank in range(2)):
            time.sleep(0.02)
        for _ in range(3):
            os.kill(os.getpid(), signal.SIGINT)
            time.sleep(0.2)

    threading.Thread(target=press, daemon=True).start()
    assert launch(2, [str(tmp_path)]) == 137


@pytest.mark.skipif(sys.platform != "linux", reason="the kernel's death signal is Linux's")
def test_a_killed_launcher_leaves_no_rank_behind(tmp_path: Path) -> None:
    script = f"""
import sys
from autotune import launch
rank = '''
import os, time
open("{tmp_path}/" + os.environ["RANK"], "w").write(str(os.getpid()))
time.sleep(60)
'''
launch.COMMAND = (sys.executable, "-c", rank)
launch.launch(2, [])
"""
    process = subprocess.Popen([sys.executable, "-c", script])
    files = [tmp_path / "0", tmp_path / "1"]
    while not all(file.exists() and file.read_text() for file in files):
        time.sleep(0.05)
    process.kill()
    process.wait()
    assert ends(*(int(file.read_text()) for file in files))


def test_under_another_launcher_it_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RANK", "0")
    monkeypatch.setenv("MASTER_ADDR", "127.0.0.1")
    with pytest.raises(InputError, match="leave out one of the two"):
        launch(2, [])


def test_a_rank_of_one_that_no_launcher_named_is_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    """accelerate leaves RANK and WORLD_SIZE behind in a process that nobody launched."""
    pytest.importorskip("torch")
    from autotune.trainer.group import launched

    monkeypatch.setenv("RANK", "0")
    monkeypatch.setenv("WORLD_SIZE", "1")
    monkeypatch.delenv("MASTER_ADDR", raising=False)
    assert not launched()
    monkeypatch.setenv("WORLD_SIZE", "2")  # srun, without an address: an error that says so, no lone run
    assert launched()
    monkeypatch.setenv("WORLD_SIZE", "1")
    monkeypatch.setenv("MASTER_ADDR", "10.0.0.1")
    assert launched()
