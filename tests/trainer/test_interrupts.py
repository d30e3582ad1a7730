"""Ctrl-C inside a held block arrives right after it."""

from __future__ import annotations

import signal
import threading

import pytest

from autotune.trainer.interrupts import held_interrupts


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
