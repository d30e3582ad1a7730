"""The trainer's side of a sampling server: starting it, handing weights over, asking for responses.

Weights travel within the machine. On a shared GPU the server is told where the trainer's tensors lie and
reads them there (`transfer: ipc`); to another GPU they are broadcast over NCCL (`transfer: broadcast`);
elsewhere they are written once, as safetensors, into shared memory (`/dev/shm`) and read from there
(`transfer: file`). A server that runs already needs the same folder, given to both sides by
AUTOTUNE_SERVER_FOLDER.
"""

from __future__ import annotations

import atexit
import contextlib
import http.client
import itertools
import json
import logging
import os
import secrets
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch.multiprocessing.reductions import StorageWeakRef

from autotune.errors import InputError, TrainingError
from autotune.recipe.schema import ServerSection
from autotune.trainer.rollout import wire
from autotune.trainer.rollout.broadcast import BUCKET, Pair, describe
from autotune.trainer.rollout.vllm_engine import EngineOptions, Generated, Request, Sampling, Weights

TOKEN_VARIABLE = "AUTOTUNE_SERVER_TOKEN"
FOLDER_VARIABLE = "AUTOTUNE_SERVER_FOLDER"

_LOG = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class _Handle:
    """A CUDA handle to a tensor, and what it was made of."""

    place: tuple[Any, ...]
    storage: StorageWeakRef
    exported: dict[str, Any]


class ServerEngine:
    """A `Generator` whose engine is another process."""

    def __init__(self, options: EngineOptions, section: ServerSection, rank: int) -> None:
        """Start this rank's server, or find the one that runs.

        Raises:
            InputError: a running server was named without its token.
            TrainingError: it did not start or does not answer.
        """
        self._section = section
        self._process: subprocess.Popen[bytes] | None = None
        self._made_folder = section.start
        self._fast_way_works = True  # of the two that `auto` tries on GPUs
        self._pair: Pair | None = None
        self._handles: dict[str, _Handle] = {}
        self._meetings = itertools.count()
        self._rank = rank
        self._folder = _folder(section.start)
        self._file = f"weights-{rank}.safetensors"  # servers that run already may share a folder
        self._token = secrets.token_hex(16) if section.start else _given(TOKEN_VARIABLE)
        self._port = section.port + rank if section.port else 0
        if section.start:
            self._start(options, rank)
        atexit.register(self.close)
        self._ask("/health")

    def generate(self, requests: Sequence[Request], sampling: Sampling) -> Generated:
        """Responses to every request; see `VllmEngine.generate`."""
        return wire.decode_generated(self._ask("/generate", wire.encode_call(list(requests), sampling)))

    @torch.no_grad()
    def load(self, weights: Weights) -> None:
        """Hand over all weights; the server has them when this returns."""
        tensors = dict(weights)
        way = self._way(tensors)
        if way == "file" or not self._load_fast(way, tensors):
            self._load_by_file(tensors)

    def _way(self, tensors: dict[str, torch.Tensor]) -> str:
        """How these weights go: ipc, broadcast or file.

        Raises:
            InputError: the recipe insists on one that cannot be.
        """
        wanted, on_gpu = self._section.transfer, all(tensor.is_cuda for tensor in tensors.values())
        if wanted == "ipc" and not on_gpu:
            raise InputError("rollout.server.transfer: ipc needs weights on a GPU; use auto or file")
        elsewhere = on_gpu and self._elsewhere(_device(tensors))
        if wanted == "broadcast" and on_gpu and not elsewhere:
            raise InputError(
                "rollout.server.transfer: broadcast needs a GPU of the server's own (rollout.server.devices):"
                " NCCL does not connect two processes on one; use auto or ipc"
            )
        if wanted != "auto":
            return wanted
        fast = "broadcast" if elsewhere else "ipc"
        return fast if on_gpu and self._fast_way_works else "file"

    def _load_fast(self, way: str, tensors: dict[str, torch.Tensor]) -> bool:
        """Whether it went well; where the recipe leaves the way open, a file takes over for good."""
        try:
            self._load_by_handle(tensors) if way == "ipc" else self._load_by_broadcast(tensors)
        except (TrainingError, RuntimeError) as error:
            if self._section.transfer != "auto" or isinstance(error, torch.OutOfMemoryError):
                raise
            _LOG.warning("transfer: %s does not work here (%s): weights go through a file", way, error)
            self._fast_way_works = False
        return self._fast_way_works

    def _load_by_file(self, tensors: dict[str, torch.Tensor]) -> None:
        from safetensors.torch import save_file

        save_file({n: t.cpu().contiguous() for n, t in tensors.items()}, self._folder / self._file)
        try:
            self._ask("/load", _json({"file": self._file}))
        finally:
            (self._folder / self._file).unlink(missing_ok=True)

    def _load_by_handle(self, tensors: dict[str, torch.Tensor]) -> None:
        torch.cuda.synchronize(_device(tensors))  # the other process reads on a stream of its own
        self._ask("/load", _json({"tensors": [self._exported(n, t) for n, t in tensors.items()]}))

    def _exported(self, name: str, tensor: torch.Tensor) -> dict[str, Any]:
        """Its handle, made once for weights that stay where they are: each time that torch is asked to share
        a storage it wraps it once more, and keeps what was wrapped.
        """
        storage = StorageWeakRef(tensor.untyped_storage())  # tells a new storage at an old address apart
        place = storage.cdata, tensor.storage_offset(), tuple(tensor.shape), tensor.stride()
        held = self._handles.get(name)
        if held is None or held.place != place or held.storage.expired():
            held = _Handle(place, storage, wire.export_tensor(name, tensor))
            self._handles[name] = held
        return held.exported

    def _load_by_broadcast(self, tensors: dict[str, torch.Tensor]) -> None:
        """The server is asked in a thread, for both sides work at the same time."""
        if self._pair is None:
            self._meeting = f"meeting-{self._rank}-{next(self._meetings)}"
        call = {"group": self._meeting, "bucket": BUCKET, "tensors": describe(tensors)}
        with ThreadPoolExecutor(1) as thread:
            asked = thread.submit(self._ask, "/load", _json({"broadcast": call}))

            def check() -> None:
                if asked.done():
                    asked.result()  # raises what went wrong there

            try:
                if self._pair is None:
                    self._pair = Pair(self._folder / self._meeting, 0, _device(tensors), check)
                self._pair.send(tensors, BUCKET, check)
                asked.result()
            except BaseException:
                pair, self._pair = self._pair, None  # what is left of it is of no use
                if pair is not None:
                    pair.leave()
                check()  # the server's own words, where it has some
                raise

    def _elsewhere(self, trainer: torch.device) -> bool:
        """Whether the server has a device that is not the trainer's; a thread's current one says nothing."""
        devices = self._section.devices
        return self._rank < len(devices) and devices[self._rank] != trainer.index

    def sleep(self) -> None:
        """Tell the engine to give memory back."""
        self._ask("/sleep", b"{}")

    def close(self) -> None:
        """End a server that this object started; one that ran already goes on."""
        atexit.unregister(self.close)
        process, self._process = self._process, None
        if process is not None:
            with contextlib.suppress(OSError, TrainingError):
                self._ask("/close", b"{}")
            _end(process)
        if self._made_folder:
            shutil.rmtree(self._folder, ignore_errors=True)

    # -- the process ---------------------------------------------------------------------------

    def _start(self, options: EngineOptions, rank: int) -> None:
        command = [sys.executable, "-m", "autotune.trainer.rollout.server", "--follow-parent"]
        command += server_arguments(options, self._section.address, self._port, self._folder)
        environment = server_environment(self._section, self._token, rank)
        with (self._folder / "stderr").open("wb") as log:
            self._process = subprocess.Popen(
                command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=log, env=environment
            )
        assert self._process.stdout is not None
        told = self._process.stdout.readline()  # after the engine has started, or when it has died
        if not told:
            self._process.wait()
            raise TrainingError(f"the sampling server did not start; its last words:\n{self._last_words()}")
        self._port = int(json.loads(told)["port"])

    def _last_words(self) -> str:
        log = self._folder / "stderr"
        text = log.read_bytes()[-4000:].decode(errors="replace") if log.exists() else ""
        return "\n".join(text.splitlines()[-20:])

    def _ask(self, path: str, body: bytes | None = None) -> bytes:
        """One call.

        Raises:
            torch.OutOfMemoryError: the server ran out of memory, and goes on.
            TrainingError: it is gone, or the call failed there.
        """
        address = f"{self._section.address}:{self._port}"
        connection = http.client.HTTPConnection(self._section.address, self._port)
        try:
            headers = {wire.TOKEN_HEADER: self._token}
            connection.request("GET" if body is None else "POST", path, body, headers)
            answer = connection.getresponse()
            content = answer.read()
        except (OSError, http.client.HTTPException) as error:
            words = f"{error}; its last words:\n{self._last_words()}" if self._process else str(error)
            raise TrainingError(f"the sampling server at {address} does not answer: {words}") from error
        finally:
            connection.close()
        if answer.status == wire.OUT_OF_MEMORY:
            raise torch.OutOfMemoryError(content.decode())
        if answer.status != 200:
            raise TrainingError(f"the sampling server at {address} refused {path}: {content.decode()}")
        return content


def server_arguments(options: EngineOptions, address: str, port: int, folder: Path) -> list[str]:
    """The server's command line; what is None is left to it."""
    given = {
        "model": options.model,
        "dtype": options.dtype,
        "seed": options.seed,
        "max-num-seqs": options.max_num_seqs,
        "max-model-len": options.max_model_len,
        "max-num-batched-tokens": options.max_num_batched_tokens,
        "gpu-memory-utilization": options.gpu_memory_utilization,
        "kv-cache-bytes": options.kv_cache_bytes,
        "sleep": options.sleep,
        "address": address,
        "port": port,
        "folder": folder,
    }
    pairs = [f"--{name}={value}" for name, value in given.items() if value is not None]
    if options.enforce_eager is not None:
        pairs.append("--enforce-eager" if options.enforce_eager else "--no-enforce-eager")
    return pairs


def server_environment(section: ServerSection, token: str, rank: int) -> dict[str, str]:
    """The trainer's environment without its process group, with the token and the server's device."""
    group = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
    environment = {name: value for name, value in os.environ.items() if name not in group}
    environment[TOKEN_VARIABLE] = token
    environment.setdefault("NCCL_NVLS_ENABLE", "0")
    device = section.devices[rank] if rank < len(section.devices) else _own_device()
    if device is not None:
        visible = os.environ.get("CUDA_VISIBLE_DEVICES", "")
        names = visible.split(",") if visible else []
        environment["CUDA_VISIBLE_DEVICES"] = names[device] if device < len(names) else str(device)
    return environment


def _device(tensors: dict[str, torch.Tensor]) -> torch.device:
    return next(iter(tensors.values())).device


def _own_device() -> int | None:
    return torch.cuda.current_device() if torch.cuda.is_available() else None


def _folder(start: bool) -> Path:
    if not start:
        return Path(_given(FOLDER_VARIABLE))
    shared = Path("/dev/shm")
    usable = shared.is_dir() and os.access(shared, os.W_OK)
    return Path(tempfile.mkdtemp(prefix="autotune-", dir=shared if usable else None))  # mode 0700


def _given(variable: str) -> str:
    value = os.environ.get(variable, "")
    if not value:
        raise InputError(
            f"rollout.server.start is false, so {variable} must name what the running server was given;"
            " or let the run start its own: rollout.server.start: true"
        )
    return value


def _end(process: subprocess.Popen[bytes]) -> None:
    if process.stdin is not None:
        process.stdin.close()
    try:
        process.wait(timeout=20)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()
    if process.stdout is not None:
        process.stdout.close()


def _json(data: dict[str, object]) -> bytes:
    return json.dumps(data).encode()
