"""Tests of chunks that continue given actions: Gaussians with known conditionals, and untrained networks."""

from typing import Any

import pytest
import torch
from closed_forms import RAW, nothing
from composition_forms import CHUNK, KINDS, Gaussian, network
from torch import Tensor, nn

from robopolicy.errors import UserError
from robopolicy.policies.base import PolicySpec
from robopolicy.policies.heads.consistency import ConsistencyConfig, ConsistencyPolicy
from robopolicy.policies.heads.gaussian import GaussianConfig, GaussianPolicy
from robopolicy.policies.noise import PerRowGenerator
from robopolicy.policies.real_time_chunking import act_with_prefix, continue_chunk
from robopolicy.policies.wrappers.latent import STEERING_ACTOR, LatentPolicy, NoiseSpace
from robopolicy.policies.wrappers.zero_noise import ZeroNoisePolicy

ROWS, LENGTH, RHO, STD = 1000, 4, 0.9, 0.5
COV = tuple(tuple(STD**2 * RHO ** abs(i - j) for j in range(LENGTH)) for i in range(LENGTH))


class AlongChunk(nn.Module):
    """An exact network for vectors, applied to chunks of scalar actions."""

    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner

    def forward(self, x: Tensor, t: Tensor, features: Tensor) -> Tensor:
        return self.inner(x.transpose(1, 2), t, features).transpose(1, 2)


def correlated(kind: str, **settings: Any) -> Any:
    """A policy with Gaussian AR(1) chunks: the correlation of adjacent actions is `RHO`."""
    config_class, policy_class, exact = KINDS[kind]
    policy = policy_class(config_class(**(RAW | settings)), PolicySpec({"state": (1,)}, 1, LENGTH))
    policy.backbone = AlongChunk(exact(Gaussian((0.0,) * LENGTH, COV), policy.config))
    return policy


def continued(policy: Any, given: Tensor) -> Tensor:
    """Chunks `(ROWS, LENGTH)` that start with `given`."""
    torch.manual_seed(0)
    prefix, weight = torch.zeros(ROWS, LENGTH, 1), torch.zeros(ROWS, LENGTH)
    prefix[:, : len(given), 0], weight[:, : len(given)] = given, 1
    return continue_chunk(policy, nothing(ROWS), torch.randn(ROWS, LENGTH, 1), prefix, weight)[..., 0]


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("given", [torch.tensor([0.5]), torch.tensor([0.5, 0.4, 0.4])])
def test_continuations_of_gaussian_chunks_follow_the_conditional_distribution(kind: str, given: Tensor) -> None:
    settings = {"steps": 25, "spacing": "trailing"} if kind == "diffusion" else {"steps": 25}
    chunk = continued(correlated(kind, **settings), given)
    rest = torch.arange(1, LENGTH - len(given) + 1)
    assert torch.equal(chunk[:, : len(given)], given.expand(ROWS, -1))
    torch.testing.assert_close(chunk.mean(0)[len(given) :], given[-1] * RHO**rest, rtol=0, atol=0.03)
    std = STD * (1 - RHO ** (2 * rest)).sqrt()  # of AR(1); finite Euler steps reduce it
    torch.testing.assert_close(chunk.std(0)[len(given) :], std, rtol=0.2, atol=0)


@pytest.mark.parametrize("kind", KINDS)
def test_continuation_of_unlikely_actions_is_close_to_the_conditional_mean(kind: str) -> None:
    settings = {"steps": 25, "spacing": "trailing"} if kind == "diffusion" else {"steps": 25}
    ratio = continued(correlated(kind, **settings), torch.tensor([0.5, 0.2, 0.6])).mean(0)[3] / (0.6 * RHO)
    assert 0.75 < ratio < 1, ratio


def test_continuation_with_four_steps_is_close_to_the_conditional_mean() -> None:
    chunk = continued(correlated("flow", steps=4), torch.tensor([0.5]))
    ratio = chunk.mean(0)[1:] / (0.5 * RHO ** torch.arange(1, LENGTH))
    assert ((ratio > 0.8) & (ratio < 1)).all(), ratio


def fixed(rows: int = 3) -> tuple[dict[str, Tensor], Tensor, Tensor]:
    draw = torch.Generator().manual_seed(1)
    noise, prefix = torch.randn(rows, 4, 2, generator=draw), 0.3 * torch.randn(rows, 4, 2, generator=draw)
    return {"state": torch.randn(rows, 1, 3, generator=draw)}, noise, prefix


SAMPLERS: dict[str, dict[str, Any]] = {"flow": {}, "diffusion": {}, "edm": {"solver": "heun"}, "shortcut": {}}
SAMPLERS |= {"meanflow": {"steps": 3}}


@pytest.mark.parametrize("kind", SAMPLERS)
def test_continuation_with_zero_weights_equals_decode_bitwise(kind: str) -> None:
    policy, (obs, noise, prefix) = network(kind, **SAMPLERS[kind]).eval(), fixed()
    with torch.no_grad():
        plain = policy.decode(obs, noise)
    assert torch.equal(continue_chunk(policy, obs, noise, prefix, torch.zeros(3, 4)), plain)


@pytest.mark.parametrize("kind", SAMPLERS)
def test_given_actions_are_reproduced_and_change_the_rest(kind: str) -> None:
    policy, (obs, noise, prefix) = network(kind, **SAMPLERS[kind]).eval(), fixed()
    weight = torch.tensor([1.0, 1.0, 0.0, 0.0]).expand(3, -1)
    chunk = continue_chunk(policy, obs, noise, prefix, weight)
    assert torch.equal(chunk[:, :2], prefix[:, :2])
    with torch.no_grad():
        assert not torch.equal(chunk[:, 2:], policy.decode(obs, noise)[:, 2:])
    with torch.inference_mode():
        assert torch.equal(chunk, continue_chunk(policy, obs, *(tensor + 0 for tensor in (noise, prefix, weight))))
    other = continue_chunk(policy, obs, noise, torch.cat([prefix[:, :2], -prefix[:, 2:]], 1), weight)
    assert torch.equal(chunk, other)  # actions with weight 0 have no effect


def test_soft_weights_give_intermediate_distances() -> None:
    policy, given = correlated("flow", steps=10), torch.full((200, 4, 1), 0.8)
    noise, obs = torch.randn(200, 4, 1, generator=torch.Generator().manual_seed(0)), nothing(200)
    distance = [
        (continue_chunk(policy, obs, noise, given, torch.full((200, 4), w)) - given).abs().mean().item()
        for w in (0.0, 0.5, 1.0)
    ]
    assert distance[0] > distance[1] > distance[2] == 0


def test_steered_and_zero_noise_policies_continue_like_they_act() -> None:
    base, (obs, _, prefix) = network("flow").eval(), fixed()
    steered = LatentPolicy.from_base(base, NoiseSpace("repeat"), STEERING_ACTOR).eval()
    for policy in (base, steered, ZeroNoisePolicy.wrap(base)):
        plain = policy.act(obs, deterministic=True, generator=PerRowGenerator(range(3), [0] * 3))
        for weight in (0.0, 1.0):
            held = torch.full((3, 4), weight)
            chunk = act_with_prefix(policy, obs, prefix, held, generator=PerRowGenerator(range(3), [0] * 3))
            assert torch.equal(chunk, prefix if weight else plain)


@pytest.mark.parametrize(
    ("policy", "reason"),
    [
        (lambda: GaussianPolicy(GaussianConfig(), CHUNK), "'gaussian' has none"),
        (lambda: ConsistencyPolicy(ConsistencyConfig(steps=2), CHUNK), "'consistency' has none"),
        (lambda: network("diffusion", sampler="ddpm"), "'diffusion' has none"),
        (lambda: network("flow", steps=1), "this 'flow' has one"),
    ],
)
def test_samplers_without_continuation_are_refused(policy: Any, reason: str) -> None:
    obs, _, prefix = fixed()
    with pytest.raises(UserError, match=reason):
        act_with_prefix(policy(), obs, prefix, torch.ones(3, 4))
