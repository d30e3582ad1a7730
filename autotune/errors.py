"""Every exception of the project, drawn as one tree.

    AutotuneError
    +-- InputError (ValueError)        exit 2   bad input, nothing was started
    |   +-- RecipeError                         one or many problems in a recipe
    |   +-- EnvironmentProblem                  something that the run needs is not installed
    |   +-- NothingYet                          what is read is not there yet, and may still come
    +-- RunError (RuntimeError)        exit 1   the run failed
    |   +-- JournalError                        the journal cannot be written, read or trusted
    |   +-- CheckpointError                     a checkpoint is missing, damaged or does not fit
    |   +-- AdapterError                        a trainer refused a knob or read back another value
    |   +-- TrainingError                       the trainer itself cannot go on
    +-- ControlStop (RuntimeError)     exit 3   the controller stopped the run, everything is saved
    +-- ElsewhereError                 its own  rank 0 failed and said why; this rank ends with it

A message says what was received, what was expected and the next move.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass


class AutotuneError(Exception):
    """Base of all errors raised on purpose by `autotune`."""

    exit_code = 1


class InputError(AutotuneError, ValueError):
    """The user's input is wrong; nothing was started."""

    exit_code = 2


class EnvironmentProblem(InputError):
    """Something that the run needs is not installed on this machine."""


class NothingYet(InputError):
    """What is to be read is not there yet or still empty; whoever watches it may wait."""


@dataclass(frozen=True, slots=True)
class Problem:
    """One thing wrong with a recipe: where it is, what was found, what was expected."""

    path: str
    """Dotted path of the field, such as `trainer.kl_coef`."""
    message: str
    """What was received, what was expected, and the next move."""
    where: str = ""
    """`file:line`, or empty when the value came from the command line."""

    def __str__(self) -> str:
        place = f"{self.where}: " if self.where else ""
        name = f"{self.path}: " if self.path else ""
        return f"{place}{name}{self.message}"


class RecipeError(InputError):
    """All problems of one recipe at once."""

    def __init__(self, problems: Sequence[Problem]) -> None:
        self.problems = tuple(problems)
        super().__init__("\n".join(str(p) for p in self.problems))


class RunError(AutotuneError, RuntimeError):
    """The run failed after it had started."""


class JournalError(RunError):
    """The journal cannot be written, read or trusted."""


class CheckpointError(RunError):
    """A checkpoint is missing, damaged or does not fit this run."""


class AdapterError(RunError):
    """A trainer refused a knob, or read back another value than it was given."""


class TrainingError(RunError):
    """The trainer itself cannot go on."""


class ControlStop(AutotuneError, RuntimeError):
    """The controller stopped the run; everything up to this rollout is saved."""

    exit_code = 3


class ElsewhereError(AutotuneError):
    """Rank 0 failed and has said why; this rank ends with its exit code and in silence."""

    def __init__(self, reason: str, exit_code: int) -> None:
        self.exit_code = exit_code
        super().__init__(reason)
