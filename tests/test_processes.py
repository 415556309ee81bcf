import contextlib
import threading
import time

import pytest

from visualtokens.processes import time_limit


def busy(seconds):
    """Compute in Python, hiding errors as careless libraries do."""
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        with contextlib.suppress(Exception):
            sum(range(100))


def test_a_block_that_takes_too_long_is_interrupted():
    with pytest.raises(TimeoutError, match=r"not finished after 0\.05 seconds"), time_limit(0.05):
        busy(60)


def test_a_block_in_time_is_not_interrupted_afterwards():
    with time_limit(0.05):
        result = 1
    busy(0.2)
    assert result == 1


def test_other_errors_pass_and_end_the_limit():
    with pytest.raises(ValueError, match="own"), time_limit(0.05):
        raise ValueError("own")
    busy(0.2)


def test_only_its_own_thread_is_interrupted():
    found = []

    def limited():
        try:
            with time_limit(0.05):
                busy(60)
        except TimeoutError:
            found.append("late")

    thread = threading.Thread(target=limited)
    thread.start()
    busy(0.3)
    thread.join()
    assert found == ["late"]
