"""Algorithms by name, imported on first use. Importing this module does not import torch."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from robopolicy.errors import UserError, unknown_name
from robopolicy.plugins import Registry

if TYPE_CHECKING:
    from robopolicy.algorithms.common.algorithm import Algorithm
    from robopolicy.policies.base import Policy

ALGORITHMS: Registry[type[Algorithm]] = Registry(
    "algorithms",
    {
        "ac_flow": "robopolicy.algorithms.ac_flow:ACFlow",
        "awm": "robopolicy.algorithms.awm:AWM",
        "bc": "robopolicy.algorithms.bc:BC",
        "cal_ql": "robopolicy.algorithms.cal_ql:CalQL",
        "dagger": "robopolicy.algorithms.dagger:DAgger",
        "distill": "robopolicy.algorithms.distill:Distill",
        "dppo": "robopolicy.algorithms.dppo:DPPO",
        "dqc": "robopolicy.algorithms.dqc:DQC",
        "dsrl_na": "robopolicy.algorithms.dsrl_na:DSRLNA",
        "dsrl_sac": "robopolicy.algorithms.dsrl_sac:DSRLSAC",
        "expo": "robopolicy.algorithms.expo:EXPO",
        "flow_grpo": "robopolicy.algorithms.flow_grpo:FlowGRPO",
        "flow_sde": "robopolicy.algorithms.flow_sde:FlowSDE",
        "fpo": "robopolicy.algorithms.fpo:FPO",
        "fpo_pp": "robopolicy.algorithms.fpo_pp:FPOPlusPlus",
        "fql": "robopolicy.algorithms.fql:FQL",
        "gorl": "robopolicy.algorithms.gorl:GoRL",
        "idql": "robopolicy.algorithms.idql:IDQL",
        "iql": "robopolicy.algorithms.iql:IQL",
        "pa_rl": "robopolicy.algorithms.pa_rl:PARL",
        "policyflow": "robopolicy.algorithms.policyflow:PolicyFlow",
        "ppo": "robopolicy.algorithms.ppo:PPO",
        "qc": "robopolicy.algorithms.qc:QC",
        "recipe": "robopolicy.algorithms.recipe:RecipeFineTuner",
        "reflow": "robopolicy.algorithms.reflow:Reflow",
        "reinflow": "robopolicy.algorithms.reinflow:ReinFlow",
        "rlpd": "robopolicy.algorithms.rlpd:RLPD",
        "sac": "robopolicy.algorithms.sac:SAC",
        "td3": "robopolicy.algorithms.td3:TD3",
        "td3_bc": "robopolicy.algorithms.td3_bc:TD3BC",
        "text_recipe": "robopolicy.text.recipe_trainer:TextRecipe",
        "text_sft": "robopolicy.text.sft:TextSFT",
    },
)
"""Name -> class; constructed as `cls(cls.config_class(...), policy, total_updates=n)`."""


def names_with(trait: str) -> str:
    """Names of the product's algorithms with a true class attribute `trait`, e.g. "distributed", for messages."""
    return ", ".join(name for name in ALGORITHMS.product() if getattr(ALGORITHMS[name], trait))


def make_algorithm(name: str, config: Any, policy: Policy, *, total_updates: int) -> Algorithm:
    """Build a registered algorithm around `policy`."""
    if name not in ALGORITHMS:
        raise unknown_name("algorithm", name, ALGORITHMS)
    algorithm: Any = ALGORITHMS[name]
    if policy.spec.hidden_dim and not algorithm.supports_recurrent:
        choices = names_with("supports_recurrent")
        raise UserError(f"Algorithm '{name}' cannot train a recurrent '{policy.name}'; choose one of {choices}.")
    return algorithm(config, policy, total_updates=total_updates)
