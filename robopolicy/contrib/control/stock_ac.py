"""Stock-augmented distributional control: maximise a functional of the return, e.g. its CVaR (Pires et al. 2025).

The *stock* c is the reward collected so far, discounted to the current step, plus an initial value c_0. A critic
predicts quantiles of the future return Z given the stock, and the actor maximises `E u(c + Z)`. For u(x) = x this is
the mean. For u(x) = min(x, 0), with the right c_0, it is the CVaR, i.e. the mean of the worst fraction of the episodes.
For u(x) = -|x| it is the distance of the total to -c_0. Only the first can be reached by actions that ignore the stock.

*Stock editing*: because rewards and dynamics do not depend on the stock, a transition is valid for any other stock.
Every row is also learned from at randomly drawn stocks.

Use it where bad episodes matter (falls, damage, energy), or a total has to be met. It needs the simulator wrapper
`stock`, which adds the stock to the observations. For the mean, td3 is cheaper.

Reconstructed from the abstract, whose agent is a DQN, on TD3. Own choices are the continuous actions, the actor's
gradient through the quantiles, the member with the least utility as target, and edited stocks drawn between the
extremes of the batch: of its stocks and of those that would cancel its returns. For the CVaR c_0 moves slowly to the
maximiser of `-c_0 + E min(c_0 + Z, 0) / level` over the first observations of episodes in the batch.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace

import torch
from torch import Tensor, nn

from robopolicy.algorithms.common.algorithm import Metrics
from robopolicy.algorithms.common.fixed_losses import refuse_unused
from robopolicy.algorithms.common.off_policy import UpdateStats, optimizer_step
from robopolicy.algorithms.td3 import TD3, TD3Config, smoothed_chunk
from robopolicy.constraints import Finite, Fraction, NonNegativeInt, Positive, PositiveFraction, PositiveInt
from robopolicy.contrib.control.quantile_critic import QuantileQ, quantile_loss
from robopolicy.contrib.control.stock_encoder import STOCK_PREFIX, StockEncoder
from robopolicy.critics.q import CriticConfig
from robopolicy.data.batches import Transitions
from robopolicy.errors import UserError, unknown_name
from robopolicy.policies.base import Info, Observation, Policy
from robopolicy.policies.heads.gaussian import GaussianPolicy

UTILITIES = {"mean": lambda x: x, "cvar": lambda x: x.clamp(max=0), "setpoint": lambda x: -x.abs()}
"""Functional -> utility u of stock plus return."""

STARTS = 65  # candidates for c_0


@dataclass(frozen=True)
class StockACConfig(TD3Config):
    """Settings of stock-augmented control: settings of TD3 and the functional."""

    critic: CriticConfig = field(
        default_factory=lambda: CriticConfig(hidden=(256, 256), activation="relu", layer_norm=False)
    )
    functional: str = "cvar"  # mean | cvar | setpoint, of the distribution of the return
    level: PositiveFraction = 0.25  # cvar: fraction of the worst episodes whose mean is maximised
    start: Finite = 0.0  # c_0: minus the total to meet (setpoint); initial value of the search (cvar)
    start_rate: Fraction = 0.01  # cvar: step of each update to the best c_0 of the batch, as a fraction of the distance
    augmentations: NonNegativeInt = 3  # additional stocks for every row
    quantiles: PositiveInt = 50  # of the return
    huber: Positive = 0.1  # error of a quantile up to which its loss is quadratic

    def __post_init__(self) -> None:
        super().__post_init__()
        refuse_unused("stock_ac", self, "action_l2", "value_reduction")
        if self.functional not in UTILITIES:
            raise unknown_name("functional", self.functional, UTILITIES)


def conditional_value(start: Tensor, returns: Tensor, level: float) -> Tensor:
    """`-c + E min(c + G, 0) / level` `(K,)` for initial stocks c `(K,)` and draws of the return G `(K, n)`.

    The maximum over c is the CVaR of G, reached where -c is the quantile of G at `level`.
    """
    return (start[:, None] + returns).clamp(max=0).mean(1) / level - start


def stock_of(net: nn.Module) -> StockEncoder:
    """Find the stock encoder of a policy or critic."""
    return next(part for part in net.modules() if isinstance(part, StockEncoder))


class StockAC(TD3):
    """TD3 with quantile critics that depend on the stock."""

    name = "stock_ac"
    config_class = StockACConfig
    data_source = "replay"
    heads = ("squashed_gaussian",)
    reference = "pires2025distributional"
    uses_full_ensemble = True
    config: StockACConfig
    critic: QuantileQ
    target_critic: QuantileQ

    def __init__(self, config: StockACConfig, policy: Policy, *, total_updates: int) -> None:
        """Prepare to train a squashed Gaussian `policy` that observes its stock."""
        keys = [key for key in policy.spec.observation if key.startswith(STOCK_PREFIX)]
        squashed = isinstance(policy, GaussianPolicy) and policy.config.squash
        if not isinstance(policy, GaussianPolicy) or not squashed or not keys:
            missing = [] if squashed else ["policy=squashed_gaussian"]
            missing += [] if keys else [_setting(config.gamma)]
            raise UserError(
                f"Stock-augmented control trains a squashed Gaussian that observes its stock, got '{policy.name}' "
                f"{'with' if keys else 'without'} it; pass {' '.join(missing)}."
            )
        self.key = keys[0]
        if float(self.key.removeprefix(STOCK_PREFIX)) != config.gamma:
            raise UserError(
                f"The stock '{self.key}' and algorithm.gamma={config.gamma:g} discount differently; set "
                f"{_setting(config.gamma)}."
            )
        stock_of(policy).start.fill_(config.start)
        super().__init__(config, policy, total_updates=total_updates)
        self.utility = UTILITIES[config.functional]
        self._set_start(stock_of(policy).start)

    def make_critic(self) -> QuantileQ:
        """Build the critic of quantiles of the return."""
        return QuantileQ(self.config.critic, self.policy, quantiles=self.config.quantiles)

    # The stock.

    def stock(self, obs: Observation) -> Tensor:
        """Stock `(B,)` at the newest observation."""
        return stock_of(self.policy).stock(obs[self.key])[:, -1, 0]

    def at_stock(self, obs: Observation, stock: Tensor) -> Observation:
        """Replace the stock of `obs` by `stock` `(B,)`, independent of c_0."""
        history = torch.stack([stock, torch.zeros_like(stock)], -1).unsqueeze(1)
        return {**obs, self.key: history.expand(-1, self.policy.spec.obs_horizon, -1)}

    @torch.no_grad()
    def extremes(self, batch: Transitions) -> tuple[Tensor, Tensor]:
        """Range of useful stocks: the stocks of `batch`, and those that cancel its predicted returns."""
        own = self.stock(batch.obs)
        returns = self.target_critic.quantiles(batch.obs, batch.chunk).mean(0)
        return torch.minimum(own.min(), -returns.max()), torch.maximum(own.max(), -returns.min())

    def augmented(self, batch: Transitions) -> Transitions:
        """Append copies of `batch` at drawn stocks; every next stock follows from stock and reward."""
        own = self.stock(batch.obs)
        low, high = self.extremes(batch)
        shape = self.config.augmentations, len(batch)
        share = torch.rand(shape, generator=self.generator, device=self.generator.device)
        stock = torch.cat([own, (low + share * (high - low)).flatten()])
        copies = 1 + self.config.augmentations
        joined = Transitions.concat([batch] * copies)
        next_stock = (stock + joined.reward) / self.config.gamma ** joined.steps.to(stock.dtype)
        return replace(
            joined, obs=self.at_stock(joined.obs, stock), next_obs=self.at_stock(joined.next_obs, next_stock)
        )

    def _set_start(self, start: Tensor) -> None:
        value = start.clone()
        for net in (self.policy, self.target_policy, self.critic, self.target_critic):
            stock_of(net).start.copy_(value)

    @torch.no_grad()
    def search_start(self, batch: Transitions) -> None:
        """Move c_0 to the value with the largest CVaR at the first observations in `batch`, if there are any."""
        first = (batch.obs[self.key][:, -1, 1] == 1).nonzero().squeeze(1)
        if not len(first):
            return
        obs = {key: value[first] for key, value in batch.obs.items()}
        low, high = self.extremes(batch)
        starts = torch.lerp(low, high, torch.linspace(0, 1, STARTS, device=low.device))
        repeated = {key: value.repeat(STARTS, *[1] * (value.dim() - 1)) for key, value in obs.items()}
        edited = self.at_stock(repeated, starts.repeat_interleave(len(first)))
        returns = self.target_critic.quantiles(edited, self.policy.mode(edited)).mean(0)  # (STARTS * F, n)
        values = conditional_value(starts, returns.view(STARTS, -1), self.config.level)
        start = torch.lerp(stock_of(self.policy).start, starts[values.argmax()], self.config.start_rate)
        self._set_start(start)

    # Learning.

    def utilities(self, critic: QuantileQ, obs: Observation, chunk: Tensor) -> Tensor:
        """`E u(c + Z)` `(M, B)` for each member."""
        return self.utility(self.stock(obs)[:, None] + critic.quantiles(obs, chunk)).mean(-1)

    def quantile_samples(self, batch: Transitions) -> Tensor:
        """Draws `(B, n)` of the return: reward plus the next quantiles of the member with the least utility."""
        chunk = smoothed_chunk(self.target_policy, batch.next_obs, self.config, self.generator)
        quantiles = self.target_critic.quantiles(batch.next_obs, chunk)
        utility = self.utility(self.stock(batch.next_obs)[:, None] + quantiles).mean(-1)
        rows = torch.arange(len(batch), device=chunk.device)
        return batch.reward[:, None] + batch.discount[:, None] * quantiles[utility.argmin(0), rows]

    def critic_loss(self, batch: Transitions) -> tuple[Tensor, Info]:
        """Quantile regression at original and edited stocks, summed over the members and averaged over the rows."""
        rows = self.augmented(batch)
        quantiles = self.critic.quantiles(rows.obs, rows.chunk)
        with torch.no_grad():
            target = self.quantile_samples(rows)
        loss = (quantile_loss(quantiles, target, self.critic.levels, self.config.huber) * rows.weight).mean(1).sum()
        error = (quantiles.detach().mean((0, 2)) - target.mean(1)).abs()[: len(batch)]
        return loss, {"value": quantiles.mean(), "target": target.mean(), "td_errors": error}

    def actor_loss(self, batch: Transitions) -> tuple[Tensor, Info]:
        """Negative utility of the first critic, at original and drawn stocks."""
        rows = self.augmented(batch)
        return -self.utilities(self.critic, rows.obs, self.policy.mode(rows.obs))[0].mean(), {}

    def update(self, batch: Transitions) -> Metrics:
        """Update as in TD3; every actor step also moves c_0."""
        stats = UpdateStats()
        for part in self.minibatches(batch):
            stats.critic(self.critic_step(part))
            if self.policy_due():
                loss, info = self.actor_loss(part)
                optimizer_step(self.optimizer, loss)
                self._policy_update.step(self.config.target_policy_tau)
                self._policy_update.copy_buffers()
                if self.config.functional == "cvar":
                    self.search_start(part)
                stats.actor(loss=loss, start=stock_of(self.policy).start, **info)
        return self.finish(batch, stats)


def _setting(discount: float) -> str:
    """The option with which a task adds the stock to its observations."""
    return f"'task.wrappers=[{{name: stock, discount: {discount:g}}}]'"
