"""Archive of elites: the best solution in every cell of a descriptor space (MAP-Elites; pyribs).

The cells are the Voronoi regions of centroids that k-means spreads over [0, 1]^C (Vassiliades et al. 2016). A solution
is a vector; its descriptor determines its cell, and its fitness whether it is kept.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from robopolicy.errors import UserError
from robopolicy.optional import require

SAMPLES = 20  # k-means samples per cell


@dataclass(frozen=True)
class Elites:
    """K solutions with fitness and descriptor, in the order of their cells."""

    solution: Tensor  # (K, D) float32
    fitness: Tensor  # (K,) float64
    descriptor: Tensor  # (K, C) float64, from 0 to 1

    def __len__(self) -> int:
        return len(self.fitness)

    def __getitem__(self, rows: Tensor) -> Elites:
        return Elites(self.solution[rows], self.fitness[rows], self.descriptor[rows])


class EliteArchive:
    """Archive with at most one elite per cell; on the CPU."""

    def __init__(
        self, solution_dim: int, descriptor_dim: int, cells: int, *, floor: float = 0.0, seed: int = 0
    ) -> None:
        """Create the cells.

        Args:
            solution_dim: D.
            descriptor_dim: C.
            cells: Number of cells.
            floor: Fitness that counts as 0 in the QD score.
            seed: Of the cells.

        Raises:
            UserError: There are too few cells, or the package `ribs` is not installed.
        """
        if cells < 2:
            raise UserError(f"An archive needs at least 2 cells, got {cells}.")
        self._archives = require("ribs.archives", "quality-diversity")
        self._dims, self.floor = (solution_dim, descriptor_dim), floor
        ranges = [(0.0, 1.0)] * descriptor_dim
        points = np.random.default_rng(seed).random((max(SAMPLES * cells, 1000), descriptor_dim))
        centroids, _ = self._archives.k_means_centroids(centroids=cells, ranges=ranges, samples=points, seed=seed)
        self._open(centroids)

    def _open(self, centroids: np.ndarray) -> None:
        solution_dim, descriptor_dim = self._dims
        self._cells = self._archives.CVTArchive(
            solution_dim=solution_dim,
            centroids=centroids,
            ranges=[(0.0, 1.0)] * descriptor_dim,
            qd_score_offset=self.floor,
            solution_dtype=np.float32,
            objective_dtype=np.float64,
            measures_dtype=np.float64,
        )

    def __len__(self) -> int:
        """Number of filled cells."""
        return len(self._cells)

    def add(self, solution: Tensor, fitness: Tensor, descriptor: Tensor) -> Tensor:
        """Add solutions `(K, D)` if they improve their cells; returns which `(K,)` bool did.

        Args:
            solution: (K, D).
            fitness: (K,), higher is better; non-finite solutions are rejected.
            descriptor: (K, C), in [0, 1].
        """
        valid = (fitness.isfinite() & solution.isfinite().all(1) & descriptor.isfinite().all(1)).cpu()
        admitted = torch.zeros(len(fitness), dtype=torch.bool)
        if bool(valid.any()):
            rows = [value.detach().cpu()[valid].double().numpy() for value in (solution, fitness, descriptor)]
            admitted[valid] = torch.from_numpy(self._cells.add(*rows)["status"] > 0)
        return admitted

    def elites(self) -> Elites:
        """All elites."""
        data = self._cells.data(["solution", "objective", "measures", "index"])
        order = np.argsort(data["index"], kind="stable")
        return Elites(*(torch.from_numpy(data[key][order]) for key in ("solution", "objective", "measures")))

    def sample(self, count: int, generator: torch.Generator) -> Elites:
        """`count` elites, drawn uniformly.

        Raises:
            UserError: The archive is empty.
        """
        elites = self.elites()
        if not len(elites):
            raise UserError("The archive is empty: no episode had a finite return; check the rewards of the task.")
        return elites[torch.randint(len(elites), (count,), generator=generator)]

    def nearest(self, descriptor: Tensor) -> Elites:
        """The elite `(1, ...)` whose descriptor is nearest to the given one `(C,)`."""
        elites = self.elites()
        return elites[(elites.descriptor - descriptor.cpu()).norm(dim=1).argmin().reshape(1)]

    def metrics(self) -> dict[str, float]:
        """QD score (sum of the fitness above the floor), fraction of filled cells, and maximum fitness."""
        stats = self._cells.stats
        return {
            "qd_score": float(stats.qd_score),
            "coverage": float(stats.coverage),
            "max_fitness": float(stats.obj_max or 0.0),
        }

    def state_dict(self) -> dict[str, Any]:
        """Centroids and elites as tensors."""
        return {"centroids": torch.from_numpy(self._cells.centroids.copy()), **vars(self.elites())}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore `state_dict`."""
        self._open(state["centroids"].numpy())
        if len(state["fitness"]):
            self.add(state["solution"], state["fitness"], state["descriptor"])
