"""Fitted Q-evaluation: the value of a policy by temporal-difference regression on logged transitions (Le et al. 2019).

Q regresses on reward + discount * Q(next, action of the policy) with a slow target network. Every ensemble member
learns from its own bootstrap sample of the episodes (bootstrapped FQE, Hao et al. 2021), which gives an interval. It
needs no densities, so it evaluates any policy on any logs.

Use it for long episodes, where importance weights degenerate. It is biased where the logs lack actions of the policy,
which its interval does not show; compare it with weighted estimators.

Deviations: target networks instead of regression to convergence; chunks instead of single actions.
"""

from __future__ import annotations

import copy
from dataclasses import dataclass, field
from statistics import NormalDist
from typing import ClassVar

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from robopolicy.constraints import Positive, PositiveFraction, PositiveInt, Validated
from robopolicy.critics.q import CriticConfig, QEnsemble, TargetUpdate
from robopolicy.data.statistics import dataset_statistics
from robopolicy.errors import UserError
from robopolicy.evaluation.intervals import Interval
from robopolicy.evaluation.ope.logs import Logs
from robopolicy.nets.encoder import ObservationEncoder
from robopolicy.nets.normalizer import make_normalizer
from robopolicy.spec import PolicySpec

Array = NDArray[np.float64]


@dataclass(frozen=True)
class FQEConfig(Validated):
    """Settings of fitted Q-evaluation."""

    critic: CriticConfig = field(default_factory=lambda: CriticConfig(members=8, hidden=(128, 128)))
    steps: PositiveInt = 4_000  # gradient steps
    batch_size: PositiveInt = 256  # windows per step
    learning_rate: Positive = 1e-3
    tau: PositiveFraction = 0.02  # update rate of the target network

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.critic.members < 2:
            raise UserError(f"FQE needs critic.members >= 2, got {self.critic.members}.")


class FQE:
    """Ensemble of Q-functions of a policy, fitted on construction."""

    def __init__(
        self, config: FQEConfig, logs: Logs, policy_chunks: Tensor, *, seed: int = 0, device: str = "cpu"
    ) -> None:
        """Fit the ensemble; `policy_chunks` `(K, F, n, A)` are chunks of the policy at every frame (`Logs.decide`)."""
        self.logs, self.policy_chunks, self.device = logs, policy_chunks, torch.device(device)
        self._scale = float(logs.returns.std()) or 1.0  # unit of the values
        with torch.random.fork_rng():
            torch.manual_seed(seed)
            self.critic = QEnsemble(config.critic, _LogsPolicy(logs)).to(self.device)
        rng = np.random.default_rng(seed)
        n = logs.episodes.num_episodes
        # Episode counts (M, N) in the bootstrap sample of each member.
        self._counts = rng.multinomial(n, np.full(n, 1 / n), size=config.critic.members).astype(np.float32)
        self._fit(config, rng)

    def _fit(self, config: FQEConfig, rng: np.random.Generator) -> None:
        logs, counts = self.logs, torch.from_numpy(self._counts)
        target = copy.deepcopy(self.critic)
        target_update = TargetUpdate(target, self.critic)
        optimiser = torch.optim.Adam(self.critic.parameters(), config.learning_rate)
        reward, discount = (torch.from_numpy(x).float() for x in (logs.reward / self._scale, logs.discount))
        size = len(logs.window)
        for step in range(config.steps):
            for group in optimiser.param_groups:
                group["lr"] = config.learning_rate * (1 - step / config.steps)
            window = rng.integers(size, size=config.batch_size)
            following = logs.following[window]
            actions = self.policy_chunks[rng.integers(len(self.policy_chunks), size=len(window)), following]
            with torch.no_grad():
                ahead = target(self._observe(following), actions.to(self.device))  # (M, B)
                goal = reward[window].to(self.device) + discount[window].to(self.device) * ahead
            weight = counts[:, logs.episode[logs.window[window]]].to(self.device)
            features = self.critic.encode(self._observe(logs.window[window]))
            output = self.critic.output(features, logs.chunks(window).to(self.device))
            loss = (self.critic.regression(output, goal) * weight).mean(1).sum()
            optimiser.zero_grad()
            loss.backward()
            optimiser.step()
            target_update.step(config.tau)

    def _observe(self, frames: NDArray[np.int64]) -> dict[str, Tensor]:
        return {key: value.to(self.device) for key, value in self.logs.observations(frames).items()}

    @torch.no_grad()
    def q(self) -> Array:
        """Return values `(M, W)` of the logged windows."""
        every = np.arange(len(self.logs.window))
        parts = [
            self.critic(self._observe(self.logs.window[rows]), self.logs.chunks(rows).to(self.device))
            for rows in self.logs.batches(every)
        ]
        return self._scale * torch.cat(parts, 1).double().cpu().numpy()

    @torch.no_grad()
    def v(self, frames: NDArray[np.int64]) -> Array:
        """Return values `(M, B)` of the policy at `frames` `(B,)`."""
        parts = []
        for rows in self.logs.batches(frames):
            chunks = self.policy_chunks[:, rows].transpose(0, 1).to(self.device)  # (B, K, n, A)
            parts.append(self.critic.candidate_values(self._observe(rows), chunks).mean(-1))
        return self._scale * torch.cat(parts, 1).double().cpu().numpy()

    def errors(self) -> Array:
        """Return the temporal-difference errors `(W,)` of the ensemble mean."""
        ahead = self.v(self.logs.following).mean(0)
        return self.logs.reward + self.logs.discount * ahead - self.q().mean(0)

    def interval(self, level: float = 0.95) -> Interval:
        """Return the mean value at the starts of the episodes; the interval is the spread of the members.

        A UserError is raised for values outside of the range that the rewards allow.
        """
        starts = self.v(self.logs.episodes.starts)  # (M, N)
        estimate = float(starts.mean())
        self._check_range(estimate)
        resampled = (starts * self._counts).sum(1) / self._counts.sum(1)  # (M,)
        half = NormalDist().inv_cdf(0.5 + level / 2) * float(resampled.std(ddof=1))
        return Interval(estimate, estimate - half, estimate + half, self.logs.episodes.num_episodes, level)

    def _check_range(self, estimate: float) -> None:
        gamma = self.logs.gamma
        longest = self.logs.rewards.shape[1] if gamma == 1 else 1 / (1 - gamma)
        low, high = (limit * longest for limit in (min(self.logs.rewards.min(), 0), max(self.logs.rewards.max(), 0)))
        margin = max(0.1 * (high - low), 0.1 * self._scale)
        if not low - margin <= estimate <= high + margin:
            raise UserError(f"diverged: {estimate:.3g} is outside of [{low:.3g}, {high:.3g}]; lower the discount.")


class _LogsPolicy(nn.Module):
    """Specification, encoder and normalisers for the critic, with the statistics of the logs."""

    name: ClassVar[str] = "logs"

    def __init__(self, logs: Logs) -> None:
        super().__init__()
        self.spec: PolicySpec = logs.spec
        statistics = dataset_statistics(logs.episodes)
        self.encoder = ObservationEncoder(self.spec.observation, normalization="meanstd")
        self.encoder.fit_normalizer(statistics)
        self.action_normalizer = make_normalizer(self.spec.action_dim, "meanstd")
        self.action_normalizer.fit_key(statistics, "action")
