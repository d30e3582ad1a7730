"""How verl finds autotune: the entry point, the waiting finder, the registry, and what is left untouched."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from importlib.metadata import entry_points
from pathlib import Path
from typing import Any

import pytest

pytestmark = pytest.mark.verl
pytest.importorskip("verl")

ROOT = Path(__file__).resolve().parents[3]


def fresh(code: str, **env: str) -> Any:
    """What a new interpreter prints as its last line, as JSON."""
    environment = {**os.environ, "PYTHONPATH": str(ROOT), **env}
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", code],
        capture_output=True,
        text=True,
        env=environment,
        timeout=120,
    )
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout.splitlines()[-1])


def test_the_installed_entry_point_names_the_plugin() -> None:
    found = {point.name: point.value for point in entry_points(group="verl.plugins")}
    assert found.get("autotune") == "autotune.hooks.verl.plugin"


def test_verl_itself_puts_our_class_in_its_registry() -> None:
    """The names stay: verl takes every name but `sync` for asynchronous. Nothing of ours is loaded before."""
    code = (
        "import json, sys, verl\n"
        "ours = sorted(m for m in sys.modules if m.startswith('autotune'))\n"
        "from verl.trainer.ppo.v1 import PPOTrainerSync, get_trainer_cls\n"
        "from verl.trainer.ppo.v1.trainer_base import TRAINER_REGISTRY\n"
        "c = get_trainer_cls('sync')\n"
        "print(json.dumps([ours, c.has_autotune, issubclass(c, PPOTrainerSync), sorted(TRAINER_REGISTRY)]))"
    )
    before, ours, real, names = fresh(code)
    assert before == ["autotune", "autotune.hooks", "autotune.hooks.verl", "autotune.hooks.verl.plugin"]
    assert ours and real and names == ["colocate_async", "separate_async", "sync"]


def test_waiting_twice_waits_once() -> None:
    from autotune.hooks.verl import plugin

    plugin.wait()
    plugin.wait()
    finders = [finder for finder in sys.meta_path if isinstance(finder, plugin.Finder)]
    assert len(finders) <= 1
    assert plugin.Finder().find_spec("verl.trainer.ppo", None) is None


def test_without_our_key_nothing_is_changed(start: Any) -> None:
    trainer = start(2)
    trainer.fit(trainer.agent_loop_manager)
    assert trainer.autotune is None and type(trainer.logger).__name__ == "Tracking"
    assert not (Path(trainer.config.trainer.default_local_dir) / "journal.jsonl").exists()


@pytest.mark.parametrize(
    ("options", "more", "told"),
    [
        ({"kontrol": "x.yaml"}, (), "autotune.kontrol"),
        ({"control": "/nowhere/control.yaml"}, (), "control.yaml"),
        ({"control": {"mode": "perhaps"}}, (), "mode"),
        ({"control": {"mode": "act"}}, ("trainer.v1.trainer_mode=colocate_async",), "colocate_async"),
    ],
)
def test_what_cannot_begin_stays_out_and_says_so(
    options: dict[str, Any], more: tuple[str, ...], told: str, start: Any, caplog: pytest.LogCaptureFixture
) -> None:
    trainer = start(2, {}, (), **options)
    if more:
        trainer.trainer_mode = "colocate_async"
    trainer.fit(trainer.agent_loop_manager)
    assert trainer.autotune is None and told in caplog.text
    assert trainer.global_steps == 3, "verl trained on"


def test_the_line_of_the_docs_is_one_that_verl_takes(start: Any) -> None:
    """The section is new to verl's configuration, which is closed; its own check must let it pass."""
    from verl.utils.config import validate_config

    trainer = start(2, {}, ("+autotune.control.mode=shadow", "+autotune.control.pin=[kl_coef]"))
    validate_config(trainer.config, use_reference_policy=True, use_critic=False)
    trainer.fit(trainer.agent_loop_manager)
    guest = trainer.autotune.guest
    assert guest.control.mode == "shadow" and guest.control.pin == ("kl_coef",) and guest.rollout == 2
