"""A vLLM engine in a process of its own, on loopback: `python -m autotune.trainer.rollout.server`.

    python -m autotune.trainer.rollout.server --model DIR --dtype bfloat16 --max-num-seqs 256 --port 8400

It answers one call after the other (`wire.py`) and ends when it is told to, when its parent's pipe
closes with `--follow-parent`, or on a signal. The token comes from the environment, AUTOTUNE_SERVER_TOKEN,
so that no other user sees it among the processes; without one the server does not start. The first line
on stdout is JSON with the port that was taken.
"""

from __future__ import annotations

import argparse
import hmac
import json
import os
import shutil
import sys
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import torch

from autotune.trainer.rollout import wire
from autotune.trainer.rollout.broadcast import Pair
from autotune.trainer.rollout.vllm_engine import EngineOptions, VllmEngine

TOKEN_VARIABLE = "AUTOTUNE_SERVER_TOKEN"
LARGEST_BODY = 1 << 30


class Server(ThreadingHTTPServer):
    """Holds the engine; calls take turns."""

    daemon_threads = True

    def __init__(self, address: tuple[str, int], engine: VllmEngine, token: str, folder: Path | None) -> None:
        self.engine = engine
        self.token = token
        self.folder = folder
        self.turn = threading.Lock()
        self.pair: tuple[str, Pair] | None = None
        self.device = torch.device("cuda", 0) if torch.cuda.is_available() else torch.device("cpu")
        super().__init__(address, Handler)

    def answer(self, path: str, body: bytes) -> bytes:
        """What a call answers; a KeyError for a path that does not exist."""
        with self.turn:
            return {
                "/generate": self._generate,
                "/load": self._load,
                "/sleep": self._sleep,
                "/close": self._close,
                "/health": self._health,
            }[path](body)

    def _generate(self, body: bytes) -> bytes:
        return wire.encode_generated(self.engine.generate(*wire.decode_call(body)))

    def _load(self, body: bytes) -> bytes:
        from safetensors.torch import load_file

        data = json.loads(body)
        if "broadcast" in data:
            self._receive(**data["broadcast"])
        elif "tensors" in data:
            self.engine.load(wire.import_tensors(data["tensors"]))
            torch.cuda.synchronize()  # the copies are done before the owner may change what was copied
        else:
            self.engine.load(load_file(self._inside(data["file"])).items())
        return b"{}"

    def _receive(self, group: str, bucket: int, tensors: list[Any]) -> None:
        """Weights that the trainer broadcasts while this call is under way."""
        metas = [(name, dtype, tuple(shape)) for name, dtype, shape in tensors]
        meeting = self._inside(group)
        try:
            if self.pair is None or self.pair[0] != group:
                self._leave()
                self.pair = group, Pair(meeting, 1, self.device)
            self.engine.load(self.pair[1].receive(metas, bucket))
            if torch.cuda.is_available():
                torch.cuda.synchronize()
        except BaseException:
            self._leave()
            raise

    def _leave(self) -> None:
        pair, self.pair = self.pair, None
        if pair is not None:
            pair[1].leave()

    def _inside(self, name: str) -> Path:
        """The file of that name in the server's own folder."""
        if self.folder is None or Path(name).name != name:
            raise ValueError(f"received file {name!r}; expected the name of a file in --folder")
        return self.folder / name

    def _sleep(self, body: bytes) -> bytes:
        self.engine.sleep()
        return b"{}"

    def _health(self, body: bytes) -> bytes:
        return json.dumps({"max_model_len": self.engine.max_model_len}).encode()

    def _close(self, body: bytes) -> bytes:
        threading.Thread(target=self.shutdown).start()
        return b"{}"


class Handler(BaseHTTPRequestHandler):
    """HTTP around `Server.answer`."""

    server: Server
    protocol_version = "HTTP/1.1"

    def do_GET(self) -> None:
        self._handle(b"")

    def do_POST(self) -> None:
        length = int(self.headers.get("Content-Length") or 0)
        if length > LARGEST_BODY:
            return self._send(413, b"the body is too large")
        self._handle(self.rfile.read(length))

    def _handle(self, body: bytes) -> None:
        if not hmac.compare_digest(self.headers.get(wire.TOKEN_HEADER, ""), self.server.token):
            return self._send(403, b"this server belongs to another run: its token is needed")
        try:
            self._send(200, self.server.answer(self.path, body))
        except torch.OutOfMemoryError as error:
            self._send(wire.OUT_OF_MEMORY, str(error).encode())
        except KeyError as error:
            self._send(404, f"there is no {error}".encode())
        except Exception as error:  # whatever went wrong is the trainer's to know
            self._send(500, f"{type(error).__name__}: {error}".encode())

    def _send(self, status: int, body: bytes) -> None:
        self.send_response(status)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, format: str, *args: Any) -> None:
        """Calls are the trainer's to log."""


def serve(arguments: argparse.Namespace, token: str) -> None:
    """Start the engine, say where it listens, and answer until told to end."""
    options = EngineOptions(
        model=arguments.model,
        dtype=arguments.dtype,
        seed=arguments.seed,
        max_num_seqs=arguments.max_num_seqs,
        max_model_len=arguments.max_model_len,
        max_num_batched_tokens=arguments.max_num_batched_tokens,
        gpu_memory_utilization=arguments.gpu_memory_utilization,
        kv_cache_bytes=arguments.kv_cache_bytes,
        enforce_eager=arguments.enforce_eager,
        sleep=arguments.sleep,
    )
    stdout, sys.stdout = sys.stdout, sys.stderr  # vLLM may print; our one line stays alone
    engine = VllmEngine(options)
    try:
        server = Server((arguments.address, arguments.port), engine, token, arguments.folder)
        if arguments.follow_parent:
            threading.Thread(target=_end_with_parent, args=(server,), daemon=True).start()
        print(json.dumps({"port": server.server_address[1]}), file=stdout, flush=True)
        server.serve_forever(poll_interval=0.1)
    finally:
        engine.close()
        if arguments.follow_parent and arguments.folder is not None:
            shutil.rmtree(arguments.folder, ignore_errors=True)  # a parent that was killed could not


def _end_with_parent(server: Server) -> None:
    """The parent holds the other end of stdin: it closes when the parent ends, however that happens."""
    sys.stdin.buffer.read()
    server.shutdown()


def parse(arguments: list[str] | None = None) -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(prog="python -m autotune.trainer.rollout.server", description=__doc__)
    parser.add_argument("--model", required=True)
    parser.add_argument("--dtype", choices=("float32", "bfloat16"), required=True)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--max-num-seqs", type=int, required=True)
    parser.add_argument("--max-model-len", type=int)
    parser.add_argument("--max-num-batched-tokens", type=int)
    parser.add_argument("--gpu-memory-utilization", type=float, default=0.3)
    parser.add_argument("--kv-cache-bytes", type=int)
    parser.add_argument("--enforce-eager", action=argparse.BooleanOptionalAction)
    parser.add_argument("--sleep", type=int, choices=(0, 1, 2), default=0)
    parser.add_argument("--address", default="127.0.0.1")
    parser.add_argument("--port", type=int, default=0)
    parser.add_argument("--folder", type=Path, help="where weight files are handed over")
    parser.add_argument("--follow-parent", action="store_true", help="end when stdin closes")
    return parser.parse_args(arguments)


def main() -> int:
    """Exit codes as everywhere: 0 ended when told to, 2 bad input."""
    arguments, token = parse(), os.environ.get(TOKEN_VARIABLE, "")
    if len(token) < 16:
        print(f"{TOKEN_VARIABLE} must hold a secret of at least 16 characters", file=sys.stderr)
        return 2
    serve(arguments, token)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
