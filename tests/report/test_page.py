"""The page: one file that fetches nothing, escapes what runs say, and says what is missing."""

from __future__ import annotations

import dataclasses
import io
import re
import time
from html.parser import HTMLParser
from pathlib import Path

import pytest
from rich.console import Console
from typer.testing import CliRunner

from autotune.cli import app
from autotune.journal import inspect_journal
from autotune.report import read_run, render
from autotune.report.page import GENERATOR
from autotune.screen import print_summary
from tests import journal_lines as j
from tests.report.made import make_run, write_lines

VOID = {"meta", "link", "input", "br", "hr", "img"}


class Outline(HTMLParser):
    """Ids, links, text, and whether every element was closed in order."""

    def __init__(self, page: str) -> None:
        super().__init__()
        self.ids: list[str] = []
        self.links: list[str] = []
        self.words: list[str] = []
        self.open: list[str] = []
        self.feed(page)
        assert not self.open, f"not closed: {self.open}"

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        given = dict(attrs)
        self.ids += [given["id"]] if given.get("id") else []
        self.links += [given["href"]] if tag == "a" and given.get("href") else []
        if tag not in VOID:
            self.open.append(tag)

    def handle_endtag(self, tag: str) -> None:
        assert self.open, tag
        assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        if self.open and self.open[-1] not in ("script", "style"):
            self.words.append(data)

    @property
    def text(self) -> str:
        return " ".join(" ".join(self.words).split())


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    """Three seeds with the controller and three without."""
    place = tmp_path_factory.mktemp("runs")
    return [
        make_run(place / f"{mode}-{s}", mode, s, name=f"timid_{mode}")
        for mode in ("act", "off")
        for s in (1, 2, 3)
    ]


def test_it_is_one_file_that_fetches_nothing(runs: list[Path]) -> None:
    page = render(runs)
    outside = re.findall(r"""(?:src|href|url\(|@import)\s*[=(]?\s*["']?(?!data:|#)[\w./:]+""", page)
    assert outside == []
    assert "http" not in re.sub(r"<script.*?</script>", "", page, flags=re.S)
    assert "prefers-color-scheme: dark" in page


def test_every_link_has_its_target_and_every_id_is_unique(runs: list[Path]) -> None:
    outline = Outline(render(runs))
    assert len(outline.ids) == len(set(outline.ids))
    missing = {link for link in outline.links if link.removeprefix("#") not in set(outline.ids)}
    assert not missing
    assert len([link for link in outline.links if re.fullmatch(r"#run-\d+-\d+", link)]) > 10


def test_the_answer_comes_first(runs: list[Path]) -> None:
    text = Outline(render(runs)).text
    assert "The controller helped on timid_act: +0.5" in text
    assert (
        text.index("The controller helped") < text.index("course of the reward") < text.index("Reward and KL")
    )


def test_two_readings_of_the_same_runs_give_the_same_page(runs: list[Path]) -> None:
    assert render(runs[:2]) == render(runs[:2])


def test_what_a_run_says_is_never_markup(tmp_path: Path) -> None:
    evil = "</script><script>alert(1)</script><img src=x onerror=alert(2)>"
    change = {**j.change("X1", "kl_coef", 0.005, 0.01), "reason": evil, "evidence": {evil: 1.0}}
    lines = [
        j.header(name=evil),
        j.rollout(0),
        j.rollout(1, invalid={"kl_ref": ["missing", evil]}, changes=[change]),
    ]
    page = render(
        [write_lines(tmp_path / "run", [*lines, j.rollout(2, vetoes=[j.veto(evil, "kl_coef", 1, evil)])])]
    )
    assert "<img" not in page
    assert (
        page.count("<script") == page.count("</script>") == page.count('<script type="application/json"') + 1
    )
    assert evil in Outline(page).text.replace("&lt;", "<")


def test_marks_of_one_rollout_stand_side_by_side(tmp_path: Path) -> None:
    rescue = {"kind": "undo", "before_rollout": 3, "reason": "too far"}
    lines = [
        j.header(),
        *(j.rollout(t) for t in range(3)),
        j.rollout(3, restore=rescue, alarms=["one", "two"]),
    ]
    page = render([write_lines(tmp_path / "run", lines)])
    (rail,) = re.findall(r'data-key="decisions">.*?</figure>', page, re.S)
    marks = re.findall(r'<a class="mark.*?style="left:(.*?)"', rail)
    assert len(marks) == len(set(marks)) == 3


def test_a_metric_that_is_not_measured_is_said_and_not_drawn(tmp_path: Path) -> None:
    lines = [{**j.header(), "recipe": {"name": "trl", "control": {"mode": "act"}}}]
    lines += [
        j.rollout(t, invalid={"clip_ratio": ["not_logged", "TRL logs clip_ratio/low_mean only"]})
        for t in range(9)
    ]
    for line in lines[1:]:
        del line["snapshot"]["histograms"]
    page = render([write_lines(tmp_path / "run", lines)])
    figure = re.search(r'<figure[^>]*data-key="clip_ratio".*?</figure>', page, re.S)
    assert figure
    assert "<svg" not in figure[0]
    assert "not logged: TRL logs clip_ratio/low_mean only" in figure[0]
    assert "kl_ref: not logged by this trainer" in page
    assert page.count('data-points="0"') == 0


@pytest.mark.parametrize("count", [1, 2])
def test_a_very_short_run_has_a_page(tmp_path: Path, count: int) -> None:
    page = render([write_lines(tmp_path / "run", [j.header(), *(j.rollout(t) for t in range(count))])])
    assert "Broken off" in Outline(page).text


def test_broken_and_missing_runs_are_listed_beside_the_others(tmp_path: Path, runs: list[Path]) -> None:
    (tmp_path / "bad").mkdir()
    (tmp_path / "bad" / "journal.jsonl").write_text("no json\n{}\n")
    page = tmp_path / "page.html"
    done = CliRunner().invoke(
        app, ["report", str(runs[0]), str(tmp_path / "bad"), str(tmp_path / "no"), "--out", str(page)]
    )
    assert done.exit_code == 0, done.output
    assert "1 run" in done.output
    assert done.output.count("not shown:") == 2
    assert "there is no" in Outline(page.read_text()).text
    alone = CliRunner().invoke(app, ["report", str(tmp_path / "no")])
    assert alone.exit_code == 2
    assert "expected the folder of a run" in alone.output


def test_a_folder_of_runs_stands_for_them(runs: list[Path], tmp_path: Path) -> None:
    done = CliRunner().invoke(app, ["report", str(runs[0].parent), "--out", str(tmp_path / "page.html")])
    assert done.exit_code == 0, done.output
    assert "6 runs" in done.output


def test_the_page_goes_into_the_run_and_never_over_something_else(tmp_path: Path) -> None:
    run = make_run(tmp_path / "run", rollouts=8)
    for _ in range(2):
        assert CliRunner().invoke(app, ["report", str(run)]).exit_code == 0
    assert GENERATOR in (run / "report.html").read_text()
    (tmp_path / "mine.html").write_text("<p>my own page</p>")
    done = CliRunner().invoke(app, ["report", str(run), "--out", str(tmp_path / "mine.html")])
    assert done.exit_code == 2
    assert "is no report of autotune" in done.output
    assert (tmp_path / "mine.html").read_text() == "<p>my own page</p>"
    nowhere = CliRunner().invoke(app, ["report", str(run), "--out", str(tmp_path / "no" / "page.html")])
    assert nowhere.exit_code == 2
    assert "cannot be written" in nowhere.output


def test_two_hundred_runs_make_a_small_page_soon(
    runs: list[Path], capsys: pytest.CaptureFixture[str]
) -> None:
    """Read, grouped, drawn: in under 30 s of CPU and 15 MB."""
    start = time.process_time()
    many = []
    for i in range(200):
        run = read_run(runs[i % 6])
        many.append(dataclasses.replace(run, seed=str(i // 6), folder=f"{run.folder}-{i}"))
    page = render(many)
    seconds, size = time.process_time() - start, len(page.encode()) / 1e6
    with capsys.disabled():
        print(f"\n200 runs of 60 rollouts: {seconds:.1f} s of CPU, {size:.1f} MB")
    assert page.count('class="run"') == 200
    assert seconds < 30
    assert size < 15


def test_the_summary_of_a_run_names_the_command(runs: list[Path]) -> None:
    console = Console(file=io.StringIO(), width=100)
    print_summary(console, inspect_journal(runs[0] / "journal.jsonl").lines, runs[0])
    assert f"autotune report {runs[0]}" in console.file.getvalue()  # type: ignore[attr-defined]


def test_long_runs_say_that_they_are_thinned(tmp_path: Path) -> None:
    rewards = [0.5 + 0.001 * (t % 7) for t in range(2000)]
    rewards[1234] = 0.9  # a peak of one rollout
    lines = [j.header(), *(j.rollout(t, {"reward_mean": r}) for t, r in enumerate(rewards))]
    page = render([write_lines(tmp_path / "run", lines)])
    assert "A chart shows about 600 positions of up to 2000 rollouts" in page
    drawn = re.search(r'"n":"reward".*?"y":\[(.*?)\]', page)
    assert drawn
    values = [float(v) for v in drawn[1].split(",")]
    assert (min(values), max(values)) == (0.5, 0.9)
    assert len(values) < 700


def test_moved_and_different_knobs_are_compared(tmp_path: Path) -> None:
    """One chart per knob that somebody moved, with a curve of every group; none for the others."""
    arms = [(mode, seed) for mode in ("off", "act") for seed in (1, 2)]
    folders = [make_run(tmp_path / f"{mode}-{seed}", mode, seed) for mode, seed in arms]
    page = render(folders)
    section = page[page.index('id="compared"') :]
    section = section[: section.index("</section>")]
    found = re.findall(r'data-key="knob/([a-z_]+)"', section)
    assert "actor_learning_rate" in found and "temperature" not in found
    assert len(found) == len(set(found))
