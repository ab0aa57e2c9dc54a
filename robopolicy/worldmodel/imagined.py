"""Planning by random shooting in a learned model, with candidates from a policy (Zhang et al. 2026, StarWM).

    planner = ImaginedPolicy(base, VideoDynamics(world, world.judge, shapes), ShootingConfig(candidates=8))

The policy proposes N chunks. The model rolls out each of them, and the policy continues for `depth` decisions in all;
the chunk with the highest predicted return is executed. All chunks of one decision have the same noise, and in an
ensemble the mean return of all members. Refinement samples N more chunks around the best ones (cross-entropy method).
One candidate without refinement is the base policy.

Use it where the model ranks actions better than the policy. A useless model picks randomly among samples of the policy,
which only costs time; refinement can leave the distribution of the policy.

Reconstructed from the abstract of StarWM. Deviation: its model describes a game in text and a language model reflects
on it; here the model predicts frames or states, and a success detector or a reward scores them.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, ClassVar, Protocol

import torch
from torch import Tensor

from robopolicy.constraints import NonNegativeInt, PositiveFraction, PositiveInt, Validated
from robopolicy.errors import UserError
from robopolicy.nets.encoder import IMAGE_PREFIX
from robopolicy.policies.base import Observation, Policy, Sample
from robopolicy.policies.noise import Randomness, draw_seeds, normal, row_generator
from robopolicy.policies.wrappers.best_of_n import Candidates
from robopolicy.worldmodel.contract import SuccessDetector, VideoWorldModel, first_frames
from robopolicy.worldmodel.latent import EnsembleWorldModel


class LearnedDynamics(Protocol):
    """Model interface for planning."""

    @property
    def members(self) -> Sequence[LearnedDynamics]:
        """Members of an ensemble, whose returns are averaged; else the model itself."""
        ...

    def begin(self, obs: Observation, seeds: Tensor) -> Any:
        """Return the model state for the newest observations `{key: (R, ...)}`; rows of one seed `(R,)` share noise."""
        ...

    def step(self, state: Any, actions: Tensor) -> tuple[Any, Observation, Tensor]:
        """Return the state after `actions` `(R, k, A)`, observations `{key: (R, k, ...)}` and rewards `(R, k)`."""
        ...


@dataclass(frozen=True)
class FunctionDynamics:
    """A function as the model of one control step."""

    # `function(obs, action) -> (obs, reward)`: `{key: (R, ...)}` and `(R, A)` to the next ones and `(R,)`
    function: Callable[[Observation, Tensor], tuple[Observation, Tensor]]

    @property
    def members(self) -> Sequence[LearnedDynamics]:
        """The model itself."""
        return (self,)

    def begin(self, obs: Observation, seeds: Tensor) -> Observation:
        """Return the observations, which are the state."""
        return obs

    def step(self, state: Observation, actions: Tensor) -> tuple[Observation, Observation, Tensor]:
        """Call the function once per action."""
        visited: list[Observation] = []
        rewards: list[Tensor] = []
        for action in actions.unbind(1):
            state, reward = self.function(state, action)
            visited.append(state)
            rewards.append(reward)
        return state, {key: torch.stack([obs[key] for obs in visited], 1) for key in state}, torch.stack(rewards, 1)


class VideoDynamics:
    """A video world model with a success detector; the reward is the gain of success and progress."""

    def __init__(
        self, model: VideoWorldModel, judge: SuccessDetector, observation: Mapping[str, tuple[int, ...]]
    ) -> None:
        """Wrap `model`; `observation` gives the shapes of the vectors that it predicts, by key."""
        self.model, self.judge = model, judge
        self.sizes = [torch.Size(observation[key]).numel() for key in model.spec.proprio]
        images = {IMAGE_PREFIX + camera: (3, model.spec.size, model.spec.size) for camera in model.spec.cameras}
        self.observation = {key: tuple(observation[key]) for key in model.spec.proprio} | images

    @property
    def members(self) -> Sequence[LearnedDynamics]:
        """Members of an ensemble, with the shared success detector."""
        if not isinstance(self.model, EnsembleWorldModel):
            return (self,)
        return [VideoDynamics(member, self.judge, self.observation) for member in self.model.members]

    def begin(self, obs: Observation, seeds: Tensor) -> tuple[Any, Tensor]:
        """Start a video at the newest frame."""
        spec, device = self.model.spec, next(iter(obs.values())).device
        images = {camera: obs[IMAGE_PREFIX + camera] for camera in spec.cameras}
        rows = len(next(iter(images.values())))
        vectors = [obs[key].flatten(1) for key in spec.proprio]
        proprio = torch.cat(vectors, 1) if vectors else torch.zeros(rows, 0, device=device)
        state = self.model.reset(*first_frames(spec, images, proprio), seeds=seeds)
        if state.seeds.device.type == "cpu":  # rows of one seed would have one slot, and thus a network call each
            state = replace(state, slots=torch.arange(rows))
        return state, self._score({camera: view[:, None] for camera, view in images.items()}, proprio[:, None])

    def step(self, state: tuple[Any, Tensor], actions: Tensor) -> tuple[tuple[Any, Tensor], Observation, Tensor]:
        """Predict the frames of the actions; only the last one is scored."""
        video, before = state
        video, frames = self.model.step(video, actions)
        after = self._score(frames.images, frames.proprio)
        rewards = torch.zeros(actions.shape[:2], device=after.device)
        rewards[:, -1] = after - before
        obs = {IMAGE_PREFIX + camera: view for camera, view in frames.images.items()}
        if self.sizes:
            parts = zip(self.model.spec.proprio, frames.proprio.split(self.sizes, -1), strict=True)
            obs |= {key: value.unflatten(-1, self.observation[key]) for key, value in parts}
        return (video, after), obs, rewards

    def _score(self, images: dict[str, Tensor], proprio: Tensor) -> Tensor:
        """Return success, 0 where the detector abstains, plus progress `(R,)`."""
        found = self.judge(images, proprio)
        return (torch.where(found.uncertain, 0.0, found.success) + found.progress).float()


@dataclass(frozen=True)
class ShootingConfig(Validated):
    """Budget of the planner per decision."""

    candidates: PositiveInt = 8  # N, chunks that the policy proposes
    depth: PositiveInt = 1  # decisions per rollout: the candidate, then actions of the policy
    rounds: NonNegativeInt = 0  # refinement rounds of N chunks around the best
    elites: PositiveInt = 3  # best chunks of all rounds so far, around which the next ones are sampled
    discount: PositiveFraction = 1.0  # of rewards, per control step


class ImaginedPolicy(Policy):
    """Policy that selects among chunks of `base` by their return in `dynamics`; verbs `act` and `sample`."""

    name: ClassVar[str] = "imagined"

    def __init__(
        self,
        base: Policy,
        dynamics: LearnedDynamics,
        config: ShootingConfig | None = None,
        observation: Mapping[str, tuple[int, ...]] | None = None,
    ) -> None:
        """Wrap `base`, which is shared with the caller; `observation` has the shapes of the inputs of the model.

        A UserError is raised if the policy is recurrent, or depth > 1 and it needs what the model does not predict.
        """
        super().__init__()
        self.base, self.dynamics, self.config = base, dynamics, config or ShootingConfig()
        if base.spec.hidden_dim:
            raise UserError("A recurrent policy cannot plan: its hidden state is not part of the model.")
        missing = sorted(base.spec.observation.keys() - observation.keys()) if observation is not None else []
        if missing and self.config.depth > 1:
            raise UserError(f"The model does not predict '{missing[0]}', which the policy needs; set depth 1.")
        self.spec = replace(base.spec, observation={**base.spec.observation, **(observation or {})})

    @property
    def nfe(self) -> int:
        """Network evaluations of the policy; evaluations of the model are not counted."""
        config, members = self.config, len(self.dynamics.members)
        return self.base.nfe * config.candidates * (1 + (config.depth - 1) * (1 + config.rounds) * members)

    @torch.no_grad()
    def act(self, obs: Observation, *, deterministic: bool = False, generator: Randomness = None) -> Tensor:
        """Return the best chunk `(B, H, A)`."""
        config = self.config
        if config.candidates == 1 and not config.rounds:
            return self.base.act(self._base_obs(obs), deterministic=deterministic, generator=generator)
        return self.propose(obs, generator=generator).best()

    @torch.no_grad()
    def propose(self, obs: Observation, *, generator: Randomness = None) -> Candidates:
        """Return all evaluated chunks `(B, C, H, A)` with their predicted returns."""
        count, config = self.config.candidates, self.config
        chunks = self.base.sample_many(self._base_obs(obs), count, generator=generator)
        seeds = draw_seeds(len(chunks), generator, chunks.device)
        low, high = chunks.amin(1, keepdim=True), chunks.amax(1, keepdim=True)
        found = Candidates(chunks, self.imagine(obs, chunks, seeds))
        for _ in range(config.rounds):
            elites = self._elites(found)  # (B, E, H, A)
            mean, std = elites.mean(1, keepdim=True), elites.std(1, unbiased=False, keepdim=True)
            noise = normal((len(mean), count, *mean.shape[2:]), generator, mean.device)
            drawn = torch.minimum(torch.maximum(mean + std * noise, low), high)
            chunks = torch.cat([found.chunks, drawn], 1)
            found = Candidates(chunks, torch.cat([found.values, self.imagine(obs, drawn, seeds)], 1))
        return found

    def imagine(self, obs: Observation, chunks: Tensor, seeds: Tensor | None = None) -> Tensor:
        """Return the discounted predicted rewards `(B, C)` of `chunks` `(B, C, H, A)` and the decisions after them.

        All chunks of a row share the noise of its seed `(B,)`, 0 by default. Rewards of an ensemble are averaged.
        """
        seeds = torch.zeros(len(chunks), dtype=torch.int64, device=chunks.device) if seeds is None else seeds
        seeds = seeds.repeat_interleave(chunks.shape[1])
        returns = [self._returns(member, obs, chunks, seeds) for member in self.dynamics.members]
        return torch.stack(returns).mean(0)

    def _returns(self, dynamics: LearnedDynamics, obs: Observation, chunks: Tensor, seeds: Tensor) -> Tensor:
        """Return the discounted rewards `(B, C)` in one model, with the noise of `seeds` `(B C,)`."""
        count, action_horizon, history = chunks.shape[1], self.spec.action_horizon, self.spec.obs_horizon
        rows = {key: value.repeat_interleave(count, 0) for key, value in obs.items()}  # (B C, To, ...)
        state = dynamics.begin({key: value[:, -1] for key, value in rows.items()}, seeds)
        chunk, total = chunks.flatten(0, 1), chunks.new_zeros(len(chunks) * count)
        for decision in range(self.config.depth):
            if decision:
                streams = row_generator(seeds, torch.full_like(seeds, decision))
                chunk = self.base.act(self._base_obs(rows), deterministic=True, generator=streams)
            state, predicted, rewards = dynamics.step(state, chunk[:, :action_horizon])
            steps = decision * action_horizon + torch.arange(action_horizon, device=total.device)
            total = total + (rewards.to(total) * self.config.discount**steps).sum(1)
            for key in predicted.keys() & rows.keys():
                rows[key] = torch.cat([rows[key], predicted[key].to(rows[key])], 1)[:, -history:]
        return total.unflatten(0, (-1, count))

    def sample(self, obs: Observation, *, generator: Randomness = None) -> Sample:
        """Return the chosen chunk, without a density."""
        return Sample.unscored(self.act(obs, generator=generator))

    def _base_obs(self, obs: Observation) -> Observation:
        """Select the observations of the base policy."""
        return {key: obs[key] for key in self.base.spec.observation}

    def _elites(self, found: Candidates) -> Tensor:
        """Return the best chunks `(B, E, H, A)`."""
        index = found.values.topk(min(self.config.elites, found.values.shape[1]), 1).indices
        return found.chunks[torch.arange(len(index), device=index.device)[:, None], index]
