"""Signs of life on every kind of storage, with a clock that the test moves."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("optuna")

import optuna

from autotune.errors import EnvironmentProblem, InputError
from autotune.launch import free_port
from autotune.recipe import Recipe
from autotune.recipe.schema import SweepSection
from autotune.sweep import life, storages, studies
from autotune.sweep.storages import open_storage

KINDS = ("sqlite", "journal", "grpc")


@pytest.fixture(params=KINDS)
def storage(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Any]:
    if request.param == "grpc":
        yield from _proxy(tmp_path)
    else:
        prefix = {"sqlite": "sqlite:///", "journal": "journal:"}[request.param]
        yield open_storage(f"{prefix}{tmp_path / 'study'}")


def _proxy(folder: Path) -> Iterator[Any]:
    """Optuna's proxy in a thread, before an SQLite file."""
    pytest.importorskip("grpc")
    from optuna.storages._grpc.server import make_server

    behind = open_storage(f"sqlite:///{folder / 'behind'}")
    port = free_port()
    server = make_server(behind, "127.0.0.1", port)
    server.start()
    proxy = open_storage(f"grpc://127.0.0.1:{port}")
    yield proxy
    proxy.close()
    server.stop(0)


@pytest.fixture
def study(storage: Any, tmp_path: Path) -> Any:
    section = SweepSection.model_validate({"space": {"trainer.kl_coef": {}}, "trials": 3})
    return studies.make(storage, "s", Recipe(name="s", sweep=section), tmp_path)


class Clock:
    now = 0.0

    def __call__(self) -> float:
        return self.now


def states(study: Any) -> list[tuple[int, str, int]]:
    """(slot, state, attempt) of every trial."""
    trials = study.get_trials(deepcopy=False)
    return [(t.user_attrs["slot"], t.state.name, t.user_attrs["attempt"]) for t in trials]


def test_each_trial_is_claimed_once(study: Any) -> None:
    claimed = [life.claim(study) for _ in range(4)]
    assert [t.user_attrs["slot"] if t else None for t in claimed] == [0, 1, 2, None]


def test_a_silent_trial_is_queued_again_once_with_its_values(study: Any) -> None:
    first = life.claim(study)
    value = optuna.trial.Trial(study, first._trial_id).suggest_float("trainer.kl_coef", 1e-5, 2.0, log=True)
    clock = Clock()
    watch = life.Watch(study, grace=10.0, clock=clock)
    assert watch.rescue() == []
    clock.now = 10.0
    assert watch.rescue() == []  # exactly the grace: not yet
    clock.now = 10.1
    assert watch.rescue() == [first.number]
    assert states(study)[-1] == (0, "WAITING", 1)
    assert watch.rescue() == []
    again = next(t for t in iter(lambda: life.claim(study), None) if t.user_attrs["slot"] == 0)
    while life.claim(study):
        pass
    assert again.params == {"trainer.kl_coef": value}
    clock.now = 50.0
    watch.rescue()
    clock.now = 70.0
    watch.rescue()
    assert (0, "WAITING", 2) not in states(study), "a second loss must not be retried"
    assert states(study).count((0, "FAIL", 1)) == 1


def test_a_sign_of_life_keeps_it(study: Any) -> None:
    first, clock = life.claim(study), Clock()
    watch = life.Watch(study, grace=10.0, clock=clock)
    for count in range(5):
        study._storage.set_trial_user_attr(first._trial_id, "beat", count)
        assert watch.rescue() == []
        clock.now += 9.0


def test_two_rescuers_queue_it_once(study: Any) -> None:
    life.claim(study)
    clock = Clock()
    watches = [life.Watch(study, 1.0, clock) for _ in range(2)]
    for watch in watches:
        watch.rescue()
    clock.now = 2.0
    assert sorted(len(watch.rescue()) for watch in watches) == [0, 1]
    assert states(study).count((0, "WAITING", 1)) == 1


def test_a_rescuer_killed_half_way_is_made_good(study: Any) -> None:
    life.fail(study, life.claim(study), life.LOST)  # and then it was killed
    clock = Clock()
    watch = life.Watch(study, 1.0, clock)
    watch.rescue()
    assert (0, "WAITING", 1) not in states(study)
    clock.now = 2.0
    watch.rescue()
    watch.rescue()
    assert states(study).count((0, "WAITING", 1)) == 1


def test_a_frozen_worker_finds_its_trial_taken_away(study: Any) -> None:
    first = life.claim(study)
    lost = threading.Event()
    with life.Beating(study, first, 0.02, life.Watch(study, 100.0)) as beating:
        life.fail(study, first, life.LOST)
        for _ in range(200):
            if beating.lost:
                lost.set()
                break
            lost.wait(0.02)
    assert lost.is_set()


def test_an_interrupted_trial_costs_no_retry(study: Any) -> None:
    life.hand_back(study, life.claim(study))
    assert states(study)[-1] == (0, "WAITING", 0)
    life.hand_back(study, list(iter(lambda: life.claim(study), None))[-1])
    assert [s for s in states(study) if s[1] == "WAITING"] == [(0, "WAITING", 0)]


@pytest.mark.parametrize(
    ("url", "words"),
    [
        ("mongodb://me:secret@x/y", "expected sqlite"),
        ("postgresql://me:secret@127.0.0.1:1/x", "does not answer"),
        ("grpc://nowhere", "expected grpc://HOST:PORT"),
    ],
)
def test_a_storage_that_cannot_be_had_says_so_without_the_password(url: str, words: str) -> None:
    with pytest.raises(InputError, match=words) as refused:
        open_storage(url)
    assert "secret" not in str(refused.value)


def test_a_missing_driver_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(storages.importlib.util, "find_spec", lambda name: None)
    with pytest.raises(EnvironmentProblem, match=r"autotune-rl\[sweep\]"):
        open_storage("postgresql://db/x")
