"""Ctrl-C inside a held block arrives right after it."""

from __future__ import annotations

import signal
import threading

import pytest

from autotune.trainer import interrupts
from autotune.trainer.interrupts import TogetherInterrupts, held_interrupts


def test_the_block_is_finished_first() -> None:
    done = []
    with pytest.raises(KeyboardInterrupt), held_interrupts():
        signal.raise_signal(signal.SIGINT)
        done.append("after the signal")
    assert done == ["after the signal"]
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler


def test_an_error_of_the_block_is_not_replaced() -> None:
    with pytest.raises(ZeroDivisionError), held_interrupts():
        signal.raise_signal(signal.SIGINT)
        _ = 1 / 0


def test_other_threads_are_left_alone() -> None:
    seen = []

    def work() -> None:
        with held_interrupts():
            seen.append(signal.getsignal(signal.SIGINT))

    thread = threading.Thread(target=work)
    thread.start()
    thread.join()
    assert seen == [signal.default_int_handler]


# -- several ranks ---------------------------------------------------------------------------------


@pytest.fixture
def others(monkeypatch: pytest.MonkeyPatch) -> list[bool]:
    """What the other rank says when asked; this rank's own word is heard too."""
    said = [False]
    monkeypatch.setattr(interrupts, "any_rank", lambda flag: flag or said[0])
    return said


def test_ranks_stop_where_they_are_asked(others: list[bool]) -> None:
    together = TogetherInterrupts(2)
    with together.held():
        together.obey()
        signal.raise_signal(signal.SIGINT)
        with pytest.raises(KeyboardInterrupt):
            together.obey()
    assert together.in_step, "so the state can be saved by all of them"
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler


def test_a_rank_that_was_not_interrupted_stops_with_the_others(others: list[bool]) -> None:
    together = TogetherInterrupts(2)
    with together.held():
        others[0] = True
        with pytest.raises(KeyboardInterrupt):
            together.obey()
        with pytest.raises(KeyboardInterrupt):  # one more, while saving
            signal.raise_signal(signal.SIGINT)
    assert not together.in_step


def test_a_second_interrupt_waits_for_nobody(others: list[bool]) -> None:
    together = TogetherInterrupts(2)
    with pytest.raises(KeyboardInterrupt), together.held():
        signal.raise_signal(signal.SIGINT)
        signal.raise_signal(signal.SIGINT)
    assert not together.in_step


def test_an_interrupt_held_back_is_remembered_and_not_raised(others: list[bool]) -> None:
    together = TogetherInterrupts(2)
    with together.held():
        with held_interrupts():
            signal.raise_signal(signal.SIGINT)
        with pytest.raises(KeyboardInterrupt):
            together.obey()
    assert together.in_step


def test_one_rank_is_interrupted_at_once() -> None:
    together = TogetherInterrupts(1)
    with pytest.raises(KeyboardInterrupt), together.held():
        together.obey()
        signal.raise_signal(signal.SIGINT)
    assert together.in_step
