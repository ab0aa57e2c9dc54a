"""One-step episodes with action chunks and a known reward, hence a known best chunk."""

import copy
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from robopolicy.algorithms.common.off_policy import OffPolicy
from robopolicy.critics.q import CriticConfig
from robopolicy.data.batches import Transitions
from robopolicy.policies.base import Policy, PolicySpec, Sample
from robopolicy.policies.heads.flow import FlowConfig, FlowPolicy
from robopolicy.policies.heads.gaussian import GaussianConfig, GaussianPolicy
from robopolicy.policies.heads.generative import GenerativePolicy

SPEC = PolicySpec({"state": (2,)}, action_dim=1, horizon=2, action_horizon=1)
STATISTICS = {
    "state": {"min": [-1.0] * 2, "max": [1.0] * 2},
    "action": {"min": [-1.0], "max": [1.0], "mean": [0.1], "std": [0.5]},
}
SMALL = CriticConfig(members=2, hidden=(32, 32), activation="relu")


def flow(**config: Any) -> FlowPolicy:
    """A small flow head."""
    policy = FlowPolicy(FlowConfig(**({"hidden": (32, 32), "steps": 4} | config)), SPEC)
    policy.fit_normalizer(STATISTICS)
    return policy


def gaussian(**config: Any) -> GaussianPolicy:
    """A small squashed Gaussian."""
    settings = {"hidden": (32, 32), "squash": True, "normalization": "minmax", "action_normalization": "minmax"}
    policy = GaussianPolicy(GaussianConfig(**(settings | config)), SPEC)
    policy.fit_normalizer(STATISTICS)
    return policy


def output_layer(head: GenerativePolicy) -> nn.Linear:
    """The last linear layer, one output per element of the chunk."""
    return [layer for layer in head.backbone.modules() if isinstance(layer, nn.Linear)][-1]


def always(head: GenerativePolicy, action: float) -> None:
    """Make `head` always act `action`, -1 or 1: its velocity leads far beyond the bound."""
    with torch.no_grad():
        output_layer(head).bias.fill_(9.0 * action)


class Known(nn.Module):
    """A critic with known values: one member per function of newest states `(B, S)` and first actions `(B, A)`."""

    def __init__(self, *members: Callable[[Tensor, Tensor], Tensor]) -> None:
        super().__init__()
        self.members = members

    def forward(self, obs: dict[str, Tensor], chunk: Tensor, members: Tensor | None = None) -> Tensor:
        """Values `(M, B)`."""
        values = torch.stack([member(obs["state"][:, -1], chunk[:, 0]) for member in self.members])
        return values if members is None else values[members]

    def candidate_values(self, obs: dict[str, Tensor], chunks: Tensor) -> Tensor:
        """Values `(M, B, C)` of candidates `(B, C, H, A)`."""
        return torch.stack([self(obs, chunk) for chunk in chunks.unbind(1)], -1)


def two_modes(rows: int) -> Tensor:
    """Chunks `(B, 2, 1)` near +-0.6."""
    sign = torch.randint(0, 2, (rows, 1, 1)) * 2.0 - 1
    return sign * 0.6 + 0.05 * torch.randn(rows, 2, 1)


def batch(
    chunk: Tensor, reward: Callable[[Tensor], Tensor], *, online: bool = False, discount: float = 0.0
) -> Transitions:
    """Transitions with reward `(B,)` of the executed actions `(B, 1)`; the episode ends unless there is a discount."""
    rows = len(chunk)
    obs = {"state": torch.rand(rows, 1, 2) * 2 - 1}
    earned = reward(chunk[:, 0])
    return Transitions(
        obs=obs,
        chunk=chunk,
        mask=torch.ones(rows, 2),
        rewards=earned[:, None],
        steps=torch.ones(rows, dtype=torch.int64),
        discount=torch.full((rows,), discount),
        reward=earned,
        next_obs={"state": torch.rand(rows, 1, 2) * 2 - 1},
        returns=earned if discount == 0 else torch.full((rows,), torch.nan),
        record={},
        online=torch.full((rows,), online),
        weight=torch.ones(rows),
        index=torch.arange(rows),
    )


def first_actions(policy: Policy, rows: int = 200, *, deterministic: bool = True) -> Tensor:
    """Executed actions `(B,)` at random observations, the same in every call."""
    generator = torch.Generator().manual_seed(0)
    obs = {"state": torch.rand(rows, 1, 2, generator=generator) * 2 - 1}
    return policy.act(obs, deterministic=deterministic, generator=generator)[:, 0, 0]


def shifted(module: Any, by: float = 0.3) -> Any:
    """The module, its weights perturbed in place."""
    with torch.no_grad():
        for weights in module.parameters():
            weights.add_(by * torch.randn_like(weights))
    return module


def seeded(algorithm: Any, seed: int = 3) -> torch.Generator:
    """Seed the algorithm's generator and return a generator with the same seed."""
    algorithm.generator.manual_seed(seed)
    return torch.Generator().manual_seed(seed)


def assert_acts_without_dropout(algorithm: OffPolicy, data: Transitions) -> None:
    """The same seed gives the same chunks in `act`, warm-up and targets, before and after an update.

    Critic dropout is active only in the critic's loss.
    """
    obs = {"state": torch.rand(50, 1, 2) * 2 - 1}

    def chunks(verb: Callable[..., Sample]) -> Tensor:
        return verb(obs, generator=torch.Generator().manual_seed(0)).chunk

    def target() -> Tensor:
        algorithm.generator.manual_seed(0)
        with torch.no_grad():
            return algorithm.target(data)

    def loss() -> Tensor:
        algorithm.generator.manual_seed(0)
        return algorithm.critic_loss(data)[0]

    for _ in range(2):
        assert not algorithm.policy.training
        assert bool(algorithm.config.critic.dropout) != torch.equal(loss(), loss())
        for verb in (algorithm.act, algorithm.warmup_action):
            assert torch.equal(chunks(verb), chunks(verb))
        assert torch.equal(target(), target())
        before = copy.deepcopy(algorithm.policy.state_dict())
        algorithm.update(data)
        assert any(not torch.equal(value, before[key]) for key, value in algorithm.policy.state_dict().items())
