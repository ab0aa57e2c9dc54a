"""Evaluation harness of periodic evaluation, `robopolicy eval` and benchmarks.

Episodes are a fixed set of seeds, because "the first n to finish" would favour short episodes. An episode depends only
on its seed and the policy, so the result is the same for any number of parallel environments.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext

import numpy as np
import torch
from torch import Tensor

from robopolicy.device import module_device
from robopolicy.errors import UserError
from robopolicy.evaluation.actors import Actor, PolicyActor, check_compatible
from robopolicy.evaluation.result import Cost, EvalResult
from robopolicy.nets.module_state import evaluation_mode
from robopolicy.policies.base import Policy
from robopolicy.policies.noise import PerRowGenerator
from robopolicy.sim.chunk import ChunkedSim
from robopolicy.sim.contract import Observation, Step, VectorSim
from robopolicy.spec import HIDDEN_STATE

OnStep = Callable[[Tensor, Step], None]
BeforeStep = Callable[[], None]
_PROBES, _WARM_UP, _PROBE_SECONDS = 20, 3, 1.0


class _Score:
    """Sums of the control steps per episode seed; steps of other seeds are ignored."""

    def __init__(self, seeds: Sequence[int]) -> None:
        self.slots = {seed: i for i, seed in enumerate(seeds)}
        self.returns = np.zeros(len(seeds))
        self.lengths = np.zeros(len(seeds), dtype=np.int64)
        self.finished = np.zeros(len(seeds), dtype=np.bool_)
        self.success = np.zeros(len(seeds), dtype=np.bool_)
        self.has_success = False
        self.diverged = 0

    def open_rows(self, seeds: Sequence[int]) -> list[int]:
        """Return the rows with an unfinished episode of the set."""
        slots = [self.slots.get(seed) for seed in seeds]
        return [row for row, slot in enumerate(slots) if slot is not None and not self.finished[slot]]

    def add(self, seeds: Sequence[int], moved: Tensor, step: Step) -> None:
        """Add a control step of the rows `moved` `(N,)` bool; `seeds` are the episodes before it."""
        rows = moved.nonzero().flatten().tolist()
        slots = [self.slots[seeds[row]] for row in rows]
        reward = step.reward.cpu().numpy()[rows]
        if not np.isfinite(reward).all():
            bad = seeds[rows[int(np.flatnonzero(~np.isfinite(reward))[0])]]
            raise UserError(f"The simulator returned a non-finite reward in episode {bad}; fix the environment.")
        self.returns[slots] += reward  # float32 rewards, float64 sum
        self.lengths[slots] += 1
        self.finished[slots] = step.done.cpu().numpy()[rows]
        if "diverged" in step.info:
            self.diverged += int(step.info["diverged"].cpu().numpy()[rows].sum())
        if "success" in step.info:
            self.has_success = True
            self.success[slots] |= step.info["success"].bool().cpu().numpy()[rows]


class _ScoredSim(VectorSim):
    """Simulator wrapper that scores every control step and does not step rows without an episode of the set."""

    def __init__(self, sim: VectorSim, score: _Score, before_step: BeforeStep | None, on_step: OnStep | None) -> None:
        self.sim = sim
        self.spec = sim.spec
        self.num_envs = sim.num_envs
        self.device = sim.device
        self._score = score
        self._before_step = before_step
        self._on_step = on_step

    def reset(self, seed: int | Sequence[int] = 0) -> Observation:
        """Reset the simulator."""
        return self.sim.reset(seed)

    def step(self, action: Tensor, active: Tensor | None = None) -> Step:
        """Step the active rows and add the result to the score."""
        if self._before_step is not None:
            self._before_step()
        seeds = self.sim.episode_seed.tolist()
        moving = torch.zeros(self.num_envs, dtype=torch.bool, device=self.device)
        moving[self._score.open_rows(seeds)] = True
        if active is not None:
            moving &= active
        rest = self.spec.supports_masked_step and not bool(moving.all())
        step = self.sim.step(action, moving if rest else active)
        self._score.add(seeds, moving, step)
        if self._on_step is not None:
            self._on_step(moving, step)
        return step

    def reset_rows(self, ended: Tensor) -> tuple[Observation, dict[str, Tensor]]:
        """Start the next episodes of the rows `ended`."""
        return self.sim.reset_rows(ended)


def evaluate(
    policy: Policy | Actor,
    sim: VectorSim,
    *,
    episodes: int = 100,
    seed: int = 10_000,
    deterministic: bool = True,
    policy_batch: int = 32,
    progress: Callable[[int], None] | None = None,
) -> EvalResult:
    """Evaluate the episodes `seed .. seed + episodes - 1`.

    Args:
        policy: The policy, or an actor (`ExpertActor`, `RandomActor`, a composition of policies).
        sim: Simulator of the task with any number of environments; it is reset.
        episodes: Number of episodes; fewer than 100 give wide intervals.
        seed: First episode seed; use seeds that are not used in training.
        deterministic: Disable exploration noise. Noise is a function of episode seed and decision in both cases.
        policy_batch: Rows per policy call; a fixed number keeps rounding independent of the number of environments.
        progress: Called after every decision with the number of finished episodes.

    Raises:
        UserError: The policy does not fit the simulator, or a number is out of range.
    """
    if episodes < 1 or policy_batch < 1 or seed < 0:
        raise UserError(
            f"Evaluation needs episodes >= 1, policy_batch >= 1 and seed >= 0, got {episodes}, {policy_batch}, {seed}."
        )
    return run_episodes(
        policy,
        sim,
        range(seed, seed + episodes),
        deterministic=deterministic,
        policy_batch=policy_batch,
        probe=True,
        progress=progress,
    )


def run_episodes(
    policy: Policy | Actor,
    sim: VectorSim,
    seeds: Sequence[int],
    *,
    deterministic: bool = True,
    policy_batch: int = 32,
    probe: bool = False,
    progress: Callable[[int], None] | None = None,
    before_step: BeforeStep | None = None,
    on_step: OnStep | None = None,
) -> EvalResult:
    """Evaluate the episodes `seeds`: consecutive ones, or as many as the simulator has environments.

    `probe` measures the latency of single decisions afterwards. `before_step` is called before every control step, when
    its state can still be rendered; `on_step` is called after it with the mask `(N,)` of scored rows and the step.
    Other arguments are as in `evaluate`.
    """
    if not _consecutive(seeds) and len(seeds) != sim.num_envs:
        raise ValueError(f"{len(seeds)} non-consecutive seeds need as many environments, got {sim.num_envs}.")
    if isinstance(policy, Policy):
        check_compatible(policy.spec, sim.spec)
        actor: Actor = PolicyActor(policy, deterministic=deterministic, batch=policy_batch)
    else:
        actor = policy
    score = _Score(seeds)
    chunked = ChunkedSim(
        _ScoredSim(sim, score, before_step, on_step), action_horizon=actor.action_horizon, obs_horizon=actor.obs_horizon
    )
    with evaluation_mode(policy) if isinstance(policy, Policy) else nullcontext():
        start, calls = time.perf_counter(), actor.policy_calls
        obs = chunked.reset(seeds[0] if _consecutive(seeds) else list(seeds))
        decisions, obs = _run(actor, sim, chunked, obs, score, progress)
        wall = time.perf_counter() - start
        latency = _probe(policy, obs, deterministic) if probe and isinstance(policy, Policy) else {}
    return EvalResult(
        task=sim.spec.task,
        seeds=np.asarray(seeds, dtype=np.int64),
        returns=score.returns,
        lengths=score.lengths,
        success=score.success if score.has_success else None,
        cost=Cost(
            network_calls=actor.network_calls,
            decisions=decisions,
            steps=int(score.lengths.sum()),
            policy_calls=actor.policy_calls - calls,
            wall_s=wall,
            **latency,
        ),
        seeded=sim.spec.seeded_episodes,
        diverged=score.diverged,
    )


def _run(
    actor: Actor,
    sim: VectorSim,
    chunked: ChunkedSim,
    obs: Observation,
    score: _Score,
    progress: Callable[[int], None] | None,
) -> tuple[int, Observation]:
    """Run until all episodes have ended; return the number of their decisions and the last observation."""
    decision = [0] * sim.num_envs  # index of the next decision within each row's episode
    total = 0
    while not score.finished.all():
        names = sim.episode_seed.tolist()
        rows = score.open_rows(names)
        if not rows:
            raise RuntimeError(f"The simulator of {sim.spec.task} skipped episode seeds; run `check_simulator` on it.")
        index = torch.tensor(rows, device=sim.device)
        part = actor(sim, obs, index, [names[row] for row in rows], [decision[row] for row in rows])
        chunk = torch.zeros(sim.num_envs, *part.shape[1:], dtype=part.dtype, device=sim.device)
        chunk[index] = part
        step = chunked.step(chunk)
        decision = [0 if done else count + 1 for count, done in zip(decision, step.done.tolist(), strict=True)]
        obs = step.obs
        total += len(rows)
        if progress is not None:
            progress(int(score.finished.sum()))
    return total, obs


def _consecutive(seeds: Sequence[int]) -> bool:
    return list(seeds) == list(range(seeds[0], seeds[0] + len(seeds)))


def _probe(policy: Policy, history: Observation, deterministic: bool) -> Mapping[str, float]:
    """Measure the latency of decisions for one robot, with the observation of the first environment."""
    size = policy.spec.hidden_dim
    history = {**history, HIDDEN_STATE: torch.zeros(1, 1, size)} if size else history
    first = {key: history[key][:1] for key in policy.spec.observation}
    device = module_device(policy)
    obs = first if device is None else {key: value.to(device) for key, value in first.items()}
    times: list[float] = []
    begin = time.perf_counter()
    with torch.inference_mode():
        for probe in range(_WARM_UP + _PROBES):
            start = time.perf_counter()
            chunk = policy.act(obs, deterministic=deterministic, generator=PerRowGenerator([0], [probe]))
            chunk.cpu()  # waits for the accelerator
            times.append(1e3 * (time.perf_counter() - start))
            if len(times) > _WARM_UP and time.perf_counter() - begin > _PROBE_SECONDS:
                break
    measured = times[_WARM_UP:]
    return {"latency_ms": float(np.median(measured)), "latency_p95_ms": float(np.quantile(measured, 0.95))}
