"""The sampling server without vLLM: who may talk to it, what it answers, and how it is started."""

from __future__ import annotations

import http.client
import json
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from autotune.errors import InputError, TrainingError
from autotune.recipe.schema import ServerSection
from autotune.trainer.rollout import wire
from autotune.trainer.rollout.client import (
    FOLDER_VARIABLE,
    TOKEN_VARIABLE,
    ServerEngine,
    server_arguments,
    server_environment,
)
from autotune.trainer.rollout.server import Server, parse
from autotune.trainer.rollout.vllm_engine import EngineOptions, Generated, Request, Sampling
from tests.trainer.served import OPTIONS, TOKEN, connected, serving

SAMPLING = Sampling(0.7, 4, (1,))


class Echo:
    """An engine whose responses repeat the prompt's first token, as often as the response's index."""

    max_model_len = 32

    def __init__(self) -> None:
        self.weights: dict[str, torch.Tensor] = {}
        self.slept = 0
        self.fail: Exception | None = None

    def generate(self, requests: Sequence[Request], sampling: Sampling) -> Generated:
        if self.fail is not None:
            raise self.fail
        assert sampling == SAMPLING
        rows = [[r.prompt[0]] * (i + 1) for r in requests for i in range(r.count)]
        lengths = torch.tensor([len(row) for row in rows])
        ids = torch.tensor([row + [0] * (int(lengths.max()) - len(row)) for row in rows])
        return Generated(ids, lengths, ids.float() / 8)

    def load(self, weights: Any) -> None:
        self.weights = dict(weights)

    def sleep(self) -> None:
        self.slept += 1


@pytest.fixture
def echo() -> Echo:
    return Echo()


@pytest.fixture
def server(echo: Echo, tmp_path: Path) -> Iterator[Server]:
    with serving(echo, tmp_path) as server:
        yield server


@pytest.fixture
def client(server: Server, tmp_path: Path) -> Iterator[ServerEngine]:
    with connected(server, tmp_path) as engine:
        yield engine


def call(server: Server, path: str, token: str | None, body: bytes = b"{}") -> tuple[int, bytes]:
    connection = http.client.HTTPConnection("127.0.0.1", server.server_address[1], timeout=10)
    connection.request("POST", path, body, {} if token is None else {wire.TOKEN_HEADER: token})
    answer = connection.getresponse()
    found = answer.status, answer.read()
    connection.close()
    return found


def test_responses_arrive_as_they_were_made(client: ServerEngine) -> None:
    made = client.generate([Request([5, 6], 2, 11), Request([7], 1, None)], SAMPLING)
    assert made.ids.tolist() == [[5, 0], [5, 5], [7, 0]]
    assert made.lengths.tolist() == [1, 2, 1]
    assert made.log_probs is not None and torch.equal(made.log_probs, made.ids.float() / 8)


def test_weights_arrive_bit_for_bit_and_their_file_is_gone(
    client: ServerEngine, echo: Echo, tmp_path: Path
) -> None:
    weights = {"a.weight": torch.randn(3, 4), "b": torch.randn(2).to(torch.bfloat16)}
    client.load(weights.items())
    assert echo.weights.keys() == weights.keys()
    assert all(torch.equal(echo.weights[name], tensor) for name, tensor in weights.items())
    assert list(tmp_path.iterdir()) == []


def test_sleep_is_passed_on(client: ServerEngine, echo: Echo) -> None:
    client.sleep()
    assert echo.slept == 1


def test_a_full_device_there_is_a_full_device_here(client: ServerEngine, echo: Echo) -> None:
    echo.fail = torch.OutOfMemoryError("no room for 8")
    with pytest.raises(torch.OutOfMemoryError, match="no room for 8"):
        client.generate([Request([5], 1, None)], SAMPLING)


def test_another_error_there_is_told_in_its_words(client: ServerEngine, echo: Echo) -> None:
    echo.fail = ValueError("what a prompt")
    with pytest.raises(TrainingError, match="what a prompt"):
        client.generate([Request([5], 1, None)], SAMPLING)


@pytest.mark.parametrize("token", [None, "", "wrong", TOKEN + "0"])
def test_nobody_else_is_served(server: Server, echo: Echo, token: str | None) -> None:
    for path in ("/generate", "/load", "/sleep", "/close", "/health"):
        assert call(server, path, token)[0] == 403
    assert echo.slept == 0 and echo.weights == {}


@pytest.mark.parametrize("name", ["../secret.safetensors", "/etc/passwd", "a/b"])
def test_files_outside_of_the_folder_are_not_read(
    server: Server, echo: Echo, tmp_path: Path, name: str
) -> None:
    save_file({"x": torch.ones(1)}, tmp_path.parent / "secret.safetensors")
    status, words = call(server, "/load", TOKEN, json.dumps({"file": name}).encode())
    assert status == 500 and b"expected the name of a file" in words
    assert echo.weights == {}


def test_an_unknown_path_is_404(server: Server) -> None:
    assert call(server, "/eval", TOKEN)[0] == 404


def test_a_server_that_is_not_there_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(TOKEN_VARIABLE, TOKEN)
    monkeypatch.setenv(FOLDER_VARIABLE, str(tmp_path))
    with pytest.raises(TrainingError, match=r"127\.0\.0\.1:9 does not answer"):
        ServerEngine(OPTIONS, ServerSection(start=False, port=9), rank=0)


def test_a_running_server_needs_its_token(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(TOKEN_VARIABLE, raising=False)
    monkeypatch.setenv(FOLDER_VARIABLE, "/nowhere")
    with pytest.raises(InputError, match=TOKEN_VARIABLE):
        ServerEngine(OPTIONS, ServerSection(start=False, port=9), rank=0)


def test_the_command_line_carries_all_options(tmp_path: Path) -> None:
    options = EngineOptions("m", "bfloat16", 3, 8, 64, 512, 0.4, 1024, False, 2)
    parsed = parse(server_arguments(options, "127.0.0.1", 8400, tmp_path))
    for name in ("model", "dtype", "seed", "max_num_seqs", "max_model_len", "max_num_batched_tokens"):
        assert getattr(parsed, name) == getattr(options, name)
    for name in ("gpu_memory_utilization", "kv_cache_bytes", "enforce_eager", "sleep"):
        assert getattr(parsed, name) == getattr(options, name)
    assert (parsed.address, parsed.port, parsed.folder) == ("127.0.0.1", 8400, tmp_path)
    assert parse(server_arguments(OPTIONS, "127.0.0.1", 0, tmp_path)).enforce_eager is None


def test_a_server_has_no_process_group_and_its_own_device(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RANK", "1")
    monkeypatch.setenv("WORLD_SIZE", "2")
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "4,5,6")
    environment = server_environment(ServerSection(devices=(0, 2)), TOKEN, rank=1)
    assert environment["CUDA_VISIBLE_DEVICES"] == "6"
    assert environment[TOKEN_VARIABLE] == TOKEN
    assert not {"RANK", "WORLD_SIZE"} & environment.keys()


def test_a_handle_is_made_once_for_weights_that_stay(
    client: ServerEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Sharing a storage again wraps it again; a new storage needs a handle of its own, wherever it lies."""
    made: list[str] = []

    def export(name: str, tensor: torch.Tensor) -> dict[str, Any]:
        made.append(name)
        return {"name": name, "at": len(made)}

    monkeypatch.setattr(wire, "export_tensor", export)
    parameter = torch.nn.Parameter(torch.ones(4))
    first = client._exported("w", parameter.detach())
    parameter.data.add_(1)  # an update, in place
    assert client._exported("w", parameter.detach()) is first and made == ["w"]
    for count in range(2, 6):  # adapters are folded into a new tensor every time, likely at the same address
        assert client._exported("w", parameter.detach() + 1)["at"] == count
    assert client._exported("v", parameter.detach()[1:])["name"] == "v"
