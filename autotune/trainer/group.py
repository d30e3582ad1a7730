"""The ranks of a run as one group: how it starts, and what they tell each other beside tensors.

A launcher says who is who in the environment (`RANK`, `WORLD_SIZE`, `LOCAL_RANK`, `MASTER_ADDR`,
`MASTER_PORT`): `torchrun`, `deepspeed` and `autotune run --nproc` all do. Without it a process is
alone, and its store lives inside the process: no address, no port.

What is not a tensor travels as JSON text, never as a pickle. On GPUs the group speaks NCCL for what
is on the device and gloo for what is not, so that words cost no wait for the device.
"""

from __future__ import annotations

import atexit
import contextlib
import json
import logging
import os
import sys
import warnings
from collections.abc import Iterator
from typing import Any, NoReturn

from autotune.errors import TrainingError


def start_group() -> str:
    """Bring up the process group once per process, quietly; return the device type."""
    import torch.distributed as dist

    deepspeed = import_deepspeed()
    from deepspeed.accelerator import get_accelerator

    _skip_shared_memory_op()
    device_type = str(get_accelerator().device_name())
    backend = "nccl" if device_type == "cuda" else "gloo"
    if not dist.is_initialized():
        if launched():
            get_accelerator().set_device(int(os.environ.get("LOCAL_RANK", "0")))
            dist.init_process_group("cpu:gloo,cuda:nccl" if backend == "nccl" else backend)
        else:
            # One process, nobody to meet: a store inside the process needs no address and no port.
            dist.init_process_group(backend, store=dist.HashStore(), rank=0, world_size=1)
        atexit.register(leave_group)
    os.environ.setdefault("LOCAL_RANK", "0")  # only a launcher sets it, and DeepSpeed insists on it
    deepspeed.init_distributed(dist_backend=backend, auto_mpi_discovery=False, verbose=False)
    # At ZeRO 3 DeepSpeed calls collectives by names that torch has renamed: no news for a user.
    warnings.filterwarnings("ignore", category=FutureWarning, module=r"torch\.distributed\.c10d_logger")
    return device_type


def launched() -> bool:
    """Whether a launcher started this rank. accelerate names a rank of one in a process that is alone."""
    several = os.environ.get("WORLD_SIZE", "1") != "1"
    return "RANK" in os.environ and ("MASTER_ADDR" in os.environ or several)


def leave_group() -> None:
    """Say goodbye, so that the others' next word to us fails instead of waiting."""
    import torch.distributed as dist

    if dist.is_initialized():
        dist.destroy_process_group()


def leave_now(code: int) -> NoReturn:
    """End this rank with an exit code, at once, after all that was registered for the end has run.

    Threads of the process group's transport can outlive the interpreter; when its C++ objects are torn
    down under them the process aborts now and then, with everything already saved and a wrong exit code.
    """
    atexit._run_exitfuncs()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)


def from_first(value: Any) -> Any:
    """Rank 0's JSON value, on every rank; a collective call."""
    import torch
    import torch.distributed as dist

    if _alone():
        return value
    text = json.dumps(value).encode()
    size = torch.tensor([len(text)])
    dist.broadcast(size, src=0)
    buffer = torch.zeros(int(size), dtype=torch.uint8)
    if dist.get_rank() == 0:
        buffer.copy_(torch.frombuffer(bytearray(text), dtype=torch.uint8))
    dist.broadcast(buffer, src=0)
    return json.loads(bytes(buffer.tolist()))


def from_all(value: str) -> list[str]:
    """Every rank's text, in their order, on every rank; a collective call."""
    import torch
    import torch.distributed as dist

    if _alone():
        return [value]
    text = torch.frombuffer(bytearray(value.encode() or b"\0"), dtype=torch.uint8)
    ranks = dist.get_world_size()
    sizes = torch.zeros(ranks, dtype=torch.int64)
    sizes[dist.get_rank()] = len(value.encode())
    dist.all_reduce(sizes)
    table = torch.zeros((ranks, max(int(sizes.max()), 1)), dtype=torch.uint8)  # [W, longest]
    table[dist.get_rank(), : len(text)] = text
    dist.all_reduce(table)
    return [bytes(row[:n].tolist()).decode() for row, n in zip(table, sizes.tolist(), strict=True)]


def any_rank(flag: bool) -> bool:
    """Whether it is so on some rank; a collective call."""
    import torch
    import torch.distributed as dist

    if _alone():
        return flag
    raised = torch.tensor([int(flag)])
    dist.all_reduce(raised)
    return bool(raised.item())


def agree_on(what: str, value: Any) -> None:
    """Stop all ranks when they do not have the same JSON value; a collective call.

    Raises:
        TrainingError: with every rank's value.
    """
    told = from_all(json.dumps(value))
    if len(set(told)) > 1:
        shown = ", ".join(f"rank {rank}: {text}" for rank, text in enumerate(told))
        raise TrainingError(
            f"the ranks do not agree on {what}: {shown}; expected the same everywhere. Check that all of"
            " them run the same code, recipe and data files"
        )


@contextlib.contextmanager
def first_goes_first() -> Iterator[None]:
    """Rank 0 runs the block before the others: what it leaves in the cache is there for them."""
    import torch.distributed as dist

    alone = _alone()
    if not alone and dist.get_rank() > 0:
        dist.barrier()
    yield
    if not alone and dist.get_rank() == 0:
        dist.barrier()


def _alone() -> bool:
    import torch.distributed as dist

    return not dist.is_initialized() or dist.get_world_size() == 1


# -- DeepSpeed's manners ---------------------------------------------------------------------


def import_deepspeed() -> Any:
    """Import DeepSpeed, its log at WARNING and on stderr: stdout belongs to the run's screen."""
    before = logging.root.manager.disable
    logging.disable(logging.WARNING)  # that no GPU was found is no news here
    try:
        import deepspeed
    finally:
        logging.disable(before)
    deepspeed.logger.setLevel(logging.WARNING)
    for handler in deepspeed.logger.handlers:
        if type(handler) is logging.StreamHandler:  # its own, not one that a host has added
            handler.setStream(sys.stderr)
    return deepspeed


def _skip_shared_memory_op() -> None:
    """Tell DeepSpeed that its C++ shared-memory op is not to be built.

    On CPU its communication backend compiles that op at start (minutes, and an error without a C++
    compiler). Only the all-reduce of tensor-parallel *inference* uses it; training collectives go
    through gloo, so nothing that this engine does becomes slower. DeepSpeed looks an op up in
    `deepspeed.ops.__compatible_ops__` (built at first access by probing every op, compilers
    included) and reads that table nowhere else; an op missing from it counts as incompatible.
    """
    import deepspeed.ops

    table = vars(deepspeed.ops).setdefault("__compatible_ops__", {})
    table["deepspeed_shm_comm"] = False
