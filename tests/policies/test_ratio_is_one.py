"""Tests for every head: the ratio of fresh data is one, and a seed determines the chunk."""

from collections.abc import Callable

import pytest
import torch
from ratio_rules import (
    ACTION,
    RANGE,
    STATE,
    check_a_seed_decides_the_chunk,
    check_every_ratio_is_one_in_any_minibatch,
    check_losses_stay_finite_and_show_a_nan,
    check_rows_do_not_depend_on_the_batch,
    check_sampling_leaves_no_graph,
    check_survives_a_state_dict,
)

from robopolicy.nets.vision import VisionConfig
from robopolicy.policies.base import Policy, PolicySpec
from robopolicy.policies.exploration.flow_chains import NoiseConfig, StochasticFlow
from robopolicy.policies.heads.autoregressive import AutoregressiveConfig, AutoregressivePolicy
from robopolicy.policies.heads.average_velocity import MeanFlowConfig, MeanFlowPolicy, ShortcutConfig, ShortcutPolicy
from robopolicy.policies.heads.flow import FlowConfig, FlowPolicy
from robopolicy.policies.heads.gaussian import GaussianConfig, GaussianPolicy
from robopolicy.policies.heads.mixture import MixtureConfig, MixturePolicy
from robopolicy.policies.registry import make_policy

SMALL = {"hidden": (32, 32), "unet_channels": (8, 16), "transformer_width": 16, "transformer_layers": 1}


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


# Rounding of convolutions depends on the batch and is divided by the std: 2e-5 in the ratio of a one-step flow.
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
    check_every_ratio_is_one_in_any_minibatch(HEADS[head](), mode)


@heads
def test_sampling_leaves_no_graph_and_gives_finite_chunks(head: str) -> None:
    check_sampling_leaves_no_graph(HEADS[head]())


@heads
def test_a_seed_decides_the_chunk(head: str) -> None:
    check_a_seed_decides_the_chunk(HEADS[head]())


@heads
def test_row_streams_make_rows_independent_of_the_batch(head: str) -> None:
    check_rows_do_not_depend_on_the_batch(HEADS[head]())


@heads
def test_the_whole_policy_survives_a_state_dict(head: str) -> None:
    check_survives_a_state_dict(HEADS[head])


@heads
def test_losses_stay_finite_under_autocast_and_show_a_nan(head: str) -> None:
    check_losses_stay_finite_and_show_a_nan(HEADS[head]())


def test_policies_are_built_by_name() -> None:
    policy = make_policy("gaussian", None, STATE)
    assert isinstance(policy, GaussianPolicy) and policy.config == GaussianConfig()
