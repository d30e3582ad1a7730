"""What a sampling server and its trainer say to each other: JSON and safetensors, never a pickle.

    POST /generate   JSON {requests, sampling}                   answer: safetensors ids, lengths, log_probs
    POST /load       JSON {file}, {tensors: [CUDA handles]}, or
                     {broadcast: {group, bucket, tensors}}       answer: {}
    POST /sleep, /close, GET /health                             answer: JSON

Every call carries the run's token in a header; a server without the right one answers 403 and does
nothing. A file must lie in the folder that the server was started with. Out of memory is answer 507,
which the trainer takes as it takes its own.

A CUDA handle names memory that another process of this machine owns: 64 bytes from the driver, with
size, offset and shape. It is made of plain numbers, so JSON holds it.
"""

from __future__ import annotations

import base64
import json
from collections.abc import Iterator
from dataclasses import asdict
from typing import Any

import torch
from safetensors.torch import load, save
from torch import Tensor

from autotune.trainer.rollout.vllm_engine import Generated, Request, Sampling

TOKEN_HEADER = "X-Autotune-Token"
OUT_OF_MEMORY = 507


def encode_call(requests: list[Request], sampling: Sampling) -> bytes:
    """A call of `generate` as JSON."""
    return json.dumps({"requests": [asdict(r) for r in requests], "sampling": asdict(sampling)}).encode()


def decode_call(body: bytes) -> tuple[list[Request], Sampling]:
    """Inverse of `encode_call`; unknown or missing fields are a TypeError."""
    data = json.loads(body)
    sampling = data["sampling"] | {"end_ids": tuple(data["sampling"]["end_ids"])}
    return [Request(**request) for request in data["requests"]], Sampling(**sampling)


def encode_generated(generated: Generated) -> bytes:
    """Responses as safetensors."""
    tensors = {"ids": generated.ids, "lengths": generated.lengths}
    if generated.log_probs is not None:
        tensors["log_probs"] = generated.log_probs
    return save(tensors)


def decode_generated(body: bytes) -> Generated:
    """Inverse of `encode_generated`."""
    tensors = load(body)
    return Generated(tensors["ids"], tensors["lengths"], tensors.get("log_probs"))


# -- CUDA handles ------------------------------------------------------------------------------


def export_tensor(name: str, tensor: Tensor) -> dict[str, Any]:
    """Where a CUDA tensor lies, so that another process on this device can read it while it lives.

    The device's number is left out: each process counts the devices that it may see.
    """
    storage = tensor.untyped_storage()._share_cuda_()
    return {
        "name": name,
        "dtype": str(tensor.dtype).removeprefix("torch."),
        "shape": list(tensor.shape),
        "stride": list(tensor.stride()),
        "offset": tensor.storage_offset(),
        "storage": [_plain(part) for part in storage[1:]],
    }


def import_tensors(exported: list[dict[str, Any]]) -> Iterator[tuple[str, Tensor]]:
    """Views of the other process's memory: copy them before it is told that the call is done."""
    for one in exported:
        parts = (_bytes(part) for part in one["storage"])
        storage = torch.UntypedStorage._new_shared_cuda(torch.cuda.current_device(), *parts)
        dtype = getattr(torch, one["dtype"])
        view = torch.empty(0, dtype=dtype, device=storage.device)
        yield one["name"], view.set_(storage, one["offset"], one["shape"], one["stride"])


def _plain(part: Any) -> Any:
    return {"base64": base64.b64encode(part).decode()} if isinstance(part, bytes) else part


def _bytes(part: Any) -> Any:
    return base64.b64decode(part["base64"]) if isinstance(part, dict) else part
