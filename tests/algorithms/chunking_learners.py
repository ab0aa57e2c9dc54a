"""Small QC, FQL and DQC learners on the chunk bandit."""

from collections.abc import Callable
from typing import Any

from chunk_bandit import SMALL, flow

from robopolicy.algorithms.common.off_policy import OffPolicy
from robopolicy.algorithms.dqc import DQC, DQCConfig
from robopolicy.algorithms.fql import FQL, FQLConfig
from robopolicy.algorithms.qc import QC, QCConfig
from robopolicy.critics.value import ValueConfig
from robopolicy.policies.base import Policy

COMMON: dict[str, Any] = {"critic": SMALL, "batch_size": 64, "critic_lr": 3e-3, "lr": 3e-3, "tau": 0.05}
VALUE = ValueConfig(hidden=(32, 32), activation="relu")


def qc(policy: Policy | None = None, **config: Any) -> QC:
    settings: dict[str, Any] = COMMON | {"candidates": 16} | config
    return QC(QCConfig(**settings), policy or flow(), total_updates=100)


def fql(policy: Policy | None = None, **config: Any) -> FQL:
    settings: dict[str, Any] = COMMON | {"alpha": 1.0} | config
    return FQL(FQLConfig(**settings), policy or flow(), total_updates=100)


def dqc(policy: Policy | None = None, **config: Any) -> DQC:
    settings: dict[str, Any] = COMMON | {"candidates": 16, "value": VALUE, "n_step": 2} | config
    return DQC(DQCConfig(**settings), policy or flow(), total_updates=100)


MAKERS: dict[str, Callable[..., OffPolicy]] = {"qc": qc, "fql": fql, "dqc": dqc}
