"""Simulated accelerator for tests: `torch.device("simulated")` computes on the CPU under the rules of CUDA.

    from simulated import DEVICE, record
    with record() as found:
        step()
    assert found.launches <= 40 and found.waits <= 1, found.places()

It refuses operators on tensors of two devices, generators of the other device and `numpy()`, fills fresh memory with
NaN, and counts kernel launches and waits for the device with the lines that cause them. `build.py` compiles it, and
`conftest.py` loads it before the first backward pass, after which autograd knows no further device; tests import it by
`pytest.importorskip("simulated", exc_type=ImportError)`.
"""

from __future__ import annotations

import contextlib
import importlib.util
import sys
import types
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from . import build

NAME = "simulated"
ROOT = Path(__file__).resolve().parents[3]


def _load() -> Any:
    library = build.library()
    if not library.is_file():
        raise ImportError("the simulated device is not built; run: python tests/helpers/simulated/build.py")
    spec = importlib.util.spec_from_file_location(build.EXTENSION, library)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


class _Module(types.ModuleType):
    """`torch.simulated`, as `torch.cuda` is for CUDA."""

    class device:
        """Context of the only device."""

        def __init__(self, device: object) -> None:
            pass

        def __enter__(self) -> None:
            pass

        def __exit__(self, *_: object) -> None:
            pass

    def __init__(self, native: Any) -> None:
        super().__init__(f"torch.{NAME}")
        self._generator = native.default_generator()

    def is_available(self) -> bool:
        return True

    def is_initialized(self) -> bool:
        return True

    def _is_in_bad_fork(self) -> bool:
        return False

    def _lazy_init(self) -> None:
        pass

    def device_count(self) -> int:
        return 1

    def current_device(self) -> int:
        return 0

    def set_device(self, device: object) -> None:
        pass

    def synchronize(self, device: object = None) -> None:
        _event("sync", "synchronize", 0)

    def current_stream(self, device: object = None) -> None:
        return None

    def manual_seed(self, seed: int) -> None:
        self._generator.manual_seed(seed)

    manual_seed_all = manual_seed

    def get_rng_state(self, device: object = None) -> torch.Tensor:
        return self._generator.get_state()

    def set_rng_state(self, state: torch.Tensor, device: object = None) -> None:
        self._generator.set_state(state)

    def get_amp_supported_dtype(self) -> list[torch.dtype]:
        return [torch.bfloat16, torch.float16]


@dataclass(eq=False)  # records of nested blocks may count the same
class Record:
    """Launches, waits and memory of a block of code."""

    launches: int = 0
    operators: Counter[str] = field(default_factory=Counter)  # launches by operator
    events: Counter[tuple[str, str, str]] = field(default_factory=Counter)  # waits: (kind, operator, place)
    peak_bytes: int = 0  # beyond what was allocated before

    @property
    def waits(self) -> int:
        """Number of times the host waited for the device."""
        return sum(self.events.values())

    def places(self, count: int = 12) -> str:
        """The most frequent waits and launches, for messages."""
        waits = [f"{n:6} {kind:5} {op} at {place}" for (kind, op, place), n in self.events.most_common(count)]
        return "\n".join(
            [f"{self.launches} launches, {self.waits} waits", *waits, str(self.operators.most_common(count))]
        )


_active: list[Record] = []


def _event(kind: str, op: str, size: int) -> None:
    if _active:
        place = _place()
        for found in _active:
            found.events[kind, op, place] += 1


def _place() -> str:
    """Innermost line of the project, outside of the tests."""
    frame = sys._getframe(2) if sys._getframe(1).f_back else None
    while frame is not None:
        path = Path(frame.f_code.co_filename)
        if path.is_relative_to(ROOT) and path.relative_to(ROOT).parts[0] in ("robopolicy", "tasks", "real_robot"):
            return f"{path.relative_to(ROOT)}:{frame.f_lineno}"
        frame = frame.f_back
    return "backward or torch"


@contextlib.contextmanager
def record() -> Iterator[Record]:
    """Count launches and waits of a block."""
    found = Record()
    launches, operators = _native.launches(), Counter(_native.operators())
    allocated, _ = _native.memory()
    _native.reset_peak()
    _active.append(found)
    try:
        yield found
    finally:
        _active.remove(found)
        found.launches = _native.launches() - launches
        found.operators = Counter(_native.operators()) - operators
        found.peak_bytes = _native.memory()[1] - allocated


def share(tensor: torch.Tensor) -> torch.Tensor:
    """View of a CPU tensor as one of the device, for libraries whose kernels run on the CPU here."""
    return _native.share(tensor)


torch.utils.rename_privateuse1_backend(NAME)
_native = _load()
torch._register_device_module(NAME, _Module(_native))
torch.utils.generate_methods_for_privateuse1_backend()
_native.configure(*build.operators())
_native.set_callback(_event)
DEVICE = torch.device(NAME, 0)
