"""The tree's one law: imports point downward.

`LAYERS` is the whole architecture. A module may import what stands before it: earlier layers, and
earlier entries of its own layer. Imports inside functions and under TYPE_CHECKING count as well,
and so does a string that names a module, such as `"autotune.trainer.tasks.digits:load"`: all couple.

The second half starts fresh interpreters: the light core must load nothing heavy and answer fast.
"""

from __future__ import annotations

import ast
import json
import os
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
PACKAGE = ROOT / "autotune"
QUICKSTART = "experiments/quickstart/timid.yaml"

LAYERS: tuple[tuple[str, ...], ...] = (
    # L0: words. The standard library only.
    ("autotune", "errors", "metrics", "knobs", "decisions"),
    # L1: deciding. numpy, and nothing that could touch a trainer, a clock or a disk.
    (
        *("statistics", "history", "policies", "ledger", "guards", "judge", "hand", "standing", "controller"),
        *("preflight", "procedure", "catalogue"),
    ),
    # L2: what a run is told and what it says. pydantic, ruamel.yaml.
    ("recipe", "journal", "story", "commands", "provenance"),
    # L3: sensing, acting, showing.
    ("logs", "trainer", "hooks", "tracking", "screen"),
    # L4: where trainer, adapter, controller and sinks meet.
    ("testing", "doctor", "check", "replay", "advise", "ranks", "run", "launch", "ctl"),
    # L5: many runs.
    ("children", "sweep", "tune", "report", "dashboard"),
    # L6: the command line.
    ("cli", "__main__"),
)

FOREIGN: dict[str, tuple[str, ...]] = {
    "numpy": tuple(name for layer in LAYERS[1:] for name in layer),
    "pydantic": ("recipe", "hooks", "sweep"),
    "ruamel": ("recipe", "hooks"),
    "rich": (
        *("screen", "check", "doctor", "replay", "advise", "run", "ctl", "sweep", "tune", "report"),
        *("dashboard", "cli"),
    ),
    "typer": ("cli",),
    "torch": ("trainer", "hooks.trl"),
    "transformers": ("trainer", "hooks.trl"),
    "deepspeed": ("trainer",),
    "safetensors": ("trainer",),
    "tokenizers": ("trainer",),
    "gguf": ("trainer",),
    "peft": ("trainer",),
    "reasoning_gym": ("recipe.gym", "trainer.tasks.reasoning_gym"),
    "pyarrow": ("recipe.data_checks", "trainer.tasks.parquet"),
    "math_verify": ("trainer.rewards.mathematics",),
    "vllm": ("trainer.rollout",),
    "mlflow": ("tracking",),
    "matplotlib": ("tracking.figures",),  # mlflow brings it
    "optuna": ("sweep",),
    "sqlalchemy": ("sweep",),
    "scipy": ("sweep",),
    "pandas": ("report",),
    "trl": ("hooks.trl",),
    "verl": ("hooks.verl",),
    "openrlhf": ("hooks.openrlhf",),
    "ray": ("hooks.verl", "hooks.openrlhf"),
    "omegaconf": ("hooks.verl",),
    "transfer_queue": ("hooks.verl",),
}
"""Package from outside -> the only modules of ours that may import it, anywhere in their files."""

HEAVY = ("torch", "transformers", "deepspeed", "vllm", "mlflow", "optuna", "pandas", "scipy")

MODULE_NAME = re.compile(r"autotune(\.\w+)+(:\w+)?")


def module_name(path: Path) -> str:
    """`autotune/hooks/base.py` -> `hooks.base`; the package's own `__init__` is `autotune`."""
    parts = list(path.relative_to(PACKAGE).with_suffix("").parts)
    if parts[-1] == "__init__":
        parts.pop()
    return ".".join(parts) or "autotune"


MODULES = {module_name(path): path for path in sorted(PACKAGE.rglob("*.py"))}
RANK = {name: i for i, name in enumerate(n for layer in LAYERS for n in layer)}


def top(module: str) -> str:
    return module.split(".")[0]


def imported(path: Path) -> Iterator[tuple[int, str]]:
    """(line, absolute dotted name) of everything that a file imports, wherever in the file."""
    package = module_name(path).split(".") if path.name == "__init__.py" else None
    here = package or module_name(path).split(".")[:-1]
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            yield from ((node.lineno, alias.name) for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            base = node.module or ""
            if node.level:
                up = here[: len(here) - node.level + 1]
                base = ".".join(p for p in ("autotune", *up, base) if p)
            yield node.lineno, base
            yield from ((node.lineno, f"{base}.{alias.name}") for alias in node.names)
        elif isinstance(node, ast.Constant) and MODULE_NAME.fullmatch(str(node.value)):
            yield node.lineno, str(node.value).split(":")[0]


def own(path: Path) -> Iterator[tuple[int, str]]:
    """(line, module of ours) for every import of this project; names inside modules are dropped."""
    for line, name in imported(path):
        inside = name.removeprefix("autotune.") if name != "autotune" else "autotune"
        if name.split(".")[0] == "autotune" and inside in MODULES:
            yield line, inside


def where(module: str, line: int) -> str:
    return f"{MODULES[module].relative_to(ROOT)}:{line}"


def test_every_module_has_a_row() -> None:
    missing = {top(m) for m in MODULES} - set(RANK)
    assert not missing, f"no layer for {sorted(missing)}: add them to LAYERS"


def test_imports_point_downward() -> None:
    upward = [
        f"{where(module, line)} imports {target}"
        for module, path in MODULES.items()
        for line, target in own(path)
        if top(module) != top(target) and RANK[top(target)] > RANK[top(module)]
    ]
    assert not upward, "imports that point upward:\n" + "\n".join(upward)


def test_the_trainer_sees_words_and_recipe_only() -> None:
    """It is controlled from outside: it knows no rule, no controller and no hook."""
    allowed = {*LAYERS[0], "statistics", *LAYERS[2], "trainer"}
    wrong = [
        f"{where(module, line)} imports {target}"
        for module, path in MODULES.items()
        if top(module) == "trainer"
        for line, target in own(path)
        if top(target) not in allowed
    ]
    assert not wrong, "\n".join(wrong)


def test_policies_never_import_each_other() -> None:
    """Rules share `policies.base`; the package's own `__init__` is the table that lists them."""
    wrong = [
        f"{where(module, line)} imports {target}"
        for module, path in MODULES.items()
        if module.startswith("policies.")
        for line, target in own(path)
        if target.startswith("policies.") and target not in (module, "policies.base")
    ]
    assert not wrong, "\n".join(wrong)


def allowed_foreign(module: str, package: str) -> bool:
    homes = FOREIGN.get(package, ())
    return any(module == home or module.startswith(f"{home}.") for home in homes)


def test_packages_from_outside_stay_in_their_place() -> None:
    wrong = sorted(
        {
            f"{where(module, line)} imports {name.split('.')[0]}"
            for module, path in MODULES.items()
            for line, name in imported(path)
            if name.split(".")[0] not in {"autotune", "__future__", *sys.stdlib_module_names}
            and not allowed_foreign(module, name.split(".")[0])
        }
    )
    assert not wrong, "imports that FOREIGN does not allow:\n" + "\n".join(wrong)


# Fresh interpreters.

REPORT = """
import json, sys
print(json.dumps(sorted(m for m in {heavy!r} if m in sys.modules)))
"""

COMMANDS = {
    "help": ["--help"],
    "check": ["check", QUICKSTART],
}


def fresh(code: str) -> list[str]:
    """Runs `code` in a new interpreter; the heavy packages that were loaded at its end."""
    done = subprocess.run(
        [sys.executable, "-c", code + REPORT.format(heavy=HEAVY)],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert done.returncode == 0, done.stderr
    loaded: list[str] = json.loads(done.stdout.splitlines()[-1])
    return loaded


def run_as_main(arguments: list[str]) -> str:
    return (
        "import runpy, sys\n"
        f"sys.argv = ['autotune', *{arguments!r}]\n"
        "try:\n    runpy.run_module('autotune', run_name='__main__', alter_sys=False)\n"
        "except SystemExit as end:\n    assert not end.code, end.code\n"
    )


def test_the_probe_sees_a_heavy_import() -> None:
    """The checks below are worth nothing if this one cannot fail them."""
    planted = "import sys, types\nsys.modules['scipy'] = types.ModuleType('scipy')\n"
    assert fresh(planted) == ["scipy"]


def test_light_layers_load_nothing_heavy() -> None:
    light = {name for layer in LAYERS[:3] for name in layer}
    names = [m if m == "autotune" else f"autotune.{m}" for m in MODULES if top(m) in light]
    assert len(names) > 10
    assert fresh("".join(f"import {name}\n" for name in names)) == []


@pytest.mark.parametrize("command", COMMANDS)
def test_commands_load_nothing_heavy(command: str) -> None:
    assert fresh(run_as_main(COMMANDS[command])) == []


def cpu_seconds(arguments: list[str]) -> float:
    """User + system time of one child: unlike wall time, it hardly grows when others are busy."""
    child = subprocess.Popen(
        [sys.executable, *arguments],
        cwd=ROOT,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    )
    _, status, usage = os.wait4(child.pid, 0)
    child.returncode = os.waitstatus_to_exitcode(status)
    assert child.returncode == 0, f"{arguments} ended with {child.returncode}"
    return usage.ru_utime + usage.ru_stime


LIBRARIES = "import numpy, pydantic, ruamel.yaml, typer, rich.console"


@pytest.mark.parametrize("command", COMMANDS)
def test_commands_answer_fast(command: str) -> None:
    """Below 0.8 s of CPU; on a slower machine, below 1.6 times what our five libraries cost.

    The two are measured in turns, and the least of five is taken: a busy neighbour can only add.
    """
    own_times, library_times = [], []
    for _ in range(5):
        own_times.append(cpu_seconds(["-m", "autotune", *COMMANDS[command]]))
        library_times.append(cpu_seconds(["-c", LIBRARIES]))
    limit = max(0.8, 1.6 * min(library_times))
    assert min(own_times) < limit, f"{own_times} against libraries {library_times}"
