"""The tables of the page: runs, rules, and every decision with its evidence and verdict."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

from autotune.policies import POLICIES
from autotune.report import acts, compared, timelines, verdict
from autotune.report.acts import Step, tally
from autotune.report.groups import Group
from autotune.report.markup import esc, tag, text
from autotune.report.runs import RunData
from autotune.screen.marks import arrow, duration, number

GOOD_ENDS = ("done", "running")


def scores(run: RunData) -> str:
    """Tiles: the scores before and after, what was done, and how fast it was."""
    tiles = [_score_tile(score) for score in verdict.scores(run)]
    count = tally(run.steps)
    if run.mode == "act":
        judged = ", ".join(f"{count[k]} {k}" for k in ("kept", "reverted", "inconclusive") if count[k])
        tiles.append(_tile("changes", str(count["acts"]), judged or "none judged"))
    if count["restore"]:
        tiles.append(_tile("weights brought back", str(count["restore"]), "rule X2"))
    speed = run.known("tokens_per_second")
    if speed:
        tiles.append(
            _tile("tokens/s, median", f"{sorted(speed)[len(speed) // 2]:,.0f}", f"{len(speed)} rollouts")
        )
    seconds = [v for v in run.times.get("total", ()) if v is not None]
    if seconds:
        tiles.append(
            _tile("time in rollouts", duration(sum(seconds)), f"{sum(seconds) / len(seconds):.2f} s each")
        )
    return tag("dl", *tiles, class_="tiles")


def _score_tile(score: verdict.Score) -> str:
    if score.before is None or score.after is None:
        return _tile(score.name, number(score.after), "")
    change = score.after - score.before
    style = "up" if change >= 0 else "down"
    value = tag("span", text("span", f"{score.before:.3f} → ", class_="from"), f"{score.after:.3f}")
    return _tile_of(score.name, value, text("span", f"{change:+.3f}", class_=style))


def _tile(name: str, value: str, below: str) -> str:
    return _tile_of(name, esc(value), esc(below))


def _tile_of(name: str, value: str, below: str) -> str:
    return tag("div", text("dt", name), tag("dd", value), tag("dd", below, class_="below"), class_="tile")


def runs(groups: Sequence[Group], anchors: dict[str, str]) -> str:
    """All runs, a row each, sortable by every column."""
    head = (
        "run",
        "seed",
        "control",
        "ended",
        "rollouts",
        "reward",
        "held-out",
        "tokens/s",
        "changes",
        "kept",
        "reverted",
        "restores",
        "course of the reward",
    )
    sortable = [
        _sort_button(name) if name != "course of the reward" else text("th", name, scope="col")
        for name in head
    ]
    rows = [_run_row(group, run, anchors) for group in groups for run in group.runs]
    return _scroll(
        tag("table", tag("thead", tag("tr", *sortable)), tag("tbody", *rows), class_="runs sortable"),
        "All runs",
    )


def _sort_button(name: str) -> str:
    return tag("th", text("button", name, type="button"), scope="col")


def _run_row(group: Group, run: RunData, anchors: dict[str, str]) -> str:
    count, rewards = tally(run.steps), run.known("reward_mean")
    first, last = rewards[: verdict.LAST], rewards[-verdict.LAST :]
    reward = f"{sum(first) / len(first):.3f} → {sum(last) / len(last):.3f}" if rewards else "not logged"
    held = [e for e in run.evaluations if e.greedy is not None or e.sampled is not None]
    score = [e.greedy if e.greedy is not None else e.sampled for e in held]
    speed = sorted(run.known("tokens_per_second"))
    swatch = tag("i", class_=f"swatch {compared.color(group)}")
    end = text("span", run.status, class_="" if run.status in GOOD_ENDS else "bad", title=run.reason or None)
    cells = [
        _cell(tag("a", swatch, esc(group.label), href=f"#{anchors[run.folder]}"), group.label),
        _cell(esc(run.seed), run.seed, "n"),
        _cell(esc(run.mode or "unknown"), run.mode),
        _cell(end, run.status),
        _cell(str(len(run.rollouts)), len(run.rollouts), "n"),
        _cell(esc(reward), sum(last) / len(last) if rewards else "", "n"),
        _cell(
            esc(f"{score[0]:.3f} → {score[-1]:.3f}" if score else "not evaluated"),
            score[-1] if score else "",
            "n",
        ),
        _cell(
            esc(f"{speed[len(speed) // 2]:,.0f}" if speed else "not logged"),
            speed[len(speed) // 2] if speed else "",
            "n",
        ),
        *(_cell(str(count[k]), count[k], "n") for k in ("acts", "kept", "reverted", "restore")),
        tag("td", compared.spark(run.metrics.get("reward_mean", ()))),
    ]
    return tag("tr", *cells)


def _cell(markup: str, value: object, class_: str | None = None) -> str:
    """A cell, with the value that it is sorted by."""
    return tag("td", markup, data_v=value, class_=class_)


def rules(group_runs: Sequence[RunData]) -> str:
    """What each rule did over all runs: changes, verdicts, and what the guards held back."""
    steps = [step for run in group_runs for step in run.steps if step.rule and step.what != "reverted"]
    held: Counter[str] = Counter()
    for run in group_runs:
        for (rule, _, _), count in run.vetoes.items():
            held[rule] += count
    names = sorted({s.rule for s in steps} | set(held), key=lambda r: (-sum(s.rule == r for s in steps), r))
    if not names:
        return ""
    head = (
        "rule",
        "what it does",
        "changes",
        "kept",
        "reverted",
        "inconclusive",
        "would",
        "refused",
        "restores",
        "held back by guards",
    )
    rows = [tag("tr", *_rule_cells(name, [s for s in steps if s.rule == name], held[name])) for name in names]
    table = tag(
        "table", tag("thead", tag("tr", *(text("th", h, scope="col") for h in head))), tag("tbody", *rows)
    )
    return _scroll(table, "What each rule did")


def _rule_cells(name: str, steps: Sequence[Step], held: int) -> list[str]:
    first = [s for s in steps if not s.again]
    numbers = [
        sum(s.what == "change" for s in first),
        *(sum(s.verdict == v for s in first) for v in ("kept", "reverted", "inconclusive")),
        *(sum(s.what == w for s in first) for w in ("would", "refused", "restore")),
        held,
    ]
    return [
        text("th", name, scope="row", class_="rule"),
        text("td", what_it_does(name)),
        *(text("td", n or "·", class_="n" if n else "n zero") for n in numbers),
    ]


def what_it_does(rule: str) -> str:
    """The rule's own summary; empty for what is no rule of ours."""
    known = POLICIES.get(rule)
    return str(getattr(known, "summary", "")) if known else ""


def decisions(run: RunData, prefix: str) -> str:
    """Every step of a run: rollout, rule, change, reason with evidence, verdict with statistics."""
    if not run.steps:
        return text("p", "No knob was changed, and nothing was restored or stopped.", class_="quiet")
    head = ("rollout", "rule", "change", "why, and on what evidence", "verdict, and what it rests on")
    rows = [_decision_row(step, f"{prefix}-{i}") for i, step in enumerate(run.steps)]
    again = sum(step.again for step in run.steps)
    more = ""
    if again:
        words = f"show {again} further move{'s' * (again != 1)} of regulators"
        more = tag("label", '<input type="checkbox" class="again"> ', esc(words), class_="more")
    table = tag(
        "table",
        tag("thead", tag("tr", *(text("th", h, scope="col") for h in head))),
        tag("tbody", *rows),
        class_="decisions",
    )
    return more + _scroll(table, f"Decisions of {run.label}")


def _decision_row(step: Step, id: str) -> str:
    change = text("span", step.knob, class_="knob") if step.knob else ""
    if step.after is not None:
        change += text("b", arrow(step.before, step.after), class_="change")
    if not change or step.what not in ("change", "reverted"):
        change = tag("span", esc(step.what), class_="what") + change
    rule = (
        text("abbr", step.rule, title=what_it_does(step.rule)) if what_it_does(step.rule) else esc(step.rule)
    )
    sign = text("span", timelines.sign(step), class_=f"sign {step.outcome}", aria_hidden="true")
    return tag(
        "tr",
        text("td", step.rollout, class_="n"),
        tag("th", sign, " ", rule, scope="row", class_="rule"),
        tag("td", change),
        tag("td", text("span", step.reason), _facts(step.evidence)),
        tag("td", *_verdict(step)),
        id=id,
        tabindex="-1",
        class_="again" if step.again else None,
    )


_UNJUDGED = {
    "regulating": "still regulating",
    "emergency": "emergency, not on probation",
    "open": "not judged yet",
    "would": "not made: the controller was in shadow",
    "refused": "not what the trainer uses",
}


def _verdict(step: Step) -> list[str]:
    if step.verdict:
        when = f" at {step.verdict_rollout}" if step.verdict_rollout is not None else ""
        word = text("b", f"{step.verdict}{when}", class_=f"verdict {step.verdict}")
        return [word, " ", text("span", step.verdict_reason), _facts(step.statistics)]
    words = _UNJUDGED.get(step.outcome, "")
    return [text("span", words, class_="quiet") if words else "", _facts(step.statistics)]


def _facts(values: object) -> str:
    pairs = list(acts.plain(values)) if isinstance(values, dict) else []
    if not pairs:
        return ""
    return tag("dl", *(tag("div", text("dt", n), " ", text("dd", v)) for n, v in pairs), class_="facts")


def others(run: RunData) -> str:
    """Vetoes by their cause, and rules that could not speak."""
    parts = []
    if run.vetoes:
        rows = [_veto_row(key, n, run.veto_reasons[key]) for key, n in run.vetoes.most_common()]
        head = ("rule", "knob", "guard", "times", "last reason")
        table = tag(
            "table", tag("thead", tag("tr", *(text("th", h, scope="col") for h in head))), tag("tbody", *rows)
        )
        title = f"{sum(run.vetoes.values())} proposals held back by guards"
        parts.append(tag("details", text("summary", title), _scroll(table, title)))
    if run.silent:
        items = [
            tag("li", text("b", ", ".join(rules)), " ", esc(why)) for why, rules in _by_reason(run.silent)
        ]
        title = f"{len(run.silent)} rules that could not speak, and why"
        parts.append(tag("details", text("summary", title), tag("ul", *items)))
    return "".join(parts)


def _veto_row(key: tuple[str, str, str], count: int, reason: str) -> str:
    rule, knob, guard = key
    return tag(
        "tr",
        text("th", rule, scope="row", class_="rule"),
        text("td", knob),
        text("td", guard),
        text("td", count, class_="n"),
        text("td", reason),
    )


def _by_reason(silent: dict[str, str]) -> list[tuple[str, list[str]]]:
    reasons: dict[str, list[str]] = {}
    for rule, why in sorted(silent.items()):
        reasons.setdefault(why, []).append(rule)
    return list(reasons.items())


def _scroll(table: str, label: str) -> str:
    """A wide table scrolls in its own box, with the keyboard too."""
    return tag("div", table, class_="scroll", tabindex="0", role="region", aria_label=label)
