"""The controller's memory beside the history: all of its mutable state, plain JSON in and out.

What is here must survive a kill: cooldowns, a change under probation, engaged regulators, locks and
counts. A controller that forgets them on resume acts twice.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from typing import Any

from autotune.decisions import Outcome, Verdict
from autotune.errors import RunError
from autotune.policies.base import Engagement

VERSION = 1


@dataclass(frozen=True, slots=True)
class Probation:
    """One intervention that is being judged."""

    rule: str
    knob: str
    before: Mapping[str, float]
    """Real knobs and their values from before the change: what a revert puts back."""
    after: Mapping[str, float]
    since: int
    """Rollout whose decision made the change; its effect starts one later."""
    epoch: int
    rewards: tuple[float, ...]
    """Rewards of the before-window, oldest first."""
    kl_step: float | None
    """Median drift of the before-window."""


@dataclass(frozen=True, slots=True)
class Move:
    """One granted change of one knob, for cooldowns and direction flips."""

    rollout: int
    knob: str
    direction: int
    kind: str


@dataclass
class Ledger:
    epoch: int = 0
    probation: Probation | None = None
    engagements: dict[str, Engagement] = field(default_factory=dict)
    anchors: dict[str, float] = field(default_factory=dict)
    """Regulator -> knob value at which the run was last seen healthy."""
    last_moves: dict[str, int] = field(default_factory=dict)
    memory: dict[str, float] = field(default_factory=dict)
    """Rule -> the number that it carries from rollout to rollout."""
    moves: list[Move] = field(default_factory=list)
    cooldown_until: int = 0
    locks: dict[str, int] = field(default_factory=dict)
    """Knob -> first rollout at which it may move again after a revert."""
    revert_counts: dict[str, int] = field(default_factory=dict)
    reverts: list[int] = field(default_factory=list)
    frozen: str = ""
    emergencies: int = 0
    vetoes: int = 0
    """Rollouts running that were undone."""
    since_restore: int = 0
    expected: dict[str, float] = field(default_factory=dict)
    """Knob -> value that the trainer read back; another value later means a second writer."""
    contested: dict[str, str] = field(default_factory=dict)
    """Knob -> why it is left alone: it did not obey, or somebody else writes it."""
    effective: dict[str, int] = field(default_factory=dict)
    """Knob -> first rollout whose data shows the value that was read back."""
    at_bound: dict[str, int] = field(default_factory=dict)
    """Knob -> rollouts running that a rule pushed it against its bound."""
    silent: dict[str, str] = field(default_factory=dict)
    """Rule -> why it could not speak at the last rollout."""
    advised: dict[str, str] = field(default_factory=dict)
    """Rule -> what it last gave advice about."""
    paused: bool = False
    """A human took the controller's hands off the run."""
    pinned: list[str] = field(default_factory=list)
    """Real knobs that only a person may move: the recipe's pins, then what was pinned by hand."""
    hands_off: dict[str, int] = field(default_factory=dict)
    """Knob that was set by hand (or "*", after a pause) -> first rollout at which a rule may move it."""
    closed: list[Verdict] = field(default_factory=list)
    """Judgements that a human's hand ended; told with the next decision."""
    last_rollout: int = -1

    def trim(self, rollout: int, keep: int = 400) -> None:
        """Forget moves and reverts that no guard can ask for any more."""
        self.moves = [m for m in self.moves if rollout - m.rollout <= keep]
        self.reverts = [r for r in self.reverts if rollout - r <= keep]

    def to_json(self) -> dict[str, Any]:
        return {"version": VERSION, **asdict(self)}

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> Ledger:
        """Inverse of `to_json`.

        Raises:
            RunError: if the state was written by another version.
        """
        fields = dict(data)
        version = fields.pop("version", None)
        if version != VERSION:
            raise RunError(
                f"controller state has version {version!r}, this program reads {VERSION}:"
                " resume with the version that wrote it, or start a new run"
            )
        if fields["probation"]:
            raw = dict(fields["probation"])
            fields["probation"] = Probation(**{**raw, "rewards": tuple(raw["rewards"])})
        fields["engagements"] = {k: Engagement(**v) for k, v in fields["engagements"].items()}
        fields["moves"] = [Move(**m) for m in fields["moves"]]
        closed = fields.get("closed", ())
        fields["closed"] = [Verdict(**{**v, "outcome": Outcome(v["outcome"])}) for v in closed]
        return cls(**fields)
