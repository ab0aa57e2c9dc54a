"""Out-of-distribution detector for state-action pairs, as in the OOD guardian of OGSRL.

States and actions are scaled to [-1, 1] by their range in the data. The score is the log of a kernel
density, mean_i exp(-|x - x_i|^2 / 2 sigma^2) without its constant, or minus the distance to the k-th nearest neighbour.
Points below a percentile of the scores of the data are outside. Both scores lose power if many numbers are independent:
the middle of the data then counts as inside even without data points.

Deviations from the source: the percentile is taken over episodes that are held out, or leaves each point itself out
where there are too few, so that it holds for new data of the same behaviour and not for the points that are compared
with; only some of the points are kept.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self

import numpy as np
import torch
from numpy.typing import NDArray
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from robopolicy.constraints import AtLeastTwo, FractionBelowOne, NonNegativeInt, Positive, PositiveInt, Validated
from robopolicy.data.episodes import Episodes, is_cloud, is_image
from robopolicy.errors import UserError, unknown_name
from robopolicy.files import atomic_file, parse_json
from robopolicy.schema import from_dict, to_dict

KINDS = ("kernel", "neighbours")
HELD_OUT = 5  # one of this many episodes sets the threshold
LEAST_RANGE = 1e-3  # [units of the data] smaller ranges are numbers that stood still
_BLOCK = 1024  # points scored at a time
_TENSORS = ("low", "high", "points")


@dataclass(frozen=True)
class OODDetectorConfig(Validated):
    """Settings of the detector."""

    kind: str = "kernel"  # kernel (density) | neighbours (distance to the k-th nearest)
    outside: FractionBelowOne = 0.05  # false-positive rate on new data of the same behaviour
    bandwidth: Positive = 0.535  # sigma of the kernel, where the data spans [-1, 1]
    neighbours: PositiveInt = 5  # k
    points: AtLeastTwo = 4096  # maximum number of stored points
    seed: NonNegativeInt = 0  # seed for the choice of points and episodes

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.kind not in KINDS:
            raise unknown_name("kind of support", self.kind, KINDS)


class OODDetector:
    """Detector of states with actions outside of the data."""

    def __init__(
        self,
        config: OODDetectorConfig,
        keys: Sequence[str],
        low: Tensor,
        high: Tensor,
        points: Tensor,
        threshold: float,
    ) -> None:
        """Create a detector from fitted values.

        Args:
            config: Settings.
            keys: Observations in the order of concatenation; the action is last.
            low: (D,) least values in the data.
            high: (D,) largest values.
            points: (M, D) of the data, scaled.
            threshold: Minimum score of points that are inside.
        """
        self.config, self.keys = config, tuple(keys)
        self.low, self.high, self.points, self.threshold = low, high, points, threshold

    @classmethod
    def fit(cls, data: Tensor, groups: NDArray[np.int64], config: OODDetectorConfig, keys: Sequence[str] = ()) -> Self:
        """Fit to points `(F, D)` of the episodes `groups` `(F,)`.

        Raises:
            UserError: There are fewer points than neighbours.
        """
        rng = np.random.default_rng(config.seed)
        low, high = data.min(0).values, data.max(0).values
        gate = cls(config, keys, low, high, data[:0], -math.inf)
        names = rng.permutation(np.unique(groups))
        held = np.isin(groups, names[: len(names) // HELD_OUT])
        shown = gate._kept(data[torch.from_numpy(~held)], rng)
        if len(shown) <= config.neighbours:
            raise UserError(f"An OOD detector needs more than {config.neighbours} data points, got {len(shown)}.")
        gate.points = gate._scaled(shown)
        own = not held.any()  # too few episodes to hold any out
        new = shown if own else gate._kept(data[torch.from_numpy(held)], rng)
        gate.threshold = float(torch.quantile(gate._scores(gate._scaled(new), own).double(), config.outside))
        return gate

    def point(self, obs: Mapping[str, Tensor], action: Tensor) -> Tensor:
        """Observations `{key: (B, ...)}` and actions `(B, A)` as points `(B, D)`.

        Raises:
            UserError: Keys or sizes differ from the data.
        """
        missing = [key for key in self.keys if key not in obs]
        if missing:
            raise UserError(f"The OOD detector needs {', '.join(self.keys)}, but '{missing[0]}' is not observed.")
        point = torch.cat([value.flatten(1).float().cpu() for value in (*(obs[key] for key in self.keys), action)], 1)
        if point.shape[1] != len(self.low):
            raise UserError(
                f"The OOD detector needs {len(self.low)} numbers, got {point.shape[1]} of states and actions."
            )
        return point

    def score(self, points: Tensor) -> Tensor:
        """Scores `(B,)` of `points` `(B, D)`; -inf where a number is not finite."""
        finite = points.isfinite().all(1)
        score = self._scores(self._scaled(torch.where(finite[:, None], points, self.low)))
        return torch.where(finite, score, -torch.inf)

    def inside(self, points: Tensor) -> Tensor:
        """Mask `(B,)` of the points `(B, D)` inside of the data."""
        return self.score(points) >= self.threshold

    def state_dict(self) -> dict[str, Any]:
        """Fitted values, as tensors and plain values."""
        tensors = {name: getattr(self, name) for name in _TENSORS}
        return {**tensors, "threshold": self.threshold, "keys": list(self.keys), "config": to_dict(self.config)}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore `state_dict`."""
        self.config = from_dict(OODDetectorConfig, state["config"], "support")
        self.keys, self.threshold = tuple(state["keys"]), float(state["threshold"])
        self.low, self.high, self.points = (state[name].clone() for name in _TENSORS)

    def save(self, path: str | Path) -> None:
        """Write one safetensors file."""
        state = self.state_dict()
        facts = {name: state[name] for name in ("threshold", "keys", "config")}
        with atomic_file(Path(path)) as temporary:
            save_file({name: state[name].contiguous() for name in _TENSORS}, temporary, {"support": json.dumps(facts)})

    @classmethod
    def load(cls, path: str | Path) -> Self:
        """Read what `save` wrote.

        Raises:
            UserError: The file is something else or damaged.
        """
        try:
            with safe_open(str(path), "pt") as file:
                state = parse_json((file.metadata() or {})["support"])
                state |= {name: file.get_tensor(name) for name in _TENSORS}
            gate = cls(OODDetectorConfig(), (), state["low"], state["high"], state["points"], 0.0)
            gate.load_state_dict(state)
        except (OSError, SafetensorError, KeyError, ValueError, TypeError) as error:
            raise UserError(f"{path} is not an OOD detector: {str(error).splitlines()[0]}; fit it again.") from error
        return gate

    def _kept(self, data: Tensor, rng: np.random.Generator) -> Tensor:
        if len(data) <= self.config.points:
            return data
        return data[torch.from_numpy(np.sort(rng.choice(len(data), self.config.points, replace=False)))]

    def _scaled(self, points: Tensor) -> Tensor:
        half = ((self.high - self.low) / 2).clamp(min=LEAST_RANGE / 2)
        return (points - (self.low + self.high) / 2) / half

    def _scores(self, scaled: Tensor, own: bool = False) -> Tensor:
        """Scores `(B,)`; with `own`, row i is stored point i, which is excluded from its own score."""
        scores: list[Tensor] = []
        for start in range(0, len(scaled), _BLOCK):
            rows = scaled[start : start + _BLOCK]
            distance = torch.cdist(rows, self.points, compute_mode="donot_use_mm_for_euclid_dist")  # (b, M)
            if own:
                distance.diagonal(start).fill_(torch.inf)
            if self.config.kind == "neighbours":
                scores.append(-distance.kthvalue(self.config.neighbours, dim=1).values)
                continue
            energy = -distance.square() / (2 * self.config.bandwidth**2)
            scores.append(energy.logsumexp(1) - math.log(len(self.points) - own))
        return torch.cat(scores) if scores else scaled.new_zeros(0)


def fit_ood_detector(
    episodes: Episodes, config: OODDetectorConfig | None = None, keys: Sequence[str] | None = None
) -> OODDetector:
    """Fit a detector to the vectors and actions of a dataset.

    Args:
        episodes: The data.
        config: Settings.
        keys: Observations to use; all vectors by default.

    Raises:
        UserError: There are no such vectors.
    """
    data = episodes.without_closing_frames().with_executed_actions()
    vectors = [key for key in data.observation_keys if not is_image(key) and not is_cloud(key)]
    chosen = sorted(vectors) if keys is None else list(keys)
    if not chosen or not set(chosen) <= set(vectors):
        raise UserError(
            f"An OOD detector needs observed vectors; the data has {', '.join(vectors) or 'none'}, expected "
            f"{', '.join(chosen) or 'any'}."
        )
    columns = [data.arrays[key].reshape(len(data), -1) for key in (*chosen, "action")]
    points = torch.from_numpy(np.concatenate(columns, 1).astype(np.float32))
    return OODDetector.fit(
        points, np.repeat(np.arange(data.num_episodes), data.lengths), config or OODDetectorConfig(), chosen
    )


def load_ood_detector(
    place: str | Path, keys: Sequence[str] | None = None, config: OODDetectorConfig | None = None
) -> OODDetector:
    """Load a detector from a `.safetensors` file, or fit one to the dataset in a folder.

    Raises:
        UserError: There is neither, or it lacks the observations `keys`.
    """
    from robopolicy.data.formats.lerobot import read_lerobot

    if Path(place).suffix == ".safetensors":
        return OODDetector.load(place)
    return fit_ood_detector(read_lerobot(place, images=False), config, keys)
