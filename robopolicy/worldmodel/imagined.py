"""Generate, imagine, refine: a policy whose chunks are tried in a learned model before the best is played.

Source: Zhang et al. 2026, StarWM.

    planner = ImaginedPolicy(base, FilmDynamics(world, world.judge, shapes), Imagining(candidates=8))

Of N chunks that the policy proposes each is played in the model, the policy itself going on from there for `depth`
decisions in all; what the model then pays decides. Refinement proposes N more around the best ones, ever closer
(cross-entropy method), and whatever was the best at any time is played. One candidate without refinement is the base
policy itself.

Use it where the model is better at telling good from bad than the policy is at choosing. A model that knows nothing
picks blindly among the policy's own samples, which costs time but, without refinement, no more than that; refinement
trusts the model beyond what the policy would do.

Reconstructed from the abstract of StarWM, whose model writes observations of a game in words for a language model to
reflect on: here the model predicts frames or states, and a number, the judge's or a reward, takes the place of
reflection.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any, ClassVar, Protocol

import torch
from torch import Tensor

from robopolicy.constraints import NonNegativeInt, PositiveFraction, PositiveInt, Validated
from robopolicy.errors import UserError
from robopolicy.nets.encoder import IMAGE_PREFIX
from robopolicy.policies.base import Observation, Policy, Sample
from robopolicy.policies.noise import PerRowGenerator, Randomness, normal
from robopolicy.policies.wrappers.best_of_n import Candidates
from robopolicy.worldmodel.contract import SuccessDetector, VideoWorldModel, first_frames


class LearnedDynamics(Protocol):
    """What imagination needs of a model."""

    def begin(self, obs: Observation) -> Any:
        """The state in which the newest observations `{key: (R, ...)}` leave the model."""
        ...

    def step(self, state: Any, actions: Tensor) -> tuple[Any, Observation, Tensor]:
        """Play `actions` `(R, k, A)`: the state after them, observations `{key: (R, k, ...)}` and rewards `(R, k)`."""
        ...


@dataclass(frozen=True)
class FunctionDynamics:
    """A function as model of one control step."""

    # `function(obs, action) -> (obs, reward)`: `{key: (R, ...)}` and `(R, A)` to the next ones and `(R,)`
    function: Callable[[Observation, Tensor], tuple[Observation, Tensor]]

    def begin(self, obs: Observation) -> Observation:
        """The observations are all there is."""
        return obs

    def step(self, state: Observation, actions: Tensor) -> tuple[Observation, Observation, Tensor]:
        """One call per action."""
        seen: list[Observation] = []
        rewards: list[Tensor] = []
        for action in actions.unbind(1):
            state, reward = self.function(state, action)
            seen.append(state)
            rewards.append(reward)
        return state, {key: torch.stack([obs[key] for obs in seen], 1) for key in state}, torch.stack(rewards, 1)


class VideoDynamics:
    """A video world model and its judge: the reward is what success and progress have gained."""

    def __init__(
        self, model: VideoWorldModel, judge: SuccessDetector, observation: Mapping[str, tuple[int, ...]]
    ) -> None:
        """Imagine with `model`; `observation` gives the shapes of the vectors that it predicts, by key."""
        self.model, self.judge = model, judge
        self.sizes = [torch.Size(observation[key]).numel() for key in model.spec.proprio]
        images = {IMAGE_PREFIX + camera: (3, model.spec.size, model.spec.size) for camera in model.spec.cameras}
        self.observation = {key: tuple(observation[key]) for key in model.spec.proprio} | images

    def begin(self, obs: Observation) -> tuple[Any, Tensor]:
        """A film that begins with the newest frame; row i has the noise of film i."""
        spec, device = self.model.spec, next(iter(obs.values())).device
        images = {camera: obs[IMAGE_PREFIX + camera] for camera in spec.cameras}
        rows = len(next(iter(images.values())))
        vectors = [obs[key].flatten(1) for key in spec.proprio]
        proprio = torch.cat(vectors, 1) if vectors else torch.zeros(rows, 0, device=device)
        state = self.model.reset(*first_frames(spec, images, proprio), seeds=torch.arange(rows))
        return state, self._worth({camera: view[:, None] for camera, view in images.items()}, proprio[:, None])

    def step(self, state: tuple[Any, Tensor], actions: Tensor) -> tuple[tuple[Any, Tensor], Observation, Tensor]:
        """Film the actions; only the last frame is judged."""
        film, worth = state
        film, frames = self.model.step(film, actions)
        after = self._worth(frames.images, frames.proprio)
        rewards = torch.zeros(actions.shape[:2])
        rewards[:, -1] = after - worth
        seen = {IMAGE_PREFIX + camera: view for camera, view in frames.images.items()}
        if self.sizes:
            parts = zip(self.model.spec.proprio, frames.proprio.split(self.sizes, -1), strict=True)
            seen |= {key: value.unflatten(-1, self.observation[key]) for key, value in parts}
        return (film, after), seen, rewards

    def _worth(self, images: dict[str, Tensor], proprio: Tensor) -> Tensor:
        """Success, where the judge is sure, plus progress `(R,)`."""
        told = self.judge(images, proprio)
        return (torch.where(told.uncertain, 0.0, told.success) + told.progress).float().cpu()


@dataclass(frozen=True)
class ShootingConfig(Validated):
    """How much is imagined before a chunk is played."""

    candidates: PositiveInt = 8  # N, chunks that the policy proposes
    depth: PositiveInt = 1  # decisions imagined: the candidate, and then what the policy would do
    rounds: NonNegativeInt = 0  # further rounds of N chunks around the best
    elites: PositiveInt = 3  # best chunks of all rounds so far, around which the next ones are drawn
    discount: PositiveFraction = 1.0  # of rewards, per control step


class ImaginedPolicy(Policy):
    """Best of the chunks of `base` by what `dynamics` makes of them; verbs `act` and `sample`."""

    name: ClassVar[str] = "imagined"

    def __init__(
        self,
        base: Policy,
        dynamics: LearnedDynamics,
        config: ShootingConfig | None = None,
        observation: Mapping[str, tuple[int, ...]] | None = None,
    ) -> None:
        """Wrap `base`, which is shared with the caller.

        Args:
            base: Policy that proposes.
            dynamics: Model that they are tried in.
            config: How much is imagined.
            observation: Shapes of what the model must see besides what the policy does.

        Raises:
            UserError: The policy has a memory, or sees what the model does not predict though it is to go on in it.
        """
        super().__init__()
        self.base, self.dynamics, self.config = base, dynamics, config or ShootingConfig()
        if base.spec.hidden_dim:
            raise UserError("A recurrent policy cannot imagine: its memory is not part of the model.")
        missing = sorted(base.spec.observation.keys() - observation.keys()) if observation is not None else []
        if missing and self.config.depth > 1:
            raise UserError(f"The model does not predict '{missing[0]}', which the policy sees; set depth 1.")
        self.spec = replace(base.spec, observation={**base.spec.observation, **(observation or {})})

    @property
    def network_calls(self) -> int:
        """Those of the policy; what the model costs is not counted."""
        config = self.config
        return self.base.nfe * config.candidates * (1 + (config.depth - 1) * (1 + config.rounds))

    @torch.no_grad()
    def act(self, obs: Observation, *, deterministic: bool = False, generator: Randomness = None) -> Tensor:
        """The best chunk `(B, H, A)`."""
        config = self.config
        if config.candidates == 1 and not config.rounds:
            return self.base.act(self._seen(obs), deterministic=deterministic, generator=generator)
        return self.propose(obs, generator=generator).best()

    @torch.no_grad()
    def propose(self, obs: Observation, *, generator: Randomness = None) -> Candidates:
        """All chunks that were tried `(B, C, H, A)`, and what they were worth."""
        count, config = self.config.candidates, self.config
        chunks = self.base.sample_many(self._seen(obs), count, generator=generator)
        low, high = chunks.amin(1, keepdim=True), chunks.amax(1, keepdim=True)
        found = Candidates(chunks, self.imagine(obs, chunks))
        for _ in range(config.rounds):
            elites = self._elites(found)  # (B, E, H, A)
            mean, std = elites.mean(1, keepdim=True), elites.std(1, unbiased=False, keepdim=True)
            noise = normal((len(mean), count, *mean.shape[2:]), generator, mean.device)
            drawn = torch.minimum(torch.maximum(mean + std * noise, low), high)
            chunks = torch.cat([found.chunks, drawn], 1)
            found = Candidates(chunks, torch.cat([found.values, self.imagine(obs, drawn)], 1))
        return found

    def imagine(self, obs: Observation, chunks: Tensor) -> Tensor:
        """Discounted rewards `(B, C)` that the model pays for `chunks` `(B, C, H, A)` and what follows them."""
        count, action_horizon, history = chunks.shape[1], self.spec.action_horizon, self.spec.obs_horizon
        rows = {key: value.repeat_interleave(count, 0) for key, value in obs.items()}  # (B C, To, ...)
        state = self.dynamics.begin({key: value[:, -1] for key, value in rows.items()})
        chunk, total = chunks.flatten(0, 1), chunks.new_zeros(len(chunks) * count)
        for decision in range(self.config.depth):
            if decision:
                # The same noise for every row, so that candidates meet the same future.
                streams = PerRowGenerator([0] * len(chunk), [decision] * len(chunk))
                chunk = self.base.act(self._seen(rows), deterministic=True, generator=streams)
            state, seen, rewards = self.dynamics.step(state, chunk[:, :action_horizon])
            steps = decision * action_horizon + torch.arange(action_horizon, device=total.device)
            total = total + (rewards.to(total) * self.config.discount**steps).sum(1)
            for key in seen.keys() & rows.keys():
                rows[key] = torch.cat([rows[key], seen[key].to(rows[key])], 1)[:, -history:]
        return total.unflatten(0, (-1, count))

    def sample(self, obs: Observation, *, generator: Randomness = None) -> Sample:
        """The chosen chunk; it has no density."""
        return Sample.unscored(self.act(obs, generator=generator))

    def _seen(self, obs: Observation) -> Observation:
        """What the policy sees of `obs`."""
        return {key: obs[key] for key in self.base.spec.observation}

    def _elites(self, found: Candidates) -> Tensor:
        """The best chunks `(B, E, H, A)`."""
        index = found.values.topk(min(self.config.elites, found.values.shape[1]), 1).indices
        return found.chunks[torch.arange(len(index), device=index.device)[:, None], index]
