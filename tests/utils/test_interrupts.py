"""Ctrl-C waits for the end of a block that must not stop half-way."""

import signal
import threading

import pytest

from nanovllm.utils.interrupts import deferred_interrupt


def test_an_interrupt_strikes_at_the_end_of_the_block():
    done = []
    with pytest.raises(KeyboardInterrupt), deferred_interrupt():
        signal.raise_signal(signal.SIGINT)
        done.append("the rest of the block")
    assert done == ["the rest of the block"]


def test_the_handler_is_put_back():
    before = signal.getsignal(signal.SIGINT)
    with deferred_interrupt():
        assert signal.getsignal(signal.SIGINT) is not before
    assert signal.getsignal(signal.SIGINT) is before
    with pytest.raises(ZeroDivisionError), deferred_interrupt():
        raise ZeroDivisionError
    assert signal.getsignal(signal.SIGINT) is before


def test_the_handler_of_the_application_gets_the_interrupt():
    came = []
    before = signal.signal(signal.SIGINT, lambda number, frame: came.append(number))
    try:
        with deferred_interrupt():
            signal.raise_signal(signal.SIGINT)
            assert came == []
        assert came == [signal.SIGINT]
    finally:
        signal.signal(signal.SIGINT, before)


def test_blocks_nest():
    done = []
    with pytest.raises(KeyboardInterrupt), deferred_interrupt():
        with deferred_interrupt():
            signal.raise_signal(signal.SIGINT)
        done.append("the outer block")
    assert done == ["the outer block"]


def test_other_threads_are_left_alone():
    handlers = []

    def work() -> None:
        with deferred_interrupt():
            handlers.append(signal.getsignal(signal.SIGINT))

    thread = threading.Thread(target=work)
    thread.start()
    thread.join()
    assert handlers == [signal.getsignal(signal.SIGINT)]
