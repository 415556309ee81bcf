from __future__ import annotations

import os
import signal
import threading

import pytest

from visualtokens.train.distributed import SIGNALS, Stop, catch_signals


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


def test_processes_agree_to_stop_if_one_was_asked_to() -> None:
    asked, other = Stop(), Stop()
    asked.signal = signal.SIGTERM
    told = [stop.signal or 0 for stop in (asked, other)]
    assert asked.agree(told)
    assert other.agree(told)
    assert other.signal == signal.SIGTERM
    assert not Stop().agree([0, 0])


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
