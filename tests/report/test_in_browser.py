"""What a person finds on the page, in a real browser: with eyes, with the mouse, with keys, by ear."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from autotune.journal import read_journal
from autotune.report import pictures, read_run, render
from autotune.screen.marks import arrow
from tests.browser import Browser, needs_chromium
from tests.report.made import make_run

CHART = "document.querySelector('[data-key=reward_kl]')"
pytestmark = [needs_chromium(), pytest.mark.slow]


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    place = tmp_path_factory.mktemp("runs")
    return [
        make_run(place / f"{mode}-{s}", mode, s, name=f"timid_{mode}")
        for mode in ("act", "off")
        for s in (1, 2)
    ]


@pytest.fixture(scope="module")
def browser() -> Iterator[Browser]:
    with Browser(1280, 900) as browser:
        yield browser


@pytest.fixture(scope="module")
def one(folders: list[Path], tmp_path_factory: pytest.TempPathFactory) -> str:
    page = tmp_path_factory.mktemp("one") / "page.html"
    page.write_text(render(folders[:1]), "utf-8")
    return page.as_uri()


@pytest.fixture(scope="module")
def many(folders: list[Path], tmp_path_factory: pytest.TempPathFactory) -> str:
    page = tmp_path_factory.mktemp("many") / "page.html"
    page.write_text(render(folders), "utf-8")
    return page.as_uri()


def lines_of(folder: Path) -> list[dict[str, Any]]:
    return [line for line in read_journal(folder / "journal.jsonl") if line["type"] == "rollout"]


def tip(browser: Browser) -> str:
    """The tooltip's words on one line."""
    return " ".join(browser.script("document.querySelector('#tip').innerText").split())


@pytest.mark.parametrize("scheme", ["light", "dark"])
@pytest.mark.parametrize("size", [(1280, 900), (390, 844)], ids=["wide", "phone"])
@pytest.mark.parametrize("which", ["one", "many"])
def test_no_complaint_and_nothing_sticks_out(
    browser: Browser,
    request: pytest.FixtureRequest,
    tmp_path: Path,
    which: str,
    size: tuple[int, int],
    scheme: str,
) -> None:
    browser.resize(*size, mobile=size[0] < 500)
    browser.media(prefers_color_scheme=scheme)
    browser.open(request.getfixturevalue(which))
    browser.picture(tmp_path / "page.png", whole=True)
    assert browser.problems() == []
    assert browser.script("document.documentElement.scrollWidth") <= size[0]
    ground = browser.script("getComputedStyle(document.body).backgroundColor.match(/\\d+/)[0]")
    assert (int(ground) > 128) == (scheme == "light")
    fetched = [e["request"]["url"] for e in browser.events("Network.requestWillBeSent")]
    assert [url for url in fetched if not url.startswith("data:")] == [request.getfixturevalue(which)]
    browser.resize(1280, 900)
    browser.media(prefers_color_scheme="light")


def test_every_curve_has_as_many_points_as_the_journal_has_readings(
    browser: Browser, one: str, folders: list[Path]
) -> None:
    browser.open(one)
    lines = lines_of(folders[0])
    shown = {"reward_kl": ["reward_mean", "kl_ref"], "clip_ratio": ["clip_ratio"], "kl_step": ["kl_step"],
             "entropy": ["entropy"], "grad_norm": ["grad_norm"],
             "ratio_shares": ["ratio_low", "ratio_high"]}  # fmt: skip
    for key, names in shown.items():
        counted = browser.script(
            f"[...document.querySelectorAll('[data-key={key}] path.line')]"
            ".filter(p => !p.classList.contains('held') && !p.closest('.key')).map(p => +p.dataset.points)"
        )
        expected = [sum(name in line["snapshot"]["metrics"] for line in lines) for name in names]
        assert counted == [n for n in expected if n], key
    vertices = browser.script(f"{CHART}.querySelector('path.reward[data-points]').getAttribute('d')")
    assert vertices.count("M") + vertices.count("L") == len(lines)


def test_pointing_at_a_rollout_reads_its_numbers(browser: Browser, one: str, folders: list[Path]) -> None:
    browser.open(one)
    lines = {line["rollout"]: line["snapshot"]["metrics"] for line in lines_of(folders[0])}
    browser.script(f"{CHART}.scrollIntoView({{block: 'center', behavior: 'instant'}})")
    frame = browser.script(
        f"(r => [r.left, r.top, r.width, r.height])({CHART}.querySelector('.cursor').getBoundingClientRect())"
    )
    for rollout in (0, 17, 42, 59):
        browser.move(frame[0] + frame[2] * (rollout + 0.5) / 60, frame[1] + frame[3] / 3)
        said = tip(browser)
        assert said.startswith(f"rollout {rollout} ")
        assert f"reward {lines[rollout]['reward_mean']:.4g} " in said + " "
        assert f"KL to the reference {lines[rollout]['kl_ref']:.4g}" in said
    crosses = "[...document.querySelectorAll('.cross')].filter(c => !c.hidden).map(c => c.style.left)"
    assert len(set(browser.script(crosses))) == 1
    assert len(browser.script(crosses)) > 8


def test_pointing_at_a_decision_reads_rule_evidence_change_and_verdict(
    browser: Browser, one: str, folders: list[Path]
) -> None:
    browser.open(one)
    changes = [
        (line["rollout"], change) for line in lines_of(folders[0]) for change in line["decision"]["changes"]
        if change["kind"] != "revert"
    ]  # fmt: skip
    verdicts = {s.reason: s for s in read_run(folders[0]).steps}
    rollout, change = changes[0]
    browser.hover(f'[data-key="knob/{change["knob"]}"] .mark')
    said = tip(browser)
    assert said.startswith(f"rollout {rollout} ")
    assert change["rule"] in said
    assert f"{change['knob']} {arrow(change['before'], change['after'])}" in said
    assert " ".join(change["reason"].split()) in said
    for name, value in change["evidence"].items():
        assert f"{name.replace('_', ' ')} {value:.4g}" in said
    step = verdicts[change["reason"]]
    assert f"{step.verdict} at {step.verdict_rollout}" in said
    assert " ".join(step.verdict_reason.split()) in said
    marks = browser.script("document.querySelectorAll('[data-key^=\"knob/\"] .mark').length")
    assert marks == sum(s.after is not None for s in read_run(folders[0]).steps)


def test_the_keyboard_reaches_charts_and_decisions(browser: Browser, one: str, folders: list[Path]) -> None:
    browser.open(one)
    steps = read_run(folders[0]).steps
    seen = []
    for _ in range(12):
        browser.key("Tab")
        seen.append(browser.focused())
        if seen[-1].startswith(f"link: rollout {steps[0].rollout}, {steps[0].rule}"):
            break
    assert seen[0] == "link: to the verdict"
    assert steps[0].reason in seen[-1]
    browser.key("ArrowRight")
    second = [s for s in steps if not s.again][1]
    assert f"rollout {second.rollout}, {second.rule}" in browser.focused()
    assert tip(browser).startswith(f"rollout {second.rollout} ")
    browser.key("Enter")  # to its row in the table
    browser.wait("document.activeElement.tagName == 'TR'")
    assert second.reason in browser.script("document.activeElement.innerText")


def test_arrow_keys_go_through_the_rollouts_and_are_spoken(
    browser: Browser, one: str, folders: list[Path]
) -> None:
    browser.open(one)
    lines = lines_of(folders[0])
    browser.script("document.querySelector('[data-key=reward_kl] .cursor').focus({focusVisible: true})")
    value = "document.activeElement.getAttribute('aria-valuetext')"
    browser.key("Home")
    assert browser.script(value).startswith(
        f"rollout 0: reward {lines[0]['snapshot']['metrics']['reward_mean']:.4g}"
    )
    browser.key("ArrowRight")
    browser.key("ArrowRight")
    assert browser.script(value).startswith(
        f"rollout 2: reward {lines[2]['snapshot']['metrics']['reward_mean']:.4g}"
    )
    browser.key("End")
    assert browser.script("document.activeElement.getAttribute('aria-valuenow')") == "59"
    browser.key("Escape")
    assert browser.script("document.querySelector('#tip').hidden") is True


def test_a_screen_reader_hears_every_chart(browser: Browser, one: str) -> None:
    browser.open(one)
    nodes = browser.accessible()
    pictures = [n for n in nodes if n["role"] == "image" and n["name"]]
    sliders = [n for n in nodes if n["role"] == "slider"]
    charts = browser.script("document.querySelectorAll('figure.panel .plot > svg').length")
    assert len(pictures) == charts > 10
    assert all("points" in n["description"] or "points" in n["name"] for n in sliders)
    assert {"Verdict", "Decisions"} <= {n["name"] for n in nodes}


def test_every_chart_becomes_a_table_of_its_numbers(browser: Browser, one: str, folders: list[Path]) -> None:
    browser.open(one)
    browser.click("[data-key=kl_step] .totable")
    rows = browser.script(
        "[...document.querySelectorAll('[data-key=kl_step] .numbers tbody tr')]"
        ".map(r => [...r.cells].map(c => c.textContent))"
    )
    metrics = [line["snapshot"]["metrics"]["kl_step"] for line in lines_of(folders[0])]
    assert [int(row[0]) for row in rows] == list(range(60))
    assert [float(row[1]) for row in rows] == pytest.approx(metrics, rel=1e-3)
    browser.click("[data-key=kl_step] .totable")
    assert browser.script("document.querySelector('.numbers')") is None


def test_groups_are_compared_by_mean_and_band(browser: Browser, many: str, folders: list[Path]) -> None:
    browser.open(many)
    numbers = json.loads(
        browser.script(
            "document.getElementById(document.querySelector('#compared [data-key=reward_mean]').id + '-d')"
            ".textContent"
        )
    )
    act = [[line["snapshot"]["metrics"]["reward_mean"] for line in lines_of(f)] for f in folders[:2]]
    assert [s["n"] for s in numbers["s"]] == ["timid_act", "timid_off"]
    assert numbers["s"][0]["y"] == pytest.approx([(a + b) / 2 for a, b in zip(*act, strict=True)], rel=1e-4)
    spread = [abs(a - b) / 2**0.5 for a, b in zip(*act, strict=True)]
    high = [m + s for m, s in zip(numbers["s"][0]["y"], spread, strict=True)]
    assert numbers["s"][0]["h"] == pytest.approx(high, rel=1e-3)
    assert browser.script("document.querySelectorAll('#compared path.band').length") >= 8


def test_the_table_of_runs_sorts_and_leads_to_a_run(browser: Browser, many: str) -> None:
    browser.open(many)
    column = "[...document.querySelectorAll('.runs tbody tr')].map(r => r.cells[8].textContent)"
    browser.script(
        "[...document.querySelectorAll('.runs th button')].find(b => b.textContent == 'changes').click()"
    )
    assert browser.script(column) == sorted(browser.script(column), key=int)
    browser.script(
        "[...document.querySelectorAll('.runs th button')].find(b => b.textContent == 'changes').click()"
    )
    assert browser.script(column) == sorted(browser.script(column), key=int, reverse=True)
    browser.click(".runs tbody a")
    browser.wait("[...document.querySelectorAll('details.run')].some(d => d.open)")
    assert browser.problems() == []


def test_pictures_for_papers(folders: list[Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run = read_run(folders[0])
    wanted = [
        figure for figure in pictures.figures([run]) if figure[0].endswith(("decisions", "policy-ratio"))
    ]
    monkeypatch.setattr(pictures, "figures", lambda runs: iter(wanted))
    files = pictures.write_pictures([run], tmp_path / "png")
    assert [file.name for file in files] == ["timid_act-decisions.png", "timid_act-policy-ratio.png"]
    for file in files:
        raw = file.read_bytes()
        assert raw[:8] == b"\x89PNG\r\n\x1a\n"
        assert int.from_bytes(raw[16:20], "big") == 2160
        assert len(raw) > 10_000  # something is drawn
