"""Who decides in an evaluated episode: a policy, a scripted expert or a random agent, behind one call."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Protocol

import numpy as np
import torch
from torch import Tensor

from robopolicy.device import module_device
from robopolicy.errors import UserError
from robopolicy.nets.module_state import evaluation_mode
from robopolicy.policies.base import Policy, PolicySpec
from robopolicy.policies.noise import PerRowGenerator, assign_slots
from robopolicy.sim.contract import Observation, SimSpec, VectorSim
from robopolicy.sim.registry import Expert
from robopolicy.sim.wrappers.base import unwrapped
from robopolicy.spec import HIDDEN_STATE

_APART = 1 << 41  # added to the decision in the key of a disturbance, so that it is not the noise of the policy


class Actor(Protocol):
    """Decides the next chunk of the rows that still count."""

    action_horizon: int  # Ta, actions played per chunk
    obs_horizon: int  # To, observations per decision
    network_calls: int  # network evaluations per decision
    policy_calls: int  # batched calls made so far

    def __call__(
        self, sim: VectorSim, obs: Observation, rows: Tensor, seeds: Sequence[int], decisions: Sequence[int]
    ) -> Tensor:
        """Return chunks `(R, H, A)`.

        Args:
            sim: The simulator being played.
            obs: Histories `(N, To, ...)` of all environments.
            rows: `(R,)` int64, environments to decide for.
            seeds: Episode seed of each of those rows.
            decisions: Index of the decision within the episode of each of those rows.
        """
        ...


class PolicyActor:
    """Plays a policy so that an episode depends on its seed alone.

    Two things would otherwise leak the number of environments into the result. Noise: every row draws from its own
    stream keyed by episode seed and decision index. Rounding: the policy always sees exactly `batch` rows, in which an
    episode always has the same place (`policies.noise.seats`).
    """

    def __init__(self, policy: Policy, *, deterministic: bool = True, batch: int = 32) -> None:
        self.policy = policy
        self.deterministic = deterministic
        self.batch = batch
        self.action_horizon = policy.spec.action_horizon
        self.obs_horizon = policy.spec.obs_horizon
        self.network_calls = policy.nfe
        self.policy_calls = 0
        self._device = module_device(policy)
        self._keys = [key for key in policy.spec.observation if key != HIDDEN_STATE]
        self._memory: dict[int, Tensor] = {}  # episode seed -> (1, M) of a recurrent policy

    def __call__(
        self, sim: VectorSim, obs: Observation, rows: Tensor, seeds: Sequence[int], decisions: Sequence[int]
    ) -> Tensor:
        """Decide for `rows` in as few calls of `batch` rows as their places allow."""
        chunks: list[Tensor] = []
        calls = assign_slots(seeds, self.batch)
        for call in calls:
            members = call.members
            played = self._act(obs, rows[members], [seeds[i] for i in members], [decisions[i] for i in members])
            chunks.append(played[call.places])
        order = torch.tensor([i for call in calls for i in call.seated])
        chunk = torch.cat(chunks)[order.argsort().to(sim.device)]
        self._check_finite(chunk, {key: obs[key][rows] for key in self._keys}, seeds, decisions)
        return chunk

    def _act(self, obs: Observation, rows: Tensor, seeds: Sequence[int], decisions: Sequence[int]) -> Tensor:
        self.policy_calls += 1
        batch = {key: obs[key][rows].to(self._device or rows.device) for key in self._keys}
        with torch.inference_mode():
            batch |= self._recalled(seeds, decisions)
            chunk = self._chunk(batch, seeds, PerRowGenerator(seeds, decisions))
            if HIDDEN_STATE in batch:
                after = self.policy.next_hidden(batch)
                # Copies that fill the batch are rounded differently: an episode's own row counts.
                self._memory |= {seed: after[i] for i, seed in enumerate(seeds) if seed % self.batch == i}
        return chunk.to(rows.device)

    def _chunk(self, obs: Observation, seeds: Sequence[int], streams: PerRowGenerator) -> Tensor:
        return self.policy.act(obs, deterministic=self.deterministic, generator=streams)

    def _recalled(self, seeds: Sequence[int], decisions: Sequence[int]) -> Observation:
        """Memories of the episodes of a recurrent policy, zeros at their first decision; else nothing."""
        size = self.policy.spec.hidden_dim
        if not size:
            return {}
        fresh = torch.zeros(1, size, device=self._device)
        kept = [self._memory[seed] if step else fresh for seed, step in zip(seeds, decisions, strict=True)]
        return {HIDDEN_STATE: torch.stack(kept)}

    @staticmethod
    def _check_finite(chunk: Tensor, obs: Observation, seeds: Sequence[int], decisions: Sequence[int]) -> None:
        finite = chunk.flatten(1).isfinite().all(1)
        if not bool(finite.all()):
            bad = int((~finite).nonzero()[0, 0])
            where = f"in episode {seeds[bad]} at decision {decisions[bad]}"
            if not all(bool(value[bad].isfinite().all()) for value in obs.values()):
                raise UserError(f"The simulator showed a number that is not finite {where}; mend the environment.")
            cure = "the checkpoint has diverged, evaluate an earlier one"
            raise UserError(f"The policy returned a non-finite action {where}; {cure}.")


class ExpertActor:
    """Plays a task's scripted demonstrator."""

    action_horizon = 1
    obs_horizon = 1
    network_calls = 0

    def __init__(self, expert: Expert) -> None:
        self.expert = expert
        self.policy_calls = 0

    def __call__(
        self, sim: VectorSim, obs: Observation, rows: Tensor, seeds: Sequence[int], decisions: Sequence[int]
    ) -> Tensor:
        """Ask the expert once for all environments and keep `rows`."""
        self.policy_calls += 1
        return self.expert(unwrapped(sim), {key: value[:, -1] for key, value in obs.items()})[rows].unsqueeze(1)


class NoisyActor:
    """Another actor whose chunks are disturbed: a policy of graded quality, for comparing evaluations."""

    def __init__(self, actor: Actor, noise: float) -> None:
        """Add Gaussian noise of standard deviation `noise`, a fraction of half the range of the actions."""
        self.actor, self.noise = actor, noise
        self.action_horizon, self.obs_horizon, self.network_calls = (
            actor.action_horizon,
            actor.obs_horizon,
            actor.network_calls,
        )
        self.policy_calls = 0

    def __call__(
        self, sim: VectorSim, obs: Observation, rows: Tensor, seeds: Sequence[int], decisions: Sequence[int]
    ) -> Tensor:
        """Ask the actor and disturb what it says."""
        calls = self.actor.policy_calls
        chunk = self.actor(sim, obs, rows, seeds, decisions)
        self.policy_calls += self.actor.policy_calls - calls
        keys = [decision + _APART for decision in decisions]
        low, high = sim.spec.action_low.to(chunk.device), sim.spec.action_high.to(chunk.device)
        noise = PerRowGenerator(seeds, keys).normal(chunk.shape).to(chunk.device)
        return (chunk + self.noise * (high - low) / 2 * noise).clamp(low, high)


class PolicyExpert:
    """A policy as demonstrator: it plays its chunks step by step and keeps each row's history."""

    def __init__(self, policy: Policy, *, deterministic: bool = True, batch: int = 32) -> None:
        self.actor = PolicyActor(policy, deterministic=deterministic, batch=batch)
        self._history: Observation = {}
        self._chunk = torch.empty(0)

    def __call__(self, sim: VectorSim, obs: Observation) -> Tensor:
        """Decide for the rows whose chunk is used up or whose episode is fresh; return the due action of all."""
        step, action_horizon = sim.episode_step, self.actor.action_horizon
        fresh = step == 0
        if not self._history:
            self._history = {
                key: value.unsqueeze(1).repeat_interleave(self.actor.obs_horizon, 1) for key, value in obs.items()
            }
        for key, value in obs.items():
            pushed = torch.cat([self._history[key][:, 1:], value.unsqueeze(1)], 1)
            first = value.unsqueeze(1).expand_as(pushed)
            self._history[key] = torch.where(fresh.reshape(-1, *[1] * (pushed.dim() - 1)), first, pushed)
        place = step % action_horizon
        rows = (place == 0).nonzero().flatten()
        if len(rows):
            seeds, decisions = sim.episode_seed[rows].tolist(), (step[rows] // action_horizon).tolist()
            chunk = self.actor(sim, self._history, rows, seeds, decisions)
            if not len(self._chunk):
                self._chunk = chunk.new_zeros(sim.num_envs, *chunk.shape[1:])
            self._chunk[rows] = chunk
        return self._chunk[torch.arange(sim.num_envs), place]


class RandomExpert:
    """Uniformly random actions as demonstrator, each held for a few steps, so that films of them show movement."""

    def __init__(self, hold: int = 4) -> None:
        self.hold = hold

    def __call__(self, sim: VectorSim, obs: Observation) -> Tensor:
        """Draw each row from a generator keyed by its episode seed and the number of the draw."""
        seeds, draws = sim.episode_seed.tolist(), (sim.episode_step // self.hold).tolist()
        rows = torch.arange(sim.num_envs, device=sim.device)
        return RandomActor()(sim, obs, rows, seeds, draws)[:, 0]


class RandomActor:
    """Plays uniformly random actions; the floor that any result should be read against."""

    action_horizon = 1
    obs_horizon = 1
    network_calls = 0
    policy_calls = 0

    def __call__(
        self, sim: VectorSim, obs: Observation, rows: Tensor, seeds: Sequence[int], decisions: Sequence[int]
    ) -> Tensor:
        """Draw each row from a generator keyed by its episode seed and decision index."""
        low, high = (bound.cpu().numpy() for bound in (sim.spec.action_low, sim.spec.action_high))
        keys = zip(seeds, decisions, strict=True)
        actions = [np.random.default_rng((seed, step)).uniform(low, high) for seed, step in keys]
        return torch.from_numpy(np.stack(actions)).float().unsqueeze(1).to(sim.device)


@contextmanager
def as_actor(policy: Policy | Actor, sim: VectorSim, *, deterministic: bool = True) -> Iterator[Actor]:
    """A policy as an actor, in evaluation mode meanwhile; an actor as it is.

    Raises:
        UserError: The policy does not fit the simulator.
    """
    if not isinstance(policy, Policy):
        yield policy
        return
    check_compatible(policy.spec, sim.spec)
    with evaluation_mode(policy):
        yield PolicyActor(policy, deterministic=deterministic)


def check_compatible(policy: PolicySpec, sim: SimSpec) -> None:
    """Refuse a policy whose inputs or outputs do not fit the simulator.

    Raises:
        UserError: An observation is missing or has another shape, or the action dimensions differ.
    """
    for key, shape in policy.observation.items():
        if key == HIDDEN_STATE:
            continue
        if key not in sim.observation:
            raise UserError(
                f"The policy needs observation '{key}', but {sim.task} provides {', '.join(sorted(sim.observation))}; "
                "choose the task or cameras it was trained with."
            )
        found = tuple(sim.observation[key].shape)
        if found != tuple(shape):
            raise UserError(
                f"The policy expects observation '{key}' of shape {tuple(shape)}, but {sim.task} provides {found}; "
                "choose the task it was trained on."
            )
    if policy.action_dim != sim.action_dim:
        raise UserError(
            f"The policy outputs {policy.action_dim} action dimensions, but {sim.task} takes {sim.action_dim}; "
            "choose the task it was trained on."
        )
