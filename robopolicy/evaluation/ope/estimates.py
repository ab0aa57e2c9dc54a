"""All estimators of a policy on the same logs, each with its interval or the reason why it has none."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from typing import Any, Protocol, runtime_checkable

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from robopolicy.constraints import Fraction, NonNegative, NonNegativeInt, OpenFraction, PositiveInt, Validated
from robopolicy.data.episodes import Episodes
from robopolicy.data.ood_detector import fit_ood_detector
from robopolicy.errors import UserError
from robopolicy.evaluation.intervals import Interval, bootstrap_mean
from robopolicy.evaluation.ope.fqe import FQE, FQEConfig
from robopolicy.evaluation.ope.logs import Logs
from robopolicy.evaluation.ope.weights import (
    Terms,
    corrected,
    cumulative_weights,
    doubly_robust,
    effective_size,
    effective_size_per_decision,
    features_of,
    marginal_of,
    per_decision,
    terms_interval,
    trajectory_wise,
)
from robopolicy.nets.normalizer import Normalizer
from robopolicy.plurals import counted
from robopolicy.policies.base import Observation, Policy

Array = NDArray[np.float64]
_MIN_FRAMES, _MAX_FRAMES = 100, 2_000  # frames required, and frames used, to measure the support
_OUTSIDE = 0.25  # fraction of unsupported actions that causes a note

WEIGHTED = {
    "is": "importance sampling, whole episodes",
    "pdis": "importance sampling, per decision",
    "snis": "self-normalised, whole episodes",
    "snpdis": "self-normalised, per decision",
    "dr": "doubly robust",
    "sndr": "doubly robust, self-normalised",
}
"""Estimators that need the log-probability of the logged actions under both policies."""

NAMES = {
    "behaviour": "mean return of the logs",
    **WEIGHTED,
    "fqe": "fitted Q-evaluation",
    "marginal": "marginal importance sampling",
    "marginal_dr": "marginal doubly robust",
    "played": "evaluated in the simulator",
}
"""Estimators in printing order."""


@dataclass(frozen=True)
class OPEConfig(Validated):
    """Settings of off-policy evaluation."""

    gamma: Fraction = 0.99  # discount per control step
    deterministic: bool = True  # evaluate the policy without exploration noise
    samples: PositiveInt = 4  # samples per frame of a stochastic policy
    minimum_size: NonNegative = 10.0  # effective sample size below which weighted estimates are refused
    warn_size: NonNegative = 50.0  # effective sample size below which they have a warning
    features: PositiveInt = 200  # random features of the marginal estimators
    fqe: FQEConfig = field(default_factory=FQEConfig)
    level: OpenFraction = 0.95  # of the intervals
    seed: NonNegativeInt = 0


@runtime_checkable
class Scoring(Protocol):
    """Policy with a density of its actions, in normalised units."""

    action_normalizer: Normalizer

    def log_density(self, obs: Observation, chunk: Tensor) -> Tensor:
        """Return the log-density `(B,)` of the executed part of chunks `(B, H, A)`."""
        ...


@dataclass(frozen=True)
class ValueEstimate:
    """Result of one estimator."""

    name: str  # key of `NAMES`
    interval: Interval | None  # None where it cannot be computed
    effective: float | None = None  # effective sample size, of estimators that weight episodes
    note: str = ""  # reason for a missing or unreliable estimate


@dataclass(frozen=True)
class Estimates:
    """Discounted value of a policy by estimator."""

    rows: tuple[ValueEstimate, ...]
    notes: tuple[str, ...]  # remarks for the reader

    def __getitem__(self, name: str) -> ValueEstimate:
        return next(row for row in self.rows if row.name == name)

    def table(self) -> tuple[list[str], list[list[str]]]:
        """Return the header and one row per estimator."""
        rows = [
            [
                NAMES[row.name],
                f"{row.interval}" if row.interval else "-",
                f"{row.effective:.1f}" if row.effective is not None else "-",
                row.note,
            ]
            for row in self.rows
        ]
        return ["estimator", "discounted return", "effective episodes", "note"], rows

    def to_dict(self) -> dict[str, Any]:
        """JSON-ready form."""
        rows = {
            row.name: asdict(row) | {"interval": row.interval.to_dict() if row.interval else None} for row in self.rows
        }
        return {"estimates": rows, "notes": list(self.notes)}


def estimate(
    policy: Policy,
    episodes: Episodes,
    *,
    behaviour: Policy | None = None,
    rollouts: Episodes | None = None,
    config: OPEConfig | None = None,
    announce: Callable[[str], None] = lambda text: None,
) -> Estimates:
    """Evaluate `policy` on logged episodes by every estimator that the logs allow.

    `behaviour`, the policy that collected the logs with exploration, is required for importance weights; `rollouts` are
    episodes of `policy` itself, for comparison. `announce` is called with the name of each part that is finished.
    A UserError is raised if the logs lack rewards or observations.
    """
    config, episodes = config or OPEConfig(), episodes.without_closing_frames()
    logs = Logs(episodes, policy.spec, config.gamma)
    options: dict[str, Any] = {"level": config.level, "seed": config.seed}
    decided = logs.decide(policy, samples=config.samples, deterministic=config.deterministic, seed=config.seed)
    announce(f"decisions on {counted(len(episodes), 'logged frame')}")
    rows = [ValueEstimate("behaviour", bootstrap_mean(logs.returns, **options))]
    fqe = FQE(config.fqe, logs, decided, seed=config.seed, device=str(policy.device))
    errors, start = fqe.errors(), fqe.v(episodes.starts).mean(0)
    announce(NAMES["fqe"])
    reason = weighting_problem(policy, behaviour, config.deterministic)
    if "executed" in episodes.arrays and not reason:
        reason = "the logged actions have additional noise (collect --noise), so their density is unknown"
    if reason or behaviour is None:  # a missing behaviour also has a reason
        rows += [ValueEstimate(name, None, note=reason) for name in WEIGHTED]
    else:
        ratios = log_density(policy, logs) - behavior_density(behaviour, Logs(episodes, behaviour.spec, config.gamma))
        _check_explored(behaviour, episodes)
        rows += weighted(logs, ratios, start, logs.by_episode(errors), config)
        announce("importance sampling")
    rows.append(_attempt("fqe", lambda: fqe.interval(config.level)))
    features = features_of(logs, config.features, config.seed)
    if features is None:
        note = "not supported with cameras or point clouds"
        rows += [ValueEstimate(name, None, note=note) for name in ("marginal", "marginal_dr")]
    else:
        found = marginal_of(logs, decided, features)
        both = corrected(start, found.weights, errors, logs.episode[logs.window])
        for name, terms in (("marginal", found.terms), ("marginal_dr", both)):
            rows.append(_guarded(name, found.effective, Terms(terms[:, None]), config))
        announce(NAMES["marginal"])
    if rollouts is not None:
        rows.append(
            ValueEstimate("played", bootstrap_mean(Logs(rollouts, policy.spec, config.gamma).returns, **options))
        )
    order = list(NAMES)
    return Estimates(tuple(sorted(rows, key=lambda row: order.index(row.name))), _notes(logs, reason, decided))


def weighted(logs: Logs, ratios: Array, start: Array, errors: Array, config: OPEConfig) -> list[ValueEstimate]:
    """Compute the weighted estimates from the log ratios `(F,)` of policy and behaviour at every frame.

    `start` `(N,)` are values of the first states, `errors` `(N, T)` the temporal-difference errors of the values.
    """
    table = np.zeros_like(logs.rewards)
    table[logs.episode, logs.age] = ratios
    weights, gamma = cumulative_weights(table), config.gamma
    whole, steps = effective_size(weights[:, -1]), effective_size_per_decision(weights, gamma)
    terms = {
        "is": (whole, trajectory_wise(weights, logs.rewards, gamma)),
        "pdis": (steps, per_decision(weights, logs.rewards, gamma)),
        "snis": (whole, trajectory_wise(weights, logs.rewards, gamma, normalised=True)),
        "snpdis": (steps, per_decision(weights, logs.rewards, gamma, normalised=True)),
        "dr": (steps, doubly_robust(weights, start, errors, gamma)),
        "sndr": (steps, doubly_robust(weights, start, errors, gamma, normalised=True)),
    }
    return [_guarded(name, size, value, config) for name, (size, value) in terms.items()]


def weighting_problem(policy: Policy, behaviour: Policy | None, deterministic: bool) -> str:
    """Return the reason why decisions of these policies cannot be weighted; empty where they can."""
    if behaviour is None:
        return "needs the policy that collected the logs (--behavior-policy)"
    if deterministic:
        return "a policy without exploration noise has no density (--stochastic)"
    for who, what in ((policy, "policy"), (behaviour, "behaviour")):
        if not isinstance(who, Scoring):
            return f"the {what} ('{who.name}') has no density of its actions"
        if who.spec.action_horizon > 1:
            return (
                f"the {what} executes {who.spec.action_horizon} actions per decision; only single actions are weighted"
            )
    return ""


@torch.no_grad()
def log_density(policy: Policy, logs: Logs) -> Array:
    """Return the log-density `(F,)` of the logged actions under `policy`, per unit of action."""
    assert isinstance(policy, Scoring)
    scale = policy.action_normalizer.scale.double().cpu()  # two policies may normalise differently
    parts = []
    for frames in logs.batches(np.arange(len(logs.episodes))):
        obs = {key: value.to(policy.device) for key, value in logs.observations(frames).items()}
        action = torch.from_numpy(logs.episodes.arrays["action"][frames]).float().to(policy.device)
        chunk = action[:, None].expand(-1, policy.spec.horizon, -1)
        parts.append(policy.log_density(obs, chunk).double().cpu() - scale.log().sum())
    return torch.cat(parts).numpy()


def behavior_density(behaviour: Policy, logs: Logs) -> Array:
    """Return `log_density` of the behaviour; a UserError is raised if it cannot have produced the logs."""
    found = log_density(behaviour, logs)
    if strange := int((~np.isfinite(found)).sum()):
        raise UserError(
            f"The behaviour ('{behaviour.name}') has zero density at {strange} of {len(found)} logged actions, so it "
            "cannot have produced them; pass the policy that did."
        )
    return found


def _guarded(name: str, size: float, terms: Terms, config: OPEConfig) -> ValueEstimate:
    """Return an estimate with `size` effective episodes, or refuse it for too few."""
    if size < config.minimum_size:
        episodes = counted(len(terms.numerator), "episode")
        note = f"refused: {size:.1f} effective of {episodes}, at least {config.minimum_size:g}"
        return ValueEstimate(name, None, size, note)
    note = "few effective episodes; the interval is too narrow" if size < config.warn_size else ""
    return ValueEstimate(name, terms_interval(terms, level=config.level, seed=config.seed), size, note)


def _attempt(name: str, interval: Callable[[], Interval]) -> ValueEstimate:
    try:
        return ValueEstimate(name, interval())
    except UserError as error:
        return ValueEstimate(name, None, note=str(error))


def _check_explored(behaviour: Policy, episodes: Episodes) -> None:
    """Raise a UserError for logs that the behaviour collected without noise."""
    logs = Logs(episodes, behaviour.spec, 1.0)
    modes = logs.decide(behaviour, samples=1, deterministic=True, seed=0)[0, :, 0].numpy()
    if np.allclose(modes, episodes.arrays["action"], atol=1e-4):
        raise UserError("The logs contain modes of the behaviour; collect them with --stochastic to weight them.")


def unsupported_fraction(logs: Logs, policy_chunks: Tensor) -> float | None:
    """Return the fraction of `policy_chunks` `(K, F, n, A)` without support in the logs; None if unknown."""
    keys = [key for key, shape in logs.spec.observation.items() if len(shape) == 1]
    if not keys or len(logs.episodes) < _MIN_FRAMES:
        return None
    frames = np.linspace(0, len(logs.episodes) - 1, min(len(logs.episodes), _MAX_FRAMES)).astype(np.int64)
    gate = fit_ood_detector(logs.episodes, keys=keys)
    obs = {key: torch.from_numpy(logs.episodes.arrays[key][frames]) for key in keys}
    return float((~gate.inside(gate.point(obs, policy_chunks[0, frames, 0]))).float().mean())


def _notes(logs: Logs, reason: str, decided: Tensor) -> tuple[str, ...]:
    notes = []
    outside = unsupported_fraction(logs, decided)
    if outside is not None and outside > _OUTSIDE:
        notes.append(
            f"{100 * outside:.0f} % of the actions of the policy are outside of the support of the logs, where all "
            "estimates are unreliable; 5 % of the logged actions are."
        )
    if logs.cut_weight > 0.05:
        notes.append(
            f"Time limits truncated episodes at a discount of {logs.cut_weight:.2f}; fqe, doubly robust and marginal "
            "estimates extrapolate beyond them, the others do not."
        )
    action = logs.episodes.arrays["action"]
    clipped = ((action == action.min(0)) | (action == action.max(0))).any(1).mean()
    if not reason and clipped > 0.01 + 2 * action.shape[1] / len(action):
        notes.append(f"{100 * clipped:.0f} % of the logged actions were clipped at a bound, where densities are wrong.")
    return tuple(notes)
