"""What commands share: where they print, JSON for programs, arguments that several of them take."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console

RecipeFile = Annotated[Path, typer.Argument(metavar="RECIPE", help="The recipe, a YAML file.")]
Overrides = Annotated[
    list[str] | None,
    typer.Argument(metavar="[KEY=VALUE]...", help="Fields to set, such as trainer.kl_coef=0.01."),
]
AsJson = Annotated[bool, typer.Option("--json", help="Print JSON for programs.")]


def console() -> Console:
    """Standard output, without colours that nobody asked for."""
    return Console(highlight=False)


def print_json(data: Any, indent: int | None = 2) -> None:
    """For programs; `indent=None` keeps an object on one line."""
    print(json.dumps(data, indent=indent, ensure_ascii=False))
