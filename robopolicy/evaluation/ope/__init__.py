"""Off-policy evaluation: the return of a policy from episodes of another policy.

Estimators are ours because no well-kept library takes what we have. scope-rl (2023, by the authors of
Kiyohara et al. 2023) evaluates the algorithm objects of d3rlpy alone and smooths continuous actions with kernels;
d3rlpy has FQE for its own networks and pins gymnasium 1.0.0; obp is for single decisions among discrete actions. None
knows action chunks, observation histories, cameras or generative policies without a density, which are the rule here.
What they compute per episode is a dozen lines each; the long part, fitted Q-evaluation, stands on the critics of
`robopolicy.critics`.
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
