"""Tests of text critics: value head on hidden states, value targets, and recipes with a critic."""

import pytest
import torch
from critic_runs import learner, rows

from robopolicy.core.recipe import Recipe
from robopolicy.text.value_head import score_with_value


def test_a_detached_critic_gives_the_policy_no_gradient():
    algorithm, feed = learner("vl_dac")
    batch = feed.next(algorithm)
    torch.nn.init.normal_(algorithm.critic.layers[-1].weight)
    for detach in (True, False):
        _, value = score_with_value(algorithm.policy, algorithm.critic, batch, detach=detach)
        algorithm.policy.zero_grad()
        value.square().sum().backward()
        touched = any(p.grad is not None and bool(p.grad.any()) for p in algorithm.policy.parameters())
        assert touched is not detach


def test_unfinished_windows_are_excluded_from_critic_targets():
    recipe = Recipe.from_dict({"title": "t", "advantage_source": "window_gae", "critic": {}})
    for finished in (True, False):
        batch = rows(extra={"finished": torch.tensor([finished])})
        _, fitted = recipe.value_targets(batch)
        assert torch.equal(fitted, batch.valid() & finished)


def test_first_minibatch_ratios_are_one_and_critic_warmup_keeps_the_policy_fixed(monkeypatch):
    algorithm, feed = learner("vl_dac")
    assert algorithm.recipe.critic.warmup == 5
    first, loss = [], Recipe.loss

    def watched(self, decisions, advantage, logp, entropy=None):
        first.append(float(torch.expm1(logp.detach() - decisions.logp_old)[decisions.valid()].abs().max()))
        return loss(self, decisions, advantage, logp, entropy)

    monkeypatch.setattr(Recipe, "loss", watched)
    before = {key: value.clone() for key, value in algorithm.policy.state_dict().items()}
    algorithm.update(feed.next(algorithm))
    assert first[0] < 1e-4
    assert all(torch.equal(value, before[key]) for key, value in algorithm.policy.state_dict().items())


@pytest.mark.parametrize("recipe", ["t_ppo", "poad", "dr_po", "retool"])
def test_contributed_recipes_with_a_critic_learn_values(recipe):
    algorithm, feed = learner(recipe, critic_lr=3e-3)
    batch = feed.next(algorithm)
    ends = torch.ones(len(batch), dtype=torch.bool)
    batch = batch.with_fields(reward=batch.valid().float(), extra={**batch.extra, "finished": ends})
    metrics = algorithm.update(batch)
    assert all(torch.isfinite(torch.tensor(value)) for value in metrics.values())
    assert algorithm.critic.layers[-1].weight.any() and metrics["actor/value_loss"] > 0
    assert algorithm._preprocess(batch).value[batch.valid()].mean() > 0
