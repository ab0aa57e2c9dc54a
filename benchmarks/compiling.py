"""Speed of acting and updating with `torch.compile` and bfloat16, compared with plain float32 in one run.

    python -m benchmarks.compiling --quick                       # one network, short turns, nothing written
    python -m benchmarks.compiling                               # about 10 minutes, most of them spent compiling
    python -m benchmarks.compiling --device cuda --rows 4096     # with CUDA graphs, as many rows as on GPU simulators

Untrained policies observe 32 numbers and have 7 action dimensions. *act* samples the actions of all environments
without gradients; *update* is loss, gradient and a step of Adam on a minibatch: the PPO loss for the Gaussian, the
imitation loss for the flow. The variants alternate in short slots in changing order, so that a drift of the machine's
speed affects all of them; `faster` is the median over the turns of the median time of plain float32 divided by the
median time of the variant (`low`, `high`: the extremes). On the CPU times are processor times of one thread.
`start-up` is the wall time of compiling before the first result, `difference` the largest difference from the result of
plain float32, relative to the largest entry.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from benchmarks.common import brackets, print_result, write_result
from robopolicy.core.decisions import Decisions
from robopolicy.core.estimator import Estimator, EstimatorConfig
from robopolicy.device import usable_device
from robopolicy.nets.normalizer import Normalizer
from robopolicy.policies.base import Policy, PolicySpec
from robopolicy.policies.registry import POLICIES

SPECS = {
    "gaussian": PolicySpec({"state": (32,)}, 7),
    "flow": PolicySpec({"state": (32,)}, 7, horizon=8, action_horizon=8),
}
NETWORKS: dict[str, tuple[str, dict[str, Any]]] = {
    "gaussian 64x64": ("gaussian", {}),
    "gaussian 256x256": ("gaussian", {"hidden": (256, 256)}),
    "flow MLP": ("flow", {}),
    "flow U-Net": ("flow", {"backbone": "unet"}),
}
WAYS = ("float32", "bfloat16", "compiled", "compiled bfloat16")
Work = Callable[[], Tensor]


@dataclass(frozen=True)
class Contest:
    """One network in one phase, with every variant."""

    network: str
    phase: str
    works: dict[str, Work]
    start_up: dict[str, float]  # wall seconds until the first result
    difference: dict[str, float]


def head(network: str, device: torch.device) -> Policy:
    """An untrained policy in raw units, always with the same weights."""
    kind, settings = NETWORKS[network]
    torch.manual_seed(0)
    raw = {"normalization": "identity", "action_normalization": "identity"}
    policy_class = POLICIES[kind]
    config_class = policy_class.config_class
    policy = policy_class(config_class(**(raw | settings)), SPECS[kind]).eval()  # type: ignore[call-arg]
    for part in policy.modules():
        if isinstance(part, Normalizer):
            part.fitted.fill_(True)
    return policy.to(device)


def acting(policy: Policy, rows: int, device: torch.device) -> Work:
    """Sample the actions of `rows` environments; returns a result that the seed determines."""
    obs = {"state": torch.randn(rows, 1, 32, device=device)}
    noise = torch.randn(rows, *policy.noise_shape, device=device)

    def work() -> Tensor:
        with torch.no_grad():
            return policy.decode(obs, noise) if policy.is_steerable else policy.act(obs, deterministic=True)

    return work


def loss_of(policy: Policy, rows: int, device: torch.device) -> Work:
    """PPO loss or imitation loss on a minibatch, always with the same random numbers."""
    obs = {"state": torch.randn(rows, 1, 32, device=device)}
    if policy.name == "gaussian":
        with torch.no_grad():
            sample = policy.sample(obs)
        decisions, advantage = Decisions(logp_old=sample.logp), torch.randn(rows, 1, device=device)
        estimator = Estimator(EstimatorConfig())
        return lambda: estimator(decisions, advantage, policy.decisions(obs, sample.record).logp, log_stats=False)[0]
    chunk = torch.randn(rows, policy.spec.horizon, 7, device=device)
    x, t = torch.randn_like(chunk), torch.rand(rows, device=device)
    target = chunk - x
    return lambda: (policy.field(obs, x + t[:, None, None] * target, t) - target).square().mean()


def updating(policy: Policy, loss: Work) -> Work:
    """A step of Adam; returns the flattened gradient."""
    parameters = [p for p in policy.parameters() if p.requires_grad]
    optimizer = torch.optim.Adam(parameters, lr=0.0, fused=True)  # fixed weights: all variants compute the same

    def work() -> Tensor:
        optimizer.zero_grad(set_to_none=True)
        loss().backward()
        nn.utils.clip_grad_norm_(parameters, 1.0)
        optimizer.step()
        return torch.cat([p.grad.flatten() for p in parameters if p.grad is not None])

    return work


def prepare(network: str, phase: str, rows: int, device: torch.device) -> Contest:
    """Build and warm up every variant."""
    works: dict[str, Work] = {}
    start_up: dict[str, float] = {}
    difference: dict[str, float] = {}
    exact = torch.zeros(0)
    for way in WAYS:
        torch._dynamo.reset()
        policy = head(network, device)
        torch.manual_seed(1)
        inner = acting(policy, rows, device) if phase == "act" else loss_of(policy, rows, device)
        if "compiled" in way:
            inner = torch.compile(inner, mode="reduce-overhead" if device.type == "cuda" else "default")
        work = reduced(inner, device) if "bfloat16" in way else inner
        works[way] = work if phase == "act" else updating(policy, work)
        start = time.perf_counter()
        result = works[way]().float().clone()
        start_up[way] = time.perf_counter() - start
        exact = result if way == "float32" else exact
        difference[way] = float((result - exact).abs().max() / exact.abs().max())
    return Contest(network, phase, works, start_up, difference)


def reduced(work: Work, device: torch.device) -> Work:
    """`work` under autocast to bfloat16."""

    def inside() -> Tensor:
        with torch.autocast(device.type, torch.bfloat16):
            return work()

    return inside


def slot(work: Work, seconds: float, device: torch.device) -> float:
    """Median time [ms] of the calls within `seconds`, at least five."""
    clock = time.process_time if device.type == "cpu" else time.perf_counter
    times: list[float] = []
    end = clock() + seconds
    while len(times) < 5 or clock() < end:
        start = clock()
        work()
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        times.append(1e3 * (clock() - start))
    return float(np.median(times))


def measure(contest: Contest, turns: int, seconds: float, device: torch.device) -> list[dict[str, object]]:
    """Measure every variant; returns one row each."""
    times: dict[str, list[float]] = {way: [] for way in WAYS}
    for turn in range(-1, turns):  # turn -1 warms up and is not counted
        for way in WAYS if turn % 2 else WAYS[::-1]:
            found = slot(contest.works[way], seconds, device)
            if turn >= 0:
                times[way].append(found)
    plain = np.array(times["float32"])
    rows: list[dict[str, object]] = []
    for way in WAYS:
        ratio = plain / np.array(times[way])
        rows.append(
            {
                "network": contest.network,
                "phase": contest.phase,
                "way": way,
                "ms": float(np.median(times[way])),
                "faster than float32": f"{np.median(ratio):.2f}x [{ratio.min():.2f}, {ratio.max():.2f}]",
                "start-up s": contest.start_up[way],
                "relative difference": contest.difference[way],
            }
        )
    return rows


def main() -> None:
    """Measure, print, and write the results of a full run."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="one network in short turns, no results written")
    parser.add_argument("--device", default="cpu", help="cpu or cuda")
    parser.add_argument("--rows", type=int, default=16, help="parallel environments")
    parser.add_argument("--batch", type=int, default=256, help="rows of a minibatch")
    arguments = parser.parse_args()
    device = usable_device(arguments.device)
    torch.set_num_threads(1)
    turns, seconds = (3, 0.1) if arguments.quick else (9, 0.3)
    rows: list[dict[str, object]] = []
    for network in list(NETWORKS)[:1] if arguments.quick else NETWORKS:
        for phase, size in (("act", arguments.rows), ("update", arguments.batch)):
            rows += measure(prepare(network, phase, size, device), turns, seconds, device)
            print(f"{network}, {phase}: done", flush=True)
    name = torch.cuda.get_device_name(device) if device.type == "cuda" else "cpu"
    figures = {"device": name, "rows": arguments.rows, "batch": arguments.batch, "turns": turns, "results": rows}
    print_result("compiling", rows, figures)
    if not arguments.quick:
        suffix = "" if device.type == "cpu" else "_cuda"
        write_result(f"compiling{suffix}", rows, figures, command="python -m benchmarks.compiling", notes=[brackets()])


if __name__ == "__main__":
    main()
