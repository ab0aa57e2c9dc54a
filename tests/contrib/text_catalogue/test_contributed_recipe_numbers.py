"""Tests that a recipe has the numbers of its source, independent of the defaults of its parts."""

from __future__ import annotations

from typing import Any

import pytest
from recipe_numbers import CLIP, HELP, ROLLOUT, STAGE, check_numbers

NUMBERS: dict[str, dict[str, Any]] = {
    "a_star_po": {"objective.beta": 1e-3},
    "v0": {STAGE + "context_baseline.width": 1.0, STAGE + "context_baseline.size": 4096},
    "arpo_gui": {
        **{
            HELP + f"replay.{key}": value
            for key, value in (("size", 8), ("keep", 0.1), ("spread", 0.05), ("mean", 0.2))
        },
        CLIP + "low": 0.2,
        CLIP + "high": 0.3,
        "group_size": 8,
    },
    "distribution_dcpo": {
        STAGE + "tempered_target.entropy": 0.5,
        STAGE + "tempered_target.most": 0.1,
        STAGE + "tempered_target.above": 0.05,
        ROLLOUT + "score_temperatures": {"logp_cool": 0.8, "logp_warm": 1.2},
    },
    "aspo": {STAGE + "shape.fraction": 0.7, STAGE + "shape.bonus.slope": -2.0},
    "segment_spo": {ROLLOUT + "segments": {"every": 5, "below": 0.9}, "estimator.masks.uncertain.below": 0.9},
    "pipo": {
        STAGE + "improvement_baseline.window": 8,
        STAGE + "improvement_baseline.limit": 10.0,
        STAGE + "improvement_baseline.loss_weight": 0.0,
        ROLLOUT + "replay_last_batch": True,
    },
    "loop": {"group_size": 6},
    "poad": {"advantage_source.lam": 0.95, "advantage_source.inner_gamma": 1.0, "advantage_source.inner_lam": 0.95},
    "hgpo": {
        f"{STAGE}history_groups.{key}": value
        for key, value in (("longest", 2), ("power", 1.0), ("base", True), ("standardise", True), ("gamma", 0.95))
    },
    "hapo": {
        CLIP + "low": 0.2,
        CLIP + "high": 0.2,
        CLIP + "quantile": 0.8,
        "estimator.weights.entropy_gate.beta": 1.0,
        "group_size": 16,
    },
    "poise": {
        STAGE + "probe_baseline.components": 32,
        STAGE + "probe_baseline.ridge": 1.0,
        STAGE + "probe_baseline.size": 4096,
        "group_size": 2,
    },
    "adora": {STAGE + "modulate.factor.low": 0.1, STAGE + "modulate.factor.overlong": 4054.0},
    "bupo": {ROLLOUT + "layer.number": 5, ROLLOUT + "layer.updates": 30, "group_size": 8},
    "trajectory_selection": {"select.contrast.keep": 4, "group_size": 16},
    "fiberpo": {
        "estimator.hierarchy": {"outer": "sequence", "budget_up": 0.2, "budget_down": 0.1, "residual": 0.02},
        "estimator.surrogate": "importance_sampling",
    },
    "r2vpo": {
        "estimator.surrogate": "importance_sampling",
        "controllers.ratio_variance": {"name": "dual", "value": 1.0, "target": 0.04, "rate": 10.0},
    },
    "capo": {
        f"estimator.masks.predicted_kl.{key}": value
        for key, value in (("rate", 1.0), ("shift", 0.3), ("gain", 0.0), ("share", 0.08))
    },
    "hpt": {"select.demonstration_switch.gate": 0, "regularizers.imitation.coef": 1.0, "group_size": 8},
    "empg": {
        STAGE + "modulate.factor.sharpness": 1.0,
        STAGE + "shape.bonus.scale": 0.05,
        STAGE + "shape.bonus.sharpness": 1.0,
    },
    "supo": {ROLLOUT + "strategy.summaries": 2},
    "scaf_grpo": {HELP + "graded_hints.levels": 4, HELP + "graded_hints.warmup": 50},
    "minirl": {"estimator.importance_cap": 2.0, "estimator.importance_level": "token"},
    "clpo": {ROLLOUT + "strategy.hard": 0.3, ROLLOUT + "strategy.easy": 0.7},
    "asyncflow": {ROLLOUT + "staleness.limit": 1},
    "nlpo": {
        ROLLOUT + "support": {"top_p": 0.9, "refresh": 20},
        "controllers.kl.value": 1e-3,
        "controllers.kl.target": 0.2,
        "estimator.kl_coef": 1e-3,
    },
    "pcpg": {"advantage_source.gamma": 1.0, "advantage_source.window": 3},
    "gppo": {"estimator.surrogate_options": {"low_gain": 1.0, "high_gain": 1.0, "cap": 3.0}},
    "bnpo": {
        CLIP + "low": 0.2,
        CLIP + "high": 0.28,
        "estimator.surrogate_options.cap": 10.0,
        "estimator.aggregate": "sequence_sum",
        "group_size": 16,
    },
    "dynamic_clipping": {
        CLIP + "low": 0.16,
        CLIP + "high": 0.2,
        CLIP + "limit": 10.0,
        "estimator.surrogate_options.cap": 10.0,
    },
    "copo": {
        **{
            f"{STAGE}mix.branches.{branch}.modulate.factor.{key}": value
            for branch in (0, 1)
            for key, value in (("sharpness", 20.0), ("middle", 0.5))
        },
        STAGE + "mix.branches.1.modulate.factor.complement": True,
        STAGE + "mix.weights": [1.0, 1.0],
    },
    "rpo": {"objective.beta": 0.01, "regularizers.imitation.coef": 0.005},
    "ghpo": {HELP + "hint.shares": [0.25, 0.5, 0.75]},
    "disco": {
        "objective.temperature": 1.0,
        "regularizers.kl_barrier.limit": 1e-4,
        "regularizers.kl_barrier.slope": 1e3,
    },
    "dr_po": {ROLLOUT + "strategy.share": 1.0},
    "sec": {ROLLOUT + "sampler.temperature": 1.0, ROLLOUT + "sampler.rate": 0.1},
    "oppo": {"objective.margin": 1.0, "objective.norm": 1.0, "objective.coef": 0.1},
    "gepo": {"objective.variance": 1.0, "objective.coef": 0.01},
    "ampo": {
        "objective.shape": 0.1,
        "estimator.entropy_coef": 1e-3,
        HELP + "teacher.count": 2,
        CLIP + "low": 0.2,
    },
    "dialtree": {ROLLOUT + "strategy.width": 4, ROLLOUT + "strategy.depth": 5, "group_size": 32},
    "ded": {"select.diverse.keep": 2},
    "pf_ppo": {"select.extremes.rest": 0.0},
    "attention_rhythm": {STAGE + "modulate.factor.gain": 0.5, STAGE + "modulate.factor.share": 0.4},
    "pcl": {ROLLOUT + "sampler.factor": 4, ROLLOUT + "sampler.target": 0.5, "group_size": 16},
    "epo": {"advantage_source.gamma": 0.99},
    "critique_rl": {ROLLOUT + "reward.refinement.first": 200, ROLLOUT + "reward.refinement.bonus": 0.2},
    "spae": {STAGE + "modulate.factor.limit": 0.9},
    "canon": {
        **{STAGE + f"split_baseline.{key}": value for key, value in (("inter", 1.0), ("alpha", 1.0), ("beta", 0.0))},
        CLIP + "high": 0.28,
        "estimator.length": 8192.0,
    },
    "spc": {"estimator.kl_coef": 0.1, "regularizers.imitation.coef": 0.15},
    "progrpo": {STAGE + "shape.bonus.share": 0.2, CLIP + "low": 0.2, CLIP + "high": 0.28},
    "hiper": {"advantage_source.gamma": 0.99, "advantage_source.lam": 0.95, "critic.coef": 0.5},
    "cm2": {STAGE + "min_group_size.least": 5},
    "critic_v": {"objective.beta": 0.1},
    "critique_coder": {ROLLOUT + "sampler.shares": [0.8, 0.2]},
    "vl_dac": {
        "advantage_source.gamma": 0.99,
        "advantage_source.lam": 0.95,
        CLIP + "low": 0.1,
        "estimator.kl": "k3",
        "estimator.kl_coef": 0.04,
        "critic.coef": 0.5,
        "critic.detach": True,
    },
    "proact": {"advantage_source.gamma": 0.9, "advantage_source.level": "unit"},
    "a_lol": {CLIP + "low": 0.9},
}


@pytest.mark.parametrize("name", NUMBERS)
def test_a_contributed_recipe_has_the_numbers_of_its_source(name: str) -> None:
    check_numbers(name, NUMBERS[name])
