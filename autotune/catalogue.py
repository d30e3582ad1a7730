"""The whole catalogue of rules in one table, and the page `docs/rules.md` that is printed from it.

    python -m autotune.catalogue > docs/rules.md

A rule's source, summary, parameters, needs and moves are read from its class: there is no second copy.
What is no policy has its words here: the environment gate, the invariants, what is said before a run and
the conditions of the staged procedure. Invariants name the tests that prove them.

Adding a rule: one row here, beside its row in `autotune.policies.POLICIES`; a test holds the two equal,
and another holds the page equal to what this module prints.
"""

from __future__ import annotations

import ast
import dataclasses
import inspect
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from enum import StrEnum
from functools import cache
from types import ModuleType

from autotune.decisions import RunFacts
from autotune.knobs import KNOBS, Capability, Liveness, expand
from autotune.metrics import spec_of
from autotune.policies import POLICIES, PROFILES
from autotune.policies.base import Policy


class Kind(StrEnum):
    RULE = "rule"
    """Proposes a change of a knob, or says why a person should make one."""
    INVARIANT = "invariant"
    """Always holds; tests prove it."""
    GATE = "gate"
    """Stops tuning, or the procedure, until it is met."""
    PREFLIGHT = "preflight"
    """Speaks before the run."""
    PROCEDURE = "procedure"
    """A condition between two rounds of the staged procedure."""
    BASELINE = "baseline"
    """What the rules are measured against."""


@dataclass(frozen=True, slots=True)
class Entry:
    """One id of the catalogue."""

    id: str
    kind: Kind
    source: str
    summary: str
    home: str
    """The file, and the name in it."""
    policy: type[Policy] | None = None
    tests: tuple[str, ...] = ()
    """The tests that prove an invariant."""
    also: str = ""
    """A second place where the same id speaks."""

    @property
    def profiles(self) -> tuple[str, ...]:
        """Profiles that have it on; everything that is no policy is on in all of them."""
        if self.policy is None:
            return tuple(PROFILES)
        return tuple(name for name, rules in PROFILES.items() if self.id in rules)


def _rule(id: str, kind: Kind = Kind.RULE, *, also: str = "", tests: tuple[str, ...] = ()) -> Entry:
    cls = POLICIES[id]
    home = f"{cls.__module__.replace('.', '/')}.py: {cls.__name__}"
    return Entry(id, kind, cls.source, cls.summary, home, cls, tests, also)


BEFORE = "autotune/preflight.py"
STAGED = "autotune/procedure.py"

CATALOGUE: tuple[Entry, ...] = (
    Entry(
        "E1",
        Kind.GATE,
        "B 2: many failures are environments that do not match",
        "python, packages, versions, GPU, memory, compiler, old names -> said; blocks P1",
        "autotune/doctor.py: examine",
    ),
    _rule("A1", also=f"{BEFORE}: updates"),
    _rule("A2", also=f"{BEFORE}: batch"),
    _rule("A3"),
    _rule("A4"),
    Entry(
        "A5",
        Kind.INVARIANT,
        "A: micro_batch_size is a matter of memory alone",
        "micro_batch_size never changes the training result",
        "autotune/trainer/update.py",
        tests=(
            "tests/trainer/test_update.py::test_gradients_do_not_depend_on_the_micro_batch",
            "tests/trainer/test_engine.py::test_many_micro_batches_equal_plain_torch",
        ),
    ),
    _rule(
        "A6",
        Kind.INVARIANT,
        tests=(
            "tests/trainer/test_update.py::test_updates_run_in_train_mode_and_old_log_probs_in_eval_mode",
            "tests/trainer/test_update.py::test_one_update_has_ratio_exactly_one",
            "tests/trainer/test_loop.py::test_old_log_probs_are_computed_once_and_kept",
            "tests/trainer/test_rollout.py::test_sampling_is_in_eval_mode_and_once_per_prompt",
        ),
    ),
    _rule("B1"),
    _rule("B2"),
    _rule("B3a"),
    _rule("B3b"),
    _rule("B3c"),
    _rule("B4a"),
    _rule("B4b"),
    _rule("B5a"),
    _rule("B5b", also=f"{BEFORE}: critic"),
    _rule("B6"),
    _rule("B6p", Kind.PREFLIGHT, also=f"{BEFORE}: prompts"),
    _rule("B7", Kind.GATE, also=f"{STAGED}: baseline_gates"),
    Entry(
        "B8",
        Kind.PREFLIGHT,
        "B 3.3, 4: an optimum does not transfer",
        "settings carried to another model, data set, reward or hardware -> said",
        f"{BEFORE}: transfer",
        also="autotune/recipe/fingerprint.py: fingerprint",
    ),
    _rule("X1"),
    _rule("X2"),
    _rule("X3"),
    _rule("X4"),
    _rule("X5"),
    _rule("XC"),
    _rule("XE"),
    _rule("XL"),
    _rule("XM"),
    _rule("XR"),
    _rule("XT", also=f"{BEFORE}: temperature"),
    _rule("XZ"),
    Entry(
        "P1",
        Kind.PROCEDURE,
        "B 4.1: baseline",
        "200 rollouts with fixed parameters -> environment, success > 95 %, reward clearly up",
        f"{STAGED}: baseline_gates",
    ),
    Entry(
        "P2",
        Kind.PROCEDURE,
        "B 4.2: KL and clip",
        "KL > 0.08, clipped > 35 %, reward variance > 0.3 -> one change, kept if the spread narrows",
        f"{STAGED}: kl_and_clip, confirmed",
    ),
    Entry(
        "P3",
        Kind.PROCEDURE,
        "B 4.3: throughput and quality",
        "GPU use < 80 %, steady length, reward slowing -> sampling batch, cap, kl_coef to 0.08",
        f"{STAGED}: speed_and_length",
    ),
    Entry(
        "P4",
        Kind.PROCEDURE,
        "B 4: always",
        "one parameter at a time; every comparison from three runs, mean and standard deviation",
        f"{STAGED}: one_parameter, compare",
    ),
    _rule("random", Kind.BASELINE),
    _rule("adaptive_kl", Kind.BASELINE),
    _rule("adaptive_entropy", Kind.BASELINE),
)

BY_ID: dict[str, Entry] = {entry.id: entry for entry in CATALOGUE}


# ------------------------------------------------------------------------------------ the page


def page() -> str:
    """`docs/rules.md`, whole."""
    return "\n".join([*_intro(), *_overview(), *_rules(), *_others()]) + "\n"


def _intro() -> Iterator[str]:
    yield "<!-- Printed by `python -m autotune.catalogue > docs/rules.md`; a test holds the two equal. -->"
    yield "# The rules"
    yield ""
    yield (
        "Every rule with its parameters as they stand in the code. `A` and `B` are the two documents"
        " that the rules come from. The signs are exact: `> 15 %` is silent at 15 % itself, `<=` is not."
        " A percentage or factor in a summary is the default of a parameter below it."
    )
    yield ""
    yield (
        "In a recipe, `control.policies: {A4: {threshold: 0.1}, B4b: off}` re-parameterises and switches"
        " off; `autotune check RECIPE` tells for each rule whether it can act there, or why not."
    )
    yield ""
    yield (
        "A rule is silent at a rollout where a metric that it needs was not measured, is a structural"
        " zero, or is not to be trusted (not finite, out of range, frozen); where the integrity of the"
        " run is in doubt nobody tunes. Guards for all rules (warm-up, one change in flight, cooldown,"
        " bounds, direction lock) are in `autotune/guards.py`."
    )
    yield ""


def _overview() -> Iterator[str]:
    yield from ("| id | kind | what it does | source | profiles |", "|---|---|---|---|---|")
    for e in CATALOGUE:
        where = "all" if e.profiles == tuple(PROFILES) else ", ".join(e.profiles) or "none: optional"
        yield f"| [{e.id}](#{e.id.lower()}) | {e.kind} | {_cell(e.summary)} | {_cell(e.source)} | {where} |"
    yield ""


def _rules() -> Iterator[str]:
    """One section per file of rules: its own words, then each of its rules."""
    modules = dict.fromkeys(inspect.getmodule(e.policy) for e in CATALOGUE if e.policy is not None)
    for module in (m for m in modules if m is not None):
        title, _, words = (module.__doc__ or "").partition("\n")
        yield f"## {title.rstrip('.')}"
        yield ""
        yield from _plain(words.strip("\n"))
        for e in CATALOGUE:
            if e.policy is not None and e.policy.__module__ == module.__name__:
                yield from _rule_section(e, e.policy, module)


def _plain(words: str) -> Iterator[str]:
    """A docstring as text: indented tables stay as they are."""
    yield from (line.rstrip() for line in words.splitlines())
    yield ""


def _rule_section(e: Entry, cls: type[Policy], module: ModuleType) -> Iterator[str]:
    yield f"### {e.id}"
    yield ""
    yield f"{_cell(e.summary)}."
    yield ""
    yield f"- source: {e.source}"
    yield f"- needs: {', '.join(f'`{m}` ({spec_of(m).unit})' for m in cls.needs) or 'nothing in particular'}"
    yield f"- moves: {', '.join(map(_knob, cls.moves)) or 'nothing that it must have; it advises'}"
    yield f"- silent: {'; '.join(_silences(cls)) or 'only where a metric that it needs is not valid'}"
    yield f"- lives in: `{e.home}`{f', and before the run `{e.also}`' if e.also else ''}"
    if e.tests:
        yield f"- proven by: {', '.join(f'`{t}`' for t in e.tests)}"
    yield ""
    yield from _parameters(cls, module)


def _knob(name: str) -> str:
    spec = KNOBS[expand(name)[0]]
    bounds = "on the divisor lattice" if spec.scale == "lattice" else f"within {spec.low:g} to {spec.high:g}"
    return f"`{name}` ({bounds})"


def _silences(cls: type[Policy]) -> Iterator[str]:
    """What the rule itself says on runs that lack something."""
    policy = cls()
    said: dict[str, None] = {}
    if cls.needs_ratio:
        said["one update per rollout, or a loss without a policy ratio"] = None
    for lacking in ({"has_reference": False}, {"has_critic": False}):
        said[policy.blocked(_facts(**lacking), _facts().knobs)] = None
    said[policy.blocked(_facts(), {**_facts().knobs, "kl_coef": 0.0})] = None
    if cls.moves:
        said[f"{' and '.join(cls.moves)} pinned, or not movable in this trainer"] = None
    return (words for words in said if words)


def _facts(*, has_reference: bool = True, has_critic: bool = True) -> RunFacts:
    """A run that has everything, except for what is named."""
    knobs = dict.fromkeys(KNOBS, 1.0) | {"train_batch_size": 4.0}
    live = {name: Capability(Liveness.NEXT_ROLLOUT) for name in KNOBS}
    return RunFacts(100, 1, "ppo", "token", has_reference, has_critic, knobs, live)


def _parameters(cls: type[Policy], module: ModuleType) -> Iterator[str]:
    fields = dataclasses.fields(cls)
    if not fields:
        return
    words = _field_words(module).get(cls.__name__, {})
    yield from ("| parameter | default | |", "|---|---|---|")
    for field in fields:
        yield f"| `{field.name}` | {_number(field.default)} | {_cell(words.get(field.name, ''))} |"
    yield ""


def _number(value: object) -> str:
    return f"{value:.4g}" if isinstance(value, float) else str(value)


@cache
def _field_words(module: ModuleType) -> dict[str, dict[str, str]]:
    """Class -> field -> the string that stands under it in the source."""
    found: dict[str, dict[str, str]] = {}
    for node in ast.parse(inspect.getsource(module)).body:
        if isinstance(node, ast.ClassDef):
            found[node.name] = dict(_documented(node))
    return found


def _documented(node: ast.ClassDef) -> Iterator[tuple[str, str]]:
    for field, below in zip(node.body, node.body[1:], strict=False):
        if isinstance(field, ast.AnnAssign) and isinstance(field.target, ast.Name):
            match below:
                case ast.Expr(value=ast.Constant(value=str(words))):
                    yield field.target.id, " ".join(words.split())


def _others() -> Iterator[str]:
    yield from ("## Gates, invariants, pre-flight and procedure", "")
    for e in (e for e in CATALOGUE if e.policy is None):
        yield from (f"### {e.id}", "", f"{_cell(e.summary)}.", "")
        yield f"- kind: {e.kind}"
        yield f"- source: {e.source}"
        yield f"- lives in: `{e.home}`{f', `{e.also}`' if e.also else ''}"
        if e.tests:
            yield f"- proven by: {', '.join(f'`{t}`' for t in e.tests)}"
        yield ""


def _cell(text: str) -> str:
    """Text that neither a table nor HTML takes for its own."""
    return text.replace("|", "\\|").replace("<", "&lt;").replace("->", "→")


if __name__ == "__main__":
    sys.stdout.write(page())
