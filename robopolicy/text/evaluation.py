"""pass@k of a text policy: probability that at least one of k samples succeeds, with an interval over prompts."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from statistics import fmean
from typing import Any

import torch
from torch import Tensor

from robopolicy.evaluation.intervals import Interval, bootstrap_mean
from robopolicy.evaluation.report import Table, percent
from robopolicy.text.policy import TextPolicy
from robopolicy.text.rollouts.protocols import Task
from robopolicy.text.task import TextTask


def pass_at_k(successes: Tensor, samples: Tensor | int, k: int) -> Tensor:
    """Estimate the probability `(P,)` that at least one of k samples succeeds, from the count c among n >= k samples.

    Unbiased: `1 - C(n - c, k) / C(n, k)`, computed as a product that neither overflows nor underflows.
    """
    n = torch.as_tensor(samples, dtype=torch.float64, device=successes.device).expand_as(successes)  # pyright: ignore[reportUnknownMemberType]
    if k < 1 or bool((n < k).any()):
        raise ValueError(f"pass@{k} needs at least {max(k, 1)} samples per prompt, got {int(n.min())}.")
    failures = n - successes.double()
    steps = torch.arange(k, dtype=torch.float64, device=successes.device)
    all_fail = ((failures.unsqueeze(-1) - steps).clamp(min=0.0) / (n.unsqueeze(-1) - steps)).prod(-1)
    return 1.0 - all_fail


MAX_ROLLOUTS = 512  # rollouts per batch
COMMON_METRICS = {"success", "length", "turns", "truncated", "reward_failed", "assisted"}  # metrics of every task


@dataclass(frozen=True)
class SampledRollouts:
    """Several rollouts of each prompt."""

    success: Tensor  # (P, n) bool
    entropy: float  # mean over the sampled tokens [nats]
    length: float  # mean number of tokens per rollout
    reward_errors: int  # rollouts without a valid reward, which count as failures
    measures: Mapping[str, float] = field(default_factory=dict[str, float])  # means of "format", "calls", ...

    def pass_at(self, k: int) -> Interval:
        """Estimate pass@k from all n rollouts, with a bootstrap interval over prompts."""
        return bootstrap_mean(pass_at_k(self.success.sum(1), self.success.shape[1], k).numpy())

    def to_dict(self) -> dict[str, Any]:
        """Return plain numbers for reports."""
        found = {k: self.pass_at(k) for k in powers_of_two(self.success.shape[1])}
        return {
            "prompts": len(self.success),
            "samples": self.success.shape[1],
            "pass_at": {str(k): {"value": x.estimate, "low": x.low, "high": x.high} for k, x in found.items()},
            "entropy": self.entropy,
            "length": self.length,
            "degenerate": self.degenerate,
            "reward_errors": self.reward_errors,
            **self.measures,
        }

    @property
    def degenerate(self) -> float:
        """Fraction of the prompts whose rollouts all have the same outcome."""
        wins = self.success.sum(1)
        return float(((wins == 0) | (wins == self.success.shape[1])).double().mean())


def powers_of_two(samples: int) -> list[int]:
    """Return 1, 2, 4, ... up to `samples`, the values of k in reports."""
    return [2**i for i in range(samples.bit_length())]


def pass_at_k_table(results: Mapping[str, SampledRollouts]) -> Table:
    """Tabulate pass@k, entropy, length, task metrics and the fraction of degenerate prompts, one row per policy."""
    columns = powers_of_two(min(result.success.shape[1] for result in results.values()))
    names = _common_measures(results)
    rows = [
        [
            label,
            *(percent(result.pass_at(k)) for k in columns),
            f"{result.entropy:.3f}",
            f"{result.length:.1f}",
            *(f"{result.measures[name]:.3f}" for name in names),
            f"{result.degenerate:.0%}",
        ]
        for label, result in results.items()
    ]
    return ["policy", *(f"pass@{k}" for k in columns), "entropy [nats]", "tokens", *names, "degenerate"], rows


def pass_at_k_legend(results: Mapping[str, SampledRollouts]) -> str:
    """Explain the columns of `pass_at_k_table` in one line."""
    names = _common_measures(results)
    own = f"{', '.join(names)}: measured by the task, mean per answer; " if names else ""
    return (
        "pass@k: with a 95 % interval over the prompts; entropy: mean over the sampled tokens; tokens: mean per "
        f"answer; {own}degenerate: prompts whose sampled answers are all right or all wrong."
    )


def _common_measures(results: Mapping[str, SampledRollouts]) -> list[str]:
    return sorted(set[str].intersection(*(set(result.measures) for result in results.values())))


def pass_at_k_facts(results: Mapping[str, SampledRollouts]) -> dict[str, Any]:
    """Return the results as JSON-ready values."""
    return {"sampled": {label: result.to_dict() for label, result in results.items()}}


def sample_rollouts(
    policy: TextPolicy, task: TextTask, seeds: Sequence[int], *, samples: int, temperature: float = 1.0, seed: int = 0
) -> SampledRollouts:
    """Roll out the held-out problems of `seeds`, each once, `samples` times; `seed` is the seed of the sampling."""
    seeds = seeds[: len(task.held_out_problems) or len(seeds)]
    env = policy.env_class(policy, task, torch.Generator().manual_seed(seed))
    prompts = max(1, MAX_ROLLOUTS // samples)
    wins: list[Tensor] = []
    measures: dict[str, list[float]] = {}
    entropy, count = 0.0, 0
    for start in range(0, len(seeds), prompts):
        block = seeds[start : start + prompts]
        tasks = [Task(key, payload=task.held_out_seed(key), temperature=temperature) for key in block]
        trajectories = env.rollout([task for task in tasks for _ in range(samples)])
        wins.append(torch.tensor([trajectory.metrics["success"] > 0 for trajectory in trajectories]).view(-1, samples))
        for trajectory in trajectories:
            entropy += float(trajectory.decisions.require("entropy").sum())
            count += int(trajectory.metrics["length"])
            for name in trajectory.metrics.keys() - COMMON_METRICS:
                measures.setdefault(name, []).append(trajectory.metrics[name])
    env.reward_runner.close()
    success = torch.cat(wins)
    means = {name: fmean(values) for name, values in sorted(measures.items())}
    return SampledRollouts(
        success, entropy / max(count, 1), count / success.numel(), len(env.reward_runner.pop_errors()), means
    )
