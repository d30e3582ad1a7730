"""`autotune tune`: the staged procedure, P1 to P4, on real runs.

    plan      how long the rounds are, where they begin, what they train
    rounds    one round: its repeated runs, and their logs as the procedure's rounds
    drive     the rounds in order: gates, one change at a time, stop with the reason
    figure    KL and reward overlaid, round by round, as SVG
    written   summary.md and tune.json

The conditions themselves are pure functions in `autotune.procedure`; here they meet runs.
"""

from autotune.tune.drive import tune
from autotune.tune.plan import with_preset

__all__ = ["tune", "with_preset"]
