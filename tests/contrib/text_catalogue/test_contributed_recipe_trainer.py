"""Learning text by the existing loop: imitation, recipes, faults, overflow, exact resume, the command line."""

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


def test_half_precision_keeps_what_was_recorded_of_rows_that_this_policy_did_not_draw():
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


def test_what_text_does_not_measure_or_record_is_refused_by_name():
    from robopolicy.errors import UserError

    for recipe, message in (("otc", "needs the metric 'calls'"), ("hiper", "extra\\['switch'\\]")):
        algorithm = learner(Grid(), group_size=2, recipe=recipe)
        feed = source(Grid(), algorithm)
        with pytest.raises(UserError, match=f"Recipe '{recipe}' (requires|needs) a .* that text .*{message}"):
            algorithm.update(feed.next(algorithm))
    with pytest.raises(UserError, match="'supo': it writes a summary after 4 turns, and text/arithmetic has only 1;"):
        source(Arithmetic(), learner(Arithmetic(), group_size=2, recipe="supo"))


def test_a_recipe_that_asks_for_a_reference_gets_the_policy_it_started_from():
    algorithm = learner(Grid(), group_size=4, recipe="f_dpg")
    before = algorithm.policy.state_dict()["model.model.norm.weight"].clone()
    algorithm.update(source(Grid(), algorithm).next(algorithm))
    assert torch.equal(algorithm.reference_policy.state_dict()["model.model.norm.weight"], before)
    again = learner(Grid(), group_size=4, recipe="f_dpg")
    again.load_state_dict(algorithm.state_dict())
    assert torch.equal(again.reference_policy.state_dict()["model.model.norm.weight"], before)


def test_an_update_that_learns_that_it_needs_a_reference_is_the_one_that_had_it_from_the_start():
    late, early = (learner(Grid(), group_size=4, recipe="lspo", minibatches=2) for _ in range(2))
    batch = source(Grid(), late).next(late)
    early.reference_policy = frozen_copy(early.policy)
    assert late.reference_policy is None
    assert late.update(batch) == early.update(batch)
    assert torch.equal(late.generator.get_state(), early.generator.get_state())
    other = early.policy.state_dict()
    assert all(torch.equal(value, other[key]) for key, value in late.policy.state_dict().items())
