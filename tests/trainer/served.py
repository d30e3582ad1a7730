"""A sampling server in this process: for tests of either side, without vLLM."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch

from autotune.recipe.schema import ServerSection
from autotune.trainer.rollout.client import FOLDER_VARIABLE, TOKEN_VARIABLE, ServerEngine
from autotune.trainer.rollout.server import Server
from autotune.trainer.rollout.vllm_engine import EngineOptions, Generated, Request, Sampling

TOKEN = "0123456789abcdef"
OPTIONS = EngineOptions(model="m", dtype="float32", seed=1, max_num_seqs=8)


@contextmanager
def serving(engine: Any, folder: Path) -> Iterator[Server]:
    """Answer calls for an engine on a free port of loopback."""
    server = Server(("127.0.0.1", 0), engine, TOKEN, folder)
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
    thread.start()
    try:
        yield server
    finally:
        server.shutdown()
        thread.join()
        server.server_close()


@contextmanager
def connected(server: Server, folder: Path, **section: Any) -> Iterator[ServerEngine]:
    """The trainer's side of a server that runs already; `section` are fields of `rollout.server`."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv(TOKEN_VARIABLE, TOKEN)
        patch.setenv(FOLDER_VARIABLE, str(folder))
        given = ServerSection(start=False, port=server.server_address[1], **section)
        engine = ServerEngine(OPTIONS, given, rank=0)
        yield engine
        engine.close()


class Engine:
    """A server in this process: a copy of the model that samples by the seeds of the requests."""

    def __init__(self, model: Any) -> None:
        self.model = model
        self.version = 0.0
        self.calls: list[tuple[bool, float]] = []
        """Whether the call came from the thread, and a mark of the weights that it used."""
        self.before: Callable[[bool], None] = lambda ahead: None
        self.closed = False

    def load(self, weights: Any) -> None:
        tensors = dict(weights)
        self.model.load_state_dict(tensors, strict=False)
        self.version = mark(tensors)

    def generate(self, requests: Sequence[Request], sampling: Sampling) -> Generated:
        ahead = threading.current_thread() is not threading.main_thread()
        self.before(ahead)
        self.calls.append((ahead, self.version))
        rows = [self._one(r.prompt, (r.seed or 0) + i, sampling) for r in requests for i in range(r.count)]
        width = max(len(ids) for ids, _ in rows)
        return Generated(
            torch.tensor([ids + [0] * (width - len(ids)) for ids, _ in rows]),
            torch.tensor([len(ids) for ids, _ in rows]),
            torch.tensor([told + [0.0] * (width - len(told)) for _, told in rows]),
        )

    @torch.no_grad()
    def _one(self, prompt: list[int], seed: int, sampling: Sampling) -> tuple[list[int], list[float]]:
        noise, ids, told = torch.Generator().manual_seed(seed % 2**63), [], []
        while len(ids) < sampling.max_tokens and (not ids or ids[-1] not in sampling.end_ids):
            logits = self.model(torch.tensor([prompt + ids])).logits[0, -1]
            shares = torch.log_softmax(logits.float() / max(sampling.temperature, 1e-4), 0)
            word = int(torch.multinomial(shares.exp(), 1, generator=noise))
            ids.append(word)
            told.append(float(shares[word]))
        return ids, told

    def sleep(self) -> None:
        """Nothing to give back."""

    def close(self) -> None:
        self.closed = True


def mark(tensors: dict[str, torch.Tensor]) -> float:
    return float(sum(t.double().abs().sum() for n, t in sorted(tensors.items()) if "norm" not in n))
