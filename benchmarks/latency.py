"""Processor time per chunk of a policy: its bundle in onnxruntime against torch eager, one robot, one thread.

    python -m benchmarks.latency --quick      # a few heads in short turns, nothing written
    python -m benchmarks.latency              # about 20 minutes, most of them spent exporting

Untrained policies of the default sizes with a vector of 32 numbers as observation and chunks of 8 x 7 actions (tokens:
2 x 7, because every token unrolls the network once more and 56 did not export within six minutes on a loaded machine).
Both backends sample their own noise, as in normal use. They alternate in short slots within one run, in changing order,
so that a drift of the machine's speed affects both; finished policies are stored and skipped. `speedup` is the median
over the turns of torch's median time divided by onnxruntime's (`low`, `high`: the extremes). `robopolicy export`
measures parity. Cold start is the wall time from the start of a fresh Python process to its first chunk, memory the
peak of that process.

Times are processor times of the process (`time.process_time`); with one thread they equal the time of a chunk on an
idle machine. On a shared machine wall times favour the faster backend: a call that outlasts a time slice waits for
other processes and a shorter call does not (DDIM in ten steps then appeared 50 times faster instead of 12 times).

The bundle with rtc computes plain chunks here and still pays for its guidance; torch does not.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from benchmarks.common import brackets, load_cell, made_on, print_result, save_cell, write_result
from robopolicy.critics.q import CriticConfig, QEnsemble
from robopolicy.deploy.bundle import Bundle, open_bundle
from robopolicy.deploy.export import export_bundle
from robopolicy.nets.normalizer import Normalizer
from robopolicy.nets.recurrent import RecurrentConfig
from robopolicy.policies.base import Policy, PolicySpec
from robopolicy.policies.registry import POLICIES
from robopolicy.policies.wrappers.best_of_n import make_best_of_n
from robopolicy.policies.wrappers.composed import compose
from robopolicy.policies.wrappers.latent import STEERING_ACTOR, LatentPolicy, NoiseSpace
from robopolicy.spec import IMAGE_PREFIX, TaskMetadata
from robopolicy.training.checkpoint import save_checkpoint

NOTES = [
    brackets(),
    "Processor time; `largest difference` is the one between the chunks of torch and of the bundle.",
]
SPEC = PolicySpec({"state": (32,)}, action_dim=7, horizon=8, action_horizon=8)
PICTURES = PolicySpec({"image.front": (3, 64, 64), "state": (32,)}, action_dim=7, horizon=8, action_horizon=8)
RAW: dict[str, Any] = {"normalization": "identity", "action_normalization": "identity"}
QUICK = ("flow", "gaussian")

COLD = {
    "torch": "from robopolicy.training.checkpoint import *; import torch\n"
    "torch.set_num_threads(1); policy, _ = load_policy(sys.argv[1])\n"
    "policy.act({k: v[:1] for k, v in golden_observations(sys.argv[1]).items()}, deterministic=True)\n",
    "onnxruntime": "from robopolicy.deploy.bundle import *\n"
    "bundle = open_bundle(sys.argv[1]); golden = read_golden(bundle.folder)\n"
    "bundle.chunk({k: golden[k][0] for k in bundle.spec.observation})\n",
}
"""Program of a fresh process up to its first chunk."""
PEAK = "print(next(line.split()[1] for line in open('/proc/self/status') if line.startswith('VmHWM')))\n"
"""Program that prints the peak resident memory [KiB]; getrusage starts at the memory of the parent process."""


def head(kind: str, spec: PolicySpec = SPEC, **settings: Any) -> Any:
    """An untrained policy of default size, in raw units."""
    policy_class = POLICIES[kind]
    config_class = policy_class.config_class
    return policy_class(config_class(**(RAW | settings)), spec)  # type: ignore[call-arg]


def best_of_16() -> Policy:
    """A flow with a critic that selects one of its chunks."""
    base = head("flow")
    return make_best_of_n(base, QEnsemble(CriticConfig(), base), candidates=16)


HEADS: dict[str, Callable[[], Policy]] = {
    "flow": lambda: head("flow"),
    "flow-rtc": lambda: head("flow"),
    "flow-u-net": lambda: head("flow", backbone="unet"),
    "flow-transformer": lambda: head("flow", backbone="transformer"),
    "flow-pictures": lambda: head("flow", PICTURES),
    "shortcut-k1": lambda: head("shortcut"),
    "meanflow-k1": lambda: head("meanflow"),
    "consistency-k1": lambda: head("consistency"),
    "ddim-k10": lambda: head("diffusion", steps=10),
    "ddpm-k20": lambda: head("diffusion", steps=20, sampler="ddpm"),
    "edm-k10": lambda: head("edm"),
    "gaussian": lambda: head("gaussian"),
    "gaussian-gru": lambda: head("gaussian", PolicySpec({"state": (32,)}, 7), recurrent=RecurrentConfig("gru")),
    "mixture": lambda: head("mixture"),
    "sequence": lambda: head("sequence"),
    "autoregressive-2x7": lambda: head("autoregressive", PolicySpec({"state": (32,)}, 7, 2, 2)),
    "steered-dsrl": lambda: LatentPolicy.from_base(head("flow"), NoiseSpace("repeat"), STEERING_ACTOR),
    "best-of-16": best_of_16,
    "composed": lambda: compose([head("flow"), head("diffusion", steps=10)]),
}


@dataclass(frozen=True)
class Contest:
    """One policy in both backends."""

    policy: Policy
    bundle: Bundle
    obs: Mapping[str, NDArray[Any]]  # (To, ...)

    def torch(self) -> None:
        """Compute a chunk in torch, from numpy and back to numpy, as a robot needs it."""
        obs = {key: torch.from_numpy(value)[None] for key, value in self.obs.items()}
        self.policy.act(obs, deterministic=True)[0].numpy()

    def onnxruntime(self) -> None:
        """Compute a chunk with the bundle."""
        self.bundle.chunk({key: value for key, value in self.obs.items() if key != "memory"})


def prepare(name: str, folder: Path) -> tuple[Contest, dict[str, Any]]:
    """Export a policy; returns the contest and the costs of export, cold start and memory."""
    torch.manual_seed(0)
    policy = HEADS[name]().eval()
    for part in policy.modules():
        if isinstance(part, Normalizer):
            part.fitted.fill_(True)
    obs: dict[str, torch.Tensor] = {}
    for key, shape in policy.spec.observation.items():
        size = (4, policy.spec.obs_horizon, *shape)
        picture = key.startswith(IMAGE_PREFIX)
        obs[key] = torch.randint(0, 256, size, dtype=torch.uint8) if picture else torch.randn(size)
    save_checkpoint(folder / "checkpoint", policy, task="none/none", obs_sample=obs)
    start = time.perf_counter()
    facts = TaskMetadata("none/none")
    manifest = export_bundle(policy, folder / "bundle", task_metadata=facts, obs=obs, rtc=name.endswith("rtc"))
    costs: dict[str, Any] = {"parity": manifest.parity, "export_s": time.perf_counter() - start}
    for way, source in COLD.items():
        words = [sys.executable, "-c", f"import sys\n{source}{PEAK}"]
        start = time.perf_counter()
        words.append(str(folder / ("checkpoint" if way == "torch" else "bundle")))
        peak = subprocess.run(words, capture_output=True, text=True, check=True).stdout
        costs[way] = {"cold_s": time.perf_counter() - start, "memory_mib": int(peak) / 1024}
    return Contest(policy, open_bundle(folder / "bundle", seed=0), {k: v[0].numpy() for k, v in obs.items()}), costs


def slot(play: Callable[[], None], seconds: float) -> NDArray[np.float64]:
    """Processor times [ms] of the chunks computed within `seconds` of processor time, at least five."""
    times: list[float] = []
    end = time.process_time() + seconds
    while len(times) < 5 or time.process_time() < end:
        start = time.process_time()
        play()
        times.append(1e3 * (time.process_time() - start))
    return np.array(times)


def measure(contest: Contest, turns: int, seconds: float) -> dict[str, list[NDArray[np.float64]]]:
    """Times of both backends in every turn."""
    times: dict[str, list[NDArray[np.float64]]] = {"torch": [], "onnxruntime": []}
    for turn in range(-1, turns):  # turn -1 warms up and is not counted
        for way in sorted(times, reverse=bool(turn % 2)):
            found = slot(getattr(contest, way), seconds)
            if turn >= 0:
                times[way].append(found)
    return times


def summarise(times: Mapping[str, list[NDArray[np.float64]]], costs: Mapping[str, Any]) -> dict[str, Any]:
    """Figures of one policy."""
    ratio = np.array([np.median(a) / np.median(b) for a, b in zip(times["torch"], times["onnxruntime"], strict=True)])
    figures: dict[str, Any] = {
        "speedup": float(np.median(ratio)),
        "low": float(ratio.min()),
        "high": float(ratio.max()),
        "parity": costs["parity"],
        "export_s": costs["export_s"],
    }
    for way, turns in times.items():
        p50, p95 = np.percentile(np.concatenate(turns), [50, 95])
        figures[way] = {"p50_ms": float(p50), "p95_ms": float(p95), **costs[way]}
    return figures


def row(name: str, figures: Mapping[str, Any]) -> dict[str, object]:
    """A line of the table."""
    ours, theirs = figures["onnxruntime"], figures["torch"]
    return {
        "policy": name,
        "torch p50 / p95 ms": f"{theirs['p50_ms']:.2f} / {theirs['p95_ms']:.2f}",
        "onnxruntime p50 / p95 ms": f"{ours['p50_ms']:.2f} / {ours['p95_ms']:.2f}",
        "faster by": f"{figures['speedup']:.1f}x [{figures['low']:.1f}, {figures['high']:.1f}]",
        "largest difference": f"{figures['parity']:.0e}",
        "cold start s": f"{theirs['cold_s']:.1f} -> {ours['cold_s']:.1f}",
        "memory MiB": f"{theirs['memory_mib']:.0f} -> {ours['memory_mib']:.0f}",
    }


def main() -> None:
    """Measure, print, and write the results of a full run."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="two heads in short turns, no results written")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    turns, seconds = (3, 0.2) if arguments.quick else (9, 0.15)
    results: dict[str, Any] = {}
    for name in QUICK if arguments.quick else HEADS:
        cell = None if arguments.quick else load_cell(f"latency/{name}")
        if cell is None:
            with tempfile.TemporaryDirectory() as folder:
                contest, costs = prepare(name, Path(folder))
                cell = {**summarise(measure(contest, turns, seconds), costs), "made_on": made_on()}
                contest.bundle.close()
            if not arguments.quick:
                save_cell(f"latency/{name}", cell)
        results[name] = cell
        print(" | ".join(str(value) for value in row(name, cell).values()), flush=True)
    slowest = min(results, key=lambda name: results[name]["speedup"])
    figures = {
        "least_speedup": results[slowest]["speedup"],
        "least_speedup_of": slowest,
        "largest_parity": max(found["parity"] for found in results.values()),
        "turns": turns,
        "seconds_per_slot": seconds,
        "results": results,
    }
    rows = [row(name, found) for name, found in results.items()]
    cells = list(results.values())
    print_result("latency", rows, figures, cells=cells)
    if not arguments.quick:
        write_result("latency", rows, figures, command="python -m benchmarks.latency", notes=NOTES, cells=cells)


if __name__ == "__main__":
    main()
