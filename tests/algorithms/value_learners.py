"""Small IQL, IDQL, Cal-QL, PA-RL and EXPO learners for the chunk bandit."""

from collections.abc import Callable
from typing import Any

import torch
from chunk_bandit import SMALL, flow, gaussian
from torch import Tensor, nn

from robopolicy.algorithms.cal_ql import CalQL, CalQLConfig
from robopolicy.algorithms.common.off_policy import OffPolicy
from robopolicy.algorithms.common.offline import ConservativeConfig, ImplicitConfig
from robopolicy.algorithms.expo import EXPO, EXPOConfig
from robopolicy.algorithms.idql import IDQL, IDQLConfig
from robopolicy.algorithms.iql import IQL, IQLConfig
from robopolicy.algorithms.pa_rl import PARL, PARLConfig
from robopolicy.critics.value import ValueConfig
from robopolicy.policies.base import Policy
from robopolicy.policies.wrappers.residual_edit import EditConfig

VALUE = ImplicitConfig(expectile=0.9, value=ValueConfig(hidden=(32, 32), activation="relu"))
COMMON: dict[str, Any] = {"critic": SMALL, "batch_size": 64, "critic_lr": 3e-3, "lr": 3e-3, "tau": 0.05}


def iql(policy: Policy | None = None, **config: Any) -> IQL:
    settings: dict[str, Any] = COMMON | {"implicit": VALUE} | config
    return IQL(IQLConfig(**settings), policy or flow(), total_updates=100)


def idql(policy: Policy | None = None, **config: Any) -> IDQL:
    settings = COMMON | {"implicit": VALUE, "candidates": 16} | config
    return IDQL(IDQLConfig(**settings), policy or flow(), total_updates=100)


def cal_ql(policy: Policy | None = None, **config: Any) -> CalQL:
    settings = COMMON | {"candidates": 4, "conservative": ConservativeConfig(1.0, 4)} | config
    return CalQL(CalQLConfig(**settings), policy or gaussian(state_dependent_std=True), total_updates=100)


def pa_rl(policy: Policy | None = None, **config: Any) -> PARL:
    small = {"candidates": 6, "top": 3, "ascent_steps": 3, "ascent_rate": 0.05, "temperature": 0.1}
    settings = COMMON | small | {"implicit": VALUE, "conservative": ConservativeConfig(0.1, 4)} | config
    return PARL(PARLConfig(**settings), policy or flow(), total_updates=100)


def pa_rl_iql(policy: Policy | None = None, **config: Any) -> PARL:
    return pa_rl(policy, **({"critic_objective": "iql"} | config))


def expo(policy: Policy | None = None, **config: Any) -> EXPO:
    small = {"candidates": 4, "edits": 4, "utd": 1.0, "policy_delay": 1, "edit": EditConfig(0.3, hidden=(32, 32))}
    return EXPO(EXPOConfig(**(COMMON | small | config)), policy or flow(), total_updates=100)


def expo_softmax(policy: Policy | None = None, **config: Any) -> EXPO:
    return expo(policy, **({"selection": "softmax"} | config))


MAKERS: dict[str, Callable[..., OffPolicy]] = {"iql": iql, "idql": idql, "cal_ql": cal_ql, "pa_rl": pa_rl}
MAKERS |= {"pa_rl_iql": pa_rl_iql, "expo": expo, "expo_softmax": expo_softmax}


def peak(action: Tensor) -> Tensor:
    """Reward with its maximum 1 at action 0.9."""
    return 1 - (action[:, 0] - 0.9).square()


def snapshot(module: nn.Module) -> dict[str, Tensor]:
    return {key: value.clone() for key, value in module.state_dict().items()}


def same(before: dict[str, Tensor], module: nn.Module) -> bool:
    return all(torch.equal(before[key], value) for key, value in module.state_dict().items())
