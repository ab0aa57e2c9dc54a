"""Tests of text critics: the value head on hidden states, hand-computed returns, and recipes with a critic."""

import copy
from pathlib import Path

import pytest
import torch
from critic_runs import SPEC, learner, rows

from robopolicy.core.advantage_sources import Critic
from robopolicy.core.recipe import Recipe
from robopolicy.errors import UserError
from robopolicy.text.policy import TextConfig, TextPolicy
from robopolicy.text.text_env import score
from robopolicy.text.value_head import ValueHead, score_with_value


def test_new_value_head_outputs_zero_and_leaves_scores_unchanged():
    algorithm, feed = learner("ppo")
    batch = feed.next(algorithm)
    out, value = score_with_value(algorithm.policy, algorithm.critic, batch)
    plain = score(algorithm.policy, batch)
    assert torch.equal(out.logp, plain.logp) and torch.equal(out.entropy, plain.entropy)
    assert value.shape == batch.shape and not value.any()


def test_value_of_a_token_uses_only_earlier_tokens():
    algorithm, feed = learner("ppo")
    batch = feed.next(algorithm)
    for parameter in algorithm.critic.parameters():
        torch.nn.init.normal_(parameter)
    _, value = score_with_value(algorithm.policy, algorithm.critic, batch)
    row, column = batch.valid().nonzero()[-1].tolist()
    tokens = batch.extra["tokens"].clone()
    tokens[row, int(batch.extra["start"][row]) + column] += 1  # the last chosen token
    changed = batch.with_fields(extra={**batch.extra, "tokens": tokens})
    assert torch.equal(score_with_value(algorithm.policy, algorithm.critic, changed)[1], value)
    assert not value[~batch.valid()].any() and value[batch.valid()].std() > 0


def plain(**start):
    return Recipe.from_dict({"title": "t", "advantage_source": {"name": "gae", **start}, "critic": {"clip": 0.2}})


def test_value_targets_equal_hand_computed_returns():
    # errors: 0.9 * 0.25 - 0.5 = -0.275, 0.9 * 1 - 0.25 = 0.65, 2 - 1 = 1; trace 0.9 * 0.5 = 0.45
    last, middle = 1.0, 0.65 + 0.45 * 1.0
    first = -0.275 + 0.45 * middle
    target, fitted = plain(gamma=0.9, lam=0.5).value_targets(rows())
    torch.testing.assert_close(target[0, [0, 2, 3]], torch.tensor([first + 0.5, middle + 0.25, last + 1.0]))
    assert torch.equal(fitted, rows().valid())


def test_nested_discount_value_targets_do_not_decay_inside_a_message():
    # POAD: no discount and, with inner_lam 1, no decay inside the second message; 0.9 and 0.5 between messages
    last, middle = 1.0, (1.0 - 0.25) + 1.0
    first = (0.9 * 0.25 - 0.5) + 0.45 * middle
    target, _ = plain(gamma=0.9, lam=0.5, inner_gamma=1.0, inner_lam=1.0).value_targets(rows())
    torch.testing.assert_close(target[0, [0, 2, 3]], torch.tensor([first + 0.5, middle + 0.25, last + 1.0]))


def test_unit_critic_is_fitted_only_at_the_first_token_of_each_unit():
    target, fitted = plain(gamma=1.0, lam=1.0, level="unit").value_targets(rows())
    assert fitted.tolist() == [[True, False, True, False]]
    assert target[fitted].tolist() == [2.0, 2.0]


def test_clipped_value_loss_uses_the_larger_error():
    batch, target = rows(), torch.full((1, 4), 1.0)
    value = torch.tensor([[1.0, 7.0, 0.25, 1.3]])  # moved by 0.5, not at all, 0.3
    bounded = torch.tensor([0.7, 0.25, 1.2])
    plain_error = (value[0, [0, 2, 3]] - 1.0).square()
    assert float(Critic().loss(value, batch, target, batch.valid())) == pytest.approx(float(plain_error.mean()))
    larger = torch.maximum(plain_error, (bounded - 1.0).square())
    clipped = Critic(clip=0.2).loss(value, batch, target, batch.valid())
    assert float(clipped) == pytest.approx(float(larger.mean()))


@pytest.mark.parametrize("recipe", ["ppo", "digirl"])
def test_recipes_with_a_critic_learn_values(recipe):
    algorithm, feed = learner(recipe, critic_lr=3e-3)
    batch = feed.next(algorithm)
    ends = torch.ones(len(batch), dtype=torch.bool)
    batch = batch.with_fields(reward=batch.valid().float(), extra={**batch.extra, "finished": ends})
    metrics = algorithm.update(batch)
    assert all(torch.isfinite(torch.tensor(value)) for value in metrics.values())
    assert algorithm.critic.layers[-1].weight.any() and metrics["actor/value_loss"] > 0
    assert algorithm._preprocess(batch).value[batch.valid()].mean() > 0


def test_critic_and_its_optimiser_are_restored():
    algorithm, feed = learner("ppo", minibatches=2)
    algorithm.update(feed.next(algorithm))
    batch = feed.next(algorithm)
    again, _ = learner("ppo", minibatches=2)
    again.load_state_dict(copy.deepcopy(algorithm.state_dict()))  # optimisers would share their moments
    for one in (algorithm, again):
        one.update(batch)
    for original, restored in zip(algorithm.critic.parameters(), again.critic.parameters(), strict=True):
        assert torch.equal(original, restored)
    assert all(
        torch.equal(value, again.policy.state_dict()[key]) for key, value in algorithm.policy.state_dict().items()
    )


def test_recipes_without_a_critic_create_none():
    algorithm, _ = learner("grpo")
    assert algorithm.critic is None and "critic" not in algorithm.state_dict()


def test_a_pretrained_model_gets_a_head_of_its_width(folder: Path):
    policy = TextPolicy(TextConfig(pretrained=str(folder), lora_rank=2), SPEC)
    assert ValueHead(policy).layers[0].in_features == 32
    policy.model.get_output_embeddings = lambda: torch.nn.Identity()
    with pytest.raises(UserError, match="cannot have a critic: its output layer"):
        ValueHead(policy)


def test_a_critic_without_values_to_fit_is_refused():
    with pytest.raises(ValueError, match="needs an advantage source with values"):
        Recipe.from_dict({"title": "t", "advantage_source": "outcome", "critic": {}})
    with pytest.raises(ValueError, match="coef > 0"):
        Recipe.from_dict({"title": "t", "advantage_source": "gae", "critic": {"coef": 0.0}})
