"""Off-policy evaluation: the return of a policy from episodes of another policy.

We implement the estimators because no maintained library supports our data. scope-rl (2023, by the authors of Kiyohara
et al. 2023) only evaluates algorithm objects of d3rlpy and smooths continuous actions with kernels; d3rlpy has FQE for
its own networks and pins gymnasium 1.0.0; obp is for single decisions with discrete actions. None supports action
chunks, observation histories, cameras or generative policies without a density. The estimators are short; fitted
Q-evaluation uses the critics of `robopolicy.critics`.
"""

from robopolicy.evaluation.ope.estimates import Estimates, OPEConfig, ValueEstimate, estimate
from robopolicy.evaluation.ope.fqe import FQE, FQEConfig
from robopolicy.evaluation.ope.logs import Logs
from robopolicy.evaluation.ope.policy_class import (
    ClassScores,
    UniformPolicy,
    class_scores,
    grow_trees,
    score_class,
    sharpe_ratio,
    sharpe_table,
)

__all__ = [
    "FQE",
    "ClassScores",
    "Estimates",
    "FQEConfig",
    "Logs",
    "OPEConfig",
    "UniformPolicy",
    "ValueEstimate",
    "class_scores",
    "estimate",
    "grow_trees",
    "score_class",
    "sharpe_ratio",
    "sharpe_table",
]
