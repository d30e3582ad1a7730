"""Stand-ins for what OpenRLHF needs a GPU for: DeepSpeed, vLLM, flash-attention and what belongs to them.

Everything else is the installed wheel's and the installed Ray's and torch's own.
"""

from __future__ import annotations

import importlib.util
import sys
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any
from unittest.mock import MagicMock

NAMES = (
    "deepspeed",
    "deepspeed.ops",
    "deepspeed.ops.adam",
    "deepspeed.runtime",
    "deepspeed.runtime.zero",
    "deepspeed.runtime.zero.partition_parameters",
    "deepspeed.runtime.zero.offload_config",
    "deepspeed.utils",
    "flash_attn",
    "flash_attn.bert_padding",
    "flash_attn.utils",
    "flash_attn.utils.distributed",
    "vllm",
    "vllm.inputs",
    "vllm.utils",
)


class Stub(ModuleType):
    """Answers every name with something that can be called, and made anew."""

    def __init__(self, name: str) -> None:
        super().__init__(name)
        self.__spec__ = ModuleSpec(name, None)
        self.__path__: list[str] = []

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return MagicMock(name=f"{self.__name__}.{name}")


def put_in() -> None:
    """Before the first import of openrlhf; what is really installed is left alone."""
    from transformers.integrations import is_deepspeed_available  # asks for the real one, before the stand-in

    del is_deepspeed_available
    import transformers.trainer  # noqa: F401

    for name in NAMES:
        top = name.split(".")[0]
        absent = name not in sys.modules and importlib.util.find_spec(top) is None
        if absent or isinstance(sys.modules.get(top), Stub):
            sys.modules[name] = Stub(name)
