"""One small policy of every deployable kind, with random observations."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from robopolicy.critics.q import CriticConfig, QEnsemble
from robopolicy.nets.recurrent import RecurrentConfig
from robopolicy.nets.vision import VisionConfig
from robopolicy.policies.base import Policy, PolicySpec
from robopolicy.policies.composition.operators import And, Or
from robopolicy.policies.registry import POLICIES
from robopolicy.policies.wrappers.action_optimized import make_action_optimized
from robopolicy.policies.wrappers.best_of_n import make_best_of_n
from robopolicy.policies.wrappers.black_box import CallablePolicy
from robopolicy.policies.wrappers.composed import compose
from robopolicy.policies.wrappers.latent import GaussianConfig, LatentPolicy, NoiseSpace
from robopolicy.policies.wrappers.residual_edit import EditConfig, EditNet, make_residual_edit
from robopolicy.policies.wrappers.staged import StagedDecoder, make_staged
from robopolicy.policies.wrappers.zero_noise import ZeroNoisePolicy

SPEC = PolicySpec({"goal": (2,), "state": (3,)}, action_dim=2, horizon=4, action_horizon=2, obs_horizon=2)
ONE = PolicySpec({"state": (3,)}, action_dim=2)
STATISTICS = {
    "goal": {"min": [-1.0, 0.0], "max": [2.0, 3.0], "mean": [0.0, 1.0], "std": [1.0, 2.0], "count": [9.0]},
    "state": {"min": [-2.0] * 3, "max": [2.0] * 3, "mean": [0.0] * 3, "std": [0.5] * 3, "count": [9.0]},
    "action": {"min": [-0.5, -30.0], "max": [0.5, 10.0], "mean": [0.0, 1.0], "std": [1.0, 2.0]},
}
SMALL: dict[str, Any] = {"hidden": (16,), "steps": 2}
TRANSFORMER: dict[str, Any] = {"transformer_width": 8, "transformer_layers": 1, "transformer_heads": 2}


def head(kind: str, spec: PolicySpec = SPEC, **settings: Any) -> Any:
    """An untrained head with fitted normalisers."""
    policy_class = POLICIES[kind]
    config_class = policy_class.config_class
    policy = policy_class(config_class(**settings), spec)  # type: ignore[call-arg]
    policy.fit_normalizer(STATISTICS)
    return policy.eval()


def small(kind: str, **settings: Any) -> Any:
    """A denoising head with a small network."""
    return head(kind, **({"spacing": "trailing"} if kind == "diffusion" else {}), **(SMALL | settings))


def critic(policy: Policy) -> QEnsemble:
    """An untrained critic of `policy`."""
    return QEnsemble(CriticConfig(hidden=(8,)), policy)


def steered(space: NoiseSpace) -> LatentPolicy:
    """A flow with noise from an untrained actor."""
    actor = GaussianConfig(hidden=(8,), state_dependent_std=True, squash=True, action_normalization="minmax")
    return LatentPolicy.from_base(small("flow"), space, actor)


def guided() -> Any:
    """A composition with critic guidance."""
    parents = [small("flow"), small("diffusion")]
    return compose(parents, critic=critic(compose(parents)))


def staged_decoder() -> Any:
    """The decoder of GoRL after its first stage."""
    return StagedDecoder.wrap(small("flow"), identity=False)


def edited() -> Any:
    """EXPO's policy."""
    base = small("flow")
    return make_residual_edit(base, EditNet(EditConfig(hidden=(8,)), base), critic(base), candidates=3, edits=2)


def of_samples(wrap: Callable[..., Any], **settings: Any) -> Any:
    """A wrapper that selects among samples of a flow."""
    base = small("flow")
    return wrap(base, critic(base), **settings)


def seeing() -> Any:
    """A flow with image observations."""
    spec = PolicySpec({"image.front": (3, 16, 16), "state": (3,)}, 2, 4, 2, 2)
    return head("flow", spec, vision=VisionConfig(), **SMALL)


EXPORTED: dict[str, Callable[[], Any]] = {
    "flow": lambda: small("flow"),
    "flow-unet": lambda: small("flow", backbone="unet", unet_channels=(8, 16)),
    "flow-transformer": lambda: small("flow", backbone="transformer", **TRANSFORMER),
    "flow-images": seeing,
    "one-step (FQL)": lambda: small("flow", steps=1),
    "shortcut": lambda: small("shortcut"),
    "meanflow": lambda: small("meanflow", steps=1),
    "consistency": lambda: small("consistency"),
    "ddim": lambda: small("diffusion"),
    "ddpm": lambda: small("diffusion", sampler="ddpm", steps=3),
    "edm-heun": lambda: small("edm", solver="heun"),
    "gaussian": lambda: head("gaussian", hidden=(8,)),
    "gaussian-squashed": lambda: head("gaussian", hidden=(8,), squash=True, action_normalization="minmax"),
    "gaussian-gru": lambda: head("gaussian", ONE, hidden=(8,), recurrent=RecurrentConfig("gru", 4)),
    "gaussian-lstm": lambda: head("gaussian", ONE, hidden=(8,), recurrent=RecurrentConfig("lstm", 4)),
    "mixture (PMOE)": lambda: head("mixture", hidden=(8,), experts=3, router_hidden=(4,), squash=True),
    "act": lambda: head("act", width=8, attention_heads=2, feedforward=8, posterior_layers=1),
    "autoregressive": lambda: head("autoregressive", bins=8, **TRANSFORMER),
    "latent (DSRL)": lambda: steered(NoiseSpace("repeat")),
    "latent-drawn-rest": lambda: steered(NoiseSpace("truncated", rest="draw")),
    "zero-noise": lambda: ZeroNoisePolicy.wrap(small("flow")),
    "selected (IDQL)": lambda: of_samples(make_best_of_n, candidates=3),
    "optimized (PA-RL)": lambda: of_samples(
        make_action_optimized, candidates=3, top=2, ascent_steps=2, ascent_rate=0.1
    ),
    "edited (EXPO)": edited,
    "staged-decoder (GoRL)": staged_decoder,
    "staged-diffusion (DPPO)": lambda: make_staged((0, 1), [small("diffusion"), small("diffusion")]),
    "composed-convex": lambda: compose([small("flow"), small("diffusion")]),
    "composed-or": lambda: compose([small("flow"), small("diffusion")], Or(derivative="exact")),
    "composed-or-sde": lambda: compose([small("flow"), small("diffusion")], Or(sampler="sde")),
    "composed-and": lambda: compose([small("flow"), small("diffusion")], And()),
    "composed-and-sde": lambda: compose([small("flow"), small("diffusion")], And(sampler="sde")),
    "composed-guided": guided,
}
REFUSED: dict[str, tuple[Callable[[], Any], str]] = {
    "function": (
        lambda: CallablePolicy.wrap("tiny", lambda obs, noise: noise, SPEC),
        "The function 'tiny' is not torch code of this project",
    )
}


def observed(policy: Policy, rows: int = 3) -> dict[str, Tensor]:
    """Observations of the shapes in the spec of `policy`."""
    draw = torch.Generator().manual_seed(3)
    obs: dict[str, Tensor] = {}
    for key, shape in policy.spec.observation.items():
        size = (rows, policy.spec.obs_horizon, *shape)
        if key.startswith("image."):
            obs[key] = torch.randint(0, 256, size, generator=draw, dtype=torch.uint8)
        else:
            obs[key] = torch.randn(size, generator=draw)
    return obs
