"""Recording of a function of tensors as one CUDA graph, and reading of numbers without a wait."""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from robopolicy.sim.backends.warp_physics import import_packages, on_torch_stream

Run = Callable[[], None]


class RecordedFunction:
    """A function of tensors that is recorded once and replayed with new inputs; its outputs are fresh tensors.

    `record(run)` runs `run` on fixed memory and returns a function that repeats it, as `cuda_graph` does.
    """

    def __init__(
        self,
        function: Callable[[dict[str, Tensor]], dict[str, Tensor]],
        inputs: Mapping[str, Tensor],
        record: Callable[[Run], Run],
    ) -> None:
        self._inputs = {key: value.clone() for key, value in inputs.items()}
        self._shapes: dict[str, tuple[torch.dtype, torch.Size]] = {}
        self._outputs: dict[torch.dtype, Tensor] = {}  # all outputs of one type, flat

        def run() -> None:
            results = function(self._inputs)
            self._shapes = {key: (value.dtype, value.shape) for key, value in results.items()}
            for dtype in {value.dtype for value in results.values()}:
                flat = torch.cat([value.flatten() for value in results.values() if value.dtype == dtype])
                if dtype in self._outputs:
                    self._outputs[dtype].copy_(flat)
                else:
                    self._outputs[dtype] = flat

        run()  # allocates the outputs, compiles kernels and uploads constants
        self._replay = record(run)

    def __call__(self, inputs: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Copy `inputs`, replay, and copy the outputs."""
        for key, value in inputs.items():
            self._inputs[key].copy_(value)
        self._replay()
        copies, start = {dtype: flat.clone() for dtype, flat in self._outputs.items()}, dict.fromkeys(self._outputs, 0)
        results = {}
        for key, (dtype, shape) in self._shapes.items():
            stop = start[dtype] + shape.numel()
            results[key] = copies[dtype][start[dtype] : stop].view(shape)
            start[dtype] = stop
        return results


def cuda_graph(device: torch.device, run: Run) -> Run:
    """Capture the launches of torch and Warp in `run` as one graph of `device`."""
    wp, _ = import_packages()
    stream = torch.cuda.Stream(device)
    stream.wait_stream(torch.cuda.current_stream(device))
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.stream(stream), on_torch_stream(device):
        run()  # the first run on this stream may allocate
        stream.synchronize()
        with (
            _no_garbage_collection(),
            torch.cuda.graph(graph, stream=stream, capture_error_mode="thread_local"),  # others may use the device
            wp.ScopedCapture(stream=wp.get_stream(str(device)), external=True) as capture,  # so that Warp knows of it
        ):
            run()
    torch.cuda.current_stream(device).wait_stream(stream)

    def replay(kept: object = capture) -> None:
        graph.replay()

    return replay


@contextmanager
def _no_garbage_collection() -> Iterator[None]:
    """Keep the collector from freeing older graphs, whose destructors would be recorded in the new one."""
    enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if enabled:
            gc.enable()


class DelayedRead:
    """Copies small tensors to the host, where a GPU's arrive one call later, so that nothing waits for them."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._pending: tuple[Tensor, torch.cuda.Event] | None = None

    @property
    def delay(self) -> int:
        """Number of tensors that were given and not returned."""
        return int(self._pending is not None)

    def __call__(self, values: Tensor) -> NDArray[np.int32] | None:
        """Copy `values` and return them; on a GPU, return the values of the previous call, or None in the first."""
        if self._device.type != "cuda":
            return values.cpu().numpy()
        last = self._pending
        host = torch.empty(values.shape, dtype=values.dtype, pin_memory=True)
        host.copy_(values, non_blocking=True)
        event = torch.cuda.Event()
        event.record(torch.cuda.current_stream(self._device))
        self._pending = host, event
        if last is None:
            return None
        last[1].synchronize()
        return last[0].numpy()

    def clear(self) -> None:
        """Forget what was given."""
        self._pending = None
