from __future__ import annotations

import os
import signal
import threading

import pytest

from visualtokens.train.signals import SIGNALS, Stop, Stopped, catch_signals


@pytest.mark.parametrize("number", SIGNALS)
def test_a_signal_becomes_a_request_and_the_next_one_is_the_systems(number: signal.Signals) -> None:
    with catch_signals() as stop:
        assert not stop
        os.kill(os.getpid(), number)
        assert stop
        assert stop.signal == number
        assert {signal.getsignal(each) for each in SIGNALS} == {signal.SIG_DFL}


def test_handlers_come_back_even_after_an_error() -> None:
    before = [signal.getsignal(each) for each in SIGNALS]
    with pytest.raises(RuntimeError, match="inside"), catch_signals():
        raise RuntimeError("inside")
    assert [signal.getsignal(each) for each in SIGNALS] == before


def test_watch_gives_items_until_a_stop_is_asked_for() -> None:
    with catch_signals() as stop:
        items = stop.watch(range(5))
        assert [next(items), next(items)] == [0, 1]
        os.kill(os.getpid(), signal.SIGINT)
        with pytest.raises(Stopped):
            next(items)
    assert list(Stop().watch(range(5))) == [0, 1, 2, 3, 4]


def test_a_stop_during_the_last_item_does_not_undo_it() -> None:
    with catch_signals() as stop:
        for item in stop.watch(range(3)):
            if item == 2:
                os.kill(os.getpid(), signal.SIGINT)
    assert stop.signal == signal.SIGINT


def test_another_thread_may_train_without_touching_signals() -> None:
    outcome: list[object] = []

    def work() -> None:
        with catch_signals() as stop:
            outcome.append(bool(stop))
            outcome.append(signal.getsignal(signal.SIGINT))

    handler = signal.getsignal(signal.SIGINT)
    thread = threading.Thread(target=work)
    thread.start()
    thread.join()
    assert outcome == [False, handler]
