"""What the machine does while a run goes on: CPU, memory, disk, network and GPU.

Sampled in the feeder's process with MLflow's own monitors, so the names are the ones that MLflow's
page of system metrics knows. Samples go to `RUN/system.jsonl` first and are delivered from there,
so none is lost while the store is down and none is delivered twice.
"""

from __future__ import annotations

import contextlib
import importlib
import json
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from autotune.story import finite
from autotune.tracking.names import clean_name
from autotune.tracking.payload import Point

FILE = "system.jsonl"
MONITORS = {
    "cpu_monitor": "CPUMonitor", "disk_monitor": "DiskMonitor", "network_monitor": "NetworkMonitor",
    "gpu_monitor": "GPUMonitor", "rocm_monitor": "ROCMMonitor",
}  # fmt: skip
"""Module of `mlflow.system_metrics.metrics` -> its class; each is left out where it cannot measure."""


class Sampler(threading.Thread):
    """Appends a line with a sample every few seconds until it is stopped; it never raises."""

    def __init__(self, folder: Path, every: float) -> None:
        super().__init__(name="system metrics", daemon=True)
        self._path, self._every = folder / FILE, every
        self._stop_asked = threading.Event()

    def run(self) -> None:
        with contextlib.suppress(Exception):
            monitors = list(_monitors())
            while not self._stop_asked.wait(self._every):
                self._sample(monitors)

    def _sample(self, monitors: list[Any]) -> None:
        values: dict[str, float] = {}
        for monitor in monitors:
            with contextlib.suppress(Exception):
                monitor.collect_metrics()
                values |= monitor.aggregate_metrics()
                monitor.clear_metrics()
        with self._path.open("a", encoding="utf-8") as file:
            file.write(json.dumps({"at": round(time.time(), 3), "values": values}) + "\n")

    def stop(self) -> None:
        self._stop_asked.set()
        self.join(2 * self._every)


def _monitors() -> Iterator[Any]:
    for module, name in MONITORS.items():
        with contextlib.suppress(Exception):  # no such package, driver or device here
            monitor = getattr(importlib.import_module(f"mlflow.system_metrics.metrics.{module}"), name)()
            monitor.collect_metrics()  # the first reading of a rate is of no use
            monitor.clear_metrics()
            yield monitor


def sample_points(line: dict[str, Any], index: int, start: float) -> list[Point]:
    """One sample as `system/…` points; `start` is the run's, in seconds since 1970."""
    known = {clean_name(f"system/{n}"): finite(v) for n, v in (line.get("values") or {}).items()}
    after = float(line.get("at") or start) - start
    return [Point(name, value, index, after) for name, value in known.items() if value is not None]
