"""U1, U2 and U4 for every head: fresh data scores as it was sampled, and a seed decides the chunk."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch

from robopolicy.contrib.control.sequence import SequenceConfig, SequencePolicy
from robopolicy.nets.vision import VisionConfig
from robopolicy.policies.base import Observation, Policy, PolicySpec
from robopolicy.policies.exploration.flow_chains import NoiseConfig, StochasticFlow
from robopolicy.policies.heads.autoregressive import AutoregressiveConfig, AutoregressivePolicy
from robopolicy.policies.heads.average_velocity import MeanFlowConfig, MeanFlowPolicy, ShortcutConfig, ShortcutPolicy
from robopolicy.policies.heads.explicit import ExplicitPolicy
from robopolicy.policies.heads.flow import FlowConfig, FlowPolicy
from robopolicy.policies.heads.gaussian import GaussianConfig, GaussianPolicy
from robopolicy.policies.heads.mixture import MixtureConfig, MixturePolicy
from robopolicy.policies.noise import RowStreams
from robopolicy.policies.registry import make_policy

STATE = PolicySpec({"state": (7,)}, action_dim=2, horizon=5, execute=3, obs_horizon=2)
SMALL = {"hidden": (32, 32), "unet_channels": (8, 16), "transformer_width": 16, "transformer_layers": 1}
RANGE = {"min": [-2.0] * 7, "max": [2.0] * 7, "mean": [0.1] * 7, "std": [1.3] * 7, "count": [50]}
ACTION = {"min": [-0.5, -3.0], "max": [0.5, 3.0], "mean": [0.0, 0.1], "std": [0.2, 2.0]}


def observations(rows: int, spec: PolicySpec = STATE) -> Observation:
    generator = torch.Generator().manual_seed(1)
    obs: Observation = {}
    for key, shape in spec.observation.items():
        size = (rows, spec.obs_horizon, *shape)
        image = key.startswith("image.")
        draw = torch.randint(0, 256, size, generator=generator) if image else torch.randn(size, generator=generator)
        obs[key] = draw.to(torch.uint8) if image else draw
    return obs


def flow(**config: object) -> FlowPolicy:
    torch.manual_seed(0)
    policy = FlowPolicy(FlowConfig(**(SMALL | config)), STATE)  # type: ignore[arg-type]
    policy.fit_normalizer({"state": RANGE, "action": ACTION})
    return policy


def few_step(name: str, **config: object) -> FlowPolicy:
    torch.manual_seed(0)
    config_class, policy_class = {
        "meanflow": (MeanFlowConfig, MeanFlowPolicy),
        "shortcut": (ShortcutConfig, ShortcutPolicy),
    }[name]
    policy = policy_class(config_class(**(SMALL | config)), STATE)  # type: ignore[arg-type]
    policy.fit_normalizer({"state": RANGE, "action": ACTION})
    return policy


def gaussian(**config: object) -> GaussianPolicy:
    torch.manual_seed(0)
    settings = {"normalization": "meanstd", "action_normalization": "minmax", "orthogonal_init": False} | config
    policy = GaussianPolicy(GaussianConfig(**settings), STATE)  # type: ignore[arg-type]
    policy.fit_normalizer({"state": RANGE, "action": ACTION})
    return policy


def mixture(**config: object) -> MixturePolicy:
    torch.manual_seed(0)
    settings = SMALL | {"normalization": "meanstd", "experts": 3, "orthogonal_init": False} | config
    policy = MixturePolicy(MixtureConfig(**settings), STATE)  # type: ignore[arg-type]
    policy.fit_normalizer({"state": RANGE, "action": ACTION})
    return policy


def sequence() -> SequencePolicy:
    torch.manual_seed(0)
    policy = SequencePolicy(SequenceConfig(hidden=(32, 32), normalization="meanstd"), STATE)
    policy.fit_normalizer({"state": RANGE, "action": ACTION})
    return policy


def tokens(spec: PolicySpec = STATE) -> AutoregressivePolicy:
    torch.manual_seed(0)
    settings = {"bins": 16, "transformer_width": 16, "transformer_layers": 2, "transformer_heads": 2}
    policy = AutoregressivePolicy(AutoregressiveConfig(vision=VIT, **settings), spec)  # type: ignore[arg-type]
    policy.fit_normalizer({"state": RANGE, "action": ACTION})
    with torch.no_grad():
        policy.output.weight.mul_(20)  # far from uniform
    return policy


def from_pixels() -> StochasticFlow:
    torch.manual_seed(0)
    spec = PolicySpec({"state": (3,), "image.wrist": (3, 24, 24)}, action_dim=2, horizon=2)
    config = FlowConfig(hidden=(16,), normalization="identity", action_normalization="identity", vision=VISION)
    return StochasticFlow(FlowPolicy(config, spec), NoiseConfig())


# The rounding of convolutions depends on the batch and is divided by the deviation: 2e-5 of a one-step flow's ratio.
WIDE = NoiseConfig(std_min=0.3, std_max=0.5)
VISION = VisionConfig(widths=(16,), keypoints=4)
VIT = VisionConfig(kind="vit", vit_width=16, vit_features=8)
EVERYTHING = PolicySpec({"state": (7,), "image.wrist": (3, 24, 24), "embedding.task": (6,)}, action_dim=2, horizon=2)
HEADS: dict[str, Callable[[], Policy]] = {
    "flow-mlp": lambda: StochasticFlow(flow(), NoiseConfig()),
    "flow-residual": lambda: StochasticFlow(flow(hidden=(32, 32, 32), residual=True), NoiseConfig(time_dim=0)),
    "flow-unet": lambda: StochasticFlow(flow(backbone="unet"), NoiseConfig(schedule="constant")),
    "flow-transformer": lambda: StochasticFlow(flow(backbone="transformer"), NoiseConfig(schedule="learned_decay")),
    "flow-one-step": lambda: StochasticFlow(flow(steps=1), NoiseConfig(noise_clip=0.0)),
    "flow-pixels": from_pixels,
    "shortcut": lambda: StochasticFlow(few_step("shortcut"), NoiseConfig()),
    "shortcut-unet": lambda: StochasticFlow(few_step("shortcut", backbone="unet", steps=4), WIDE),
    "shortcut-transformer": lambda: StochasticFlow(few_step("shortcut", backbone="transformer"), NoiseConfig()),
    "meanflow": lambda: StochasticFlow(few_step("meanflow"), NoiseConfig(schedule="constant")),
    "meanflow-unet": lambda: StochasticFlow(few_step("meanflow", backbone="unet"), WIDE),
    "meanflow-transformer": lambda: StochasticFlow(
        few_step("meanflow", backbone="transformer", steps=3), NoiseConfig()
    ),
    "sequence": sequence,
    "gaussian": gaussian,
    "gaussian-running": lambda: gaussian(normalization="running"),
    "gaussian-predicted-std": lambda: gaussian(state_dependent_std=True),
    "gaussian-squashed": lambda: gaussian(squash=True),
    "gaussian-squashed-predicted-std": lambda: gaussian(squash=True, state_dependent_std=True),
    "gaussian-unet": lambda: gaussian(backbone="unet", unet_channels=(16, 32), state_dependent_std=True),
    "gaussian-transformer": lambda: gaussian(backbone="transformer", transformer_width=16, transformer_layers=1),
    "mixture": mixture,
    "mixture-one-expert": lambda: mixture(experts=1),
    "mixture-predicted-std": lambda: mixture(state_dependent_std=True, router_hidden=()),
    "mixture-squashed": lambda: mixture(squash=True, state_dependent_std=True),
    "mixture-unet": lambda: mixture(backbone="unet", unet_channels=(16, 32)),
    "mixture-transformer": lambda: mixture(backbone="transformer"),
    "tokens": tokens,
    "tokens-one-action": lambda: tokens(PolicySpec({"state": (7,)}, action_dim=2)),
    "tokens-pixels-language": lambda: tokens(EVERYTHING),
}
heads = pytest.mark.parametrize("head", HEADS)


@heads
@pytest.mark.parametrize("mode", ["train", "eval"])
def test_every_ratio_of_fresh_data_is_one_in_any_minibatch(head: str, mode: str) -> None:
    policy = HEADS[head]()
    policy.train(mode == "train")
    obs = observations(64, policy.spec)
    policy.observe(obs)
    sample = policy.sample(obs, generator=torch.Generator().manual_seed(0))
    order = torch.randperm(64, generator=torch.Generator().manual_seed(2))
    for index in (torch.arange(64), order, order[:1], order[:13], order[13:30]):
        picked = {key: value[index] for key, value in sample.record.items()}
        output = policy.decisions({key: value[index] for key, value in obs.items()}, picked)
        assert output.logp.shape == output.entropy.shape == sample.logp[index].shape
        assert float((torch.exp(output.logp.detach() - sample.logp[index]) - 1).abs().max()) < 1e-5


@heads
def test_sampling_leaves_no_graph_and_gives_finite_chunks(head: str) -> None:
    policy = HEADS[head]()
    sample = policy.sample(observations(3, policy.spec))
    assert sample.chunk.shape == (3, policy.spec.horizon, policy.spec.action_dim)
    assert sample.logp.shape == (3, policy.network_calls)
    for tensor in (sample.chunk, sample.logp, *sample.record.values()):
        assert not tensor.requires_grad and bool(tensor.isfinite().all())


@heads
def test_a_seed_decides_the_chunk(head: str) -> None:
    policy = HEADS[head]()
    obs = observations(4, policy.spec)
    for deterministic in (True, False):
        chunks = [
            policy.act(obs, deterministic=deterministic, generator=torch.Generator().manual_seed(s)) for s in (5, 5, 6)
        ]
        assert torch.equal(chunks[0], chunks[1])
        drawn = not (deterministic and isinstance(policy, ExplicitPolicy))
        assert torch.equal(chunks[0], chunks[2]) != drawn


@heads
def test_row_streams_make_rows_independent_of_the_batch(head: str) -> None:
    policy = HEADS[head]()
    obs = observations(6, policy.spec)
    whole = policy.sample(obs, generator=RowStreams(range(10, 16), [3] * 6))
    rows = torch.tensor([4, 1])
    picked = {key: value[rows] for key, value in obs.items()}
    some = policy.sample(picked, generator=RowStreams([14, 11], [3, 3]))
    torch.testing.assert_close(some.chunk, whole.chunk[rows], atol=1e-5, rtol=1e-5)
    other = policy.sample(picked, generator=RowStreams([14, 11], [4, 4]))
    assert not torch.allclose(other.chunk, some.chunk, atol=1e-3)


@heads
def test_the_whole_policy_survives_a_state_dict(head: str) -> None:
    policy, other = HEADS[head](), HEADS[head]()
    with torch.no_grad():
        for parameter in other.parameters():
            parameter.add_(1.0)
    other.load_state_dict(policy.state_dict())
    obs = observations(3, policy.spec)
    chunks = [p.act(obs, generator=torch.Generator().manual_seed(0)) for p in (policy, other)]
    assert torch.equal(chunks[0], chunks[1])


@heads
def test_losses_stay_finite_under_autocast_and_show_a_nan(head: str) -> None:
    policy = HEADS[head]()
    obs = observations(8, policy.spec)
    chunk = torch.zeros(8, policy.spec.horizon, policy.spec.action_dim)
    with torch.autocast("cpu", torch.bfloat16):
        sample = policy.sample(obs)
        output = policy.decisions(obs, sample.record)
        loss, _ = policy.imitation_loss(obs, chunk)
    assert bool(output.logp.isfinite().all() & output.entropy.isfinite().all()) and bool(loss.isfinite().all())
    obs["state"][2] = float("nan")
    loss, _ = policy.imitation_loss(obs, chunk)
    assert loss.isnan().nonzero().flatten().tolist() == [2]


def test_policies_are_built_by_name() -> None:
    policy = make_policy("gaussian", None, STATE)
    assert isinstance(policy, GaussianPolicy) and policy.config == GaussianConfig()
