"""`autotune check`: is a recipe right, what does it amount to, and which rules could act on it?

Everything is told from the recipe alone: no torch, no model, nothing written. The facts come from
`recipe_facts`, the very ones that the trainer will hand to the controller, so a rule that is said
to be blind here is blind in the run, for the same reason.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import asdict, dataclass, replace
from typing import Any

from rich.console import Console, Group
from rich.table import Table
from rich.text import Text

from autotune import doctor, preflight
from autotune.catalogue import BY_ID, CATALOGUE, Kind
from autotune.controller import Controller, ControlSettings
from autotune.doctor import Finding, Level, missing
from autotune.knobs import updates_per_rollout
from autotune.preflight import REWARD_VARIANCE, Advice, largest_variance
from autotune.recipe import Recipe, knob_vector, load_schedule, recipe_facts
from autotune.recipe.deepspeed import plan
from autotune.recipe.facts import reward_range
from autotune.recipe.fingerprint import fingerprint, known
from autotune.standing import RuleStatus

PROMPT_TOKENS: dict[str, int] = {"digits": 8}
"""Task type -> tokens of its prompts, where the task fixes them."""


@dataclass(frozen=True, slots=True)
class Sizes:
    """The batch arithmetic; every number says its unit."""

    prompts: int
    group: int
    """Responses per prompt."""
    samples: int
    """Responses per rollout."""
    sampling_batches: int
    samples_at_once: int
    mini_prompts: int
    mini_samples: int
    micro_samples: int
    backward_passes: int
    """Per update, where `micro_samples` says how it is cut."""
    packed_tokens: int | None
    """Tokens of a micro batch without padding, which is cut by them; None: by samples."""
    packed_where: str
    """`on`: everywhere; `auto`: on a GPU."""
    updates: int
    """Per rollout: U."""
    rollouts: int
    total_samples: int
    total_updates: int
    tokens: int
    """Upper bound per rollout, prompts and responses."""


@dataclass(frozen=True, slots=True)
class EntryStatus:
    """One entry of the catalogue that is no policy: an invariant, a gate, a pre-flight or a procedure."""

    id: str
    kind: str
    source: str
    summary: str
    can_act: bool
    reason: str
    """Why it cannot act within a run of this recipe, or where it is asked instead."""


@dataclass(frozen=True, slots=True)
class Checked:
    """All that `check` found."""

    recipe: Recipe
    sizes: Sizes
    rules: list[RuleStatus]
    advice: list[Advice]
    missing: list[Finding]
    others: list[EntryStatus]

    @property
    def ready(self) -> bool:
        """Whether a run could start on this machine."""
        return all(finding.level is not Level.BAD for finding in self.missing)


def check(recipe: Recipe, ranks: int = 1) -> Checked:
    """Look at a valid recipe from all sides."""
    control = ControlSettings(**recipe.control.model_dump())
    rules = Controller(control, recipe_facts(recipe, ranks)).rules()
    if control.schedule is not None:
        reason = f"the knobs follow {control.schedule}, no rule is asked"
        rules = [replace(rule, can_act=False, reason=reason) if rule.on else rule for rule in rules]
    lacking = missing(recipe)
    others = other_entries(recipe, lacking)
    return Checked(recipe, sizes_of(recipe, ranks), rules, list(advise(recipe, ranks)), lacking, others)


def sizes_of(recipe: Recipe, ranks: int = 1) -> Sizes:
    """The batch algebra; what is done at once is done on every rank."""
    t = recipe.trainer
    updates = updates_per_rollout(knob_vector(recipe))
    samples, mini = t.train_batch_size * t.rollout_n, t.ppo_mini_batch_size * t.rollout_n
    return Sizes(
        prompts=t.train_batch_size,
        group=t.rollout_n,
        samples=samples,
        sampling_batches=samples // (t.rollout_micro_batch_size * ranks),
        samples_at_once=t.rollout_micro_batch_size,
        mini_prompts=t.ppo_mini_batch_size,
        mini_samples=mini,
        micro_samples=t.micro_batch_size,
        backward_passes=mini // (t.micro_batch_size * ranks),
        packed_tokens=t.packing.tokens,
        packed_where=t.packing.enabled,
        updates=updates,
        rollouts=t.rollouts,
        total_samples=samples * t.rollouts,
        total_updates=updates * t.rollouts,
        tokens=samples * (t.max_prompt_length + t.max_response_length),
    )


def advise(recipe: Recipe, ranks: int = 1) -> Iterator[Advice]:
    """The rules that speak before a run (A1, A2, B5b, B6p, B8, XT), and one of plain sense."""
    yield from preflight.advise(
        knob_vector(recipe),
        prompt_tokens=PROMPT_TOKENS.get(recipe.task.type),
        carried=known(recipe.fingerprint),
        here=_fingerprint_here(recipe),
    )
    schedule = recipe.control.schedule
    if schedule is not None and (warning := load_schedule(schedule).warning()):
        yield Advice("", warning)
    if recipe.deepspeed.config is not None:
        yield from (Advice("", f"{recipe.deepspeed.config}: {note}") for note in plan(recipe.deepspeed).notes)
    if recipe.trainer.has_critic and recipe.trainer.packing.tokens is not None:
        text = "packing.tokens counts what the actor reads: the critic pads the same responses to the longest"
        yield Advice("", f"{text}, so lower it where memory is short")
    if recipe.rollout.one_step_off and recipe.rollout.cap() is None:
        text = "one_step_off without importance weights: that responses come from the weights of one rollout"
        yield Advice("", f"{text} before is not weighed; log_probs: all and importance_cap: auto do that")
    if ranks > 1:
        yield from _of_one_rank(recipe, ranks)
    if recipe.trainer.lr_schedule.warmup >= recipe.trainer.rollouts:
        yield Advice("", "lr_schedule.warmup lasts the whole run: the full learning rate never comes")


def _of_one_rank(recipe: Recipe, ranks: int) -> Iterator[Advice]:
    """What is asked for and needs a rank that is alone."""
    packing = recipe.trainer.packing
    asked = {"graphs": packing.graphs, "leave_out_quiet": packing.leave_out_quiet == "on"}
    for name in (name for name, wanted in asked.items() if wanted):
        yield Advice("", f"packing.{name} does nothing on {ranks} ranks: it needs one that is alone")


def _fingerprint_here(recipe: Recipe) -> dict[str, str]:
    """Only looked at when there is another to compare with: it asks the GPU driver and reads files."""
    return known(fingerprint(recipe, doctor.hardware())) if recipe.fingerprint else {}


def other_entries(recipe: Recipe, lacking: list[Finding]) -> list[EntryStatus]:
    """The catalogue's entries that are no policies: where they are asked, and whether they could act."""
    bad = ", ".join(f"{f.what} {f.found}" for f in lacking if f.level is Level.BAD)
    unknown = "" if recipe.fingerprint else "these settings do not say what they were tuned on"
    reasons = {"E1": bad, "B8": unknown}
    staged = "asked between the rounds of the staged procedure, not within one run"
    reasons |= dict.fromkeys(("P1", "P2", "P3", "P4"), staged)
    if (range_ := reward_range(recipe)) and largest_variance(range_) <= REWARD_VARIANCE:
        reasons["P2"] += "; its reward variance cannot exceed 0.3 here, the relative form can"
    return [
        EntryStatus(e.id, str(e.kind), e.source, e.summary, not reasons.get(e.id), reasons.get(e.id, ""))
        for e in CATALOGUE
        if e.policy is None
    ]


def report(checked: Checked) -> dict[str, Any]:
    """What was found as JSON types."""
    return {
        "valid": True,
        "ready": checked.ready,
        "recipe": checked.recipe.model_dump(mode="json"),
        "folder": checked.recipe.folder(),
        "sizes": asdict(checked.sizes),
        "rules": [asdict(rule) for rule in checked.rules],
        "others": [asdict(entry) for entry in checked.others],
        "advice": [asdict(item) for item in checked.advice],
        "missing": [asdict(item) for item in checked.missing],
    }


# ------------------------------------------------------------------------------- on a terminal


def print_check(console: Console, checked: Checked) -> None:
    """The whole report, readable from top to bottom."""
    _print_title(console, checked.recipe)
    _print_sizes(console, checked.sizes)
    _print_rules(console, checked)
    _print_advice(console, checked.advice)
    _print_machine(console, checked)


def _print_title(console: Console, recipe: Recipe) -> None:
    task = recipe.task.type + (f" {v}" if (v := getattr(recipe.task, "variant", "")) else "")
    title = Text.assemble(("✓ ", "bold green"), (recipe.name, "bold"), (f"  seed {recipe.seed}", "dim"))
    where = f"  {recipe.model.path} on {task}, into {recipe.folder()}"
    console.print(Group(title, Text(where, "dim")))


def _print_sizes(console: Console, s: Sizes) -> None:
    rows = (
        ("rollout", f"{s.prompts:,} prompts × {s.group} responses", f"{s.samples:,} samples"),
        (
            "sampling",
            f"{s.samples_at_once:,} samples at once",
            f"{s.sampling_batches:,} × per rollout",
        ),
        ("update", f"{s.mini_prompts:,} prompts × {s.group}", f"{s.mini_samples:,} samples"),
        ("backward", *_backward_words(s)),
        ("updates", _updates_words(s), f"{s.updates:,} per rollout"),
        ("tokens", "prompt and response caps", f"≤ {s.tokens:,} per rollout"),
        (
            "run",
            f"{s.rollouts:,} rollouts × {_many(s.updates, 'update')}",
            f"{s.total_updates:,} updates",
        ),
    )
    table = _heading(console, "Batches")
    for name, how, result in rows:
        table.add_row(Text(name, "cyan"), Text(how), Text(result, "bold"))
    console.print(table)


def _backward_words(s: Sizes) -> tuple[str, str]:
    if s.packed_tokens is None:
        return f"{s.micro_samples:,} samples at once", f"{s.backward_passes:,} × per update"
    tokens = f"≤ {s.packed_tokens:,} tokens at once"
    if s.packed_where == "on":
        return f"{tokens}, packed", "by the responses' lengths"
    return f"{tokens} on a GPU, else {s.micro_samples:,} samples", f"there {s.backward_passes:,} × per update"


def _updates_words(s: Sizes) -> str:
    per_epoch = s.prompts // s.mini_prompts
    epochs = s.updates // per_epoch
    return f"{s.prompts:,} / {s.mini_prompts:,} prompts × {_many(epochs, 'epoch')}"


def _many(count: int, what: str) -> str:
    return f"{count:,} {what}{'' if count == 1 else 's'}"


def _print_rules(console: Console, checked: Checked) -> None:
    control, shown = checked.recipe.control, _catalogue_order(checked)
    judged = [s for s in shown if s.on or BY_ID[s.id].kind is not Kind.BASELINE]
    acting = sum(status.can_act for status in judged)
    words = {"off": "no rule is asked", "shadow": "they speak, nothing is changed"}.get(control.mode, "")
    note = f"mode {control.mode}" + (f": {words}" if words else "")
    title = f"Rules  {acting} of {len(judged)} can act · {note} · profile {control.profile}"
    table = _heading(console, title)
    for status in (s for s in shown if s.on):
        table.add_row(_mark(status), _words(status))
    for reason in dict.fromkeys(s.reason for s in shown if not s.on):
        ids = ", ".join(s.id for s in shown if not s.on and s.reason == reason)
        table.add_row(Text("- off", "bright_black"), Text(f"{ids}: {reason}", "bright_black"))
    console.print(table)


def _catalogue_order(checked: Checked) -> list[RuleStatus]:
    """Every id of the catalogue once, in its order."""
    found = {rule.id: rule for rule in checked.rules}
    for e in checked.others:
        found[e.id] = RuleStatus(e.id, e.source, e.summary, True, e.can_act, e.reason)
    return [found[entry.id] for entry in CATALOGUE]


def _mark(status: RuleStatus) -> Text:
    sign, style = ("✓", "green") if status.can_act else ("✗", "yellow")
    elsewhere = not status.can_act and BY_ID[status.id].policy is None and status.id != "E1"
    sign, style = ("·", "bright_black") if elsewhere else (sign, style)
    return Text.assemble((f"{sign} ", style), (status.id, "bold"))


def _words(status: RuleStatus) -> Text:
    """What it does, or why it cannot."""
    proven = BY_ID[status.id].kind is Kind.INVARIANT and BY_ID[status.id].policy is None
    if status.can_act:
        return Text(status.summary + (": proven by tests" if proven else ""), "dim")
    return Text(status.reason, "bright_black" if _mark(status).plain[0] == "·" else "yellow")


def _print_advice(console: Console, advice: list[Advice]) -> None:
    if advice:
        table = _heading(console, "Before you start")
        for item in advice:
            table.add_row(Text(item.rule or "!", "bold yellow"), Text(item.text))
        console.print(table)


def _print_machine(console: Console, checked: Checked) -> None:
    if not checked.missing:
        return
    table = _heading(console, "Missing on this machine")
    for item in checked.missing:
        sign, style = ("✗", "red") if item.level is Level.BAD else ("•", "yellow")
        name = Text.assemble((f"{sign} ", style), (item.what, "bold"))
        table.add_row(name, Text(item.found), Text(item.advice))
    console.print(table)
    if not checked.ready:
        console.print(Text("The recipe is right, but it cannot run here yet.", "bold red"))


def _heading(console: Console, title: str) -> Table:
    """Print a section's title and return the table for its rows."""
    console.print(Text(f"\n{title}", "bold"))
    table = Table.grid(padding=(0, 2))
    table.add_column(no_wrap=True)
    return table
