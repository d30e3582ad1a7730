"""`python -m autotune.hooks.openrlhf control.yaml ARGS…`: OpenRLHF's own launcher with our trainer in it."""

from __future__ import annotations

import runpy
import sys

from autotune.errors import InputError

LAUNCHER = "openrlhf.cli.train_ppo_ray"
USAGE = f"usage: python -m autotune.hooks.openrlhf control.yaml ARGS…, with the ARGS of python -m {LAUNCHER}"


def main(arguments: list[str]) -> None:
    """Put the subclass in, then be OpenRLHF's launcher; its argument parser exists under `__main__` only.

    Raises:
        SystemExit: with 2 where the control file is missing or wrong; nothing was started.
    """
    if not arguments or arguments[0].startswith("-"):
        print(f"{USAGE}\nautotune: expected a control file first, received {arguments[:1]}", file=sys.stderr)
        raise SystemExit(2)
    control, rest = arguments[0], arguments[1:]
    if "--train.async_enable" in rest:
        print(
            "autotune: with --train.async_enable rollouts in flight use old settings; OpenRLHF runs as it is"
        )
    else:
        _install(control)
    sys.argv = [LAUNCHER, *rest]
    runpy.run_module(LAUNCHER, run_name="__main__", alter_sys=True)


def _install(control: str) -> None:
    from autotune.hooks.openrlhf.trainer import install

    try:
        install(control)
    except InputError as wrong:
        print(f"autotune: {wrong}", file=sys.stderr)
        raise SystemExit(2) from None


if __name__ == "__main__":
    main(sys.argv[1:])
