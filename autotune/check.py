"""`autotune check`: is a recipe right, what does it amount to, and which rules could act on it?

Everything is told from the recipe alone: no torch, no model, nothing written. The facts come from
`recipe_facts`, the very ones that the trainer will hand to the controller, so a rule that is said
to be blind here is blind in the run, for the same reason.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import asdict, dataclass
from typing import Any

from rich.console import Console, Group
from rich.table import Table
from rich.text import Text

from autotune.controller import Controller, ControlSettings, RuleStatus
from autotune.doctor import Finding, Level, missing
from autotune.knobs import updates_per_rollout
from autotune.recipe import Recipe, knob_vector, recipe_facts

GOLDEN_UPDATES = (4, 8)
"""Rule A1's range of updates per rollout."""
JITTERY_PROMPTS, STEADY_PROMPTS = 256, 10_240
"""Rule A2's two examples of a batch, in prompts."""
SHORT_PROMPTS = 1024
"""Rule B6p warns below this many prompt tokens."""
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
    """Per update."""
    updates: int
    """Per rollout: U."""
    rollouts: int
    total_samples: int
    total_updates: int
    tokens: int
    """Upper bound per rollout, prompts and responses."""


@dataclass(frozen=True, slots=True)
class Advice:
    """A pre-flight word on one rule: not an error, the run may start."""

    rule: str
    text: str


@dataclass(frozen=True, slots=True)
class Checked:
    """All that `check` found."""

    recipe: Recipe
    sizes: Sizes
    rules: list[RuleStatus]
    advice: list[Advice]
    missing: list[Finding]

    @property
    def ready(self) -> bool:
        """Whether a run could start on this machine."""
        return all(finding.level is not Level.BAD for finding in self.missing)


def check(recipe: Recipe) -> Checked:
    """Look at a valid recipe from all sides."""
    control = ControlSettings(**recipe.control.model_dump())
    rules = Controller(control, recipe_facts(recipe)).rules()
    return Checked(recipe, sizes_of(recipe), rules, list(advise(recipe)), missing(recipe))


def sizes_of(recipe: Recipe) -> Sizes:
    """The batch algebra of one rank."""
    t = recipe.trainer
    updates = updates_per_rollout(knob_vector(recipe))
    samples, mini = t.train_batch_size * t.rollout_n, t.ppo_mini_batch_size * t.rollout_n
    return Sizes(
        prompts=t.train_batch_size,
        group=t.rollout_n,
        samples=samples,
        sampling_batches=samples // t.rollout_micro_batch_size,
        samples_at_once=t.rollout_micro_batch_size,
        mini_prompts=t.ppo_mini_batch_size,
        mini_samples=mini,
        micro_samples=t.micro_batch_size,
        backward_passes=mini // t.micro_batch_size,
        updates=updates,
        rollouts=t.rollouts,
        total_samples=samples * t.rollouts,
        total_updates=updates * t.rollouts,
        tokens=samples * (t.max_prompt_length + t.max_response_length),
    )


def advise(recipe: Recipe) -> Iterator[Advice]:
    """The documented rules that speak before a run: A1, A2, B6p."""
    yield from _updates_advice(sizes_of(recipe).updates)
    yield from _batch_advice(recipe)
    yield from _prompt_advice(recipe)
    if recipe.trainer.lr_schedule.warmup >= recipe.trainer.rollouts:
        yield Advice(
            "", "lr_schedule.warmup lasts the whole run: the full learning rate never comes"
        )


def _updates_advice(updates: int) -> Iterator[Advice]:
    low, high = GOLDEN_UPDATES
    if updates == 1:
        text = "one update per rollout: the policy ratio is always 1, so no clip rule has a sensor"
        yield Advice("A1", f"{text}; {low} to {high} updates use a rollout better")
    elif updates < low:
        text = f"{updates} updates per rollout, below the usual {low} to {high}"
        yield Advice("A1", f"{text}: much of each rollout goes unused")
    elif updates > high:
        text = f"{updates} updates per rollout, above the usual {low} to {high}"
        yield Advice("A1", f"{text}: late updates drift from the data they learn from")


def _batch_advice(recipe: Recipe) -> Iterator[Advice]:
    prompts = recipe.trainer.train_batch_size
    if prompts < JITTERY_PROMPTS:
        text = f"{prompts} prompts per rollout: expect a jittery reward curve"
        advice = f"{JITTERY_PROMPTS} still jitter, {STEADY_PROMPTS:,} are steady"
        yield Advice("A2", f"{text} ({advice}); use as many as memory and time allow")


def _prompt_advice(recipe: Recipe) -> Iterator[Advice]:
    cap, known = recipe.trainer.max_prompt_length, PROMPT_TOKENS.get(recipe.task.type)
    if known is not None and known <= cap:
        return
    if known is not None:
        yield Advice(
            "B6p", f"max_prompt_length is {cap}, but this task's prompts have {known} tokens"
        )
    elif cap < SHORT_PROMPTS:
        text = f"max_prompt_length is {cap}, below {SHORT_PROMPTS} tokens: longer prompts are cut"
        yield Advice("B6p", f"{text}; the metric prompts_cut counts them")


def report(checked: Checked) -> dict[str, Any]:
    """What was found as JSON types."""
    return {
        "valid": True,
        "ready": checked.ready,
        "recipe": checked.recipe.model_dump(mode="json"),
        "folder": checked.recipe.folder(),
        "sizes": asdict(checked.sizes),
        "rules": [asdict(rule) for rule in checked.rules],
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
    title = Text.assemble(
        ("✓ ", "bold green"), (recipe.name, "bold"), (f"  seed {recipe.seed}", "dim")
    )
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
        ("backward", f"{s.micro_samples:,} samples at once", f"{s.backward_passes:,} × per update"),
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


def _updates_words(s: Sizes) -> str:
    per_epoch = s.prompts // s.mini_prompts
    epochs = s.updates // per_epoch
    return f"{s.prompts:,} / {s.mini_prompts:,} prompts × {_many(epochs, 'epoch')}"


def _many(count: int, what: str) -> str:
    return f"{count:,} {what}{'' if count == 1 else 's'}"


def _print_rules(console: Console, checked: Checked) -> None:
    control = checked.recipe.control
    acting = sum(rule.can_act for rule in checked.rules)
    words = {"off": "no rule is asked", "shadow": "they speak, nothing is changed"}.get(
        control.mode, ""
    )
    note = f"mode {control.mode}" + (f": {words}" if words else "")
    title = f"Rules  {acting} of {len(checked.rules)} can act · {note} · profile {control.profile}"
    table = _heading(console, title)
    for rule in checked.rules:
        if rule.on:
            sign, style = ("✓", "green") if rule.can_act else ("✗", "yellow")
            why = Text(rule.summary, "dim") if rule.can_act else Text(rule.reason, style)
            table.add_row(Text.assemble((f"{sign} ", style), (rule.id, "bold")), why)
    for reason in dict.fromkeys(rule.reason for rule in checked.rules if not rule.on):
        ids = ", ".join(r.id for r in checked.rules if not r.on and r.reason == reason)
        table.add_row(Text("- off", "bright_black"), Text(f"{ids}: {reason}", "bright_black"))
    console.print(table)


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
