"""The entry point `verl.plugins`: verl loads this file at its own import, in every process.

verl is only half imported at that moment, and most of its processes never see a trainer. So nothing is
imported here; a finder waits on `sys.meta_path` for the module that defines verl's trainers and, once that
has run, puts each trainer's place in its registry into our hands. The names in the registry stay: verl
decides by them what is synchronous, so a class under a name of its own would be taken for asynchronous.
"""

from __future__ import annotations

import importlib.abc
import importlib.machinery
import sys
from collections.abc import Sequence
from types import ModuleType

TRAINERS = "verl.trainer.ppo.v1"
"""The package whose import registers all of verl's V1 trainers."""


class Finder(importlib.abc.MetaPathFinder):
    """Finds `TRAINERS` the usual way and adds one step to its loading; blind for everything else."""

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        if fullname != TRAINERS:
            return None
        spec = importlib.machinery.PathFinder.find_spec(fullname, path, target)
        if spec is not None and spec.loader is not None:
            spec.loader = _Loader(spec.loader)
        return spec


class _Loader(importlib.abc.Loader):
    def __init__(self, loader: importlib.abc.Loader) -> None:
        self.loader = loader

    def create_module(self, spec: importlib.machinery.ModuleSpec) -> ModuleType | None:
        return self.loader.create_module(spec)

    def exec_module(self, module: ModuleType) -> None:
        self.loader.exec_module(module)
        _install()


def _install() -> None:
    """Ours on top of verl's trainers; a failure leaves them as they are and says so."""
    try:
        from autotune.hooks.verl.trainer import install

        install()
    except Exception as failure:
        import logging

        logging.getLogger("autotune").warning("autotune is not in this verl: %s", failure)


def wait() -> None:
    """Wait for verl's trainers; calling it again changes nothing."""
    if TRAINERS in sys.modules:
        _install()
    elif not any(isinstance(finder, Finder) for finder in sys.meta_path):
        sys.meta_path.insert(0, Finder())


wait()
