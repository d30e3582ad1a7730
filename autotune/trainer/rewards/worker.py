"""The child process that runs a foreign reward function. Started by `foreign.Worker`, never imported there.

One JSON object a line in each direction, over two pipes of its own, so that whatever the function
prints cannot be taken for an answer:

    <- {"required": [...], "takes": [...] or null for all}           or {"error": "..."}
    -> {"columns": {"responses": [...], "answers": [...]}, "count": 2, "limit": 10.0}
    <- {"scores": [0.5, {"why": "returned nan, ..."}, ...]}          or {"error": "..."}

The function is called with keyword arguments chosen by its parameters' names: the parent sends the
columns that it takes and no others. The process ends when its parent does: at the end of the pipe,
and on Linux by the kernel even while the function hangs.
"""

from __future__ import annotations

import asyncio
import contextlib
import ctypes
import faulthandler
import importlib
import importlib.util
import inspect
import json
import math
import os
import signal
import sys
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

KEYWORDS = (inspect.Parameter.POSITIONAL_OR_KEYWORD, inspect.Parameter.KEYWORD_ONLY)
PARENT_DIED = 1
"""`PR_SET_PDEATHSIG` of Linux."""


def main(target: str, reading: int, writing: int) -> None:
    """Load the function, say so, then answer until the pipe ends."""
    _die_with_the_parent()
    faulthandler.enable()  # a segmentation fault leaves its stack in the output
    for pipe in (reading, writing):
        os.set_inheritable(pipe, False)  # a grandchild must not keep them open
    with os.fdopen(reading, encoding="utf-8") as requests, os.fdopen(writing, "w", encoding="utf-8") as said:
        _serve(target, requests, said)


def _serve(target: str, requests: Any, answers: Any) -> None:
    def say(message: dict[str, Any]) -> None:
        answers.write(json.dumps(message) + "\n")
        answers.flush()

    try:
        function = load(target)
        say(wants(function))
    except BaseException as error:
        say({"error": reason(error)})
        return
    for line in requests:
        request = json.loads(line)
        say(answer(function, **request))


def _die_with_the_parent() -> None:
    with contextlib.suppress(OSError, AttributeError):
        ctypes.CDLL(None).prctl(PARENT_DIED, signal.SIGKILL)


def load(target: str) -> Callable[..., Any]:
    """The function behind `package.module:function` or `file.py:function`."""
    place, _, name = target.rpartition(":")
    module = _from_file(Path(place)) if place.endswith(".py") else importlib.import_module(place)
    function = getattr(module, name)
    if not callable(function):
        raise TypeError(f"{name} is a {type(function).__name__}, not a function")
    return function  # type: ignore[no-any-return]


def _from_file(path: Path) -> Any:
    """The module of a file, whose neighbours it can import."""
    sys.path.insert(0, str(path.resolve().parent))
    spec = importlib.util.spec_from_file_location(path.stem, path)
    assert spec is not None and spec.loader is not None  # a name that ends with .py always has them
    module = importlib.util.module_from_spec(spec)
    sys.modules[path.stem] = module
    spec.loader.exec_module(module)
    return module


def wants(function: Callable[..., Any]) -> dict[str, Any]:
    """Names that the function cannot do without, and those that it takes (None: all there are)."""
    parameters = inspect.signature(function).parameters.values()
    alone = [p.name for p in parameters if p.kind is inspect.Parameter.POSITIONAL_ONLY]
    if alone:
        raise TypeError(f"its parameters {', '.join(alone)} have no names; remove the `/`")
    named = [p for p in parameters if p.kind in KEYWORDS]
    needed = [p.name for p in named if p.default is inspect.Parameter.empty]
    all_of_them = any(p.kind is inspect.Parameter.VAR_KEYWORD for p in parameters)
    return {"required": needed, "takes": None if all_of_them else [p.name for p in named]}


def answer(
    function: Callable[..., Any], columns: dict[str, list[Any]], count: int, limit: float
) -> dict[str, Any]:
    """Scores of one call, or what went wrong with it as a whole."""
    faulthandler.dump_traceback_later(0.9 * limit)  # shows where it hangs, before it is killed
    try:
        found = function(**columns)
        if inspect.iscoroutine(found):
            found = asyncio.run(found)
        return _scores(found, count)
    except BaseException as error:  # SystemExit too: the process serves on
        traceback.print_exc()
        return {"error": reason(error)}
    finally:
        faulthandler.cancel_dump_traceback_later()
        sys.stdout.flush()


def _scores(found: Any, count: int) -> dict[str, Any]:
    if count == 1 and isinstance(found, (int, float)):  # a function of one response
        found = [found]
    if isinstance(found, (str, bytes)) or not hasattr(found, "__iter__"):
        return {"error": f"it returned {shown(found)}; expected a list of {count} numbers"}
    values = list(found)
    if len(values) != count:
        return {"error": f"it returned {len(values)} scores for {count} responses; expected one each"}
    return {"scores": [_number(value) for value in values]}


def _number(value: Any) -> float | dict[str, str]:
    if value is None:
        return {"why": "it returned None: no score"}
    try:
        number = float(value) if not isinstance(value, (str, bytes)) else math.nan
    except Exception:
        number = math.nan
    return number if math.isfinite(number) else {"why": f"it returned {shown(value)}, not a finite number"}


def shown(value: Any) -> str:
    return f"{value!r:.60}" if isinstance(value, (int, float, str)) else f"a {type(value).__name__}"


def reason(error: BaseException) -> str:
    """`ValueError: text (file.py:12)`, the place being the innermost one of foreign code."""
    frames = [f for f in traceback.extract_tb(error.__traceback__) if f.filename != __file__]
    frames = [f for f in frames if not f.filename.startswith("<frozen")]
    place = f" ({Path(frames[-1].filename).name}:{frames[-1].lineno})" if frames else ""
    return f"{type(error).__name__}: {error}"[:300] + place
