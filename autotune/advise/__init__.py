"""`autotune advise`: the controller in shadow over another trainer's log, and a verdict first.

known.py    what the log, a recipe and the user say about the run; which rules stay silent for lack of it
shadow.py   the log's rollouts through the very same controller
verdict.py  healthy / too timid / too aggressive / collapsing / no signal / cannot tell, with evidence
follow.py   the same over a log that grows
show.py     for people, and for programs
"""

from __future__ import annotations

from autotune.advise.follow import follow
from autotune.advise.shadow import Shadow, advise, prepare
from autotune.advise.show import print_advice, print_verdict, report, said_line
from autotune.advise.verdict import Kind, Verdict, verdict

__all__ = [
    "Kind",
    "Shadow",
    "Verdict",
    "advise",
    "follow",
    "prepare",
    "print_advice",
    "print_verdict",
    "report",
    "said_line",
    "verdict",
]
