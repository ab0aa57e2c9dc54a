"""DCG-MAP-Elites: an archive of diverse policies, distilled into one conditional policy (Faldor et al. 2023).

The archive keeps the best policy of every cell of the descriptor space. Each generation evaluates candidates of three
kinds, and admits those that are better than the elite of their cell:

* *mutants* of elites (iso+line): `x1 + iso * noise + line * number * (x2 - x1)`; * *gradient offspring*, elites after
gradient steps on the critic at their own descriptor d, `mean Q(s, pi(s) | d)`; * the *actor* pi(s | d') conditioned on
descriptors d' of elites.

Critic and actor are TD3's, conditioned on the target descriptor d' through the observation `descriptor`. Their reward
is `r exp(-|d - d'| / length)`, with d the achieved descriptor of the episode, so that only the target behavior is
rewarded. The actor, which the run deploys, thus learns the whole archive in one policy without further episodes.

Use it for repertoires of gaits, recoveries and motions, from scratch, in fast simulation and with a few numbers that
describe behavior (`task.wrappers=[descriptor]`). Do not use it to maximise performance on one task (td3, sac), or where
rewards are mostly negative: scaling them down would then be rewarded.

Deviations from the public code: cells come from pyribs; every candidate of the actor competes for the archive (the
code: separate ones collect experience only); a member is the network of the actor with a constant descriptor, so that
injecting the actor is free; all gradient offspring of a step use the same states. Observations must not be normalised
by running statistics, which would change old elites. `utd`, `num_steps`, `noise` and `exploration_noise_max` are not
used.
"""

from __future__ import annotations

import copy
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import ClassVar

import torch
from torch import Tensor, nn

from robopolicy.algorithms.common.algorithm import Checkpointable, Metrics
from robopolicy.algorithms.common.off_policy import optimizer_step
from robopolicy.algorithms.td3 import TD3, TD3Config, q1
from robopolicy.constraints import Finite, NonNegative, NonNegativeInt, Positive, PositiveInt
from robopolicy.contrib.quality_diversity.behavior import DESCRIPTOR
from robopolicy.contrib.quality_diversity.elites import EliteArchive, Elites
from robopolicy.contrib.quality_diversity.generation import EvaluationBatch, PopulationBatch
from robopolicy.contrib.quality_diversity.stacked_policies import Population
from robopolicy.critics.q import CriticConfig
from robopolicy.data.batches import Transitions
from robopolicy.errors import UserError
from robopolicy.nets.backbone import DirectMLP
from robopolicy.policies.base import Observation, Policy
from robopolicy.policies.heads.gaussian import GaussianPolicy


@dataclass(frozen=True)
class DCGMAPElitesConfig(TD3Config):
    """Settings of DCG-MAP-Elites; defaults are the public code's, which ran on a GPU."""

    batch_size: PositiveInt = 100  # windows per gradient step
    critic: CriticConfig = field(
        default_factory=lambda: CriticConfig(hidden=(256, 256), activation="relu", layer_norm=False)
    )
    policy_delay: PositiveInt = 2  # critic steps per actor step
    critic_target_interval: NonNegativeInt = 1  # critic steps per update of the target critic; 0: policy_delay
    cells: PositiveInt = 1024  # of the archive
    fitness_floor: Finite = 0.0  # return that counts as 0 in the QD score
    ga_offspring: NonNegativeInt = 128  # candidates of a generation by mutation
    pg_offspring: NonNegativeInt = 128  # candidates by gradient steps
    actors: NonNegativeInt = 64  # candidates from the actor
    critic_steps: PositiveInt = 3000  # per generation
    pg_steps: NonNegativeInt = 150  # gradient steps of each offspring
    pg_lr: Positive = 5e-3  # their learning rate
    iso: NonNegative = 0.005  # standard deviation of the mutation of every weight
    line: NonNegative = 0.05  # standard deviation of the step along the line to another elite
    length: Positive = 0.1  # distance of descriptors, in [0, 1] each, at which the reward has fallen to 1 / e

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.ga_offspring + self.pg_offspring + self.actors < 1:
            raise UserError("The sum of algorithm.ga_offspring, pg_offspring and actors must be at least 1, got 0.")


def conditioned(windows: Transitions, length: float) -> Transitions:
    """Windows conditioned on the target descriptor, with rewards scaled by the similarity to it."""
    achieved, target = windows.record["achieved"], windows.record["wanted"]
    similarity = torch.exp(-(achieved - target).norm(dim=1) / length)
    return replace(
        windows,
        obs=condition_on(windows.obs, target),
        next_obs=condition_on(windows.next_obs, target),
        rewards=windows.rewards * similarity[:, None],
        reward=windows.reward * similarity,
    )


def condition_on(obs: Observation, descriptor: Tensor) -> Observation:
    """Set descriptors `(B, C)` in the whole history of `obs` `{key: (B, To, ...)}`."""
    return {**obs, DESCRIPTOR: descriptor[:, None].expand(-1, obs[DESCRIPTOR].shape[1], -1)}


def iso_line_crossover(first: Tensor, second: Tensor, iso: float, line: float, generator: torch.Generator) -> Tensor:
    """Children `(K, D)` of parents `(K, D)`: noise on every number, plus a random step along the line between both."""
    noise = torch.randn(first.shape, generator=generator)
    step = torch.randn(len(first), 1, generator=generator)
    return first + iso * noise + line * step * (second - first)


def missing_settings(policy: Policy) -> list[str]:
    """Settings that `policy` needs to become the actor of an archive."""
    gaussian = isinstance(policy, GaussianPolicy)
    lacks = {
        "policy=squashed_gaussian": not gaussian or not policy.config.squash,
        "policy.normalization=identity": not gaussian or policy.encoder.normalizer.mode == "running",
        "task.wrappers=[descriptor]": DESCRIPTOR not in policy.spec.observation,
    }
    return [setting for setting, lacking in lacks.items() if lacking]


class DCGMAPElites(TD3):
    """MAP-Elites with variation by a descriptor-conditioned critic."""

    name = "dcg_map_elites"
    config_class = DCGMAPElitesConfig
    data_source = "population"
    heads = ("squashed_gaussian",)
    reference = "faldor2023dcgmapelites"
    supports_overlap = False
    config: DCGMAPElitesConfig
    chunk_starts_only: ClassVar[bool] = True  # records contain the descriptors of a window's episode

    def __init__(self, config: DCGMAPElitesConfig, policy: Policy, *, total_updates: int) -> None:
        """Prepare to train a squashed Gaussian `policy` that observes a descriptor."""
        missing = missing_settings(policy)
        if missing:
            raise UserError(
                "DCG-MAP-Elites needs a squashed Gaussian that observes a descriptor, with fixed normalization, got "
                f"'{policy.name}'; pass {' '.join(missing)}, on a task with a behavior descriptor, e.g. task=arm."
            )
        super().__init__(config, policy, total_updates=total_updates)
        self.generator = torch.Generator().manual_seed(config.seed)  # individuals are stored on the CPU
        self.population = Population(self.policy)
        size, behaviours = self.population.weight_dim, self.population.descriptor_dim
        self.archive = EliteArchive(
            size + behaviours, behaviours, config.cells, floor=config.fitness_floor, seed=config.seed
        )
        self.candidates = self._initial_candidates()  # of the next generation

    def _initial_candidates(self) -> EvaluationBatch:
        """The policy and new networks, at random descriptors."""
        config, count = self.config, self.config.ga_offspring + self.config.pg_offspring + self.config.actors
        weights = self.population.fresh(count, config.seed)
        with torch.device("cpu"):  # independent of the network's device
            constants = torch.rand(count, self.population.descriptor_dim, generator=self.generator)
            asked = torch.zeros(count, dtype=torch.bool)
        return EvaluationBatch(torch.cat([weights, constants.to(weights.device)], 1), asked)

    def update(self, batch: PopulationBatch) -> Metrics:
        """Select, take steps of critic and actor, and vary the elites to the next candidates."""
        candidates, scores = batch.candidates, batch.scores
        admitted = self.archive.add(candidates.members, scores.fitness, scores.descriptor)
        metrics = {f"archive/{key}": value for key, value in self.archive.metrics().items()}
        metrics |= self._admission_rates(candidates, admitted)
        if bool(candidates.asked.any()):
            asked = candidates.asked.to(scores.descriptor.device)
            target = self.population.split(candidates.members)[1].to(scores.descriptor)
            metrics["actor/descriptor_error"] = float((scores.descriptor - target)[asked].norm(dim=1).mean())
        windows = conditioned(batch.windows, self.config.length)
        metrics |= super().update(windows)
        self.candidates = self._next_candidates(windows.obs)
        return metrics

    def _admission_rates(self, candidates: EvaluationBatch, admitted: Tensor) -> Metrics:
        """Admitted fraction of each kind of candidates; in the first generation, of all."""
        if not self.updates:
            return {"archive/admitted": float(admitted.double().mean())}
        counts = [self.config.ga_offspring, self.config.pg_offspring, self.config.actors]
        kinds = zip(("mutants", "climbers", "actors"), admitted.double().split(counts), strict=True)
        return {f"archive/admitted_{name}": float(rows.mean()) for name, rows in kinds if len(rows)}

    # Variation.

    def _next_candidates(self, obs: Observation) -> EvaluationBatch:
        """Mutants, gradient offspring and the actor, in this order; `obs` are states for the gradient steps."""
        config, device = self.config, self.policy.device
        pg_offspring = self._gradient_offspring(self.archive.sample(config.pg_offspring, self.generator), obs)
        target = self.archive.sample(config.actors, self.generator).descriptor.float()
        members = torch.cat([self._mutants().to(device), pg_offspring, self.population.member(target)])
        return EvaluationBatch(members, torch.arange(len(members)) >= config.ga_offspring + config.pg_offspring)

    def _mutants(self) -> Tensor:
        count = self.config.ga_offspring
        first, second = (self.archive.sample(count, self.generator).solution for _ in range(2))
        size = self.population.weight_dim
        children = iso_line_crossover(
            first[:, :size], second[:, :size], self.config.iso, self.config.line, self.generator
        )
        return torch.cat([children, first[:, size:]], 1)

    def _gradient_offspring(self, parents: Elites, obs: Observation) -> Tensor:
        """Parents after separate gradient steps on the critic at their own descriptors."""
        device = self.policy.device
        weights, constants = (part.clone() for part in self.population.split(parents.solution.to(device)))
        if not len(parents):
            return torch.cat([weights, constants], 1)
        target = parents.descriptor.to(weights)
        weights.requires_grad_()
        optimizer = torch.optim.Adam([weights], lr=self.config.pg_lr)
        rows = len(next(iter(obs.values())))
        for _ in range(self.config.pg_steps):
            index = torch.randint(rows, (self.config.batch_size,), generator=self.generator).to(device)
            states = {key: value[index] for key, value in obs.items()}
            optimizer_step(optimizer, -self.values(weights, constants, target, states).mean(1).sum())
        return torch.cat([weights.detach(), constants], 1)

    def values(self, weights: Tensor, constants: Tensor, target: Tensor, obs: Observation) -> Tensor:
        """First critic's values `(K, B)` of the actions of K members at the same B observations `{key: (B, To, ...)}`.

        Args:
            weights: (K, D).
            constants: (K, C) descriptor observation of the members.
            target: (K, C) descriptor condition of the critic.
            obs: Observations; their descriptor is replaced.
        """
        count, rows = len(weights), len(next(iter(obs.values())))
        spread = {key: value.expand(count, *value.shape) for key, value in obs.items()}
        chunks = self.population.modes(weights, constants, spread).flatten(0, 1)
        flat = {key: value.flatten(0, 1) for key, value in spread.items()}
        return q1(self.critic, condition_on(flat, target.repeat_interleave(rows, 0)), chunks).view(count, rows)

    # Results of a run.

    def elites(self) -> Elites:
        """All elites of the archive."""
        return self.archive.elites()

    @torch.no_grad()
    def extract_policy(self, member: Tensor) -> GaussianPolicy:
        """Extract a member `(D + C,)` as a policy that ignores its descriptor observation.

        Raises:
            UserError: The network is not a plain MLP on vectors.
        """
        policy = copy.deepcopy(self.policy)
        encoder = policy.encoder
        if not isinstance(policy.actor, DirectMLP) or encoder.feature_dim != encoder.vector_dim:
            raise UserError("Extracting an elite needs policy.backbone=mlp and vector observations only.")
        member = member.to(policy.device)
        self.population.put(member, policy)
        constant = member[self.population.weight_dim :]
        start = sum(encoder.sizes[key] for key in encoder.layout.vectors if key < DESCRIPTOR)
        columns = slice(start, start + len(constant))
        values = torch.zeros(encoder.feature_dim, device=policy.device)
        values[columns] = constant
        features = encoder.normalizer.normalize(values)[columns].repeat(policy.spec.obs_horizon)
        first = next(layer for layer in policy.actor.modules() if isinstance(layer, nn.Linear))
        weight = first.weight.view(first.out_features, policy.spec.obs_horizon, encoder.feature_dim)
        first.bias.data.add_(weight[:, :, columns].flatten(1) @ features)
        weight[:, :, columns] = 0.0
        return policy

    def checkpoint_items(self) -> Mapping[str, Checkpointable]:
        """Items of TD3 and the archive."""
        return {**super().checkpoint_items(), "archive": self.archive}

    def state_dict(self) -> dict[str, object]:
        """States of the items and the next candidates."""
        return {**super().state_dict(), "candidates": dict(vars(self.candidates))}

    def load_state_dict(self, state: Mapping[str, object]) -> None:
        """Restore `state_dict`."""
        super().load_state_dict(state)
        saved: Mapping[str, Tensor] = state["candidates"]  # type: ignore[assignment]
        self.candidates = EvaluationBatch(saved["members"].to(self.policy.device), saved["asked"].clone())
