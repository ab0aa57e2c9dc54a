"""Steps that compare the GPU with the CPU: packages and kernels, parity of physics and updates, and counted waits."""

from __future__ import annotations

import copy
import subprocess
import sys
import time
import tomllib
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
from torch.profiler import ProfilerActivity, profile

from benchmarks.common import Row
from benchmarks.gpu.records import Options, one_line
from docs.compatibility import allowed, opened, workplace
from robopolicy.algorithms.registry import ALGORITHMS
from robopolicy.cli import doctor
from robopolicy.device import move, usable_device
from robopolicy.errors import UserError
from robopolicy.sim.contract import VectorSim
from robopolicy.sim.registry import SimOptions, make_sim

ROOT = Path(__file__).parents[2]
BUDGETS = ROOT / "tests" / "device" / "budgets.toml"
WARP_TASKS = ("half_cheetah", "lift", "velocity/go1")
PAIRS = {"ppo": "gaussian", "sac": "squashed_gaussian", "reinflow": "flow", "bc": "flow"}
RANDOM = {"rand", "randn", "randint", "randperm"}
WAITS = {"cudaStreamSynchronize", "cudaEventSynchronize", "cudaMemcpy"}  # a blocking copy of torch ends with the first
LAUNCHES = {"cudaLaunchKernel", "cudaLaunchKernelExC", "cuLaunchKernel", "cuLaunchKernelEx"}
LAUNCHES |= {"cudaMemcpyAsync", "cudaMemsetAsync", "cudaGraphLaunch"}


def device(options: Options) -> Iterator[Row]:
    """Report of doctor, and the seconds until the first step of every task on Warp, in which its kernels load."""
    for found in (*doctor.core(), *doctor.machine()):
        yield {"check": found.name, "ok": found.ok, "found": found.found}
    usable_device(options.device)
    for task in WARP_TASKS[: 1 if options.quick else None]:
        start = time.monotonic()
        try:
            sim = make_sim(task, SimOptions(16, backend="warp", device=options.device))
            sim.reset(0)
            ok = bool(sim.step(torch.zeros(16, sim.spec.action_dim, device=options.device)).reward.isfinite().all())
            sim.close()
            yield {"check": f"first step of {task} on Warp", "ok": ok, "found": f"{time.monotonic() - start:.1f} s"}
        except UserError as error:
            yield {"check": f"first step of {task} on Warp", "ok": False, "found": one_line(error)}


def parity(options: Options) -> Iterator[Row]:
    """Differences between the CPU and the device in physics, after resuming, and in the first update of a learner."""
    for task in WARP_TASKS[: 1 if options.quick else None]:
        try:
            yield from physics_parity(task, options)
        except UserError as error:
            yield {"comparison": f"{task}: {one_line(error)}"}
    with workplace(PAIRS) as place:
        for name, head in PAIRS.items():
            yield update_parity(name, head, place, options.device)
    on_gpu = torch.device(options.device).type == "cuda"
    words = ["-m", "pytest", "-q", "-m", "gpu", "tests/sim", *([] if on_gpu else ["--collect-only"])]
    found = subprocess.run([sys.executable, *words], cwd=ROOT, capture_output=True, text=True, check=False)
    yield {"comparison": f"pytest -m gpu: {(found.stdout.strip().splitlines() or ['no output'])[-1]}"}


def physics_parity(task: str, options: Options) -> Iterator[Row]:
    """Largest difference of an observation per environment between Warp and the native backend, and after resuming."""
    num_envs, steps = (4, (1, 3)) if options.quick else (64, (1, 10, 100))
    at = SimOptions(num_envs, backend="warp", device=options.device)
    native, warp = make_sim(task, SimOptions(num_envs)), make_sim(task, at)
    first, second = native.reset(0), warp.reset(0)
    same = torch.ones(num_envs, dtype=torch.bool)  # no episode of the row has ended
    generator, overflow = torch.Generator().manual_seed(0), 0
    for step in range(max(steps) + 1):
        if step in (0, *steps):
            difference = largest_difference(first, second)[same]
            yield {
                "comparison": f"{task}, Warp and native",
                "steps": step,
                "median": float(difference.median()) if len(difference) else None,
                "largest": float(difference.max()) if len(difference) else None,
                "environments": int(same.sum()),
                "overflows": overflow,
            }
        action = random_action(native, generator)
        expected, found = native.step(action), warp.step(action.to(options.device))
        overflow += int(found.info["overflow"].sum())
        first, second = expected.obs, found.obs
        same &= ~expected.done & ~found.done.cpu()
    yield resumed(task, warp, at, generator)
    native.close()
    warp.close()


def resumed(task: str, sim: VectorSim, at: SimOptions, generator: torch.Generator) -> Row:
    """Difference of a simulator from a second one that continues from its state."""
    other = make_sim(task, at)
    other.load_state_dict(sim.state_dict())
    for _ in range(10):
        action = random_action(sim, generator).to(at.device)
        first, second = sim.step(action), other.step(action)
    other.close()
    difference = largest_difference(first.obs, second.obs)
    found = {"median": float(difference.median()), "largest": float(difference.max()), "environments": at.num_envs}
    return {"comparison": f"{task}, resumed and not", "steps": 10, **found}


def random_action(sim: VectorSim, generator: torch.Generator) -> Tensor:
    """Uniform actions `(N, A)` on the CPU."""
    low, high = sim.spec.action_low.cpu(), sim.spec.action_high.cpu()
    return low + (high - low) * torch.rand(sim.num_envs, sim.spec.action_dim, generator=generator)


def largest_difference(first: dict[str, Tensor], second: dict[str, Tensor]) -> Tensor:
    """Largest difference of any observed number per row `(N,)`, on the CPU."""
    pairs = [(value.cpu().float().flatten(1), second[key].cpu().float().flatten(1)) for key, value in first.items()]
    return torch.cat([(a - b).abs() for a, b in pairs], dim=1).amax(1)


class HostNoise(TorchFunctionMode):
    """Random numbers of one generator on the CPU in place of the generators of all devices."""

    def __init__(self) -> None:
        super().__init__()
        self._generator = torch.Generator().manual_seed(0)

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Draw on the CPU and copy to the device that was asked for."""
        kwargs = dict(kwargs or {})
        if getattr(func, "__name__", "") not in RANDOM:
            return func(*args, **kwargs)
        where = kwargs.get("device", "cpu")
        return func(*args, **{**kwargs, "generator": self._generator, "device": "cpu"}).to(where)


def update_parity(name: str, head: str, place: Path, where: str) -> Row:
    """Difference of the first update on the device from the one on the CPU, relative to its size.

    Both have the same weights, batch and random numbers.
    """
    with opened(place, name, head) as host, opened(place, name, head, device=where) as on_device:
        batch = host.source.next(host.algorithm)
        before = weights(host.algorithm)
        on_device.algorithm.load_state_dict(copy.deepcopy(host.algorithm.state_dict()))
        copied = move(batch, usable_device(where))
        for algorithm, data in ((host.algorithm, batch), (on_device.algorithm, copied)):
            with HostNoise():
                algorithm.update(data)
        size = (weights(host.algorithm) - before).norm()
        difference = (weights(on_device.algorithm) - weights(host.algorithm)).norm()
    return {"comparison": f"update of {name} ({head}), relative", "largest": float(difference / size)}


def weights(algorithm: Any) -> Tensor:
    """Parameters of all trained networks, flat, on the CPU."""
    networks = [part for part in (algorithm.policy, *vars(algorithm).values()) if isinstance(part, nn.Module)]
    found = {id(value): value for network in networks for value in network.parameters()}
    return torch.cat([value.detach().cpu().double().flatten() for value in found.values()])


def waits(options: Options) -> Iterator[Row]:
    """Waits and launches of an update of every algorithm, and the budgets of the simulated device."""
    budgets = tomllib.loads(BUDGETS.read_text())["update"]
    names = [name for name in ALGORITHMS.product() if allowed(name)]
    names = names[:2] if options.quick else names
    with workplace(names) as place:
        for name in names:
            try:
                found = count_update(name, place, options.device)
            except Exception as error:  # the other algorithms are still counted
                found = {"places": one_line(error)}
            budget = budgets.get(name, {})
            yield {
                "algorithm": name,
                "waits": found.get("waits", "-"),
                "budget": budget.get("waits", "-"),
                "launches": found.get("launches", "-"),
                "budget of launches": budget.get("launches", "-"),
                "places that wait": found["places"],
            }


def count_update(name: str, place: Path, where: str) -> dict[str, Any]:
    """Count the second update of an algorithm with its first head; the first one initialises."""
    on_gpu = torch.device(where).type == "cuda"
    activities = [ProfilerActivity.CPU, *([ProfilerActivity.CUDA] if on_gpu else [])]
    with opened(place, name, min(allowed(name)), device=where) as parts, warnings.catch_warnings(record=True) as seen:
        warnings.simplefilter("always")
        algorithm, source = parts.algorithm, parts.source
        algorithm.update(source.next(algorithm))
        batch = source.next(algorithm)
        if on_gpu:
            torch.cuda.synchronize()
            torch.cuda.set_sync_debug_mode("warn")
        seen.clear()
        try:
            with profile(activities=activities) as found:
                algorithm.update(batch)
        finally:
            if on_gpu:
                torch.cuda.set_sync_debug_mode("default")
    counts = {event.key: event.count for event in found.key_averages()}
    places = {f"{Path(w.filename).name}:{w.lineno}" for w in seen if "synchroniz" in str(w.message)}
    return {
        "waits": sum(counts.get(key, 0) for key in WAITS),
        "launches": sum(counts.get(key, 0) for key in LAUNCHES),
        "places": ", ".join(sorted(places)) or "-",
    }
