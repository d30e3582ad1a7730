"""Readers of other trainers' log files.

    sniff.open_log(path) -> Log        which format it is, its rows, and what its header tells
    tables.TABLES                      per trainer: their key -> our metric, unit, estimator
    rollouts.Reader(log, ...)          rows -> one `Snapshot` a rollout

A row is what one line (or one entry) says: a flat dict of their keys. Nothing is renamed before the
tables, so a key that no table knows is listed as unknown and never guessed.
"""

from autotune.logs.rollouts import Reader, Stretch, Survey, survey
from autotune.logs.sniff import Log, open_log

__all__ = ["Log", "Reader", "Stretch", "Survey", "open_log", "survey"]
