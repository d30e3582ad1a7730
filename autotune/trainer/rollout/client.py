"""The trainer's side of a sampling server: starting it, handing weights over, asking for responses.

Weights travel within the machine. On GPUs the server is told where the trainer's tensors lie and reads
them there (`transfer: ipc`); elsewhere they are written once, as safetensors, into shared memory
(`/dev/shm`) and read from there (`transfer: file`). A server that runs already needs the same folder,
given to both sides by AUTOTUNE_SERVER_FOLDER.
"""

from __future__ import annotations

import atexit
import contextlib
import http.client
import json
import logging
import os
import secrets
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

import torch

from autotune.errors import InputError, TrainingError
from autotune.recipe.schema import ServerSection
from autotune.trainer.rollout import wire
from autotune.trainer.rollout.vllm_engine import EngineOptions, Generated, Request, Sampling, Weights

TOKEN_VARIABLE = "AUTOTUNE_SERVER_TOKEN"
FOLDER_VARIABLE = "AUTOTUNE_SERVER_FOLDER"

_LOG = logging.getLogger(__name__)


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
        self._handles_work = True
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
        if self._by_handle(tensors) and self._load_by_handle(tensors):
            return
        from safetensors.torch import save_file

        save_file({n: t.cpu().contiguous() for n, t in tensors.items()}, self._folder / self._file)
        try:
            self._ask("/load", _json({"file": self._file}))
        finally:
            (self._folder / self._file).unlink(missing_ok=True)

    def _load_by_handle(self, tensors: dict[str, torch.Tensor]) -> bool:
        """Whether it went well; where the recipe leaves the way open, a file takes over for good."""
        torch.cuda.synchronize()  # the other process reads on a stream of its own
        try:
            self._ask("/load", _json({"tensors": [wire.export_tensor(n, t) for n, t in tensors.items()]}))
        except (TrainingError, RuntimeError) as error:
            if self._section.transfer == "ipc" or isinstance(error, torch.OutOfMemoryError):
                raise
            _LOG.warning("CUDA handles do not work here (%s): weights go through a file", error)
            self._handles_work = False
        return self._handles_work

    def _by_handle(self, tensors: dict[str, torch.Tensor]) -> bool:
        on_gpu = all(tensor.is_cuda for tensor in tensors.values())
        if self._section.transfer == "ipc" and not on_gpu:
            raise InputError("rollout.server.transfer: ipc needs weights on a GPU; use auto or file")
        possible = on_gpu and self._handles_work and not self._section.devices
        return possible and self._section.transfer != "file"

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
    device = section.devices[rank] if rank < len(section.devices) else _own_device()
    if device is not None:
        visible = os.environ.get("CUDA_VISIBLE_DEVICES", "")
        names = visible.split(",") if visible else []
        environment["CUDA_VISIBLE_DEVICES"] = names[device] if device < len(names) else str(device)
    return environment


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
