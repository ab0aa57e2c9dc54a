"""Out-of-distribution detector for state-action pairs, as in the OOD guardian of OGSRL.

States and actions are scaled to [-1, 1] by their range in the data. The score is the log of a kernel density,
mean_i exp(-|x - x_i|^2 / 2 sigma^2) without its constant, or minus the distance to the k-th nearest neighbour. Points
below a percentile of the scores of the data are outside. Both scores lose power if many numbers are independent: the
middle of the data then counts as inside even without data points.

Deviations from the source: the percentile is taken over held-out episodes, or by leave-one-out if there are too few
episodes, so that it holds for new data of the same behaviour; only a subsample of the points is stored.
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

from robopolicy.atomic import atomic_file
from robopolicy.constraints import AtLeastTwo, FractionBelowOne, NonNegativeInt, Positive, PositiveInt, Validated
from robopolicy.data.episodes import Episodes, is_cloud, is_image
from robopolicy.errors import UserError, unknown_name
from robopolicy.files import parse_json
from robopolicy.schema import from_dict, to_dict

KINDS = ("kernel", "neighbours")
HELD_OUT = 5  # one of this many episodes sets the threshold
MIN_RANGE = 1e-3  # [units of the data] numbers with a smaller range are constant
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
            raise unknown_name("kind of OOD detector", self.kind, KINDS)


class OODDetector:
    """Detector of states with actions outside of the data."""

    def __init__(
        self,
        config: OODDetectorConfig,
        keys: Sequence[str],  # observations in the order of concatenation; the action is last
        low: Tensor,  # (D,) minimum of the data
        high: Tensor,  # (D,) maximum of the data
        points: Tensor,  # (M, D) scaled data points
        threshold: float,  # minimum score of points that are inside
    ) -> None:
        """Create a detector from fitted values."""
        self.config, self.keys = config, tuple(keys)
        self.low, self.high, self.points, self.threshold = low, high, points, threshold

    @classmethod
    def fit(cls, data: Tensor, groups: NDArray[np.int64], config: OODDetectorConfig, keys: Sequence[str] = ()) -> Self:
        """Fit to points `(F, D)` of the episodes `groups` `(F,)`; there must be more points than neighbours."""
        rng = np.random.default_rng(config.seed)
        low, high = data.min(0).values, data.max(0).values
        detector = cls(config, keys, low, high, data[:0], -math.inf)
        names = rng.permutation(np.unique(groups))
        held_out = np.isin(groups, names[: len(names) // HELD_OUT])
        stored = detector._subsample(data[torch.from_numpy(~held_out)], rng)
        if len(stored) <= config.neighbours:
            raise UserError(f"An OOD detector needs more than {config.neighbours} data points, got {len(stored)}.")
        detector.points = detector._scale(stored)
        leave_one_out = not held_out.any()  # too few episodes to hold any out
        new = stored if leave_one_out else detector._subsample(data[torch.from_numpy(held_out)], rng)
        detector.threshold = float(
            torch.quantile(detector._scores(detector._scale(new), leave_one_out).double(), config.outside)
        )
        return detector

    def point(self, obs: Mapping[str, Tensor], action: Tensor) -> Tensor:
        """Concatenate observations `{key: (B, ...)}` and actions `(B, A)` of the fitted sizes to points `(B, D)`."""
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
        score = self._scores(self._scale(torch.where(finite[:, None], points, self.low)))
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
        """Read a file of `save`; raise a `UserError` if it is another file or damaged."""
        try:
            with safe_open(str(path), "pt") as file:
                state = parse_json((file.metadata() or {})["support"])
                state |= {name: file.get_tensor(name) for name in _TENSORS}
            detector = cls(OODDetectorConfig(), (), state["low"], state["high"], state["points"], 0.0)
            detector.load_state_dict(state)
        except (OSError, SafetensorError, KeyError, ValueError, TypeError) as error:
            raise UserError(f"{path} is not an OOD detector: {str(error).splitlines()[0]}; fit it again.") from error
        return detector

    def _subsample(self, data: Tensor, rng: np.random.Generator) -> Tensor:
        if len(data) <= self.config.points:
            return data
        return data[torch.from_numpy(np.sort(rng.choice(len(data), self.config.points, replace=False)))]

    def _scale(self, points: Tensor) -> Tensor:
        half = ((self.high - self.low) / 2).clamp(min=MIN_RANGE / 2)
        return (points - (self.low + self.high) / 2) / half

    def _scores(self, scaled: Tensor, leave_one_out: bool = False) -> Tensor:
        """Scores `(B,)`; with `leave_one_out`, row i is stored point i, which does not count for its own score."""
        scores: list[Tensor] = []
        for start in range(0, len(scaled), _BLOCK):
            rows = scaled[start : start + _BLOCK]
            distance = torch.cdist(rows, self.points, compute_mode="donot_use_mm_for_euclid_dist")  # (b, M)
            if leave_one_out:
                distance.diagonal(start).fill_(torch.inf)
            if self.config.kind == "neighbours":
                scores.append(-distance.kthvalue(self.config.neighbours, dim=1).values)
                continue
            energy = -distance.square() / (2 * self.config.bandwidth**2)
            scores.append(energy.logsumexp(1) - math.log(len(self.points) - leave_one_out))
        return torch.cat(scores) if scores else scaled.new_zeros(0)


def fit_ood_detector(
    episodes: Episodes, config: OODDetectorConfig | None = None, keys: Sequence[str] | None = None
) -> OODDetector:
    """Fit a detector to the actions and the vectors `keys` of a dataset, by default all vectors."""
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
    """Load a detector from a `.safetensors` file, or fit one to the dataset in a folder."""
    from robopolicy.data.formats import read_dataset

    if Path(place).suffix == ".safetensors":
        return OODDetector.load(place)
    return fit_ood_detector(read_dataset(place, images=False), config, keys)
