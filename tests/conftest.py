"""What every test shares: one thread, a cache of its own, and tests that fit what is installed.

Set before anything imports torch: results on CPU depend on the number of threads, and two test
processes on two cores must not each start two.
"""

from __future__ import annotations

import ast
import importlib.util
import os
import signal
import threading
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent

os.environ["OMP_NUM_THREADS"] = "1"
os.environ["MKL_NUM_THREADS"] = "1"
os.environ["TOKENIZERS_PARALLELISM"] = "false"
os.environ["MLFLOW_DISABLE_TELEMETRY"] = "true"
os.environ.setdefault("AUTOTUNE_CACHE", str(ROOT / "build" / "test-cache"))

# A shell starts background jobs with SIGINT ignored, and so would every process that a test starts.
if (
    threading.current_thread() is threading.main_thread()
    and signal.getsignal(signal.SIGINT) is signal.SIG_IGN
):
    signal.signal(signal.SIGINT, signal.default_int_handler)

TRAIN = (
    *("torch", "transformers", "deepspeed", "safetensors", "gguf"),
    *("autotune.trainer", "autotune.hooks.trl"),
)
"""Modules of the extra `train`, and the package that is made of them."""


@cache
def installed(package: str) -> bool:
    return importlib.util.find_spec(package) is not None


if installed("hypothesis"):  # not in the environments of other trainers
    from hypothesis import settings

    # No time limit an example: the first one may import a library, and cores are shared.
    settings.register_profile("shared_cores", deadline=None)
    settings.load_profile("shared_cores")


def needs_train(path: Path) -> bool:
    """Whether a test file imports, anywhere in it, something that the light core does not have."""
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        names: list[str] = []
        if isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom) and node.module:
            names = [node.module, *(f"{node.module}.{alias.name}" for alias in node.names)]
        if any(name == train or name.startswith(f"{train}.") for name in names for train in TRAIN):
            return True
    return False


def pytest_ignore_collect(collection_path: Path) -> bool | None:
    """In an environment without torch the light tests still run; see `pytest_report_header`."""
    if collection_path.suffix != ".py" or installed("torch"):
        return None
    return True if needs_train(collection_path) else None


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Slow tests first: with two processes, none of them is left for the end, when one would idle."""
    items.sort(key=lambda item: item.get_closest_marker("slow") is None)


def pytest_report_header() -> str:
    if installed("torch"):
        return "autotune: core and trainer"
    return "autotune: core only, torch is not installed; test files that need it are left out"


@cache
def cuda() -> bool:
    if not installed("torch"):
        return False
    import torch

    return torch.cuda.is_available()


LAUNCHER = ("RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")


@pytest.fixture(autouse=True)
def no_launcher_is_left_behind() -> Iterator[None]:
    """accelerate writes a launcher's variables into the process; later tests' children would believe them."""
    before = {name: os.environ.get(name) for name in LAUNCHER}
    yield
    for name, value in before.items():
        os.environ.pop(name, None)
        if value is not None:
            os.environ[name] = value


def pytest_runtest_setup(item: pytest.Item) -> None:
    if item.get_closest_marker("gpu") and not cuda():
        pytest.skip("needs a CUDA device")
