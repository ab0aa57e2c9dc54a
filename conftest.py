"""Test configuration; its folder puts `docs`, `recipes` and `benchmarks` on the import path of the tests."""

import gc
import os
import random
import signal
from collections.abc import Callable, Generator, Sequence
from contextlib import ExitStack, suppress
from pathlib import Path

import numpy as np
import pytest
import torch
from hiding import THEMES, hidden

from robopolicy.cli.main import main

os.environ.setdefault("OMP_NUM_THREADS", "1")  # in processes that tests start
torch.set_num_threads(1)  # test networks are small, and threads of parallel tests block each other
gc.set_threshold(20_000, 20, 50)  # a worker holds a million objects; freezing them saves nothing further
if hasattr(signal, "SIGHUP") and signal.getsignal(signal.SIGHUP) is signal.SIG_IGN:
    # Under nohup, processes that tests start would also ignore SIGHUP; an empty handler is not inherited.
    signal.signal(signal.SIGHUP, lambda *_: None)


# On a CPU-only build, `torch.manual_seed` formats a stack trace for missing GPUs: 0.4 ms per test.
seed_torch = torch.manual_seed if torch.accelerator.current_accelerator() else torch.default_generator.manual_seed
with suppress(ImportError):  # it is not built
    import simulated  # noqa: F401 -- before the first backward pass, after which autograd knows no further device


CONTRIB = Path(__file__).parent / "tests" / "contrib"


def pytest_addoption(parser: pytest.Parser) -> None:
    """Add `--hide-contrib`."""
    words = "test the product as if robopolicy/contrib had no theme; tests/contrib is left out"
    parser.addoption("--hide-contrib", action="store_true", help=words)


def pytest_configure(config: pytest.Config) -> None:
    """Hide contrib before any test file is imported."""
    if config.getoption("--hide-contrib"):
        stack = ExitStack()
        stack.enter_context(hidden(*THEMES))
        config.add_cleanup(stack.close)


def pytest_ignore_collect(collection_path: Path, config: pytest.Config) -> bool | None:
    """Ignore `tests/contrib` if contrib is hidden."""
    return True if config.getoption("--hide-contrib") and collection_path.is_relative_to(CONTRIB) else None


def pytest_collection_modifyitems(items: Sequence[pytest.Item]) -> None:
    """Mark the tests in `tests/contrib`, and among them the rules that themes share with the product."""
    for item in items:
        if item.path.is_relative_to(CONTRIB):
            item.add_marker("contrib")
            if item.path.stem.endswith("_rules"):
                item.add_marker("rules")


MOST = 25.0  # [s] of CPU time for a test: several times the longest, for slow or shared processors
UNLIMITED = {"slow", "gpu", "compiles"}


def cpu_seconds() -> float:
    """CPU time of this process and its finished children; wall time would depend on the machine's load."""
    times = os.times()
    return times.user + times.system + times.children_user + times.children_system


@pytest.hookimpl(wrapper=True)
def pytest_runtest_call(item: pytest.Item) -> Generator[None, object, object]:
    """Fail tests over the CPU time limit; the setup of fixtures is not counted."""
    start = cpu_seconds()
    result = yield
    spent = cpu_seconds() - start
    if spent > MOST and UNLIMITED.isdisjoint(mark.name for mark in item.iter_markers()):
        pytest.fail(f"{spent:.1f} s of CPU time, at most {MOST:g}: mark it slow or make it smaller", pytrace=False)
    return result


@pytest.fixture(autouse=True)
def fresh() -> None:
    """Seed all generators and set one torch thread before every test."""
    torch.set_num_threads(1)
    random.seed(0)
    np.random.seed(0)
    seed_torch(0)


@pytest.fixture
def refused(capsys: pytest.CaptureFixture[str]) -> Callable[..., str]:
    """Run a command that must exit with code 2 and print a single error line, which is returned."""

    def run(*argv: object) -> str:
        capsys.readouterr()  # discard earlier output
        assert main([str(word) for word in argv]) == 2
        printed = capsys.readouterr()
        error = printed.err
        assert printed.out == "" and error.startswith("robopolicy: error: ")
        assert error.endswith("\n") and len(error.splitlines()) == 1, error
        return error.strip()

    return run
