"""Tests of stock-augmented control: closed forms of CVaR, stock editing, a two-stage total, and risk aversion."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from chunk_bandit import flow, gaussian, shifted
from composed_rules import check_what_any_parent_knows_serves_critics_and_actors
from resumed_updates import assert_resumes
from torch import Tensor

from robopolicy.contrib.control.quantile_critic import QuantileQ, quantile_loss
from robopolicy.contrib.control.stock_ac import UTILITIES, StockAC, StockACConfig, conditional_value, stock_of
from robopolicy.critics.q import CriticConfig
from robopolicy.data.batches import Transitions
from robopolicy.data.replay import Replay
from robopolicy.errors import UserError
from robopolicy.policies.base import PolicySpec, Sample
from robopolicy.policies.heads.gaussian import GaussianConfig, GaussianPolicy
from robopolicy.rollout.off_policy import ReplaySampler
from robopolicy.sim.checker import check_simulator
from robopolicy.sim.chunk import ChunkedSim
from robopolicy.sim.contract import VectorSim
from robopolicy.sim.registry import SimOptions, make_sim, observation_options
from robopolicy.sim.wrappers.registry import WrapperSpec

GAMMA, KEY = 0.9, "stock.0.9"
STOCK = WrapperSpec("stock", {"discount": GAMMA})
MISSING = r"'task\.wrappers=\[\{name: stock, discount: 0\.99\}\]'"
SMALL = CriticConfig(members=2, hidden=(32, 32), activation="relu", layer_norm=False)
SPEC = PolicySpec({"stage": (1,), KEY: (2,)}, action_dim=1)


def policy(spec: PolicySpec = SPEC) -> GaussianPolicy:
    settings = {"hidden": (32, 32), "squash": True, "normalization": "identity", "action_normalization": "minmax"}
    made = GaussianPolicy(GaussianConfig(activation="relu", orthogonal_init=False, **settings), spec)  # type: ignore[arg-type]
    made.fit_normalizer({"action": {"min": [-1.0] * spec.action_dim, "max": [1.0] * spec.action_dim}})
    return made


def stock_ac(seed: int = 0, **config: Any) -> StockAC:
    torch.manual_seed(seed)
    small = {"critic": SMALL, "batch_size": 128, "lr": 3e-3, "critic_lr": 3e-3, "tau": 0.05, "quantiles": 16}
    settings = small | {"gamma": GAMMA, "functional": "setpoint", "start": -1.0} | config
    return StockAC(StockACConfig(**settings), policy(), total_updates=1000)


def windows(stage: Tensor, stock: Tensor, action: Tensor, reward: Tensor, last: Tensor) -> Transitions:
    """Single steps `(B,)` from `stage` and `stock` `(B, 2)` to the next stage, or the end where `last`."""
    rows = len(stage)
    after = torch.stack([stock[:, 0] + reward, stock[:, 1]], 1) / GAMMA
    return Transitions(
        obs={"stage": stage.view(-1, 1, 1), KEY: stock.unsqueeze(1)},
        chunk=action.view(-1, 1, 1),
        mask=torch.ones(rows, 1),
        rewards=reward[:, None],
        steps=torch.ones(rows, dtype=torch.int64),
        discount=torch.where(last, 0.0, GAMMA),
        reward=reward,
        next_obs={"stage": stage.view(-1, 1, 1) + 1, KEY: after.unsqueeze(1)},
        returns=torch.full((rows,), torch.nan),
        record={},
        online=torch.ones(rows, dtype=torch.bool),
        weight=torch.ones(rows),
        index=torch.arange(rows),
    )


def earned_at_stage_one(coin: Tensor) -> Tensor:
    return torch.stack([coin / GAMMA, torch.full_like(coin, 1 / GAMMA)], -1)


def second_reward(action: Tensor) -> Tensor:
    """Reward of the second stage: 0 to 2 when discounted to the start of the episode."""
    return (1 + action) / GAMMA


def two_stages(rows: int = 128) -> Transitions:
    """A coin gives reward -1 or 1; then the action sets the second reward. The target total is 1."""
    coin, action = torch.randint(0, 2, (rows,)) * 2.0 - 1, torch.rand(rows) * 2 - 1
    late = torch.arange(rows) % 2 == 1
    fresh = torch.tensor([0.0, 1.0]).expand(rows, 2)
    stock = torch.where(late[:, None], earned_at_stage_one(coin), fresh)
    return windows(late.float(), stock, action, torch.where(late, second_reward(action), coin), late)


def gamble(rows: int = 128) -> Transitions:
    """One step: action a has mean reward a / 2, and a coin adds or subtracts 1 + a."""
    coin, action = torch.randint(0, 2, (rows,)) * 2.0 - 1, torch.rand(rows) * 2 - 1
    fresh = torch.tensor([0.0, 1.0]).expand(rows, 2)
    return windows(torch.zeros(rows), fresh, action, 0.5 * action + (1 + action) * coin, torch.ones(rows) > 0)


# Closed forms.


def test_best_start_value_equals_the_cvar() -> None:
    returns = torch.randn(1, 4000, generator=torch.Generator().manual_seed(0)).sort().values
    starts = torch.linspace(-3, 3, 601)
    for level in (0.1, 0.25, 1.0):
        worst = returns[0, : int(level * 4000)]
        values = conditional_value(starts, returns, level)
        assert float(values.max()) == pytest.approx(float(worst.mean()), abs=0.01)
        if level < 1:
            assert float(starts[values.argmax()]) == pytest.approx(-float(worst[-1]), abs=0.03)


def test_quantile_regression_finds_the_quantiles() -> None:
    critic = QuantileQ(SMALL, policy(), quantiles=8)
    guess = torch.zeros(8, requires_grad=True)
    optimizer = torch.optim.Adam([guess], lr=0.02)
    quantile_samples = torch.arange(1000.0).add(0.5).div(1000)  # uniform on (0, 1)
    for _ in range(200):
        optimizer.zero_grad()
        quantile_loss(guess.view(1, 1, 8), quantile_samples[None], critic.levels, 0.0).sum().backward()
        optimizer.step()
    torch.testing.assert_close(guess.detach(), critic.levels, atol=0.02, rtol=0)


def test_utilities_match_their_functionals() -> None:
    x = torch.tensor([-2.0, 0.0, 3.0])
    found = {name: utility(x).tolist() for name, utility in UTILITIES.items()}
    assert found == {"mean": [-2, 0, 3], "cvar": [-2, 0, 0], "setpoint": [-2, 0, -3]}


# Stock and editing.


def test_recorded_stocks_are_discounted_sums_of_rewards() -> None:
    sim = make_sim(
        "toy/point_mass", SimOptions(num_envs=3, reward="shaped", wrappers=(WrapperSpec("stock", {"discount": 0.9}),))
    )
    replay = Replay(300, 3)
    sampler = ReplaySampler(ChunkedSim(sim, action_horizon=2), replay)
    g = torch.Generator().manual_seed(0)
    sampler.collect(lambda obs, *, generator: Sample.unscored(torch.rand(3, 2, 2, generator=g) * 2 - 1), 30)
    arrays = replay.state_dict()["arrays"]
    for lane in range(3):
        earned, growth = 0.0, 1.0
        for slot in range(60):
            if arrays["age"][lane, slot] == 0:
                earned, growth = 0.0, 1.0
            assert arrays[f"obs.{KEY}"][lane, slot].tolist() == pytest.approx([earned, growth], rel=1e-4, abs=1e-5)
            earned, growth = (earned + float(arrays["reward"][lane, slot])) / 0.9, growth / 0.9


def test_edits_change_only_the_stock_levels() -> None:
    algorithm, data = stock_ac(augmentations=4), two_stages()
    data = replace(data, steps=torch.randint(1, 4, (128,)))
    rows = algorithm.augmented(data)
    assert len(rows) == 5 * 128
    for name in ("chunk", "reward", "discount", "steps"):
        assert torch.equal(getattr(rows, name), getattr(data, name).repeat(5, *[1] * (getattr(data, name).dim() - 1)))
    for one, other in ((rows.obs, data.obs), (rows.next_obs, data.next_obs)):
        assert torch.equal(one["stage"], other["stage"].repeat(5, 1, 1))
    stock, after = algorithm.stock(rows.obs), algorithm.stock(rows.next_obs)
    torch.testing.assert_close(after * GAMMA**rows.steps, stock + rows.reward)
    torch.testing.assert_close(stock[:128], algorithm.stock(data.obs))  # the first copy keeps its start
    assert len(stock[128:].unique()) > 400


def test_discounted_stock_minus_the_return_so_far_stays_at_the_start() -> None:
    algorithm = stock_ac(start=-0.7)
    sim = make_sim("toy/point_mass", SimOptions(num_envs=2, reward="shaped", wrappers=(STOCK,)))
    obs, total = sim.reset(0), torch.zeros(2)
    for t in range(20):
        stock = stock_of(algorithm.policy).stock(obs[KEY].unsqueeze(1)).flatten()
        torch.testing.assert_close(GAMMA**t * stock - total, torch.full((2,), -0.7), atol=1e-4, rtol=1e-4)
        step = sim.step(torch.zeros(2, 2))
        total += GAMMA**t * step.reward
        obs = step.obs


def test_a_policy_acts_the_same_at_an_edited_and_a_recorded_stock() -> None:
    algorithm = stock_ac()
    obs = two_stages().obs
    augmented = algorithm.at_stock(obs, algorithm.stock(obs))
    torch.testing.assert_close(algorithm.policy.mode(augmented), algorithm.policy.mode(obs))


def test_target_quantiles_come_from_the_member_with_the_least_utility() -> None:
    algorithm, data = stock_ac(target_noise=0.0), two_stages()
    shifted(algorithm.target_critic, 0.1)
    shifted(algorithm.target_policy)
    with torch.no_grad():
        samples = algorithm.quantile_samples(data)
        quantiles = algorithm.target_critic.quantiles(data.next_obs, algorithm.target_policy.mode(data.next_obs))
        distance = (algorithm.stock(data.next_obs)[:, None] + quantiles).abs().mean(-1)  # (M, B)
    far = distance[0] > distance[1]
    assert 0 < far.sum() < 128
    chosen = torch.where(far[:, None], quantiles[0], quantiles[1])
    torch.testing.assert_close(samples, data.reward[:, None] + data.discount[:, None] * chosen)


# Learning.


def learned(algorithm: StockAC, feed: Any, updates: int) -> StockAC:
    torch.manual_seed(1)
    for _ in range(updates):
        algorithm.update(feed())
    return algorithm


def test_policy_with_stock_reaches_a_total_that_is_impossible_without_it() -> None:
    coin = torch.tensor([-1.0, 1.0])
    blind = torch.linspace(-1, 1, 201)  # one action at the second stage for both coin results
    gap = -(coin + GAMMA * second_reward(blind[:, None]) - 1).abs().mean(1)
    assert float(gap.max()) == pytest.approx(-1.0)
    algorithm = learned(stock_ac(policy_delay=1, target_noise=0.05), two_stages, 250)
    obs = {"stage": torch.ones(2, 1, 1), KEY: earned_at_stage_one(coin).unsqueeze(1)}
    action = algorithm.inference_policy().act(obs, deterministic=True).flatten()
    total = coin + GAMMA * second_reward(action)
    assert -float((total - 1).abs().mean()) > -0.2


@pytest.mark.parametrize(("functional", "action"), [("mean", 1.0), ("cvar", -1.0)])
def test_cvar_learns_the_safe_action_and_mean_learns_the_risky_action(functional: str, action: float) -> None:
    algorithm = learned(
        stock_ac(functional=functional, start=0.0, start_rate=0.05, policy_delay=1, augmentations=1), gamble, 200
    )
    obs = {"stage": torch.zeros(1, 1, 1), KEY: torch.tensor([[[0.0, 1.0]]])}
    assert float(algorithm.inference_policy().act(obs, deterministic=True)) == pytest.approx(action, abs=0.15)
    if functional == "cvar":  # the risk-averse action has a certain reward of -0.5
        assert float(stock_of(algorithm.policy).start) == pytest.approx(0.5, abs=0.2)


def test_policy_tau_sets_the_rate_of_the_target_policy() -> None:
    algorithm = learned(stock_ac(policy_tau=1.0, policy_delay=1), two_stages, 2)
    for mine, other in zip(algorithm.policy.parameters(), algorithm.target_policy.parameters(), strict=True):
        assert torch.equal(mine, other)


@pytest.mark.parametrize("functional", ["cvar", "setpoint"])
def test_a_resumed_run_ends_with_the_same_weights(functional: str) -> None:
    assert_resumes(lambda seed: stock_ac(seed, functional=functional), two_stages)


def test_a_simulator_with_a_stock_satisfies_the_contract() -> None:
    def make(num_envs: int) -> VectorSim:
        return make_sim("toy/point_mass", SimOptions(num_envs=num_envs, wrappers=(STOCK,)))

    assert check_simulator(make(3), make) == []


def test_observations_determine_the_required_stock_wrapper() -> None:
    assert observation_options([SPEC.observation]) == {"wrappers": (STOCK,)}
    with pytest.raises(
        UserError, match=r"'stock' with different options, discount=0\.9 and discount=0\.5; evaluate them separately"
    ):
        observation_options([SPEC.observation, {"stock.0.5": (2,)}])


def test_invalid_policies_and_settings_are_refused() -> None:
    for other in (gaussian(), flow()):
        with pytest.raises(UserError, match=MISSING):
            StockAC(StockACConfig(), other, total_updates=1)
    for other, missing in (
        (gaussian(), MISSING),
        (gaussian(squash=False), f"policy=squashed_gaussian {MISSING}"),
        (GaussianPolicy(GaussianConfig(hidden=(8,)), SPEC), "policy=squashed_gaussian"),
    ):
        with pytest.raises(UserError, match=rf"; pass {missing}\.$"):
            StockAC(StockACConfig(), other, total_updates=1)
    with pytest.raises(UserError, match="discount differently"):
        StockAC(StockACConfig(gamma=0.99), policy(), total_updates=1)
    with pytest.raises(UserError, match=r"algorithm\.action_l2=1\.0 has no effect"):
        StockACConfig(action_l2=1.0)
    with pytest.raises(UserError, match=r"algorithm\.value_reduction=mean has no effect"):
        StockACConfig(value_reduction="mean")
    with pytest.raises(UserError, match="functional"):
        StockACConfig(functional="median")
    with pytest.raises(UserError, match="level"):
        StockACConfig(level=0.0)
    with pytest.raises(UserError, match="histogram"):
        QuantileQ(CriticConfig(bins=5), policy(), quantiles=4)
    for gamma, message in (
        (1.0, r"wrappers\.stock\.discount must lie in \(0, 1\)"),
        (0.5, "closer to 1 for 40 steps"),
    ):
        with pytest.raises(UserError, match=message):
            make_sim("toy/point_mass", SimOptions(num_envs=1, wrappers=(WrapperSpec("stock", {"discount": gamma}),)))


def test_the_stock_of_any_parent_is_available_to_critics_and_actors() -> None:
    stock = {"stock.0.9": (2,)}
    check_what_any_parent_knows_serves_critics_and_actors(({"state": (3,)}, {"state": (3,), **stock}))
    check_what_any_parent_knows_serves_critics_and_actors(({"state": (3,), **stock}, {"goal": (2,), **stock}))
