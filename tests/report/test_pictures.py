"""Pictures: what is said without a browser, and cutting a PNG."""

from __future__ import annotations

import struct
import zlib
from pathlib import Path

import pytest
from typer.testing import CliRunner

from autotune.cli import app
from autotune.errors import RunError
from autotune.report import read_run
from autotune.report.heat import chunk
from autotune.report.pictures import cropped, write_pictures
from tests.report.made import make_run


def test_without_a_browser_nothing_is_written_and_the_next_move_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = make_run(tmp_path / "run", rollouts=6)
    monkeypatch.delenv("CHROMIUM", raising=False)
    monkeypatch.setenv("PATH", str(tmp_path))
    done = CliRunner().invoke(app, ["report", str(run), "--png", str(tmp_path / "png")])
    assert done.exit_code == 2
    assert "apt-get install chromium" in done.output
    assert not (run / "report.html").exists()
    assert not (tmp_path / "png").exists()


def test_a_browser_that_draws_nothing_is_told_with_its_words(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    fake = tmp_path / "chromium"
    fake.write_text("#!/bin/sh\necho no display >&2\nexit 1\n")
    fake.chmod(0o755)
    monkeypatch.setenv("CHROMIUM", str(fake))
    with pytest.raises(RunError, match=r"drew no picture: no display; name another one with CHROMIUM"):
        write_pictures([read_run(make_run(tmp_path / "run", rollouts=6))], tmp_path / "png")


@pytest.mark.parametrize(("kind", "channels"), [(0, 1), (2, 3), (3, 1), (6, 4)])
def test_cutting_keeps_the_upper_rows(kind: int, channels: int) -> None:
    rows = [bytes([0, *(i % 256 for i in range(y, y + 5 * channels))]) for y in range(9)]
    header = struct.pack(">IIBBBBB", 5, 9, 8, kind, 0, 0, 0)
    body = b"".join(
        chunk(n, b) for n, b in ((b"IHDR", header), (b"IDAT", zlib.compress(b"".join(rows))), (b"IEND", b""))
    )
    png = cropped(b"\x89PNG\r\n\x1a\n" + body, 4)
    assert struct.unpack(">II", png[16:24]) == (5, 4)
    start = png.index(b"IDAT") + 4
    size = int.from_bytes(png[start - 8 : start - 4], "big")
    assert zlib.decompress(png[start : start + size]) == b"".join(rows[:4])
