"""`autotune sweep`: a study over fields of a recipe, on one machine or many.

    lead      makes the study, starts workers, tells what they do, concludes
    worker    claims one trial after the other until none is left
    trial     one trial: its runs over the seeds, pruned, judged, told
    life      signs of life; a trial whose worker is gone is given to another, once
    studies   the study and its queue; samplers and pruners by name
    storages  SQLite, PostgreSQL, Optuna's journal file and gRPC proxy by URL
    pairs     the paired test against the best trial
    score     what a trial is worth
    state     study.json: what others may read of a study
    result    the best recipe, confirmed on fresh seeds; importances; costs

Every trial is queued before the first worker starts, and claiming one is a single atomic step of the storage:
no trial runs twice and none is made up.
"""

from autotune.sweep.lead import sweep
from autotune.sweep.result import Source
from autotune.sweep.worker import work

__all__ = ["Source", "sweep", "work"]
