"""IQL, IDQL, Cal-QL, PA-RL and EXPO: what is frozen, what the targets are, resume, deployment, and a small bandit."""

from __future__ import annotations

import copy
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from chunk_bandit import SMALL, SPEC, STATISTICS, batch, first_actions, flow, gaussian, two_modes
from torch import Tensor, nn

from robopolicy.algorithms import make_algorithm
from robopolicy.algorithms.cal_ql import CalQL, CalQLConfig
from robopolicy.algorithms.expo import EXPO, EXPOConfig, selection_bonus
from robopolicy.algorithms.idql import IDQL, IDQLConfig
from robopolicy.algorithms.iql import IQL, IQLConfig
from robopolicy.algorithms.off_policy import OffPolicy
from robopolicy.algorithms.offline_critic import ConservativeConfig, ConservativeRule, ImplicitConfig, ImplicitRule
from robopolicy.algorithms.pa_rl import PARL, PARLConfig, imitation_target
from robopolicy.critics.q import QEnsemble
from robopolicy.critics.value import ValueConfig
from robopolicy.data.replay import Replay, Request
from robopolicy.errors import UserError
from robopolicy.policies.autoregressive import AutoregressiveConfig, AutoregressivePolicy
from robopolicy.policies.base import Policy
from robopolicy.policies.diffusion import DiffusionConfig, DiffusionPolicy
from robopolicy.policies.edited import EditConfig
from robopolicy.policies.selected import Candidates
from robopolicy.training.checkpoint import load_policy, save_checkpoint, verify_checkpoint

VALUE = ImplicitConfig(expectile=0.9, value=ValueConfig(hidden=(32, 32), activation="relu"))
COMMON: dict[str, Any] = {"critic": SMALL, "batch_size": 64, "critic_lr": 3e-3, "lr": 3e-3, "tau": 0.05}


def iql(policy: Policy | None = None, **config: Any) -> IQL:
    return IQL(IQLConfig(**(COMMON | {"implicit": VALUE} | config)), policy or flow(), total_updates=100)


def idql(policy: Policy | None = None, **config: Any) -> IDQL:
    settings = COMMON | {"implicit": VALUE, "candidates": 16} | config
    return IDQL(IDQLConfig(**settings), policy or flow(), total_updates=100)


def cal_ql(policy: Policy | None = None, **config: Any) -> CalQL:
    settings = COMMON | {"candidates": 4, "conservative": ConservativeConfig(1.0, 4)} | config
    return CalQL(CalQLConfig(**settings), policy or gaussian(state_dependent_std=True), total_updates=100)


def pa_rl(policy: Policy | None = None, **config: Any) -> PARL:
    small = {"candidates": 6, "top": 3, "ascent_steps": 3, "ascent_rate": 0.05, "temperature": 0.1}
    settings = COMMON | small | {"implicit": VALUE, "conservative": ConservativeConfig(0.1, 4)} | config
    return PARL(PARLConfig(**settings), policy or flow(), total_updates=100)


def pa_rl_iql(policy: Policy | None = None, **config: Any) -> PARL:
    return pa_rl(policy, **({"critic_rule": "iql"} | config))


def expo(policy: Policy | None = None, **config: Any) -> EXPO:
    small = {"candidates": 4, "edits": 4, "utd": 1.0, "actor_delay": 1, "edit": EditConfig(0.3, hidden=(32, 32))}
    return EXPO(EXPOConfig(**(COMMON | small | config)), policy or flow(), total_updates=100)


def expo_softmax(policy: Policy | None = None, **config: Any) -> EXPO:
    return expo(policy, **({"selection": "softmax"} | config))


MAKERS: dict[str, Callable[..., OffPolicy]] = {
    "iql": iql,
    "idql": idql,
    "cal_ql": cal_ql,
    "pa_rl": pa_rl,
    "pa_rl_iql": pa_rl_iql,
    "expo": expo,
    "expo_softmax": expo_softmax,
}
every = pytest.mark.parametrize("name", MAKERS)


@pytest.fixture(autouse=True)
def _seeded() -> None:
    torch.manual_seed(0)


def peak(action: Tensor) -> Tensor:
    """Highest, 1, at 0.9."""
    return 1 - (action[:, 0] - 0.9).square()


def snapshot(module: nn.Module) -> dict[str, Tensor]:
    return {key: value.clone() for key, value in module.state_dict().items()}


def same(before: dict[str, Tensor], module: nn.Module) -> bool:
    return all(torch.equal(before[key], value) for key, value in module.state_dict().items())


@every
def test_a_resumed_algorithm_ends_with_the_same_weights(name: str) -> None:
    batches = [batch(two_modes(128), peak, online=True, discount=d) for d in (0.0, 0.9)]
    straight = MAKERS[name]()
    straight.update(batches[0])
    state = copy.deepcopy(straight.state_dict())
    seed = torch.get_rng_state()
    straight.update(batches[1])
    resumed = MAKERS[name]()
    resumed.load_state_dict(state)
    torch.set_rng_state(seed)
    resumed.update(batches[1])
    for part, value in straight.parts().items():
        if isinstance(value, nn.Module):
            assert same(snapshot(value), resumed.parts()[part]), part  # type: ignore[arg-type]
    chunks = [first_actions(algorithm.deployable()) for algorithm in (straight, resumed)]
    assert torch.equal(chunks[0], chunks[1])


@every
def test_what_is_deployed_round_trips_through_a_checkpoint(name: str, tmp_path: Path) -> None:
    algorithm = MAKERS[name]()
    data = batch(two_modes(64), peak, online=True)
    algorithm.update(data)
    save_checkpoint(tmp_path / "c", algorithm.deployable(), task="toy/point_mass", obs_sample=data.obs)
    loaded, _ = load_policy(tmp_path / "c")
    for deterministic in (True, False):
        before = first_actions(algorithm.deployable(), deterministic=deterministic)
        assert torch.equal(before, first_actions(loaded, deterministic=deterministic))
    assert verify_checkpoint(tmp_path / "c").ok


@every
def test_acting_gives_unscored_chunks_without_a_graph(name: str) -> None:
    algorithm = MAKERS[name]()
    data = batch(two_modes(8), peak)
    for draw in (algorithm.act, algorithm.explore):
        sample = draw(data.obs, generator=torch.Generator().manual_seed(0))
        assert sample.chunk.shape == (8, 2, 1) and not sample.chunk.requires_grad
        again = draw(data.obs, generator=torch.Generator().manual_seed(0))
        assert torch.equal(sample.chunk, again.chunk)


@every
def test_losses_stay_finite_under_autocast_and_show_a_nan(name: str) -> None:
    algorithm = MAKERS[name]()
    data = batch(two_modes(64), peak, online=True)
    with torch.autocast("cpu", torch.bfloat16):
        metrics = algorithm.update(data)
    assert all(torch.tensor(value).isfinite() for value in metrics.values()), metrics
    data.reward[3] = torch.nan
    assert torch.tensor(algorithm.update(data)["critic/loss"]).isnan()


@every
def test_the_target_critic_takes_no_gradient(name: str) -> None:
    algorithm = MAKERS[name]()
    algorithm.update(batch(two_modes(64), peak, online=True))
    assert all(p.grad is None and not p.requires_grad for p in algorithm.target_critic.parameters())
    assert all(p.requires_grad for p in algorithm.critic.parameters())


def diffusion() -> DiffusionPolicy:
    policy = DiffusionPolicy(DiffusionConfig(hidden=(32,)), SPEC)
    policy.fit_normalizer(STATISTICS)
    return policy


def autoregressive() -> AutoregressivePolicy:
    policy = AutoregressivePolicy(
        AutoregressiveConfig(transformer_width=16, transformer_layers=1, normalization="minmax"), SPEC
    )
    policy.fit_normalizer(STATISTICS)
    return policy


@pytest.mark.parametrize("name", ["iql", "idql", "pa_rl", "pa_rl_iql", "expo"])
@pytest.mark.parametrize("head", [flow, diffusion, autoregressive, gaussian])
def test_every_head_is_improved(name: str, head: Callable[[], Policy]) -> None:
    policy = head()
    algorithm = MAKERS[name](policy)
    before, critic = snapshot(policy), snapshot(algorithm.critic)
    metrics = algorithm.update(batch(two_modes(64), peak, online=True))
    assert all(torch.tensor(value).isfinite() for value in metrics.values()), metrics
    assert not same(before, policy) and not same(critic, algorithm.critic)


# IQL and IDQL.


def test_v_of_a_state_is_the_expectile_of_its_actions() -> None:
    # The Q of two equally frequent actions is 0 and 1 in every state: their expectile e is V = e.
    algorithm = iql(implicit=replace(VALUE, expectile=0.8))
    data = batch(two_modes(256), peak)
    q = (data.chunk[:, 0, 0] > 0).float()
    assert isinstance(algorithm.rule, ImplicitRule)
    optimizer = torch.optim.Adam(algorithm.rule.parameters(), 1e-2)
    obs = {"state": torch.zeros(256, 1, 2)}
    for _ in range(150):
        loss, _ = algorithm.rule.extra_loss(replace(data, obs=obs), algorithm.critic, lambda: q, lambda: q)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    share = float(q.mean())
    expected = 0.8 * share / (0.8 * share + 0.2 * (1 - share))
    assert algorithm.rule.value({"state": torch.zeros(1, 1, 2)}).item() == pytest.approx(expected, abs=0.02)


def test_chunk_targets_equal_the_return_of_a_deterministic_chain() -> None:
    gamma, length, steps = 0.9, 8, 3
    chain = Replay(64, gamma=gamma)
    for t in range(length):
        done = torch.tensor([t == length - 1])
        obs = {"state": torch.tensor([[float(t), 0.0]])}
        after = {"state": torch.tensor([[float(t + 1), 0.0]])}
        chain.add(torch.zeros(1).long(), obs, torch.zeros(1, 1), done.float(), done, done & False, after)
    data = chain.take(torch.arange(length), Request(length, 2, steps, gamma))

    class Known(nn.Module):
        def forward(self, obs: dict[str, Tensor]) -> Tensor:
            """gamma ** (steps to the reward)."""
            return gamma ** (length - 1 - obs["state"][:, -1, 0])

    algorithm = iql()
    algorithm.rule.value = Known()  # type: ignore[assignment]
    torch.testing.assert_close(algorithm.target(data), data.returns)
    torch.testing.assert_close(data.returns, gamma ** torch.arange(length - 1, -1, -1.0))


def test_iql_moves_a_gaussian_to_the_better_mode_and_plain_imitation_does_not() -> None:
    means = []
    for beta in (0.0, 20.0):
        torch.manual_seed(0)
        algorithm = iql(gaussian(imitation="mse"), beta=beta, implicit=replace(VALUE, expectile=0.7))
        for _ in range(40):
            algorithm.update(batch(two_modes(256), lambda action: (action[:, 0] > 0).float()))
        means.append(float(first_actions(algorithm.deployable()).mean()))
    assert abs(means[0]) < 0.2 and means[1] > 0.5


def test_idql_leaves_the_policy_to_imitation_and_acts_with_the_better_mode() -> None:
    algorithm = idql()
    for _ in range(60):
        algorithm.update(batch(two_modes(192), lambda action: (action[:, 0] > 0).float()))
    base = first_actions(algorithm.ema.module)
    assert 0.25 < float((base > 0).float().mean()) < 0.75
    assert float((first_actions(algorithm.deployable()) > 0.3).float().mean()) > 0.95


@pytest.mark.parametrize("make", [idql, expo])
def test_imitation_does_not_depend_on_the_values(make: Callable[..., Any]) -> None:
    weights = []
    for sign in (1.0, -1.0):
        torch.manual_seed(0)
        algorithm = make()
        for _ in range(2):
            torch.manual_seed(1)
            algorithm.update(batch(two_modes(64), lambda action, sign=sign: sign * peak(action), online=True))
        weights.append((snapshot(algorithm.policy), snapshot(algorithm.critic)))
    assert all(torch.equal(weights[0][0][key], weights[1][0][key]) for key in weights[0][0])
    assert any(not torch.equal(weights[0][1][key], weights[1][1][key]) for key in weights[0][1])


# Cal-QL.


def test_the_penalty_ignores_policy_chunks_valued_below_the_return() -> None:
    critic = QEnsemble(SMALL, flow())
    data = batch(two_modes(16), peak)

    def gradient(returns: float, proposed: Tensor) -> Tensor:
        rule = ConservativeRule(ConservativeConfig(1.0, 4), torch.Generator().manual_seed(0))
        loss, _ = rule.penalty(replace(data, returns=torch.full((16,), returns)), critic, proposed)
        return torch.cat([g.flatten() for g in torch.autograd.grad(loss, list(critic.parameters()))])

    some, others = torch.full((16, 3, 2, 1), 0.8), torch.full((16, 3, 2, 1), -0.8)
    assert torch.equal(gradient(100.0, some), gradient(100.0, others))
    for returns in (-100.0, torch.nan):
        assert not torch.allclose(gradient(returns, some), gradient(returns, others))


def test_the_penalty_pushes_unseen_chunks_down_but_not_the_data() -> None:
    values = []
    for weight in (0.0, 0.5):
        torch.manual_seed(0)
        algorithm = cal_ql(conservative=ConservativeConfig(weight, 8), actor_delay=100)
        for _ in range(50):
            algorithm.update(batch(0.6 + 0.02 * torch.randn(64, 2, 1), lambda action: action[:, 0].sign()))
        obs = {"state": torch.zeros(1, 1, 2)}
        grid = torch.tensor([0.6, -0.8]).view(1, 2, 1, 1).expand(1, 2, 2, 1)
        values.append(algorithm.critic.of_candidates(obs, grid).mean(0)[0])
    assert values[1][0] > values[1][1] + 0.5 and values[1][1] < values[0][1] - 0.5
    assert values[1][0].item() == pytest.approx(1.0, abs=0.3)


def test_cal_ql_trains_squashed_gaussians_only() -> None:
    with pytest.raises(UserError):
        cal_ql(flow())


# PA-RL.


def test_the_policy_is_frozen_offline_and_trained_online() -> None:
    for name in ("pa_rl", "pa_rl_iql"):
        policy = flow()
        algorithm = MAKERS[name](policy)
        before, critic = snapshot(policy), snapshot(algorithm.critic)
        for _ in range(3):
            assert "actor/loss" not in algorithm.update(batch(two_modes(128), peak))
        assert same(before, policy) and not same(critic, algorithm.critic)
        assert "actor/loss" in algorithm.update(batch(two_modes(128), peak, online=True))
        assert not same(before, policy)


def test_the_imitated_chunk_is_drawn_by_value_and_masked_only_if_it_is_the_batch_s_own() -> None:
    data = batch(two_modes(6), peak)
    data.mask[:, 1] = 0
    chunks = torch.arange(3.0).view(1, 3, 1, 1).expand(6, 3, 2, 1)
    for winner in range(3):
        values = torch.full((6, 3), -50.0)
        values[:, winner] = 50.0
        chunk, mask = imitation_target(Candidates(chunks, values), data, 1.0, torch.Generator().manual_seed(0))
        assert bool((chunk == winner).all())
        assert torch.equal(mask, data.mask if winner == 2 else torch.ones(6, 2))


def test_the_bootstrap_is_the_value_of_the_best_optimised_chunk() -> None:
    algorithm = pa_rl()
    data = batch(two_modes(16), peak, discount=0.9)
    state = algorithm.generator.get_state()
    target = algorithm.target(data)
    algorithm.generator.set_state(state)
    best = algorithm.player.propose(data.next_obs, generator=algorithm.generator).best()
    expected = data.reward + 0.9 * algorithm.target_critic(data.next_obs, best).min(0).values
    torch.testing.assert_close(target, expected)


def test_pa_rl_moves_the_policy_beyond_the_data() -> None:
    algorithm = pa_rl_iql(ascent_rate=0.1, ascent_steps=5, temperature=0.02)
    for _ in range(40):  # imitate the data first
        data = batch(0.5 + 0.05 * torch.randn(256, 2, 1), peak)
        algorithm.imitate(data.obs, data.chunk, None, data.mask)
    start = first_actions(algorithm.policy).mean()
    for _ in range(40):
        algorithm.update(batch(0.5 + 0.3 * torch.randn(128, 2, 1).clamp(-3, 1.6), peak))
    assert torch.equal(first_actions(algorithm.policy).mean(), start)
    assert first_actions(algorithm.deployable()).mean() > start + 0.1
    for _ in range(40):
        algorithm.update(batch(0.5 + 0.3 * torch.randn(128, 2, 1).clamp(-3, 1.6), peak, online=True))
    assert first_actions(algorithm.policy).mean() > start + 0.15


# EXPO.


def test_the_chosen_value_is_at_least_that_of_the_best_base_sample() -> None:
    algorithm = expo()
    obs = batch(two_modes(32), peak).obs
    found = algorithm.player.propose(obs, generator=algorithm.generator)
    chosen = algorithm.player.score(obs, found.best()[:, None])[:, 0]
    assert bool((chosen >= found.values[:, :4].max(1).values - 1e-6).all())


def test_a_single_sample_can_be_backed_up_instead_of_the_best() -> None:
    data = batch(two_modes(16), peak, discount=0.9)
    policy = flow()
    algorithm = expo(policy, backup="base")
    state = algorithm.generator.get_state()
    target = algorithm.target(data)
    algorithm.generator.set_state(state)
    chunk = policy.act(data.next_obs, generator=algorithm.generator)
    torch.testing.assert_close(target, data.reward + 0.9 * algorithm.target_critic(data.next_obs, chunk).min(0).values)


def test_the_softmax_bonus_is_zero_for_equal_values_and_never_positive_on_average() -> None:
    index = torch.tensor([0, 3])
    torch.testing.assert_close(selection_bonus(torch.full((2, 4), 7.0), index, 0.5), torch.zeros(2), atol=1e-6, rtol=0)
    values = torch.randn(1, 5)
    p = (values / 0.5).softmax(1)[0]
    mean = sum(p[i] * selection_bonus(values, torch.tensor([i]), 0.5)[0] for i in range(5))
    assert float(mean) < 0
    # The soft maximum: draws by p with the bonus give temperature * log mean exp(value / temperature) on average.
    soft = 0.5 * ((values / 0.5).exp().mean().log())
    assert float((p * values[0]).sum() + mean) == pytest.approx(float(soft), abs=1e-5)


def test_base_edit_and_temperature_step_once_per_actor_delay() -> None:
    algorithm = expo(actor_delay=4)
    algorithm.update(batch(two_modes(64 * 4), peak, online=True))
    steps = [int(next(iter(o.state.values()))["step"]) for o in (algorithm.optimizer, algorithm.edit_optimizer)]
    assert steps == [1, 1] and algorithm.critic_steps == 4 and int(algorithm.ema.updates) == 1


def test_edits_climb_beyond_the_samples_of_the_base() -> None:
    algorithm = expo(temperature=0.01, temperature_lr=0.0, edit_lr=3e-3)
    for _ in range(40):
        algorithm.update(batch(0.5 + 0.1 * torch.randn(256, 2, 1), peak, online=True))
    base, played = first_actions(algorithm.ema.module), first_actions(algorithm.deployable())
    assert abs(float(base.mean()) - 0.5) < 0.1
    assert float(played.mean()) > float(base.mean()) + 0.15


def test_no_edits_train_no_edit_policy() -> None:
    algorithm = expo(edits=0)
    before = snapshot(algorithm.edit)
    metrics = algorithm.update(batch(two_modes(64), peak, online=True))
    assert same(before, algorithm.edit) and "actor/edit_loss" not in metrics


# Refusals.


class Mute(Policy):
    """A policy that cannot imitate."""

    name = "mute"
    spec = SPEC

    def act(self, obs: dict[str, Tensor], *, deterministic: bool = False, generator: Any = None) -> Tensor:
        """Nothing."""
        return torch.zeros(len(obs["state"]), 2, 1)


@pytest.mark.parametrize("name", ["iql", "idql", "pa_rl", "expo"])
def test_policies_that_cannot_imitate_are_refused(name: str) -> None:
    with pytest.raises(UserError, match="imitation_loss"):
        make_algorithm(name, MAKERS[name]().config, Mute(), total_updates=1)


@pytest.mark.parametrize(
    "build",
    [
        lambda: IQLConfig(beta=-1.0),
        lambda: PARLConfig(critic_rule="sarsa"),
        lambda: EXPOConfig(backup="worst"),
        lambda: ImplicitConfig(expectile=1.0),
        lambda: ConservativeConfig(weight=-1.0),
    ],
)
def test_bad_settings_are_refused(build: Callable[[], object]) -> None:
    with pytest.raises(UserError):
        build()
