"""Tests of the settings of FlashSAC in SAC: distributional targets, joint batches, norms, decay, repeated noise."""

import copy
import math
from dataclasses import replace
from typing import Any

import pytest
import torch
from chunk_bandit import SMALL, batch, first_actions, gaussian
from torch import Tensor, nn

from robopolicy.algorithms.common.algorithm import cosine_decay
from robopolicy.algorithms.sac import SAC, SACConfig
from robopolicy.algorithms.td3 import TD3, TD3Config
from robopolicy.critics.q import C51, CriticConfig
from robopolicy.data.batches import Transitions
from robopolicy.errors import UserError
from robopolicy.policies.noise import RepeatedNoise

CRITIC = CriticConfig(
    backbone="inverted_residual", hidden=(16, 16), bins=51, histogram="c51", value_min=-2.0, value_max=2.0
)
ACTOR = {"backbone": "inverted_residual", "hidden": (16, 16), "state_dependent_std": True, "log_std_tanh": True}


def flash_sac(actor: Any = None, **config: Any) -> SAC:
    torch.manual_seed(0)
    settings = {"critic": CRITIC, "batch_size": 128, "temperature": 0.01, "target_std": 0.15, "lr": 3e-3}
    settings |= {"critic_lr": 3e-3, "tau": 0.05, "policy_delay": 2} | config
    return SAC(SACConfig(**settings), gaussian(log_std_min=-10.0, **(actor or ACTOR)), total_updates=100)


def data(rows: int = 128, discount: float = 0.9) -> Transitions:
    return batch(
        torch.rand(rows, 2, 1) * 2 - 1, lambda action: 1 - (action.squeeze(1) - 0.4).square(), discount=discount
    )


def test_the_target_is_the_shifted_distribution_of_the_member_with_the_least_mean() -> None:
    algorithm = flash_sac(critic=replace(CRITIC, bins=5))  # atoms -2, -1, 0, 1, 2
    rows = replace(data(2), reward=torch.tensor([0.5, 0.25]), discount=torch.tensor([0.5, 0.0]))
    high, low = [0.0, 0.0, 0.0, 0.5, 0.5], [0.5, 0.0, 0.5, 0.0, 0.0]  # means 1.5 and -1
    output = torch.tensor([[high, low], [low, high]]).clamp_min(1e-30).log()
    found = algorithm.backup_outputs(rows, output, torch.tensor([1.0, 0.0]))
    # Row 0: atoms 0.5 z, so -1 and 0, half of the mass each. Row 1 terminates: all mass is at 0.25.
    torch.testing.assert_close(found, torch.tensor([[[0.0, 0.5, 0.5, 0.0, 0.0], [0.0, 0.0, 0.75, 0.25, 0.0]]]))
    every = flash_sac(critic=replace(CRITIC, bins=5), average_members=True).backup_outputs(rows, output, None)
    assert every.shape == (2, 2, 5)
    torch.testing.assert_close(every[0, 0], torch.tensor([0.0, 0.0, 0.0, 0.75, 0.25]))  # 1 and 1.5


def test_scalar_targets_of_every_member_come_from_itself_if_members_are_averaged() -> None:
    algorithm = flash_sac({"hidden": (16,)}, critic=SMALL, average_members=True, backup_entropy=False)
    rows = data(4)
    algorithm.generator.manual_seed(0)
    found = algorithm.target(rows)
    algorithm.generator.manual_seed(0)
    chunk, _ = algorithm.policy.rsample(rows.next_obs, generator=algorithm.generator)
    torch.testing.assert_close(found, rows.reward + 0.9 * algorithm.target_critic(rows.next_obs, chunk))
    algorithm.generator.manual_seed(0)
    loss = algorithm.actor_loss(rows, torch.tensor(0.0))[0]
    algorithm.generator.manual_seed(0)
    chunk, _ = algorithm.policy.rsample(rows.obs, generator=algorithm.generator)
    torch.testing.assert_close(loss, -algorithm.critic(rows.obs, chunk).mean())


def test_batch_normalisation_sees_the_next_chunks_in_the_same_batch() -> None:
    algorithm = flash_sac()
    rows = data()
    algorithm.critic_loss(rows)
    inputs = [torch.cat([obs["state"].flatten(1), chunk], 1) for obs, chunk in both(algorithm, rows)]
    mean = torch.cat(inputs).mean(0)
    found = algorithm.critic.body.embedding[0].mean  # type: ignore[union-attr]
    torch.testing.assert_close(found[0, :2], 0.01 * mean[:2])  # type: ignore[index]  # momentum 0.01, observations
    before = copy.deepcopy(algorithm.policy.state_dict())
    algorithm.target(rows)
    algorithm.act(rows.obs)
    assert all(torch.equal(value, before[key]) for key, value in algorithm.policy.state_dict().items())
    algorithm.actor_loss(rows, torch.tensor(0.1))
    observed = algorithm.policy.actor[1].embedding[0].mean[0]  # type: ignore[index]
    torch.testing.assert_close(observed, 0.01 * mean[:2])


def both(algorithm: SAC, rows: Transitions) -> list[tuple[dict[str, Tensor], Tensor]]:
    """Normalised observations and any chunks of the two halves of the batch."""
    return [(dict(obs), rows.chunk[:, 0]) for obs in (rows.obs, rows.next_obs)]


def test_weights_keep_their_norms_and_the_resumed_run_equals_the_uninterrupted_one() -> None:
    straight = flash_sac()
    torch.manual_seed(1)
    first, second = data(256), data(256)
    straight.update(first)
    state = copy.deepcopy(straight.state_dict())
    straight.update(second)
    for network in (straight.policy, straight.critic):
        for name, value in network.named_parameters():
            if name.endswith("output.weight"):
                torch.testing.assert_close(value.norm(dim=-1), torch.ones(value.shape[:-1]))
    resumed = flash_sac(seed=5)
    resumed.load_state_dict(state)
    resumed.update(second)
    for part in ("policy", "critic", "target_critic"):
        one, two = (getattr(algorithm, part).state_dict() for algorithm in (straight, resumed))
        assert all(torch.equal(value, two[key]) for key, value in one.items()), part


def test_it_finds_the_best_action_of_a_bandit() -> None:
    algorithm = flash_sac()
    for _ in range(300):
        algorithm.update(data(discount=0.0))
    assert (first_actions(algorithm.inference_policy()) - 0.4).abs().mean() < 0.1


def test_critics_with_batch_normalisation_are_refused_elsewhere() -> None:
    with pytest.raises(UserError, match=r"'td3' does not support critic.backbone=inverted_residual"):
        TD3(TD3Config(critic=CRITIC), gaussian(), total_updates=1)


def test_the_target_entropy_may_be_that_of_a_gaussian_of_given_deviation() -> None:
    entropy = 0.5 * math.log(2 * math.pi * math.e * 0.15**2)
    assert flash_sac().target_entropy == pytest.approx(entropy)  # one executed action of one dimension
    assert entropy == pytest.approx(-0.478, abs=1e-3)


def test_learning_rates_decay_as_a_cosine_and_survive_a_resumption() -> None:
    assert [cosine_decay(at, 0.5) for at in (0, 0.5, 1, 2)] == pytest.approx([1, 0.75, 0.5, 0.5])
    algorithm = flash_sac(lr_final_fraction=0.5, temperature_lr=1e-3)
    algorithm.updates = 49
    algorithm.update(data())
    rates = [each.param_groups[0]["lr"] for each in (algorithm.optimizer, algorithm.temperature.optimizer)]
    assert rates == pytest.approx([0.75 * 3e-3, 0.75e-3])
    resumed = flash_sac(lr_final_fraction=0.5, temperature_lr=1e-3)
    resumed.load_state_dict(copy.deepcopy(algorithm.state_dict()))
    for each in (algorithm, resumed):
        each.updates = 99
        each.update(data())
        assert each.critic_optimizer.param_groups[0]["lr"] == pytest.approx(1.5e-3)


def test_weight_decay_shrinks_weights_in_proportion_and_spares_the_temperature() -> None:
    algorithm = flash_sac({"hidden": (16,)}, critic=SMALL, weight_decay=0.1)
    for optimizer in (algorithm.optimizer, algorithm.critic_optimizer):
        for group in optimizer.param_groups:
            before = [parameter.detach().clone() for parameter in group["params"]]
            for parameter in group["params"]:
                parameter.grad = torch.zeros_like(parameter)
            optimizer.step()
            kept = 1.0 if algorithm.temperature.log is group["params"][0] else 1 - 3e-3 * 0.1
            for old, new in zip(before, group["params"], strict=True):
                torch.testing.assert_close(new.detach(), kept * old)


def test_noise_is_held_for_one_to_longest_draws_with_inverse_square_probability() -> None:
    noise = RepeatedNoise(3, torch.Generator().manual_seed(0))
    draws = torch.stack([noise.normal((2, 1)).flatten() for _ in range(6000)])
    fresh = torch.cat([torch.tensor([True]), (draws[1:] != draws[:-1]).all(1)])
    lengths = fresh.nonzero().flatten().diff()
    shares = torch.bincount(lengths, minlength=4)[1:] / len(lengths)
    total = 1 + 1 / 4 + 1 / 9
    assert shares.tolist() == pytest.approx([1 / total, 1 / 4 / total, 1 / 9 / total], abs=0.02)
    assert draws.std(0).tolist() == pytest.approx([1, 1], abs=0.05) and not torch.equal(draws[:, 0], draws[:, 1])
    assert float(lengths.max()) == 3
    with pytest.raises(UserError, match="holds the one noise of a decision, and this algorithm draws several"):
        noise.normal((6, 1))


def test_smooth_bounds_of_the_deviation_reach_from_least_to_most() -> None:
    policy = gaussian(state_dependent_std=True, log_std_tanh=True, log_std_min=-10.0, hidden=())
    layer = next(module for module in policy.actor.modules() if isinstance(module, nn.Linear))
    with torch.no_grad():
        layer.weight.zero_()
        layer.bias.copy_(torch.tensor([0.0, -50.0, 0.0, 50.0]))  # mean and deviation of both steps
    log_std = policy.distribution({"state": torch.zeros(1, 1, 2)})[1]
    assert log_std.flatten().tolist() == pytest.approx([-10.0, 2.0])
    assert isinstance(flash_sac().critic.histogram, C51)
