"""A recipe's text as plain data, with the line of every value.

YAML 1.2 (`1e-6` is a number, `off` is text) is composed into nodes by ruamel.yaml and turned into
dicts, lists and scalars here, because only the nodes know their lines. No tag beyond the plain
ones is constructed, so a file can never name a Python object; aliases are expanded under a budget,
so a few lines cannot fill the memory. Everything wrong is collected, not raised.
"""

from __future__ import annotations

import difflib
import io
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from ruamel.yaml import YAML
from ruamel.yaml.error import MarkedYAMLError, YAMLError
from ruamel.yaml.nodes import MappingNode, Node, ScalarNode

from autotune.errors import Problem

Key = tuple[str | int, ...]
"""Where a value sits: `("rewards", 0, "weight")` is written `rewards.0.weight`."""

MAX_BYTES = 1_000_000
MAX_NODES = 20_000
"""Values after aliases are expanded; real recipes have about a hundred."""
PLAIN = "tag:yaml.org,2002:"


@dataclass
class Document:
    """The data of one recipe file, the line of each value, and what was wrong with the text."""

    file: str
    data: dict[str, Any] = field(default_factory=dict)
    lines: dict[Key, int] = field(default_factory=dict)
    overridden: dict[Key, str] = field(default_factory=dict)
    """Key -> the `key=value` text of the command line that set it."""
    problems: list[Problem] = field(default_factory=list)
    unreadable: set[Key] = field(default_factory=set)
    """Values whose text is already reported and that stand as None in the data."""

    def add(self, key: Key, message: str, line: int | None = None) -> None:
        where = f"{self.file}:{line}" if line else self.where(key)
        self.problems.append(Problem(dotted(key), message, where))

    def fail(self, message: str) -> None:
        """Note that the file as a whole cannot be used."""
        self.problems.append(Problem("", message, self.file))

    def where(self, key: Key) -> str:
        """`file:line` of the value or of the nearest section that holds it; empty for overrides."""
        for end in range(len(key), -1, -1):
            if key[:end] in self.overridden:
                return ""
            if key[:end] in self.lines:
                return f"{self.file}:{self.lines[key[:end]]}"
        return self.file


def dotted(key: Key) -> str:
    return ".".join(map(str, key))


def read_document(path: Path) -> Document:
    """Read and parse one file; a file that is not YAML leaves its problem and no data."""
    document = Document(str(path))
    text = _read_text(path, document)
    if text is None:
        return document
    root = _compose(text, document)
    if root is None and not document.problems:
        document.add((), "the file is empty; expected at least one field, such as `seed: 1`", 1)
    elif root is not None:
        _fill(document, root)
    return document


def parse_value(text: str) -> Any:
    """One override's value, read by the same rules as the file: `1e-6`, `off`, `[a, b]`.

    Raises:
        ValueError: if the text is not one YAML value.
    """
    document = Document("")
    root = _compose(text, document)
    value = None if root is None else _Builder(document).build(root, ())
    if document.problems:
        raise ValueError(document.problems[0].message)
    return value


def _read_text(path: Path, document: Document) -> str | None:
    raw = b""
    try:
        raw = path.read_bytes() if path.stat().st_size <= MAX_BYTES else raw
        if len(raw) == path.stat().st_size:
            return raw.decode("utf-8-sig")
        document.fail(f"is larger than {MAX_BYTES:,} bytes; a recipe is a short text file")
    except IsADirectoryError:
        document.fail("is a folder; expected a recipe file, such as recipe.yaml")
    except FileNotFoundError:
        document.fail(f"no such file; {_near_files(path)}")
    except UnicodeDecodeError as error:
        line = raw[: error.start].count(b"\n") + 1
        document.add((), f"is not UTF-8 text ({error.reason}); save it as UTF-8", line)
    except (OSError, ValueError) as error:  # ValueError: a NUL in the path
        document.fail(f"cannot be read: {error}")
    return None


def _near_files(path: Path) -> str:
    recipes = sorted(p.name for p in path.parent.glob("*.y*ml")) if path.parent.is_dir() else []
    near = difflib.get_close_matches(path.name, recipes, 1, 0.5)
    if near:
        return f"did you mean {path.parent / near[0]}?"
    return f"recipes there: {', '.join(recipes[:5])}" if recipes else "give the path of a recipe"


def _compose(text: str, document: Document) -> Node | None:
    try:
        root: Node | None = YAML(typ="safe", pure=True).compose(io.StringIO(text))
        return root
    except MarkedYAMLError as error:
        mark = error.problem_mark or error.context_mark
        document.add((), _explain(error, text, mark), mark.line + 1 if mark else 1)
    except YAMLError as error:  # a character that YAML forbids, such as NUL
        position = getattr(error, "position", 0)
        line = text[: position if isinstance(position, int) else 0].count("\n") + 1
        document.add((), f"is not YAML: {str(error).splitlines()[0]}", line)
    except RecursionError:
        document.add((), "is nested too deeply; a recipe has four levels at most", 1)
    except ValueError as error:
        document.add((), f"is not YAML: {error}", 1)
    return None


def _explain(error: MarkedYAMLError, text: str, mark: Any) -> str:
    lines = text.splitlines()
    line = lines[mark.line] if mark and mark.line < len(lines) else ""
    if "\t" in line[: len(line) - len(line.lstrip())]:
        return "is not YAML: a tab indents this line; indent with spaces"
    what = (error.problem or error.context or "cannot be parsed").strip()
    shown = f" near `{line.strip()[:60]}`" if line.strip() else ""
    return f"is not YAML: {what}{shown}"


def _fill(document: Document, root: Node) -> None:
    if not isinstance(root, MappingNode):
        document.add((), "expected `field: value` lines at the top level", _line(root))
        return
    try:
        document.data = _Builder(document).build(root, ())
    except RecursionError:
        document.add((), "is nested too deeply; a recipe has four levels at most", 1)


def _line(node: Node) -> int:
    return int(node.start_mark.line) + 1


class _TooLarge(Exception):
    """The budget of expanded values is spent."""


class _Builder:
    """Nodes -> plain data, writing lines and problems into the document on the way."""

    def __init__(self, document: Document) -> None:
        self.document = document
        self.scalars = YAML(typ="safe", pure=True).constructor
        self.budget = MAX_NODES
        self.open: set[int] = set()

    def build(self, root: Node, key: Key) -> Any:
        try:
            return self._value(root, key)
        except _TooLarge:
            message = f"expands to more than {MAX_NODES:,} values; write the repeated parts out"
            self.document.add((), message, _line(root))
            return {}

    def _value(self, node: Node, key: Key) -> Any:
        self.budget -= 1
        if self.budget < 0:
            raise _TooLarge
        if isinstance(node, ScalarNode):
            return self._scalar(node, key)
        if id(node) in self.open:
            return self._problem(node, key, "an alias contains itself; write the value out")
        if node.tag not in (PLAIN + "map", PLAIN + "seq"):
            return self._problem(node, key, f"tag {_tag(node)} is not allowed; remove it")
        self.open.add(id(node))
        build = self._mapping if isinstance(node, MappingNode) else self._list
        value = build(node, key)
        self.open.discard(id(node))
        return value

    def _mapping(self, node: Node, key: Key) -> dict[str, Any]:
        result: dict[str, Any] = {}
        first: dict[str, int] = {}
        for name_node, value_node in node.value:
            name = self._name(name_node, key)
            if name is None:
                continue
            if name in result:
                self._duplicate(name_node, (*key, name), first[name])
                continue
            first[name] = self.document.lines[(*key, name)] = _line(name_node)
            result[name] = self._value(value_node, (*key, name))
        return result

    def _name(self, node: Node, key: Key) -> str | None:
        if not isinstance(node, ScalarNode) or node.tag not in (PLAIN + "str", PLAIN + "timestamp"):
            if node.tag == PLAIN + "merge":
                self._problem(node, key, "`<<` is not part of YAML 1.2; write the fields out")
            else:
                shown = node.value if isinstance(node, ScalarNode) else "a collection"
                self._problem(node, key, f"expected a field name, received {shown}; quote it")
            return None
        return str(node.value)

    def _duplicate(self, node: Node, key: Key, first: int) -> None:
        message = f"appears twice; it was already set in line {first}; keep one of them"
        self.document.add(key, message, _line(node))

    def _list(self, node: Node, key: Key) -> list[Any]:
        for index, item in enumerate(node.value):
            self.document.lines.setdefault((*key, index), _line(item))
        return [self._value(item, (*key, i)) for i, item in enumerate(node.value)]

    def _scalar(self, node: ScalarNode, key: Key) -> Any:
        build = {
            PLAIN + "null": lambda n: None,
            PLAIN + "bool": self.scalars.construct_yaml_bool,
            PLAIN + "int": self.scalars.construct_yaml_int,
            PLAIN + "float": self.scalars.construct_yaml_float,
            PLAIN + "str": _text,
            PLAIN + "timestamp": _text,  # a date is text here
        }.get(str(node.tag))
        if build is None:
            return self._problem(node, key, f"tag {_tag(node)} is not allowed; remove it")
        try:
            return build(node)
        except (ValueError, KeyError, OverflowError):
            kind = _tag(node).replace("!!int", "number").replace("!!str", "text")
            return self._problem(node, key, f"{ascii(node.value)[:40]} cannot be read as {kind}")

    def _problem(self, node: Node, key: Key, message: str) -> None:
        self.document.unreadable.add(key)
        self.document.add(key, message, _line(node))


def _text(node: ScalarNode) -> str:
    """The scalar's text; half of a surrogate pair raises UnicodeEncodeError, a ValueError."""
    str(node.value).encode()
    return str(node.value)


def _tag(node: Node) -> str:
    return str(node.tag).replace(PLAIN, "!!")


def walk(data: Any, key: Key = ()) -> Iterator[tuple[Key, Any]]:
    """Every value with its key, sections before their fields."""
    yield key, data
    if isinstance(data, dict):
        for name, value in data.items():
            yield from walk(value, (*key, name))
    elif isinstance(data, list):
        for index, value in enumerate(data):
            yield from walk(value, (*key, index))
