"""Tests of calls on a second thread."""

import threading
import time

import pytest

from robopolicy.worker_thread import CallTimeout, WorkerThread


def names() -> list[str]:
    """Names of the running threads."""
    return [thread.name for thread in threading.enumerate()]


def test_results_have_the_order_of_the_calls_and_exceptions_are_raised() -> None:
    worker = WorkerThread("calls")
    for number in (1, 0, 2):
        worker.send(lambda number=number: 4 // number)
    assert worker.receive() == 4
    with pytest.raises(ZeroDivisionError):
        worker.receive()
    assert worker.receive() == 2


def test_a_timeout_that_a_call_raises_is_not_a_hanging_call() -> None:
    def raise_timeout() -> None:
        raise TimeoutError("the service is slow")

    worker = WorkerThread("calls")
    worker.send(raise_timeout)
    with pytest.raises(TimeoutError, match="the service is slow") as found:
        worker.receive(10)
    assert not isinstance(found.value, CallTimeout)


def test_a_hanging_call_is_reported_and_later_calls_are_dropped() -> None:
    release, called = threading.Event(), list[int]()
    worker = WorkerThread("hanging")
    worker.send(release.wait)
    worker.send(lambda: called.append(1))
    with pytest.raises(CallTimeout, match=r"no answer within 0\.01 s"):
        worker.receive(0.01)
    worker.close()
    release.set()
    wait_for_the_end("hanging")
    assert not called


def test_a_thread_ends_with_its_owner() -> None:
    worker = WorkerThread("owned")
    worker.send(int)
    assert worker.receive() == 0 and "owned" in names()
    del worker
    wait_for_the_end("owned")


def wait_for_the_end(name: str) -> None:
    """Wait until no thread has the name."""
    deadline = time.monotonic() + 10
    while name in names():
        assert time.monotonic() < deadline
        time.sleep(0.01)
