"""Tests of the text trainer with contributed recipes: half precision, refused tasks, and reference policies."""

import pytest
import torch
from recipe_learners import learner

from robopolicy.algorithms.common.algorithm import frozen_copy
from robopolicy.sim.registry import SimOptions
from robopolicy.text.rollouts.protocols import POLICY, REPLAYED, TEACHER
from robopolicy.text.sim import TextSim
from robopolicy.text.text_env import score
from robopolicy.training.text_rollout_source import TextRolloutSource
from robopolicy_tasks.text.arithmetic import Arithmetic
from robopolicy_tasks.text.grid import Grid


def source(task, algorithm, seed=0):
    return TextRolloutSource(TextSim(task, SimOptions(num_envs=1)), algorithm, seed=seed)


def test_half_precision_keeps_recorded_log_probabilities_of_off_policy_rows():
    algorithm = learner(Grid(), group_size=2, recipe="pipo", lr=1e-2, dtype="bfloat16")
    feed = source(Grid(), algorithm)
    first = feed.next(algorithm)
    algorithm.update(first)
    batch = feed.next(algorithm)
    batch.source[0] = TEACHER
    prepared, again = algorithm._preprocess(batch), batch.source == REPLAYED
    assert torch.equal(prepared.logp_old[0], batch.logp_old[0])
    width = first.shape[1]
    torch.testing.assert_close(prepared.logp_old[again][:, :width], first.logp_old)
    now = score(algorithm.policy, prepared).logp.detach()
    far = ((now - prepared.logp_old).abs() * batch.valid()).sum(1) > 0
    assert far[again].any() and not far[batch.source == POLICY].any()


def test_missing_metrics_and_fields_are_refused_by_name():
    from robopolicy.errors import UserError

    for recipe, message in (("otc", "needs the metric 'calls'"), ("hiper", "extra\\['switch'\\]")):
        algorithm = learner(Grid(), group_size=2, recipe=recipe)
        feed = source(Grid(), algorithm)
        with pytest.raises(UserError, match=f"Recipe '{recipe}' (requires|needs) a .* that text .*{message}"):
            algorithm.update(feed.next(algorithm))
    with pytest.raises(UserError, match="'supo': it writes a summary after 4 turns, and text/arithmetic has only 1;"):
        source(Arithmetic(), learner(Arithmetic(), group_size=2, recipe="supo"))


def test_the_reference_policy_is_the_initial_policy():
    algorithm = learner(Grid(), group_size=4, recipe="f_dpg")
    before = algorithm.policy.state_dict()["model.model.norm.weight"].clone()
    algorithm.update(source(Grid(), algorithm).next(algorithm))
    assert torch.equal(algorithm.reference_policy.state_dict()["model.model.norm.weight"], before)
    again = learner(Grid(), group_size=4, recipe="f_dpg")
    again.load_state_dict(algorithm.state_dict())
    assert torch.equal(again.reference_policy.state_dict()["model.model.norm.weight"], before)


def test_a_lazily_created_reference_matches_one_created_at_the_start():
    late, early = (learner(Grid(), group_size=4, recipe="lspo", minibatches=2) for _ in range(2))
    batch = source(Grid(), late).next(late)
    early.reference_policy = frozen_copy(early.policy)
    assert late.reference_policy is None
    assert late.update(batch) == early.update(batch)
    assert torch.equal(late.generator.get_state(), early.generator.get_state())
    other = early.policy.state_dict()
    assert all(torch.equal(value, other[key]) for key, value in late.policy.state_dict().items())
