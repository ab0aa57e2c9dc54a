"""Evaluation harness of periodic evaluation, `robopolicy eval` and benchmarks.

Episodes are a fixed set of seeds, because "the first n to finish" would favour short episodes. An episode depends only
on its seed and the policy, so the result is the same for any number of parallel environments; on a GPU up to rounding,
because the rows of a call are not fixed there. Scores stay on the device of the simulator: a decision waits for it
twice, for the check of the actions and the number of open episodes.
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
OnChunk = Callable[[Tensor, Tensor], None]
_PROBES, _WARM_UP, _PROBE_SECONDS = 20, 3, 1.0


class _Score:
    """Sums of the control steps per episode, on the device of the simulator; column 0 is of all other episodes."""

    def __init__(self, seeds: Sequence[int], num_envs: int, device: torch.device, success_step: str) -> None:
        self.seeds = seeds
        self._last = success_step == "last"
        rows = torch.arange(1, len(seeds) + 1, device=device)
        # Consecutive seeds are found by their first, others in the environment that starts with them.
        self._own = None if _consecutive(seeds) else (torch.tensor(seeds, device=device), rows)
        self._sums = torch.zeros(5, len(seeds) + 2, dtype=torch.float64, device=device)
        self.table = self._sums[:, 1:-1]  # return, steps, ends, counted successes, and divergences of each episode
        self._sums[2, 0] = self._sums[2, -1] = 1.0  # other episodes are never open
        self._step = torch.zeros(5, num_envs, dtype=torch.float64, device=device)  # what a control step adds
        self.has_success = False

    def columns(self, seeds: Tensor) -> Tensor:
        """Return the columns `(N,)` of the episodes `seeds`."""
        if self._own is None:
            return (seeds + (1 - self.seeds[0])).clamp(0, len(self.seeds) + 1)
        return torch.where(seeds == self._own[0], self._own[1], 0)

    def is_open(self, columns: Tensor) -> Tensor:
        """Return the mask `(N,)` of rows with an unfinished episode of the set."""
        return self._sums[2][columns] == 0

    def add(self, columns: Tensor, moved: Tensor, step: Step) -> None:
        """Add a control step of the rows `moved` `(N,)` bool, whose episodes have `columns`."""
        success = step.info.get("success")
        if success is not None:
            self.has_success = True
            success = success & step.done if self._last else success
        entries = step.reward, moved, step.done, success, step.info.get("diverged")
        for row, value in zip(self._step.unbind(), entries, strict=True):
            row.zero_() if value is None else row.copy_(value)
        self._sums.index_add_(1, columns * moved, self._step)

    def read(self, is_open: Tensor) -> tuple[int, int]:
        """Return the numbers of open rows and of finished episodes; a UserError is raised for a non-finite return."""
        broken = self.table[0] - self.table[0]  # 0 or NaN
        counts = [value.count_nonzero() for value in (is_open, self.table[2], broken)]
        num_open, finished, bad = torch.stack(counts).tolist()
        if bad:
            seed = self.seeds[int(broken.nonzero()[0, 0])]
            raise UserError(f"The simulator returned a non-finite reward in episode {seed}; fix the environment.")
        return num_open, finished


class _ScoredSim(VectorSim):
    """Simulator wrapper that scores every control step and does not step rows without an episode of the set."""

    def __init__(self, sim: VectorSim, score: _Score, before_step: BeforeStep | None, on_step: OnStep | None) -> None:
        self.sim = sim
        self.spec = sim.spec
        self.num_envs = sim.num_envs
        self.device = sim.device
        self.open = torch.zeros(sim.num_envs, dtype=torch.bool)  # rows with an unfinished episode of the set
        self.num_open = self.num_finished = 0  # such rows, and finished episodes, since `read`
        self._score = score
        self._before_step = before_step
        self._on_step = on_step

    def reset(self, seed: int | Sequence[int] = 0) -> Observation:
        """Reset the simulator."""
        obs = self.sim.reset(seed)
        self._find_open()
        self.read()
        return obs

    def step(self, action: Tensor, active: Tensor | None = None) -> Step:
        """Step the active rows and add the result to the score."""
        if self._before_step is not None:
            self._before_step()
        moving = self.open if active is None else self.open & active
        rest = self.spec.supports_masked_step and not (active is None and self.num_open == self.num_envs)
        step = self.sim.step(action, moving if rest else active)
        self._score.add(self._columns, moving, step)
        if self._on_step is not None:
            self._on_step(moving, step)
        self._find_open()
        return step

    def reset_rows(self, ended: Tensor) -> tuple[Observation, dict[str, Tensor]]:
        """Start the next episodes of the rows `ended`."""
        found = self.sim.reset_rows(ended)
        self._find_open()
        return found

    def _find_open(self) -> None:
        self.seeds = self.sim.episode_seed.to(self.device)
        self._columns = self._score.columns(self.seeds)
        self.open = self._score.is_open(self._columns)

    def read(self) -> None:
        """Update `num_open` and `num_finished`, the only wait of the score per decision."""
        self.num_open, self.num_finished = self._score.read(self.open)


def evaluate(
    policy: Policy | Actor,
    sim: VectorSim,
    *,
    episodes: int = 100,
    seed: int = 10_000,
    deterministic: bool = True,
    policy_batch: int = 32,
    progress: Callable[[int], None] | None = None,
    on_chunk: OnChunk | None = None,
) -> EvalResult:
    """Evaluate the episodes `seed .. seed + episodes - 1`, or as many as the task has different ones.

    Args:
        policy: The policy, or an actor (`ExpertActor`, `RandomActor`, a composition of policies).
        sim: Simulator of the task with any number of environments; it is reset.
        episodes: Number of episodes; fewer than 100 give wide intervals.
        seed: First episode seed; use seeds that are not used in training.
        deterministic: Disable exploration noise. Noise is a function of episode seed and decision in both cases.
        policy_batch: Rows per policy call on the CPU; a fixed number keeps rounding independent of the number of
            environments. Calls on a device have up to `actors.DEVICE_ROWS` rows.
        progress: Called after every decision with the number of finished episodes.
        on_chunk: Called before the first action of chunks `(R, H, A)` of the environments `(R,)`.

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
        range(seed, seed + min(episodes, sim.spec.num_problems or episodes)),
        deterministic=deterministic,
        policy_batch=policy_batch,
        probe=True,
        progress=progress,
        on_chunk=on_chunk,
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
    on_chunk: OnChunk | None = None,
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
    score = _Score(seeds, sim.num_envs, sim.device, sim.spec.success_step)
    scored = _ScoredSim(sim, score, before_step, on_step)
    chunked = ChunkedSim(scored, action_horizon=actor.action_horizon, obs_horizon=actor.obs_horizon)
    with evaluation_mode(policy) if isinstance(policy, Policy) else nullcontext():
        start, calls = time.perf_counter(), actor.policy_calls
        obs = chunked.reset(seeds[0] if _consecutive(seeds) else list(seeds))
        decisions, obs = _run(actor, scored, chunked, obs, len(seeds), progress, on_chunk)
        wall = time.perf_counter() - start
        latency = _probe(policy, obs, deterministic) if probe and isinstance(policy, Policy) else {}
    returns, lengths, _, success, diverged = score.table.cpu().numpy()
    return EvalResult(
        task=sim.spec.task,
        seeds=np.asarray(seeds, dtype=np.int64),
        returns=returns,
        lengths=lengths.astype(np.int64),
        success=success > 0 if score.has_success else None,
        cost=Cost(
            network_calls=actor.network_calls,
            decisions=decisions,
            steps=int(lengths.sum()),
            policy_calls=actor.policy_calls - calls,
            wall_s=wall,
            **latency,
        ),
        seeded=sim.spec.seeded_episodes,
        diverged=int(diverged.sum()),
        success_step=sim.spec.success_step,
    )


def _run(
    actor: Actor,
    scored: _ScoredSim,
    chunked: ChunkedSim,
    obs: Observation,
    episodes: int,
    progress: Callable[[int], None] | None,
    on_chunk: OnChunk | None,
) -> tuple[int, Observation]:
    """Run until all `episodes` have ended; return the number of their decisions and the last observation."""
    sim, device = scored.sim, scored.device
    decision = torch.zeros(sim.num_envs, dtype=torch.int64, device=device)  # index of the next one in each episode
    rows = torch.arange(sim.num_envs, device=device)
    total = 0
    while scored.num_finished < episodes:
        if not scored.num_open:
            raise RuntimeError(f"The simulator of {sim.spec.task} skipped episode seeds; run `check_simulator` on it.")
        if device.type == "cpu":  # on a device, selecting rows would wait
            rows = scored.open.nonzero().flatten()
        part = actor(sim, obs, rows, scored.seeds[rows], decision[rows])
        chunk = torch.zeros(sim.num_envs, *part.shape[1:], dtype=part.dtype, device=device)
        chunk[rows] = part
        if on_chunk is not None:
            on_chunk(part, rows)
        total += scored.num_open
        step = chunked.step(chunk)
        decision = torch.where(step.done, 0, decision + 1)
        obs = step.obs
        scored.read()
        if progress is not None:
            progress(scored.num_finished)
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
