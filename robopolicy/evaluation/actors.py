"""Actors for evaluation: policies, scripted experts and random agents behind one interface."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Protocol

import numpy as np
import torch
from torch import Tensor

from robopolicy.device import module_device
from robopolicy.errors import UserError
from robopolicy.nets.module_state import evaluation_mode
from robopolicy.policies.base import Policy, PolicySpec
from robopolicy.policies.noise import PerRowGenerator, assign_slots, row_generator, uniform
from robopolicy.sim.contract import Observation, SimSpec, VectorSim
from robopolicy.sim.registry import Expert
from robopolicy.sim.wrappers.base import unwrapped
from robopolicy.spec import HIDDEN_STATE

DEVICE_ROWS = 4096  # largest call of a policy on a device
_NOISE_KEY_OFFSET = 1 << 41  # added to the decision in the noise key, so that policy and disturbance differ


class Actor(Protocol):
    """Source of action chunks for the active rows of a simulator."""

    action_horizon: int  # Ta, actions executed per chunk
    obs_horizon: int  # To, observations per decision
    network_calls: int  # network evaluations per decision
    policy_calls: int  # batched calls made so far

    def __call__(self, sim: VectorSim, obs: Observation, rows: Tensor, seeds: Tensor, decisions: Tensor) -> Tensor:
        """Return chunks `(R, H, A)`.

        Args:
            sim: The simulator.
            obs: Histories `(N, To, ...)` of all environments.
            rows: Environments to decide for, `(R,)` int64.
            seeds: Episode seed of each row, `(R,)` int64.
            decisions: Index of the decision within the episode of each row, `(R,)` int64.
        """
        ...


class PolicyActor:
    """Actor of a policy, whose episodes depend only on their seeds.

    Noise comes from one stream per row, keyed by episode seed and decision index. On the CPU, the policy receives
    exactly `batch` rows with a fixed slot per episode (`policies.noise.assign_slots`), so that rounding does not depend
    on the number of environments. On a device, a call has up to `DEVICE_ROWS` rows and noise is drawn there, so the
    last bits of an action may depend on the number of environments.
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
        self._hidden: Tensor | None = None  # (N, 1, M) of all environments, for recurrent policies

    def __call__(self, sim: VectorSim, obs: Observation, rows: Tensor, seeds: Tensor, decisions: Tensor) -> Tensor:
        """Return chunks from as few calls as possible."""
        size = self.policy.spec.hidden_dim
        if size and (self._hidden is None or len(self._hidden) != sim.num_envs):
            self._hidden = torch.zeros(sim.num_envs, 1, size, device=self._device)
        if self._device is None or self._device.type == "cpu":
            chunk = self._in_slots(obs, rows, seeds, decisions)
        else:
            parts = [slice(start, start + DEVICE_ROWS) for start in range(0, len(rows), DEVICE_ROWS)]
            chunk = torch.cat([self._act(obs, rows[part], seeds[part], decisions[part]) for part in parts])
        self._check_finite(chunk, {key: obs[key][rows] for key in self._keys}, seeds, decisions)
        return chunk

    def _in_slots(self, obs: Observation, rows: Tensor, seeds: Tensor, decisions: Tensor) -> Tensor:
        """Return the chunks of calls of `batch` rows."""
        chunks: list[Tensor] = []
        calls = assign_slots(seeds.tolist(), self.batch)
        for call in calls:
            index = call.members
            chunk = self._act(obs, rows[index], seeds[index], decisions[index], call.places)
            chunks.append(chunk[call.places])
        order = torch.tensor([i for call in calls for i in call.seated])
        return torch.cat(chunks)[order.argsort().to(rows.device)]

    def _act(
        self,
        obs: Observation,
        rows: Tensor,
        seeds: Tensor,
        decisions: Tensor,
        used: Sequence[int] | slice = slice(None),  # entries of the batch that are no copies
    ) -> Tensor:
        """Return the chunks of one call."""
        self.policy_calls += 1
        device = self._device or rows.device
        batch = {key: obs[key][rows].to(device) for key in self._keys}
        streams = row_generator(seeds.to(device), decisions.to(device))
        with torch.inference_mode():
            if self._hidden is not None:
                first = (decisions == 0).to(device)[:, None, None]
                batch[HIDDEN_STATE] = torch.where(first, 0.0, self._hidden[rows.to(device)])
            chunk = self._chunk(batch, seeds, streams)
            if self._hidden is not None:
                # Copies that fill the batch are rounded differently.
                self._hidden[rows[used].to(device)] = self.policy.next_hidden(batch)[used]
        return chunk.to(rows.device)

    def _chunk(self, obs: Observation, seeds: Tensor, streams: PerRowGenerator) -> Tensor:
        return self.policy.act(obs, deterministic=self.deterministic, generator=streams)

    @staticmethod
    def _check_finite(chunk: Tensor, obs: Observation, seeds: Tensor, decisions: Tensor) -> None:
        if not bool(chunk.isfinite().all()):
            bad = int((~chunk.flatten(1).isfinite().all(1)).nonzero()[0, 0])
            where = f"in episode {int(seeds[bad])} at decision {int(decisions[bad])}"
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

    def __call__(self, sim: VectorSim, obs: Observation, rows: Tensor, seeds: Tensor, decisions: Tensor) -> Tensor:
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

    def __call__(self, sim: VectorSim, obs: Observation, rows: Tensor, seeds: Tensor, decisions: Tensor) -> Tensor:
        """Return the chunks of the actor with noise, clipped to the action bounds."""
        calls = self.actor.policy_calls
        chunk = self.actor(sim, obs, rows, seeds, decisions)
        self.policy_calls += self.actor.policy_calls - calls
        low, high = sim.spec.action_low.to(chunk.device), sim.spec.action_high.to(chunk.device)
        noise = row_generator(seeds, decisions + _NOISE_KEY_OFFSET).normal(chunk.shape).to(chunk.device)
        return (chunk + self.noise * (high - low) / 2 * noise).clamp(low, high)


class PolicyExpert:
    """Expert interface of a policy, with the current chunk and the history of each row."""

    def __init__(self, policy: Policy, *, deterministic: bool = True, batch: int = 32) -> None:
        self.actor = PolicyActor(policy, deterministic=deterministic, batch=batch)
        self._history: Observation = {}
        self._chunk = torch.empty(0)
        self._begin = torch.empty(0, dtype=torch.int64)  # (N,) step of the episode since which chunks are counted
        self._replan = False
        self.on_chunk: Callable[[Tensor, Tensor], None] | None = None  # called with new chunks (R, H, A) of rows (R,)

    def replan(self) -> None:
        """Discard the current chunks, e.g. after a person has acted; the next call starts new ones."""
        self._replan = True

    def __call__(self, sim: VectorSim, obs: Observation) -> Tensor:
        """Return one action per row, from new chunks where the chunk has ended or the episode has started."""
        step, action_horizon = sim.episode_step, self.actor.action_horizon
        fresh = step == 0
        if self._replan or not len(self._begin):
            self._begin, self._replan = step.clone(), False
        self._begin = torch.where(fresh, 0, self._begin)
        if not self._history:
            self._history = {
                key: value.unsqueeze(1).repeat_interleave(self.actor.obs_horizon, 1) for key, value in obs.items()
            }
        for key, value in obs.items():
            pushed = torch.cat([self._history[key][:, 1:], value.unsqueeze(1)], 1)
            first = value.unsqueeze(1).expand_as(pushed)
            self._history[key] = torch.where(fresh.reshape(-1, *[1] * (pushed.dim() - 1)), first, pushed)
        place = (step - self._begin) % action_horizon
        rows = (place == 0).nonzero().flatten()
        if len(rows):
            chunk = self.actor(sim, self._history, rows, sim.episode_seed[rows], step[rows] // action_horizon)
            if not len(self._chunk):
                self._chunk = chunk.new_zeros(sim.num_envs, *chunk.shape[1:])
            self._chunk[rows] = chunk
            if self.on_chunk is not None:
                self.on_chunk(chunk, rows)
        return self._chunk[torch.arange(sim.num_envs), place]


class RandomExpert:
    """Expert with uniformly random actions, each repeated for `hold` steps so that videos show motion."""

    def __init__(self, hold: int = 4) -> None:
        self.hold = hold

    def __call__(self, sim: VectorSim, obs: Observation) -> Tensor:
        """Sample each row with a generator keyed by its episode seed and the index of the sample."""
        rows = torch.arange(sim.num_envs, device=sim.device)
        return RandomActor()(sim, obs, rows, sim.episode_seed, sim.episode_step // self.hold)[:, 0]


class ReplayExpert:
    """Expert that repeats recorded actions at other starts, in open loop: it acts where nothing is."""

    def __init__(self, episodes: Sequence[Tensor]) -> None:
        """Repeat the actions of `episodes`, `(T, A)` each; at least one must be there at the first call."""
        self.episodes = episodes

    def __call__(self, sim: VectorSim, obs: Observation) -> Tensor:
        """Repeat in each row the episode that its seed selects, and then those after it."""
        actions = torch.cat(list(self.episodes)).to(sim.device)
        starts = torch.tensor([0, *map(len, self.episodes)], device=sim.device).cumsum(0)[:-1]
        return actions[(starts[sim.episode_seed % len(starts)] + sim.episode_step) % len(actions)]


class RandomActor:
    """Actor with uniformly random actions, the baseline of any result."""

    action_horizon = 1
    obs_horizon = 1
    network_calls = 0
    policy_calls = 0

    def __call__(self, sim: VectorSim, obs: Observation, rows: Tensor, seeds: Tensor, decisions: Tensor) -> Tensor:
        """Sample each row with a generator keyed by its episode seed and decision index."""
        if seeds.device.type != "cpu":
            low, high = sim.spec.action_low.to(seeds.device), sim.spec.action_high.to(seeds.device)
            shape = len(seeds), 1, len(low)
            return low + (high - low) * uniform(shape, row_generator(seeds, decisions), seeds.device)
        low, high = (bound.cpu().numpy() for bound in (sim.spec.action_low, sim.spec.action_high))
        keys = zip(seeds.tolist(), decisions.tolist(), strict=True)
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
