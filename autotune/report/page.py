"""The page: answer first, then the comparison, then each group and each run.

    verdict and tiles                    what a person wants in ten seconds
    all runs                             a row each (several runs)
    compared                             one chart per quantity, one curve per group (several groups)
    a part per group                     mean with band over its seeds; of a single run, the run itself
    a part per run                       its charts, decisions, vetoes and silent rules

One file: style and script are inside, nothing is fetched. The page can be read without its script, which
adds the crosshair, tooltips, tables of the drawn numbers and sorting.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from importlib.resources import files
from pathlib import Path

import autotune
from autotune.report import charts, compared, tables, verdict
from autotune.report.groups import Group, group_runs
from autotune.report.look import Look, span_of
from autotune.report.markup import esc, tag, text
from autotune.report.panels import Panel, draw
from autotune.report.runs import RunData, read_run

POINTS = 600
"""Positions drawn per chart, when there are few runs."""
POINTS_IN_ALL = 24_000
"""Of all runs' own charts together, per chart; so that a page of many runs stays small."""
FEWEST = 60
MOST_WITH_SIGNALS = 40
"""On a page of more runs each run's own part has the main charts only."""
GENERATOR = "autotune report"


def render(runs: Sequence[RunData | str | Path], problems: Sequence[str] = (), title: str = "") -> str:
    """The whole page as HTML.

    Args:
        runs: run folders, journals or runs already read; at least one.
        problems: what could not be read, in words, to be shown on the page.
        title: of the page; otherwise the runs' own names.

    Raises:
        InputError: a folder holds no run, or `runs` is empty.
        JournalError: a journal is damaged.
    """
    read = [run if isinstance(run, RunData) else read_run(run) for run in runs]
    return _Page(group_runs(read), problems, title).html()


class _Page:
    def __init__(self, groups: Sequence[Group], problems: Sequence[str], title: str) -> None:
        self.groups = groups
        self.runs = [run for group in groups for run in group.runs]
        self.problems = problems
        self.title = title or self._title()
        self.anchors = {run.folder: f"run-{i}" for i, run in enumerate(self.runs)}
        self.points = max(min(POINTS, POINTS_IN_ALL // max(len(self.runs), 1)), FEWEST)
        self._ids = itertools.count(1)

    def html(self) -> str:
        head = tag(
            "head",
            '<meta charset="utf-8">',
            '<meta name="viewport" content="width=device-width, initial-scale=1">',
            f'<meta name="generator" content="{GENERATOR} {esc(autotune.__version__)}">',
            '<meta name="color-scheme" content="light dark">',
            '<link rel="icon" href="data:,">',
            text("title", f"{self.title} · autotune"),
            tag("style", asset("page.css")),
        )
        body = tag(
            "body",
            '<a class="skip" href="#main">to the verdict</a>',
            self._header(),
            tag("main", *self._main(), id="main"),
            self._footer(),
            '<div id="tip" role="tooltip" hidden></div><p id="said" class="unseen" aria-live="polite"></p>',
            tag("script", asset("page.js")),
        )
        return f'<!doctype html>\n<html lang="en">{head}{body}</html>\n'

    def _title(self) -> str:
        labels = list(dict.fromkeys(group.label for group in self.groups))
        if len(self.runs) == 1:
            return self.runs[0].label
        return ", ".join(labels[:4]) + (f" and {len(labels) - 4} more" if len(labels) > 4 else "")

    def _header(self) -> str:
        count = f"{len(self.runs)} run{'s' * (len(self.runs) != 1)}"
        if len(self.groups) > 1:
            count += f" in {len(self.groups)} groups"
        links = [text("a", words, href=f"#{id}") for id, words in self._parts()]
        return tag(
            "header",
            tag("p", text("b", "autotune"), " report · ", esc(count), class_="brand"),
            text("h1", self.title),
            tag("nav", *links, aria_label="Parts of this page"),
        )

    def _parts(self) -> list[tuple[str, str]]:
        parts = [("main", "Verdict")]
        if len(self.runs) > 1:
            parts.append(("runs", "Runs"))
        if len(self.groups) > 1:
            parts.append(("compared", "Compared"))
        if len(self.groups) <= 6 and len(self.runs) > 1:
            parts += [(f"group-{g.index}", g.label) for g in self.groups]
        return [*parts, ("rules", "Rules"), ("each", "Decisions" if len(self.runs) == 1 else "Each run")]

    def _main(self) -> Iterator[str]:
        yield self._verdict()
        if len(self.runs) > 1:
            yield tag("section", text("h2", "Runs"), tables.runs(self.groups, self.anchors), id="runs")
        if len(self.groups) > 1:
            yield self._compared()
        for group in self.groups:
            yield self._group(group)
        rules = tables.rules(self.runs)
        nothing = text("p", "No rule proposed anything.", class_="quiet")
        yield tag("section", text("h2", "What each rule did"), rules or nothing, id="rules")
        yield self._each()

    # -- parts -------------------------------------------------------------------------------------

    def _verdict(self) -> str:
        boxes = [self._headline(line) for line in verdict.headlines(self.groups)]
        told = []
        if len(self.runs) == 1:
            run = self.runs[0]
            told = [text("p", verdict.told(run), class_="told"), *_reason(run), tables.scores(run)]
        notes = [tag("li", text("b", run.label), ": ", esc(note)) for run in self.runs for note in run.notes]
        notes += [tag("li", text("b", "not shown"), ": ", esc(problem)) for problem in self.problems]
        listed = tag("ul", *notes, class_="notes") if notes else ""
        return tag(
            "section",
            tag("div", *boxes, class_="boxes"),
            *told,
            listed,
            class_="answer",
            aria_label="Verdict",
        )

    def _headline(self, line: verdict.Headline) -> str:
        signs = {"helped": "✓", "harmed": "✗", "no difference": "=", "one pair": "≈", "alone": "→"}
        sign = signs.get(line.word, "?")
        mark = text("span", sign, class_="big", aria_hidden="true")
        words = tag("div", text("p", line.text, class_="headline"), text("p", line.detail, class_="detail"))
        return tag("div", mark, words, class_=f"headbox {line.word.replace(' ', '-')}")

    def _look(self, runs: Sequence[RunData], points: int) -> Look:
        anchors = self.anchors
        rows = {(run.folder, i): f"{anchors[run.folder]}-{i}" for run in runs for i in range(len(run.steps))}
        return Look(span_of(runs), points, rows)

    def _draw(self, panel: Panel) -> str:
        return draw(panel, f"p{next(self._ids)}")

    def _compared(self) -> str:
        look = self._look(self.runs, POINTS)
        drawn = [self._draw(panel) for panel in compared.compared(self.groups, look)]
        many = any(len(group.runs) > 1 for group in self.groups)
        words = "Mean over seeds; the band is one standard deviation." if many else "One run per curve."
        legend = [
            tag(
                "li",
                tag("i", class_=f"swatch {compared.color(g)}"),
                esc(g.label),
                text("span", f" {len(g.runs)} seed{'s' * (len(g.runs) != 1)}", class_="quiet"),
            )
            for g in self.groups
        ]
        return tag(
            "section",
            text("h2", "Compared"),
            text("p", words, class_="quiet"),
            tag("ul", *legend, class_="groups"),
            tag("div", *drawn, class_="grid"),
            id="compared",
            data_sync="all",
        )

    def _group(self, group: Group) -> str:
        """Of a single run, its charts open; of several, mean and band."""
        title = group.label if len(self.runs) > 1 else "The run, rollout by rollout"
        seeds = ", ".join(run.seed for run in group.runs[:12]) + (" …" if len(group.runs) > 12 else "")
        words = f"{len(group.runs)} seeds ({seeds}): mean, and one standard deviation as a band."
        told = text("p", words, class_="quiet") if len(group.runs) > 1 else ""
        name = f"group-{group.index}"
        drawn = self._charts(group, self._look(group.runs, POINTS))
        return tag("section", text("h2", title), told, drawn, id=name, data_sync=name)

    def _charts(self, group: Group, look: Look) -> str:
        """What happened, over one axis from top to bottom; then the other signals, two in a row."""
        strip = tag("div", *(self._draw(panel) for panel in charts.strip(group, look)), class_="strip")
        if len(self.runs) > MOST_WITH_SIGNALS and len(group.runs) == 1:
            return strip
        grid = tag("div", *(self._draw(panel) for panel in charts.signals(group, look)), class_="grid")
        return strip + grid

    def _each(self) -> str:
        single = len(self.runs) == 1
        parts = [self._run(group, run, single) for group in self.groups for run in group.runs]
        title = "Decisions" if single else "Each run"
        return tag("section", text("h2", title), *parts, id="each")

    def _run(self, group: Group, run: RunData, single: bool) -> str:
        anchor = self.anchors[run.folder]
        table = tables.decisions(run, anchor) + tables.others(run)
        if single:
            return tag("div", table, id=anchor)
        name = f"{group.label}, seed {run.seed}" if run.seed else group.label
        swatch = tag("i", class_=f"swatch {compared.color(group)}")
        told = text("span", verdict.told(run), class_="quiet")
        summary = tag("summary", swatch, text("b", name), " ", told)
        parts = [text("p", run.folder, class_="where"), *_reason(run), tables.scores(run), table]
        if len(group.runs) > 1:  # otherwise its charts are the group's
            own = Group(run.label, group.index, (run,))
            parts.append(tag("div", self._charts(own, self._look([run], self.points)), data_sync=anchor))
        return tag("details", summary, *parts, id=anchor, class_="run")

    def _footer(self) -> str:
        longest, points = max(len(run.rollouts) for run in self.runs), POINTS
        drawn = "Every rollout is drawn."
        if longest > min(self.points, POINTS):
            each = f" ({self.points} in each run's own part)" if self.points < POINTS else ""
            drawn = (
                f"A chart shows about {points} positions{each} of up to {longest} rollouts: of every stretch"
            )
            drawn += " the lowest and the highest reading of each curve are kept, and no reading is made up."
        words = (
            f"Drawn from the journals alone, by autotune {autotune.__version__}.", drawn,
            "A metric that a trainer does not measure has no curve: its chart says why.",
            "Of so many runs each one's own part has its main charts only; report it alone for all of them."
            if len(self.runs) > MOST_WITH_SIGNALS else "",
        )  # fmt: skip
        return tag("footer", *(text("p", w) for w in words if w))


def _reason(run: RunData) -> list[str]:
    if not run.reason:
        return []
    style = "quiet" if run.status in tables.GOOD_ENDS else "bad"
    return [text("p", run.reason, class_=f"reason {style}")]


def asset(name: str) -> str:
    """A file of this package, as text."""
    return files("autotune.report").joinpath(name).read_text("utf-8")
