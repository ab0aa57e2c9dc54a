"""Learning algorithms, one file each, all in the same order."""

from __future__ import annotations

from typing import Any

from robopolicy.algorithms.a2pr import A2PR, A2PRConfig
from robopolicy.algorithms.ac_flow import ACFlow, ACFlowConfig
from robopolicy.algorithms.ailboost import AILBoost, AILBoostConfig
from robopolicy.algorithms.awm import AWM, AWMConfig
from robopolicy.algorithms.bc import BC, BCConfig
from robopolicy.algorithms.bpo import BPO, BPOConfig
from robopolicy.algorithms.cal_ql import CalQL, CalQLConfig
from robopolicy.algorithms.camel_sac import CAMELSAC, CAMELSACConfig
from robopolicy.algorithms.camel_td3 import CAMELTD3, CAMELTD3Config
from robopolicy.algorithms.cdsa import CDSA, CDSAConfig
from robopolicy.algorithms.dcg_map_elites import DCGMAPElites, DCGMAPElitesConfig
from robopolicy.algorithms.distill import Distill, DistillConfig
from robopolicy.algorithms.dppo import DPPO, DPPOConfig
from robopolicy.algorithms.dqc import DQC, DQCConfig
from robopolicy.algorithms.dsac_t import DSACT, DSACTConfig
from robopolicy.algorithms.dsrl_na import DSRLNA, DSRLNAConfig
from robopolicy.algorithms.dsrl_sac import DSRLSAC, DSRLSACConfig
from robopolicy.algorithms.expo import EXPO, EXPOConfig
from robopolicy.algorithms.flow_grpo import FlowGRPO, FlowGRPOConfig
from robopolicy.algorithms.flow_sde import FlowSDE, FlowSDEConfig
from robopolicy.algorithms.fpo import FPO, FPOConfig
from robopolicy.algorithms.fpo_pp import FPOPlusPlus, FPOPlusPlusConfig
from robopolicy.algorithms.fql import FQL, FQLConfig
from robopolicy.algorithms.frames.base import Algorithm
from robopolicy.algorithms.gorl import GoRL, GoRLConfig
from robopolicy.algorithms.hamnet import HAMNet, HAMNetConfig
from robopolicy.algorithms.harpg import HARPG, HARPGConfig
from robopolicy.algorithms.hdpo import HDPO, HDPOConfig
from robopolicy.algorithms.hnpg import HNPG, HNPGConfig
from robopolicy.algorithms.idql import IDQL, IDQLConfig
from robopolicy.algorithms.iql import IQL, IQLConfig
from robopolicy.algorithms.mdpo import MDPO, MDPOConfig
from robopolicy.algorithms.mdpo_off import MDPOOff, MDPOOffConfig
from robopolicy.algorithms.npg_igt import NPGIGT, NPGIGTConfig
from robopolicy.algorithms.odice import ODICE, ODICEConfig
from robopolicy.algorithms.optimistic_ac import OptimisticAC, OptimisticACConfig
from robopolicy.algorithms.pa_rl import PARL, PARLConfig
from robopolicy.algorithms.pmoe import PMOE, PMOEConfig
from robopolicy.algorithms.pmoe_ppo import PMOEPPO, PMOEPPOConfig
from robopolicy.algorithms.policyflow import PolicyFlow, PolicyFlowConfig
from robopolicy.algorithms.polychromic import Polychromic, PolychromicConfig
from robopolicy.algorithms.ppo import PPO, PPOConfig
from robopolicy.algorithms.ppo_lagrangian import PPOLagrangian, PPOLagrangianConfig
from robopolicy.algorithms.prdc import PRDC, PRDCConfig
from robopolicy.algorithms.props import PROPS, PROPSConfig
from robopolicy.algorithms.qc import QC, QCConfig
from robopolicy.algorithms.recipe import RecipeTuner, RecipeTunerConfig
from robopolicy.algorithms.reflow import Reflow, ReflowConfig
from robopolicy.algorithms.reinflow import ReinFlow, ReinFlowConfig
from robopolicy.algorithms.rlpd import RLPD, RLPDConfig
from robopolicy.algorithms.sac import SAC, SACConfig
from robopolicy.algorithms.sl_mgac import SLMGAC, SLMGACConfig
from robopolicy.algorithms.srl import SRL, SRLConfig
from robopolicy.algorithms.stac import STAC, STACConfig
from robopolicy.algorithms.stax import STAX, STAXConfig
from robopolicy.algorithms.stock_ac import StockAC, StockACConfig
from robopolicy.algorithms.subpo import SubPO, SubPOConfig
from robopolicy.algorithms.symphony import Symphony, SymphonyConfig
from robopolicy.algorithms.ta_lpo import TALPO, TALPOConfig
from robopolicy.algorithms.td3 import TD3, TD3Config
from robopolicy.algorithms.td3_bc import TD3BC, TD3BCConfig
from robopolicy.algorithms.ts_ddr import TSDDR, TSDDRConfig
from robopolicy.algorithms.tscac import TSCAC, TSCACConfig
from robopolicy.errors import UserError, unknown_name
from robopolicy.policies.base import Policy

ALGORITHMS: dict[str, tuple[type[Any], type[Algorithm]]] = {
    "a2pr": (A2PRConfig, A2PR),
    "ac_flow": (ACFlowConfig, ACFlow),
    "ailboost": (AILBoostConfig, AILBoost),
    "awm": (AWMConfig, AWM),
    "bc": (BCConfig, BC),
    "bpo": (BPOConfig, BPO),
    "cal_ql": (CalQLConfig, CalQL),
    "camel_sac": (CAMELSACConfig, CAMELSAC),
    "camel_td3": (CAMELTD3Config, CAMELTD3),
    "cdsa": (CDSAConfig, CDSA),
    "dcg_map_elites": (DCGMAPElitesConfig, DCGMAPElites),
    "distill": (DistillConfig, Distill),
    "dppo": (DPPOConfig, DPPO),
    "dqc": (DQCConfig, DQC),
    "dsac_t": (DSACTConfig, DSACT),
    "dsrl_na": (DSRLNAConfig, DSRLNA),
    "dsrl_sac": (DSRLSACConfig, DSRLSAC),
    "expo": (EXPOConfig, EXPO),
    "flow_grpo": (FlowGRPOConfig, FlowGRPO),
    "flow_sde": (FlowSDEConfig, FlowSDE),
    "fpo": (FPOConfig, FPO),
    "fpo_pp": (FPOPlusPlusConfig, FPOPlusPlus),
    "fql": (FQLConfig, FQL),
    "gorl": (GoRLConfig, GoRL),
    "hamnet": (HAMNetConfig, HAMNet),
    "harpg": (HARPGConfig, HARPG),
    "hdpo": (HDPOConfig, HDPO),
    "hnpg": (HNPGConfig, HNPG),
    "idql": (IDQLConfig, IDQL),
    "iql": (IQLConfig, IQL),
    "mdpo": (MDPOConfig, MDPO),
    "mdpo_off": (MDPOOffConfig, MDPOOff),
    "npg_igt": (NPGIGTConfig, NPGIGT),
    "odice": (ODICEConfig, ODICE),
    "optimistic_ac": (OptimisticACConfig, OptimisticAC),
    "pa_rl": (PARLConfig, PARL),
    "pmoe": (PMOEConfig, PMOE),
    "pmoe_ppo": (PMOEPPOConfig, PMOEPPO),
    "policyflow": (PolicyFlowConfig, PolicyFlow),
    "polychromic": (PolychromicConfig, Polychromic),
    "ppo": (PPOConfig, PPO),
    "ppo_lagrangian": (PPOLagrangianConfig, PPOLagrangian),
    "prdc": (PRDCConfig, PRDC),
    "props": (PROPSConfig, PROPS),
    "qc": (QCConfig, QC),
    "recipe": (RecipeTunerConfig, RecipeTuner),
    "reflow": (ReflowConfig, Reflow),
    "reinflow": (ReinFlowConfig, ReinFlow),
    "rlpd": (RLPDConfig, RLPD),
    "sac": (SACConfig, SAC),
    "sl_mgac": (SLMGACConfig, SLMGAC),
    "srl": (SRLConfig, SRL),
    "stac": (STACConfig, STAC),
    "stax": (STAXConfig, STAX),
    "stock_ac": (StockACConfig, StockAC),
    "subpo": (SubPOConfig, SubPO),
    "symphony": (SymphonyConfig, Symphony),
    "ta_lpo": (TALPOConfig, TALPO),
    "td3": (TD3Config, TD3),
    "td3_bc": (TD3BCConfig, TD3BC),
    "ts_ddr": (TSDDRConfig, TSDDR),
    "tscac": (TSCACConfig, TSCAC),
}


def names_with(trait: str) -> str:
    """The algorithms whose class says yes to `trait`, e.g. "distributed", as a list for messages."""
    return ", ".join(sorted(name for name, (_, learner) in ALGORITHMS.items() if getattr(learner, trait)))


def make_algorithm(name: str, config: Any, policy: Policy, *, total_updates: int) -> Algorithm:
    """Build a registered algorithm around `policy`."""
    if name not in ALGORITHMS:
        raise unknown_name("algorithm", name, ALGORITHMS)
    algorithm: Any = ALGORITHMS[name][1]
    if policy.spec.memory_dim and not algorithm.may_remember:
        able = names_with("may_remember")
        raise UserError(f"Algorithm '{name}' cannot train a recurrent '{policy.name}'; choose one of {able}.")
    return algorithm(config, policy, total_updates=total_updates)
