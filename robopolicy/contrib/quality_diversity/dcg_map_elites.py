"""DCG-MAP-Elites: an archive of diverse policies, and one that shows all of their behaviours (Faldor et al. 2023).

The archive keeps the best policy of every cell of behaviours. Each generation plays candidates of three kinds,
and admits those that are better than what their cell holds:

* *mutants* of elites (iso+line): `x1 + iso * noise + line * number * (x2 - x1)`;
* *climbers*, elites after some gradient steps up the critic at their own descriptor d, `mean Q(s, pi(s) | d)`;
* the *actor* pi(s | d') asked for descriptors d' of elites.

Critic and actor are TD3's, conditioned on the wanted descriptor d' through the observation `descriptor`. Their reward
is `r exp(-|d - d'| / length)`, d being what the episode achieved: behaving as asked pays, everything else does not. So
the actor, which is what the run deploys, becomes the whole archive in one policy at no further episode.

Use it for repertoires of gaits, recoveries and motions, from scratch, in fast simulation and with a few numbers that
tell behaviours apart (`task.wrappers=[descriptor]`). Not for one task that is to be solved as well as possible (td3,
sac), and not where rewards are mostly negative: what is scaled down is then preferred.

Deviations from the public code: cells come from pyribs; every candidate of the actor competes for the archive, where
the code plays separate ones for experience alone; a member is the network of the actor with a constant in place of the
descriptor, so that injecting the actor costs nothing; all climbers of a step see the same states. Observations must not
be normalised by running statistics, under which old elites would change. `utd`, `num_steps`, `noise` and
`exploration_noise_max` are not read.
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
    cells: PositiveInt = 1024  # of the archive
    fitness_floor: Finite = 0.0  # return that counts as nothing in the QD score
    ga_offspring: NonNegativeInt = 128  # candidates of a generation by mutation
    pg_offspring: NonNegativeInt = 128  # by gradient steps
    actors: NonNegativeInt = 64  # by asking the actor
    critic_steps: PositiveInt = 3000  # per generation
    pg_steps: NonNegativeInt = 150  # of every climber
    pg_lr: Positive = 5e-3  # their learning rate
    iso: NonNegative = 0.005  # standard deviation of the mutation of every weight
    line: NonNegative = 0.05  # standard deviation of the step along the line to another elite
    length: Positive = 0.1  # distance of descriptors, from 0 to 1 each, at which the reward has fallen to 1 / e

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.ga_offspring + self.pg_offspring + self.actors < 1:
            raise UserError("algorithm.ga_offspring, pg_offspring and actors must be at least 1 together, got 0.")


def conditioned(windows: Transitions, length: float) -> Transitions:
    """Windows in which the wanted descriptor is seen, and the reward pays for coming near it."""
    achieved, wanted = windows.record["achieved"], windows.record["wanted"]
    similarity = torch.exp(-(achieved - wanted).norm(dim=1) / length)
    return replace(
        windows,
        obs=condition_on(windows.obs, wanted),
        next_obs=condition_on(windows.next_obs, wanted),
        rewards=windows.rewards * similarity[:, None],
        reward=windows.reward * similarity,
    )


def condition_on(obs: Observation, wanted: Tensor) -> Observation:
    """`obs` `{key: (B, To, ...)}` with descriptors `(B, C)` in all of its history."""
    return {**obs, DESCRIPTOR: wanted[:, None].expand(-1, obs[DESCRIPTOR].shape[1], -1)}


def iso_line_crossover(first: Tensor, second: Tensor, iso: float, line: float, generator: torch.Generator) -> Tensor:
    """Children `(K, D)` of parents `(K, D)`: noise on every number, and one step each along the line between both."""
    noise = torch.randn(first.shape, generator=generator)
    step = torch.randn(len(first), 1, generator=generator)
    return first + iso * noise + line * step * (second - first)


def missing_settings(policy: Policy) -> list[str]:
    """What has to be set for `policy` to become the actor of a repertoire."""
    gaussian = isinstance(policy, GaussianPolicy)
    lacks = {
        "policy=squashed_gaussian": not gaussian or not policy.config.squash,
        "policy.normalization=identity": not gaussian or policy.encoder.normalizer.mode == "running",
        "task.wrappers=[descriptor]": DESCRIPTOR not in policy.spec.observation,
    }
    return [setting for setting, lacking in lacks.items() if lacking]


class DCGMAPElites(TD3):
    """MAP-Elites whose variations follow a descriptor-conditioned critic."""

    name = "dcg_map_elites"
    config_class = DCGMAPElitesConfig
    data_source = "population"
    heads = ("squashed_gaussian",)
    reference = "faldor2023dcgmapelites"
    config: DCGMAPElitesConfig
    chunk_starts_only: ClassVar[bool] = True  # records say which behaviour a window belongs to

    def __init__(self, config: DCGMAPElitesConfig, policy: Policy, *, total_updates: int) -> None:
        """Prepare to train a squashed Gaussian `policy` that sees a descriptor."""
        missing = missing_settings(policy)
        if missing:
            raise UserError(
                "A repertoire needs a squashed Gaussian that sees a descriptor, and goes on seeing the same, got "
                f"'{policy.name}'; pass {' '.join(missing)}, on a task whose behavior is measured, e.g. task=arm."
            )
        super().__init__(config, policy, total_updates=total_updates)
        self.population = Population(self.policy)
        size, behaviours = self.population.weight_dim, self.population.descriptor_dim
        self.archive = EliteArchive(
            size + behaviours, behaviours, config.cells, floor=config.fitness_floor, seed=config.seed
        )
        self.candidates = self._first()  # of the coming generation

    def _first(self) -> EvaluationBatch:
        """The policy and fresh networks, at random descriptors."""
        config, count = self.config, self.config.ga_offspring + self.config.pg_offspring + self.config.actors
        weights = self.population.fresh(count, config.seed)
        with torch.device("cpu"):  # that of the generator, whatever the network is built on
            constants = torch.rand(count, self.population.descriptor_dim, generator=self.generator)
            asked = torch.zeros(count, dtype=torch.bool)
        return EvaluationBatch(torch.cat([weights, constants.to(weights.device)], 1), asked)

    def update(self, batch: PopulationBatch) -> Metrics:
        """Selection, steps of critic and actor, and the candidates of the next generation."""
        candidates, scores = batch.candidates, batch.scores
        admitted = self.archive.add(candidates.members, scores.fitness, scores.descriptor)
        metrics = {f"archive/{key}": value for key, value in self.archive.metrics().items()}
        metrics |= self._shares(candidates, admitted)
        if bool(candidates.asked.any()):
            asked = candidates.asked.to(scores.descriptor.device)
            wanted = self.population.split(candidates.members)[1].to(scores.descriptor)
            metrics["actor/descriptor_error"] = float((scores.descriptor - wanted)[asked].norm(dim=1).mean())
        windows = conditioned(batch.windows, self.config.length)
        metrics |= super().update(windows)
        self.candidates = self._bred(windows.obs)
        return metrics

    def _shares(self, candidates: EvaluationBatch, admitted: Tensor) -> Metrics:
        """Which share of each kind of candidates was admitted; of the first generation, of all."""
        if not self.updates:
            return {"archive/admitted": float(admitted.double().mean())}
        counts = [self.config.ga_offspring, self.config.pg_offspring, self.config.actors]
        kinds = zip(("mutants", "climbers", "actors"), admitted.double().split(counts), strict=True)
        return {f"archive/admitted_{name}": float(rows.mean()) for name, rows in kinds if len(rows)}

    # Variation.

    def _bred(self, obs: Observation) -> EvaluationBatch:
        """Mutants, climbers and the actor, in this order; `obs` are states to climb at."""
        config, device = self.config, self.policy.device
        pg_offspring = self._climbed(self.archive.sample(config.pg_offspring, self.generator), obs)
        wanted = self.archive.sample(config.actors, self.generator).descriptor.float()
        members = torch.cat([self._mutated().to(device), pg_offspring, self.population.member(wanted)])
        return EvaluationBatch(members, torch.arange(len(members)) >= config.ga_offspring + config.pg_offspring)

    def _mutated(self) -> Tensor:
        count = self.config.ga_offspring
        first, second = (self.archive.sample(count, self.generator).solution for _ in range(2))
        size = self.population.weight_dim
        children = iso_line_crossover(
            first[:, :size], second[:, :size], self.config.iso, self.config.line, self.generator
        )
        return torch.cat([children, first[:, size:]], 1)

    def _climbed(self, parents: Elites, obs: Observation) -> Tensor:
        """Parents after gradient steps up the critic at their own descriptors; every one climbs by itself."""
        device = self.policy.device
        weights, constants = (part.clone() for part in self.population.split(parents.solution.to(device)))
        if not len(parents):
            return torch.cat([weights, constants], 1)
        wanted = parents.descriptor.to(weights)
        weights.requires_grad_()
        optimizer = torch.optim.Adam([weights], lr=self.config.pg_lr)
        rows = len(next(iter(obs.values())))
        for _ in range(self.config.pg_steps):
            index = torch.randint(rows, (self.config.batch_size,), generator=self.generator).to(device)
            seen = {key: value[index] for key, value in obs.items()}
            optimizer_step(optimizer, -self.values(weights, constants, wanted, seen).mean(1).sum())
        return torch.cat([weights.detach(), constants], 1)

    def values(self, weights: Tensor, constants: Tensor, wanted: Tensor, obs: Observation) -> Tensor:
        """First critic's values `(K, B)` of what K members play at the same B observations `{key: (B, To, ...)}`.

        Args:
            weights: (K, D).
            constants: (K, C) seen as descriptor.
            wanted: (K, C) descriptors at which they are judged.
            obs: Theirs is replaced.
        """
        count, rows = len(weights), len(next(iter(obs.values())))
        spread = {key: value.expand(count, *value.shape) for key, value in obs.items()}
        chunks = self.population.modes(weights, constants, spread).flatten(0, 1)
        flat = {key: value.flatten(0, 1) for key, value in spread.items()}
        return q1(self.critic, condition_on(flat, wanted.repeat_interleave(rows, 0)), chunks).view(count, rows)

    # What a run leaves behind.

    def elites(self) -> Elites:
        """Everybody in the archive."""
        return self.archive.elites()

    @torch.no_grad()
    def extract_policy(self, member: Tensor) -> GaussianPolicy:
        """A member `(D + C,)` as a policy that ignores what it is asked for.

        Raises:
            UserError: The network is not a plain MLP on vectors.
        """
        policy = copy.deepcopy(self.policy)
        encoder = policy.encoder
        if not isinstance(policy.actor, DirectMLP) or encoder.feature_dim != encoder.vector_dim:
            raise UserError("Elites can be taken out of networks with policy.backbone=mlp that see vectors alone.")
        member = member.to(policy.device)
        self.population.put(member, policy)
        constant = member[self.population.weight_dim :]
        start = sum(encoder.sizes[key] for key in encoder.layout.vectors if key < DESCRIPTOR)
        columns = slice(start, start + len(constant))
        seen = torch.zeros(encoder.feature_dim, device=policy.device)
        seen[columns] = constant
        features = encoder.normalizer.normalize(seen)[columns].repeat(policy.spec.obs_horizon)
        first = next(layer for layer in policy.actor.modules() if isinstance(layer, nn.Linear))
        weight = first.weight.view(first.out_features, policy.spec.obs_horizon, encoder.feature_dim)
        first.bias.data.add_(weight[:, :, columns].flatten(1) @ features)
        weight[:, :, columns] = 0.0
        return policy

    def checkpoint_items(self) -> Mapping[str, Checkpointable]:
        """Those of TD3 and the archive."""
        return {**super().checkpoint_items(), "archive": self.archive}

    def state_dict(self) -> dict[str, object]:
        """Those of the parts, and who is played next."""
        return {**super().state_dict(), "candidates": dict(vars(self.candidates))}

    def load_state_dict(self, state: Mapping[str, object]) -> None:
        """Restore `state_dict`."""
        super().load_state_dict(state)
        saved: Mapping[str, Tensor] = state["candidates"]  # type: ignore[assignment]
        self.candidates = EvaluationBatch(saved["members"].to(self.policy.device), saved["asked"].clone())
