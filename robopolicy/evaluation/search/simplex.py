"""Weights of composed policies: points of the simplex, non-negative with sum 1, and their order by score."""

from __future__ import annotations

from collections.abc import Mapping
from itertools import combinations

import numpy as np
from numpy.typing import NDArray

Weights = tuple[float, ...]


def lattice(parents: int, divisions: int) -> list[Weights]:
    """All weights of `parents` policies that are multiples of `1 / divisions`, in lexicographic order.

    The corners, where one policy has all the weight, are among them: a search may find that composing does not help.
    """
    places = divisions + parents - 1
    found: list[Weights] = []
    for bars in combinations(range(places), parents - 1):  # the gaps between the bars add up to `divisions`
        ends = (-1, *bars, places)
        found.append(tuple((ends[i + 1] - ends[i] - 1) / divisions for i in range(parents)))
    return found


def corners_and_centre(parents: int) -> list[Weights]:
    """Each policy alone, and all of them in equal parts."""
    corners = [tuple(float(i == j) for j in range(parents)) for i in range(parents)]
    return [*corners, (1 / parents,) * parents]


def ranked(scores: Mapping[Weights, float]) -> list[Weights]:
    """Weights from best to worst. Among equal scores, those in the middle of their group come first, then equal parts.

    Success rates of few episodes tie often. The middle of a plateau is its safest place, whereas "the first one" would
    prefer one policy over the others for no reason.
    """
    groups: dict[float, list[Weights]] = {}
    for weights, score in scores.items():
        groups.setdefault(score, []).append(weights)
    order: list[Weights] = []
    for score in sorted(groups, reverse=True):
        points = np.array(groups[score])
        places = [_distances(points, points.mean(0)), _distances(points, 1 / points.shape[1])]
        order += [tuple(point) for *_, point in sorted(zip(*places, groups[score], strict=True))]
    return order


def _distances(points: NDArray[np.float64], centre: NDArray[np.float64] | float) -> list[float]:
    """Squared distances, rounded so that equal ones are equal whatever the order of the policies."""
    return ((points - centre) ** 2).sum(1).round(9).tolist()
