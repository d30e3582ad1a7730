"""What a person at the terminal sees of a run: a live panel, plain lines, a summary at the end.

screen   RunScreen, the observer of journal lines; chooses panel or plain lines
panel    the live panel, drawn from a story and nothing else
plain    one line per rollout, for pipes, files and CI
summary  the report after the last rollout
marks    sparklines, the band gauge, numbers and colours shared by all of them
"""

from autotune.screen.screen import RunScreen
from autotune.screen.summary import print_summary

__all__ = ["RunScreen", "print_summary"]
