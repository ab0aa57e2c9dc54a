"""Actors for evaluation: policies, scripted experts and random agents behind one interface."""

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

_NOISE_KEY_OFFSET = 1 << 41  # added to the decision in the noise key, so that policy and disturbance differ


class Actor(Protocol):
    """Source of action chunks for the active rows of a simulator."""

    action_horizon: int  # Ta, actions executed per chunk
    obs_horizon: int  # To, observations per decision
    network_calls: int  # network evaluations per decision
    policy_calls: int  # batched calls made so far

    def __call__(
        self, sim: VectorSim, obs: Observation, rows: Tensor, seeds: Sequence[int], decisions: Sequence[int]
    ) -> Tensor:
        """Return chunks `(R, H, A)`.

        Args:
            sim: The simulator.
            obs: Histories `(N, To, ...)` of all environments.
            rows: Environments to decide for, `(R,)` int64.
            seeds: Episode seed of each row.
            decisions: Index of the decision within the episode of each row.
        """
        ...


class PolicyActor:
    """Actor of a policy, whose episodes depend only on their seeds.

    Noise comes from one stream per row, keyed by episode seed and decision index. The policy always receives exactly
    `batch` rows with a fixed slot per episode (`policies.noise.assign_slots`), so that rounding does not depend on the
    number of environments.
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
        self._hidden: dict[int, Tensor] = {}  # episode seed -> hidden state (1, M) of a recurrent policy

    def __call__(
        self, sim: VectorSim, obs: Observation, rows: Tensor, seeds: Sequence[int], decisions: Sequence[int]
    ) -> Tensor:
        """Return chunks from as few calls of `batch` rows as the slots allow."""
        chunks: list[Tensor] = []
        calls = assign_slots(seeds, self.batch)
        for call in calls:
            members = call.members
            chunk = self._act(obs, rows[members], [seeds[i] for i in members], [decisions[i] for i in members])
            chunks.append(chunk[call.places])
        order = torch.tensor([i for call in calls for i in call.seated])
        chunk = torch.cat(chunks)[order.argsort().to(sim.device)]
        self._check_finite(chunk, {key: obs[key][rows] for key in self._keys}, seeds, decisions)
        return chunk

    def _act(self, obs: Observation, rows: Tensor, seeds: Sequence[int], decisions: Sequence[int]) -> Tensor:
        self.policy_calls += 1
        batch = {key: obs[key][rows].to(self._device or rows.device) for key in self._keys}
        with torch.inference_mode():
            batch |= self._hidden_states(seeds, decisions)
            chunk = self._chunk(batch, seeds, PerRowGenerator(seeds, decisions))
            if HIDDEN_STATE in batch:
                after = self.policy.next_hidden(batch)
                # Copies that fill the batch are rounded differently, so the row in the slot of the episode is stored.
                self._hidden |= {seed: after[i] for i, seed in enumerate(seeds) if seed % self.batch == i}
        return chunk.to(rows.device)

    def _chunk(self, obs: Observation, seeds: Sequence[int], streams: PerRowGenerator) -> Tensor:
        return self.policy.act(obs, deterministic=self.deterministic, generator=streams)

    def _hidden_states(self, seeds: Sequence[int], decisions: Sequence[int]) -> Observation:
        """Return the hidden states of the episodes, zeros at their first decision; empty for feedforward policies."""
        size = self.policy.spec.hidden_dim
        if not size:
            return {}
        zeros = torch.zeros(1, size, device=self._device)
        states = [self._hidden[seed] if step else zeros for seed, step in zip(seeds, decisions, strict=True)]
        return {HIDDEN_STATE: torch.stack(states)}

    @staticmethod
    def _check_finite(chunk: Tensor, obs: Observation, seeds: Sequence[int], decisions: Sequence[int]) -> None:
        finite = chunk.flatten(1).isfinite().all(1)
        if not bool(finite.all()):
            bad = int((~finite).nonzero()[0, 0])
            where = f"in episode {seeds[bad]} at decision {decisions[bad]}"
            if not all(bool(value[bad].isfinite().all()) for value in obs.values()):
                raise UserError(f"The simulator returned a non-finite observation {where}; fix the environment.")
            raise UserError(
                f"The policy returned a non-finite action {where}; the checkpoint has diverged, use an earlier one."
            )


class ExpertActor:
    """Actor of the scripted expert of a task."""

    action_horizon = 1
    obs_horizon = 1
    network_calls = 0

    def __init__(self, expert: Expert) -> None:
        self.expert = expert
        self.policy_calls = 0

    def __call__(
        self, sim: VectorSim, obs: Observation, rows: Tensor, seeds: Sequence[int], decisions: Sequence[int]
    ) -> Tensor:
        """Call the expert once for all environments and select `rows`."""
        self.policy_calls += 1
        return self.expert(unwrapped(sim), {key: value[:, -1] for key, value in obs.items()})[rows].unsqueeze(1)


class NoisyActor:
    """Actor with Gaussian action noise, which gives policies of graded quality for comparing evaluations."""

    def __init__(self, actor: Actor, noise: float) -> None:
        """Add Gaussian noise of standard deviation `noise`, a fraction of half the range of the actions."""
        self.actor, self.noise, self.policy_calls = actor, noise, 0
        self.action_horizon, self.obs_horizon = actor.action_horizon, actor.obs_horizon
        self.network_calls = actor.network_calls

    def __call__(
        self, sim: VectorSim, obs: Observation, rows: Tensor, seeds: Sequence[int], decisions: Sequence[int]
    ) -> Tensor:
        """Return the chunks of the actor with noise, clipped to the action bounds."""
        calls = self.actor.policy_calls
        chunk = self.actor(sim, obs, rows, seeds, decisions)
        self.policy_calls += self.actor.policy_calls - calls
        keys = [decision + _NOISE_KEY_OFFSET for decision in decisions]
        low, high = sim.spec.action_low.to(chunk.device), sim.spec.action_high.to(chunk.device)
        noise = PerRowGenerator(seeds, keys).normal(chunk.shape).to(chunk.device)
        return (chunk + self.noise * (high - low) / 2 * noise).clamp(low, high)


class PolicyExpert:
    """Expert interface of a policy, with the current chunk and the history of each row."""

    def __init__(self, policy: Policy, *, deterministic: bool = True, batch: int = 32) -> None:
        self.actor = PolicyActor(policy, deterministic=deterministic, batch=batch)
        self._history: Observation = {}
        self._chunk = torch.empty(0)

    def __call__(self, sim: VectorSim, obs: Observation) -> Tensor:
        """Return one action per row, from new chunks where the chunk has ended or the episode has started."""
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
    """Expert with uniformly random actions, each repeated for `hold` steps so that videos show motion."""

    def __init__(self, hold: int = 4) -> None:
        self.hold = hold

    def __call__(self, sim: VectorSim, obs: Observation) -> Tensor:
        """Sample each row with a generator keyed by its episode seed and the index of the sample."""
        seeds, draws = sim.episode_seed.tolist(), (sim.episode_step // self.hold).tolist()
        rows = torch.arange(sim.num_envs, device=sim.device)
        return RandomActor()(sim, obs, rows, seeds, draws)[:, 0]


class RandomActor:
    """Actor with uniformly random actions, the baseline of any result."""

    action_horizon = 1
    obs_horizon = 1
    network_calls = 0
    policy_calls = 0

    def __call__(
        self, sim: VectorSim, obs: Observation, rows: Tensor, seeds: Sequence[int], decisions: Sequence[int]
    ) -> Tensor:
        """Sample each row with a generator keyed by its episode seed and decision index."""
        low, high = (bound.cpu().numpy() for bound in (sim.spec.action_low, sim.spec.action_high))
        keys = zip(seeds, decisions, strict=True)
        actions = [np.random.default_rng((seed, step)).uniform(low, high) for seed, step in keys]
        return torch.from_numpy(np.stack(actions)).float().unsqueeze(1).to(sim.device)


@contextmanager
def as_actor(policy: Policy | Actor, sim: VectorSim, *, deterministic: bool = True) -> Iterator[Actor]:
    """Convert a policy, in evaluation mode meanwhile, to an actor; a UserError is raised if it does not fit `sim`."""
    if not isinstance(policy, Policy):
        yield policy
        return
    check_compatible(policy.spec, sim.spec)
    with evaluation_mode(policy):
        yield PolicyActor(policy, deterministic=deterministic)


def check_compatible(policy: PolicySpec, sim: SimSpec) -> None:
    """Raise a UserError for a policy whose observations or action dimensions do not fit the simulator."""
    advice = "choose the task or cameras it was trained with"
    for key, shape in policy.observation.items():
        if key == HIDDEN_STATE:
            continue
        if key not in sim.observation:
            found = ", ".join(sorted(sim.observation))
            raise UserError(f"The policy needs observation '{key}', but {sim.task} provides {found}; {advice}.")
        if tuple(sim.observation[key].shape) != tuple(shape):
            found = f"{tuple(shape)}, but {sim.task} provides {tuple(sim.observation[key].shape)}"
            raise UserError(f"The policy expects observation '{key}' of shape {found}; {advice}.")
    if policy.action_dim != sim.action_dim:
        found = f"The policy outputs {policy.action_dim} action dimensions, but {sim.task} takes {sim.action_dim}"
        raise UserError(f"{found}; choose the task it was trained on.")
