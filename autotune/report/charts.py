"""The charts of one group of runs, and what the documents want to be seen in them.

    reward and KL     overlaid, with the band 0.03 to 0.08 in which the KL is documented to be healthy
    clip ratio        with the lines at 1 % (too careful) and 15 % (too far)
    policy ratio      its histogram over time, and the shares below, inside and above the clip range
                      beside the documented 20 / 70 / 10
    drift, entropy …  the other signals that decisions rest on
    memory, speed     with the band of 85 to 92 % of GPU memory

Between reward and clip ratio stand the knobs (`timelines`): cause beside effect. What a trainer does not
measure has no curve at 0: the chart says why it is missing.
"""

from __future__ import annotations

from collections.abc import Iterator

from autotune.knobs import ALIASES
from autotune.metrics import METRICS
from autotune.report import heat
from autotune.report.groups import Group, course, evaluated, knob, metric, seconds
from autotune.report.look import (
    CLIP_HIGH,
    CLIP_LOW,
    IDEAL,
    MEMORY,
    STEP_LIMIT,
    STEP_TARGET,
    Look,
    absent,
    curve,
    decided,
    faults,
    held_out,
    values,
)
from autotune.report.markup import tag
from autotune.report.panels import SIZE, Curve, Panel, Reference
from autotune.report.scales import Axis, asinh, linear
from autotune.report.timelines import knobs, rail
from autotune.screen.marks import KL_BAND


def strip(group: Group, look: Look) -> Iterator[Panel]:
    """The charts that tell what happened, from top to bottom over one common axis of rollouts."""
    top = rail(group, look)
    if top is not None:
        yield top
    yield reward_and_kl(group, look)
    yield from knobs(group, look)
    yield clip_ratio(group, look)
    yield from policy_ratio(group, look)
    yield drift(group, look)


def signals(group: Group, look: Look) -> Iterator[Panel]:
    """The charts beside them, two in a row where there is room."""
    yield simple(group, look, "entropy", "Entropy")
    yield simple(group, look, "grad_norm", "Gradient norm")
    yield simple(group, look, "tokens_per_second", "Throughput")
    yield memory(group, look)
    yield phases(group, look)
    yield lengths(group, look)
    yield no_signal(group, look)


def reward_and_kl(group: Group, look: Look) -> Panel:
    reward, kl = course(group, metric("reward_mean")), course(group, metric("kl_ref"))
    missing = absent(group, "reward_mean", "kl_ref")
    top = group.runs[0].reward_maximum
    has_kl, has_reward = bool(values(kl)), bool(values(reward))
    curves = [curve("reward", reward, "reward")] if has_reward else []
    curves += [curve("KL to the reference", kl, "kl", right=True)] if has_kl else []
    scores = [*_held_out(group)]
    held = [v for c in scores for v in c.y if v is not None]
    low, high = KL_BAND
    band = Reference(low, f"KL {low:g} to {high:g}", high, right=True, color="kl")
    notes = [absent(group, "kl_ref"), absent(group, "reward_mean"), faults(group, "reward_mean", "kl_ref")]
    return Panel(
        "reward_kl",
        "Reward and KL",
        look.span,
        left=linear([*values(reward), *held], low=0.0, high=top, unit="task units"),
        right=asinh(values(kl), 0.02, 0.12, unit="nats/token") if has_kl else None,
        curves=[*curves, *scores],
        references=[band] if has_kl else [],
        lines=decided(group),
        height=230,
        missing=missing,
        note="" if missing else "; ".join(filter(None, notes)),
        points=look.points,
    )


def _held_out(group: Group) -> Iterator[Curve]:
    for kind, dash in (("greedy", 1), ("sampled", 2)):
        score = evaluated(group, kind)
        if score.x:
            yield held_out(f"held-out, {kind}", score, "held", dash=dash)


def clip_ratio(group: Group, look: Look) -> Panel:
    clip = course(group, metric("clip_ratio"))
    lines = [
        Reference(CLIP_LOW, "1 %: below, data is left unused", color="careful"),
        Reference(CLIP_HIGH, "15 %: above, updates go too far", color="danger"),
    ]
    return Panel(
        "clip_ratio",
        "Clip ratio",
        look.span,
        asinh(values(clip), 0.005, 0.2, percent=True),
        [curve("clip ratio", clip, "reward")],
        references=lines,
        lines=decided(group),
        height=120,
        missing=absent(group, "clip_ratio"),
        note=faults(group, "clip_ratio"),
        points=look.points,
    )


def policy_ratio(group: Group, look: Look) -> Iterator[Panel]:
    x, counts = heat.pooled(group)
    why = absent(group, "ratio_in", "clip_ratio") or "policy_ratio: no histogram in the journal"
    if not any(counts):
        yield Panel("policy_ratio", "Policy ratio", look.span, Axis("linear", 0, 1), missing=why)
    else:
        yield _heat_map(group, look, x, counts)
    yield _shares(group, look)


def _heat_map(group: Group, look: Look, x: list[int], counts: heat.Counts) -> Panel:
    places = heat.edges()
    axis = Axis("log", 2 ** places[0], 2 ** places[-1])
    panel = Panel("policy_ratio", "Policy ratio, share of tokens", look.span, axis)
    left, right = (round(SIZE * panel.at(t)) for t in (x[0] - 0.5, x[-1] + 0.5))
    picture = tag(
        "image",
        href=heat.data_uri(counts),
        x=left,
        y=0,
        width=right - left,
        height=SIZE,
        preserveAspectRatio="none",
        class_="heat",
    )
    low, high = (course(group, knob(name)) for name in ALIASES["clip_range"])
    edges = [
        Curve(
            "1 + clip range",
            high.x,
            [None if v is None else 1 + v for v in high.mean],
            "edge",
            step=True,
            dash=1,
        ),
        Curve(
            "1 − clip range",
            low.x,
            [None if v is None else 1 - v for v in low.mean],
            "edge",
            step=True,
            dash=1,
        ),
    ]
    middle = [heat.quantile(c, 0.5) for c in counts]
    median = Curve("median", x, middle, "ink")
    spread = {f"{100 * q:g} % below": [heat.quantile(c, q) for c in counts] for q in (0.05, 0.95)}
    shown = [c for c in edges if any(v is not None for v in c.y)]
    return Panel(
        "policy_ratio",
        panel.title,
        look.span,
        axis,
        [median, *shown],
        picture=picture,
        height=150,
        lines=decided(group),
        points=look.points,
        extra=spread,
        note="stronger: more tokens, from 1 in 10 000 in steps of ten; top and bottom rows: beyond 8 and 1/8",
    )


def _shares(group: Group, look: Look) -> Panel:
    low, inside, high = (course(group, metric(name)) for name in IDEAL)
    curves = [
        curve("below the range", low, "low"),
        curve("above the range", high, "high", dash=1),
    ]
    lines = [
        Reference(IDEAL["ratio_low"], "20 % below", color="low"),
        Reference(IDEAL["ratio_high"], "10 % above", color="high"),
    ]
    return Panel(
        "ratio_shares",
        "Shares of tokens, beside the documented 20 / 70 / 10",
        look.span,
        asinh(values(low, high), 0.005, 0.3, percent=True),
        curves,
        references=lines,
        lines=decided(group),
        height=120,
        missing=absent(group, *IDEAL),
        note=_mean_shares(group),
        points=look.points,
        extra={"inside": inside.mean},
    )


def _mean_shares(group: Group) -> str:
    means = []
    for name, words in (("ratio_in", "inside"), ("ratio_low", "below"), ("ratio_high", "above")):
        known = [v for run in group.runs for v in run.known(name)]
        if known:
            means.append(f"{100 * sum(known) / len(known):.1f} % {words}")
    ideal = "documented: 70 % inside, 20 % below, 10 % above"
    return f"mean over the run: {', '.join(means)}; {ideal}" if means else ""


def drift(group: Group, look: Look) -> Panel:
    step = course(group, metric("kl_step"))
    lines = [
        Reference(STEP_TARGET, f"{STEP_TARGET:g}: target", color="ref"),
        Reference(STEP_LIMIT, f"{STEP_LIMIT:g}: veto", color="danger"),
    ]
    return Panel(
        "kl_step",
        "Drift in one rollout (kl_step)",
        look.span,
        asinh(values(step), 0.003, 0.03, unit="nats/token"),
        [curve("kl_step", step, "kl")],
        references=lines,
        lines=decided(group),
        height=120,
        missing=absent(group, "kl_step"),
        note=faults(group, "kl_step"),
        points=look.points,
    )


def simple(group: Group, look: Look, name: str, title: str) -> Panel:
    """One metric on a linear axis from 0."""
    c = course(group, metric(name))
    axis = linear(values(c), low=0.0)
    axis = Axis(axis.kind, axis.low, axis.high, axis.soft, METRICS[name].unit, METRICS[name].unit == "share")
    return Panel(
        name,
        title,
        look.span,
        axis,
        [curve(title.lower(), c, "ink")],
        lines=decided(group),
        height=90,
        missing=absent(group, name),
        note=faults(group, name),
        points=look.points,
    )


def lengths(group: Group, look: Look) -> Panel:
    names = {
        "response_length_mean": "mean",
        "response_length_p95": "95th percentile",
        "response_length_max": "longest",
    }
    cap = course(group, knob("max_response_length"))
    courses = {words: course(group, metric(name)) for name, words in names.items()}
    cut = course(group, metric("truncated_fraction"))
    shown = [
        curve(w, c, "ink" if w == "mean" else "soft", dash=i)
        for i, (w, c) in enumerate(courses.items())
        if values(c)
    ]
    if values(cap):
        shown.append(Curve("cap", cap.x, cap.mean, "danger", step=True, dash=2))
    return Panel(
        "response_length",
        "Response length",
        look.span,
        linear(values(*courses.values(), cap), low=0.0, unit="tokens"),
        shown,
        lines=decided(group),
        height=110,
        missing=absent(group, *names),
        points=look.points,
        extra={"cut at the cap": cut.mean} if values(cut) else {},
    )


def no_signal(group: Group, look: Look) -> Panel:
    flat, good = course(group, metric("zero_std_fraction")), course(group, metric("rollout_success_rate"))
    shown = [
        c
        for c in (curve("groups without signal", flat, "kl"), curve("responses scored", good, "ink", dash=1))
        if any(v is not None for v in c.y)
    ]
    return Panel(
        "signal",
        "Groups whose rewards are all equal, responses that could be scored",
        look.span,
        Axis("linear", 0.0, 1.04, percent=True),
        shown,
        lines=decided(group),
        height=90,
        missing=absent(group, "zero_std_fraction", "rollout_success_rate"),
        points=look.points,
    )


def memory(group: Group, look: Look) -> Panel:
    used, busy = course(group, metric("gpu_memory_fraction")), course(group, metric("gpu_utilization"))
    shown = [
        c
        for c in (curve("memory, peak", used, "reward"), curve("utilization", busy, "ink", dash=1))
        if any(v is not None for v in c.y)
    ]
    return Panel(
        "memory",
        "GPU while sampling",
        look.span,
        Axis("linear", 0.0, 1.04, percent=True),
        shown,
        references=[Reference(MEMORY[0], "85 to 92 % of memory", MEMORY[1])],
        height=110,
        missing=absent(group, "gpu_memory_fraction", "gpu_utilization"),
        points=look.points,
    )


PHASES = ("rollout", "reward", "old_log_prob", "reference", "update", "kl_step_forward", "save", "eval")


def phases(group: Group, look: Look) -> Panel:
    """Seconds of every phase; the total on top."""
    names = [n for n in PHASES if any(n in run.times for run in group.runs)]
    named = [n for n in (*names, "total") if any(n in run.times for run in group.runs)]
    courses = {n: course(group, seconds(n)) for n in named}
    shown = [
        Curve(n.replace("_", " "), c.x, c.mean, "ink" if n == "total" else f"c{1 + i % 8}", dash=i // 4)
        for i, (n, c) in enumerate(courses.items())
    ]
    top = [v for c in courses.values() for v in c.mean if v is not None]
    missing = "" if top else "no times in the journal"
    axis = Axis("asinh", 0.0, max(top, default=1.0) * 1.05, max(max(top, default=1.0) / 30, 1e-3), "s")
    return Panel(
        "times",
        "Seconds of a rollout, by phase",
        look.span,
        axis,
        shown,
        height=120,
        missing=missing,
        points=look.points,
    )
