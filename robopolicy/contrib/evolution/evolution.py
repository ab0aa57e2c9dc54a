"""Gradient-free search over parameters of a network: genetic algorithm, CMA-ES, archive (`ask` / `tell`).

A *space* defines the searched numbers of a network: all of some parameters, the singular values of some matrices
(adapters), or a scale per row of some matrices. The caller defines the fitness, e.g. mean reward of a batch of texts or
success rate; only its order counts.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from robopolicy.optional import require
from robopolicy.text.rollouts.protocols import AskTellOptimizer

Genome = tuple[int, ...]


class Space(ABC):
    """Numbers of a network as one vector."""

    @abstractmethod
    def read(self) -> Tensor:
        """Return the current vector (D,) of the network."""

    @abstractmethod
    def write(self, vector: Tensor) -> None:
        """Set the network to a vector (D,)."""


class AllOf(Space):
    """All numbers of some parameters."""

    def __init__(self, parameters: Sequence[nn.Parameter]) -> None:
        self.parameters = list(parameters)

    def read(self) -> Tensor:
        """Return the concatenated parameters."""
        return torch.cat([parameter.detach().flatten() for parameter in self.parameters])

    @torch.no_grad()
    def write(self, vector: Tensor) -> None:
        """Set the parameters."""
        parts = vector.split([parameter.numel() for parameter in self.parameters])
        for parameter, part in zip(self.parameters, parts, strict=True):
            parameter.copy_(part.view_as(parameter))


class SingularValues(Space):
    """Singular values of some matrices with fixed singular vectors.

    Source: ESSA, Korotyshova et al. 2025; meant for the factors of adapters.

    A matrix of rank r has r numbers; values below `1e-6` of the largest are not searched.
    """

    def __init__(self, matrices: Sequence[nn.Parameter]) -> None:
        self.matrices = list(matrices)
        self._bases: list[tuple[Tensor, Tensor, Tensor]] = []
        for matrix in self.matrices:
            left, values, right = torch.linalg.svd(matrix.detach().double(), full_matrices=False)
            rank = int((values > 1e-6 * values.max()).sum())
            self._bases.append((left[:, :rank], values[:rank], right[:rank]))

    def read(self) -> Tensor:
        """Return the initial singular values of the matrices."""
        return torch.cat([values for _, values, _ in self._bases])

    @torch.no_grad()
    def write(self, vector: Tensor) -> None:
        """Compose the matrices with other singular values, which may be negative."""
        parts = vector.double().split([len(values) for _, values, _ in self._bases])
        for matrix, (left, _, right), values in zip(self.matrices, self._bases, parts, strict=True):
            matrix.copy_((left * values) @ right)


class RowScales(Space):
    """One factor per row of some matrices or vectors, e.g. the outputs of a last layer; 1 is the initial network."""

    def __init__(self, parameters: Sequence[nn.Parameter]) -> None:
        self.parameters = list(parameters)
        self._base = [parameter.detach().clone() for parameter in self.parameters]

    def read(self) -> Tensor:
        """Return ones."""
        return torch.ones(sum(len(base) for base in self._base))

    @torch.no_grad()
    def write(self, vector: Tensor) -> None:
        """Scale the rows."""
        parts = vector.split([len(base) for base in self._base])
        for parameter, base, part in zip(self.parameters, self._base, parts, strict=True):
            parameter.copy_(base * part.to(base).view(-1, *[1] * (base.dim() - 1)))


class DeepGA(AskTellOptimizer):
    """Mutation and truncation selection (Such et al. 2017): an individual is the chain of seeds of its mutations.

    Every generation keeps its best individual, and mutates parents drawn uniformly from the `parents` best. A network
    of any size is stored as one integer per generation.
    """

    def __init__(
        self, start: Tensor, sigma: float = 0.02, population: int = 64, parents: int = 8, seed: int = 0
    ) -> None:
        """Store the options.

        Args:
            start: (D,) initial vector.
            sigma: Standard deviation of a mutation.
            population: P, individuals of a generation.
            parents: T, individuals selected as parents.
            seed: Seed of the mutation seeds.
        """
        self.start, self.sigma, self.population, self.parents = start.detach().clone(), sigma, population, parents
        self._generator = torch.Generator().manual_seed(seed)
        self._best: list[Genome] = [()]  # parents, best first
        self._asked: list[Genome] = []

    def ask(self) -> Tensor:
        """The best individual and `P - 1` mutants `(P, D)`; the first best one is the start."""
        self._asked = [self._best[0]]
        for _ in range(self.population - 1):
            parent = self._best[self._draw(len(self._best))]
            self._asked.append((*parent, self._draw(2**31)))
        known = {genome: self.decode(genome) for genome in self._best}
        return torch.stack(
            [known[genome] if genome in known else self._mutated(known, genome) for genome in self._asked]
        )

    def tell(self, fitness: Tensor) -> None:
        """Keep the best as parents."""
        values = torch.where(fitness.isnan(), -torch.inf, fitness)
        order = torch.argsort(values, descending=True, stable=True)[: self.parents]
        self._best = [self._asked[place] for place in order.tolist()]

    def decode(self, genome: Genome) -> Tensor:
        """Return the vector (D,) of a chain of seeds."""
        vector = self.start.clone()
        for seed in genome:
            vector += self._noise(seed)
        return vector

    def best(self) -> Tensor:
        """Return the best vector (D,) of the last generation."""
        return self.decode(self._best[0])

    def _mutated(self, known: Mapping[Genome, Tensor], genome: Genome) -> Tensor:
        return known[genome[:-1]] + self._noise(genome[-1])

    def _noise(self, seed: int) -> Tensor:
        generator = torch.Generator().manual_seed(seed)
        return self.sigma * torch.randn(len(self.start), generator=generator).to(self.start)

    def _draw(self, below: int) -> int:
        return int(torch.randint(below, (1,), generator=self._generator))

    def state_dict(self) -> dict[str, Any]:
        """Return start, chains of seeds, and the generator."""
        best, asked = ([list(genome) for genome in genomes] for genomes in (self._best, self._asked))
        return {"start": self.start, "best": best, "asked": asked, "generator": self._generator.get_state()}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore `state_dict`."""
        self.start = state["start"].clone()
        self._best, self._asked = ([tuple(genome) for genome in state[key]] for key in ("best", "asked"))
        self._generator.set_state(state["generator"])


class CMAES(AskTellOptimizer):
    """Covariance matrix adaptation (the package `cma`): for up to some hundred numbers, e.g. singular values.

    Only the order of the fitness matters. The state is the reported fitness; loading repeats the run.
    """

    def __init__(self, start: Tensor, sigma: float = 0.1, population: int | None = None, seed: int = 1) -> None:
        """Store the options.

        Args:
            start: (D,) mean of the first generation.
            sigma: Standard deviation of the first generation.
            population: P; None: 4 + 3 log D.
            seed: Seed of the samples.

        Raises:
            UserError: The package is not installed.
        """
        self.start, self.sigma, self.population, self.seed = start.detach().clone(), sigma, population, seed
        self._open()

    def _open(self) -> None:
        generator = np.random.default_rng(self.seed)
        options = {"randn": lambda *shape: generator.standard_normal(shape), "seed": np.nan, "verbose": -9}
        options |= {} if self.population is None else {"popsize": self.population}
        self._search = require("cma", "evolution").CMAEvolutionStrategy(
            self.start.double().numpy(), self.sigma, options
        )
        self._asked: list[Any] = []
        self._reported: list[Tensor] = []

    def ask(self) -> Tensor:
        """Return candidates `(P, D)`."""
        self._asked = self._search.ask()
        return torch.from_numpy(np.stack(self._asked)).to(self.start)

    def tell(self, fitness: Tensor) -> None:
        """Adapt mean, step size and covariance."""
        values = torch.where(fitness.isnan(), -torch.inf, fitness.double())
        order = torch.argsort(torch.argsort(values, descending=True, stable=True)).double()
        self._search.tell(self._asked, order.tolist())  # ranks instead of infinities
        self._reported.append(order)

    def best(self) -> Tensor:
        """Return the mean (D,) of the next generation."""
        return torch.from_numpy(np.asarray(self._search.mean)).to(self.start)

    def state_dict(self) -> dict[str, Any]:
        """Return start and the ranks of all generations."""
        told = torch.stack(self._reported) if self._reported else torch.zeros(0, 0)
        return {"start": self.start, "told": told}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Repeat the run."""
        self.start = state["start"].clone()
        self._open()
        for ranks in state["told"]:
            self.ask()
            self.tell(-ranks)


class Archive(AskTellOptimizer):
    """Candidates at least `distance` apart, each with the mean of its noisy fitness.

    Source: POLCA, Ren et al. 2026, with mutations.

    Candidates with the highest `mean + bonus / sqrt(trials)` are evaluated again and mutated. A vector nearer than
    `distance` to a candidate counts as another trial of it, so that few candidates cover the space.
    """

    def __init__(
        self,
        start: Tensor,
        sigma: float = 0.1,
        distance: float = 0.1,
        bonus: float = 1.0,
        population: int = 16,
        parents: int = 4,
        seed: int = 0,
    ) -> None:
        """Store the options.

        Args:
            start: (D,) first candidate.
            sigma: Standard deviation of a mutation.
            distance: Minimum Euclidean distance between candidates.
            bonus: Exploration bonus in units of fitness.
            population: P, trials per generation.
            parents: Candidates that are evaluated again and mutated.
            seed: Seed of the mutations.
        """
        self.sigma, self.distance, self.bonus = sigma, distance, bonus
        self.population, self.parents = population, parents
        self.candidates = start.detach().clone().unsqueeze(0)  # (C, D)
        self.mean, self.trials = torch.zeros(1, dtype=torch.float64), torch.zeros(1, dtype=torch.float64)
        self._generator = torch.Generator().manual_seed(seed)
        self._asked = self.candidates[:0]

    def ask(self) -> Tensor:
        """Return the most promising candidates and mutants of them `(P, D)`."""
        priority = torch.where(self.trials > 0, self.mean + self.bonus / self.trials.sqrt(), torch.inf)
        first = torch.argsort(priority, descending=True, stable=True)[: min(self.parents, self.population)]
        parents = self.candidates[first]
        drawn = torch.randint(len(parents), (self.population - len(parents),), generator=self._generator)
        noise = torch.randn(len(drawn), parents.shape[1], generator=self._generator).to(parents)
        self._asked = torch.cat([parents, parents[drawn] + self.sigma * noise])
        return self._asked

    def tell(self, fitness: Tensor) -> None:
        """Update the nearest candidates, and add vectors that are far from all."""
        for vector, value in zip(self._asked, fitness.double().tolist(), strict=True):
            if value != value:
                continue
            gaps = (self.candidates - vector).norm(dim=1)
            place = int(gaps.argmin())
            if float(gaps[place]) >= self.distance:
                self.candidates = torch.cat([self.candidates, vector.unsqueeze(0)])
                self.mean, self.trials = (torch.cat([old, old.new_zeros(1)]) for old in (self.mean, self.trials))
                place = len(self.candidates) - 1
            self.trials[place] += 1.0
            self.mean[place] += (value - float(self.mean[place])) / float(self.trials[place])

    def best(self) -> Tensor:
        """Return the candidate (D,) with the highest `mean - bonus / sqrt(trials)`."""
        cautious = torch.where(self.trials > 0, self.mean - self.bonus / self.trials.sqrt(), -torch.inf)
        return self.candidates[int(cautious.argmax())]

    def state_dict(self) -> dict[str, Any]:
        """Return candidates with means and trials, the last proposals, and the generator."""
        kept = {name: getattr(self, name).clone() for name in ("candidates", "mean", "trials", "_asked")}
        return {**kept, "generator": self._generator.get_state()}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore `state_dict`."""
        for name in ("candidates", "mean", "trials", "_asked"):
            setattr(self, name, state[name].clone())
        self._generator.set_state(state["generator"])


def evolve(optimizer: AskTellOptimizer, space: Space, fitness: Callable[[], float], generations: int) -> list[float]:
    """Search for `generations` and set the network to the best vector.

    Args:
        optimizer: Ask-tell optimizer.
        space: Search space.
        fitness: Fitness of the current network, higher is better.
        generations: Calls of `ask` and `tell`.

    Returns:
        Best fitness of each generation.
    """
    history: list[float] = []
    for _ in range(generations):
        values: list[float] = []
        for vector in optimizer.ask():
            space.write(vector)
            values.append(fitness())
        scores = torch.tensor(values, dtype=torch.float64)
        optimizer.tell(scores)
        history.append(float(scores[~scores.isnan()].max()) if bool((~scores.isnan()).any()) else float("nan"))
    space.write(optimizer.best())
    return history
