"""Recurrent on-policy learners on the cue task, and a check for all of them."""

from typing import Any

import torch
from cue import CueSim

from robopolicy.algorithms.common.rollout_batch import recurrent_minibatches
from robopolicy.algorithms.registry import ALGORITHMS, make_algorithm
from robopolicy.nets.recurrent import RecurrentConfig
from robopolicy.policies.base import PolicySpec
from robopolicy.policies.heads.gaussian import GaussianConfig
from robopolicy.policies.registry import make_policy
from robopolicy.rollout.on_policy import RolloutSampler
from robopolicy.sim.chunk import ChunkedSim
from robopolicy.spec import HIDDEN_STATE

SPEC = PolicySpec({"state": (2,)}, action_dim=1)


def learner(name: str = "ppo", kind: str = "gru", seed: int = 0, updates: int = 40, **overrides: Any) -> Any:
    """A learner with a recurrent policy; with fewer settings if its config has no epochs."""
    torch.manual_seed(seed)
    config = GaussianConfig(recurrent=RecurrentConfig(kind=kind, width=16), log_std_init=-0.5)
    config_class = ALGORITHMS[name].config_class
    settings = {"num_steps": 13, "epochs": 3, "batch_size": 104, "lr": 3e-3, "gamma": 1.0} | overrides
    if not hasattr(config_class(), "epochs"):
        settings = {"num_steps": 13}
    return make_algorithm(name, config_class(**settings), make_policy("gaussian", config, SPEC), total_updates=updates)


def sampler_for(made: Any, num_envs: int = 16) -> RolloutSampler:
    sim = ChunkedSim(CueSim(num_envs))
    return RolloutSampler(sim, decisions=made.config.num_steps, memory=made.policy.spec.hidden_dim)


def check_has_ratios_of_one_after_unrolling(name: str, kind: str) -> None:
    """Decisions of new data have ratio 1 after unrolling from the middle of episodes."""
    made = learner(name, kind)
    sampler = sampler_for(made)
    sampler.collect(made.act)  # the next rollout starts in the middle of episodes
    rollout = sampler.collect(made.act)
    rows = made.process_rollout(rollout)
    for part, _ in recurrent_minibatches(rows, rollout.shape, 52, made.generator):
        obs = made.policy.unroll_rnn(part.obs, 13)
        torch.testing.assert_close(obs[HIDDEN_STATE], part.obs[HIDDEN_STATE], rtol=0, atol=1e-6)
        logp = made.policy.decisions(obs, part.record).logp
        torch.testing.assert_close(logp, part.logp, rtol=0, atol=1e-5)
