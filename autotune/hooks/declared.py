"""What each adapter declares of its trainer, in one shape, and the page that is printed from it.

    python -m autotune.hooks.declared > docs/integrations.md

A declaration is plain data and loads no trainer: which key becomes which metric, what is set for
which knob and when that takes effect, which versions were tested, what to set so that the clip rules
have a sensor. What holds in one run (no reference model, another loss) stands in that run's facts.

Adding a trainer: its `DECLARED` in a file that imports nothing of it, and one row in `ADAPTERS`.
"""

from __future__ import annotations

import importlib
import sys
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from autotune.knobs import KNOBS, Liveness
from autotune.metrics import METRICS, spec_of

ADAPTERS: dict[str, str] = {
    "trl": "autotune.hooks.trl.declared:DECLARED",
    "verl": "autotune.hooks.verl.declared:DECLARED",
    "openrlhf": "autotune.hooks.openrlhf.declared:DECLARED",
    "generic": "autotune.hooks.generic:DECLARED",
}
"""Trainer -> where its declaration is; in the order of the page."""


@dataclass(frozen=True, slots=True)
class MetricRow:
    """One metric that the adapter can read, and where it comes from."""

    name: str
    """Canonical; `reward/…` stands for the family."""
    key: str
    """The trainer's own spelling, or how it is computed."""
    note: str = ""

    @property
    def unit(self) -> str:
        return spec_of(self.name).unit

    @property
    def sign(self) -> str:
        """The range that a reading must be in."""
        spec = spec_of(self.name)
        return "any" if spec.low < 0 else "0 to 1" if spec.high == 1 else "≥ 0"


@dataclass(frozen=True, slots=True)
class KnobRow:
    """One knob of the trainer: what is set in it, and when that takes effect."""

    name: str
    where: str
    liveness: Liveness
    note: str = ""
    config: str = ""
    """Of a knob that needs a restart: the line to write, with `{value}`, `{samples}` (value x
    rollout_n) and the other knobs by name."""
    otherwise: str = ""
    """The same line, of a knob that moves in some runs only."""


@dataclass(frozen=True, slots=True)
class Declaration:
    """Everything that one adapter says of its trainer."""

    trainer: str
    title: str
    package: str
    """Whose version counts; empty where there is none."""
    versions: tuple[str, ...]
    """Versions that were tested, whole (`0.9.1`) or as a beginning (`1.16.`); empty where there is none."""
    lines: str
    """The user's lines, ready to paste."""
    metrics: tuple[MetricRow, ...]
    knobs: tuple[KnobRow, ...]
    sensor: str
    """What to set so that the clip rules have a sensor."""
    words: tuple[str, ...] = ()
    """What else must be known, one paragraph each; how far it was run belongs here."""
    missing: Mapping[str, str] | None = None
    """Metric -> why this trainer never has it."""

    def untested(self, version: str) -> str:
        """Why a version cannot be acted on, or an empty string."""
        plain = version.partition("+")[0]
        tested = any(plain == v or (v.endswith(".") and plain.startswith(v)) for v in self.versions)
        if tested or not self.versions:
            return ""
        known = " or ".join(map(_shown, self.versions))
        return f"{self.package} {version} has not been tested with this adapter, which knows {known}"

    def knob(self, name: str) -> KnobRow | None:
        return next((row for row in self.knobs if row.name == name), None)

    def restart_line(self, name: str, value: float, knobs: Mapping[str, float]) -> str:
        """The configuration line that gives a knob this value at the next start; empty where unknown."""
        row = self.knob(name)
        line = (row.config or row.otherwise) if row is not None else ""
        numbers = {**knobs, name: value, "value": value, "samples": value * knobs.get("rollout_n", 1)}
        return line.format(**{key: f"{number:g}" for key, number in numbers.items()})


def _shown(version: str) -> str:
    """`1.16.x` for a beginning."""
    return f"{version}x" if version.endswith(".") else version


def declaration(trainer: str) -> Declaration:
    """The declaration of one row of `ADAPTERS`."""
    module, _, name = ADAPTERS[trainer].partition(":")
    found: Declaration = getattr(importlib.import_module(module), name)
    return found


# --------------------------------------------------------------------------------------- the page

WHEN = {
    Liveness.LIVE: "at once",
    Liveness.NEXT_ROLLOUT: "at the next rollout",
    Liveness.RESTART: "restart",
    Liveness.UNAVAILABLE: "no",
    Liveness.PINNED: "pinned",
}

COMMAND = "python -m autotune.hooks.declared > docs/integrations.md"

HEAD = """\
# Other trainers

The same controller, rules and journal as in `autotune run`, inside a training run of yours. An adapter
reads the trainer's metrics, and sets and reads back its knobs; everything else is the same code. One
`control.yaml`, which is a recipe's `control` section alone, serves all of them:

```yaml
mode: act            # or shadow: decides and journals, touches nothing; off: journals only
profile: recommended
pin: [kl_coef]       # hands off
```

`pip install autotune-rl` goes where the trainer is installed. The journal lies in the run's output folder, so
`autotune replay`, `autotune ctl` and every other reader of a run folder work there.

- A failing adapter never stops your run. The controller stands down, the journal and the log say why, and
  training goes on with the knobs as they are.
- A version of the trainer that was not tested is only watched (`shadow`), and the reason is told.
- A knob that cannot move in a running trainer becomes advice with the line to write before the next start.
- A stop that a rule asks for ends the training through the trainer's own means, in `act` only.
"""

FOOT = """\
## Any other trainer: its log

`autotune advise LOG` reads the logs of trainers that have no adapter and says what the controller would have
done: `metrics.jsonl` of prime-rl, `experiment_log.jsonl` of EasyR1, TensorBoard files of SkyRL, NeMo-RL,
AReaL and slime, a CSV export of wandb, and plain console output. `--trainer NAME` helps where the keys do not
tell.
"""


def page() -> str:
    """`docs/integrations.md`, whole."""
    return "\n".join(_lines()).rstrip() + "\n"


def _lines() -> Iterator[str]:
    yield f"<!-- Printed by `{COMMAND}`; a test holds the two equal. -->"
    yield HEAD
    for trainer in ADAPTERS:
        yield from _trainer(declaration(trainer))
    yield FOOT


def _trainer(d: Declaration) -> Iterator[str]:
    yield from (f"## {d.title}", "")
    if d.versions:
        tested = ", ".join(map(_shown, d.versions))
        yield from (f"Tested with {d.package} {tested}.", "")
    language = "sh" if "python -m " in d.lines else "python"
    yield from (f"```{language}", d.lines.strip(), "```", "")
    for words in d.words:
        yield from (words, "")
    yield from (f"**So that the clip rules have a sensor:** {d.sensor}", "")
    yield from (*_metrics(d), "", *_knobs(d), "")


def _metrics(d: Declaration) -> Iterator[str]:
    yield from ("| metric | unit | range | read from | |", "|---|---|---|---|---|")
    for row in sorted(d.metrics, key=lambda row: _order(row.name)):
        yield f"| `{row.name}` | {row.unit} | {row.sign} | {_cell(row.key)} | {_cell(row.note)} |"
    for name, why in (d.missing or {}).items():
        yield f"| `{name}` | {spec_of(name).unit} | | not logged | {_cell(why)} |"


def _order(name: str) -> int:
    return list(METRICS).index(name) if name in METRICS else len(METRICS)


def _knobs(d: Declaration) -> Iterator[str]:
    yield from ("| knob | takes effect | set in | |", "|---|---|---|---|")
    for row in sorted(d.knobs, key=lambda row: list(KNOBS).index(row.name)):
        line = row.config or row.otherwise
        config = f"`{line}`" if line else ""
        note = "; ".join(part for part in (row.note, config) if part)
        yield f"| `{row.name}` | {WHEN[row.liveness]} | {_cell(row.where)} | {_cell(note)} |"


def _cell(text: str) -> str:
    return text.replace("|", "\\|").replace("\n", " ")


if __name__ == "__main__":
    sys.stdout.write(page())
