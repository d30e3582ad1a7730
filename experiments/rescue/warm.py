"""What the fork server imports once, so that no run pays for it again: import it for its effect.

Nothing here may start a thread or touch a GPU: its processes are forks. What is in memory by now is taken out
of the garbage collector's rounds, which would otherwise walk through it, and copy its pages, in every run.
"""

from __future__ import annotations

import gc
import importlib

MODULES = (
    "autotune.cli",
    "autotune.run",
    "autotune.trainer.loop",
    "autotune.trainer.rewards.text",
    "transformers.models.auto.tokenization_auto",
    "transformers.models.qwen2.modeling_qwen2",
    "torch._inductor.compile_fx",  # an optimizer's import brings it in
    "deepspeed.runtime.engine",
    "deepspeed.module_inject.auto_ep_layer",
)


def load() -> None:
    from autotune.trainer.group import import_deepspeed

    import_deepspeed()
    for name in MODULES:
        importlib.import_module(name)
    gc.collect()
    gc.freeze()


load()
