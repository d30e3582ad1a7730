"""MLflow, fed from outside the training path.

The journal is the spool. A process of its own (`feeder`) tails it and delivers every line once;
the training process only starts that process and never imports mlflow. Whatever happens to the
tracker, the run goes on, and `autotune sync RUN` is the same feeder run again to the end.

    spawn    start_feeder, FeederHandle, sync: what the run and the command line call
    feeder   the process: tail the spool, deliver, finish; `python -m autotune.tracking.feeder RUN`
    spool    complete journal lines as they appear, and whether more can come
    payload  journal lines as params, metrics, tags and tables: pure functions
    figures  the policy ratio's histograms as one picture
    system   the machine sampled: CPU, memory, disk, network, GPU
    names    sanitising, flattening and cutting to MLflow's limits
    receipt  RUN/mlflow.json: which lines are known to be delivered, and where to
    book     what a sweep tells of itself and its trials; book_feeder delivers it
    patience retrying while a store is down; one feeder at a time
    groups   runs that hold other runs: a sweep above its trials, a trial above its seeds
    comparison  a page that compares runs, as an artifact
    store    the only file that imports mlflow
"""

from autotune.tracking.book import Book, open_book
from autotune.tracking.spawn import Delivery, FeederHandle, start_feeder, store_hint, sync

__all__ = ["Book", "Delivery", "FeederHandle", "open_book", "start_feeder", "store_hint", "sync"]
