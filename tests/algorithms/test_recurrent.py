"""Tests of recurrent policies: hidden states in rollouts, backpropagation through time, evaluation, a memory task."""

from pathlib import Path
from typing import Any

import fine_tuning_tools as tools
import pytest
import torch
from cue import BEST, LENGTH, CueSim
from recurrent_learners import SPEC, check_has_ratios_of_one_after_unrolling, learner, sampler_for
from torch import Tensor

from robopolicy.algorithms.common.rollout_batch import recurrent_minibatches
from robopolicy.critics.value import ValueConfig
from robopolicy.errors import UserError
from robopolicy.evaluation.harness import evaluate
from robopolicy.nets.recurrent import RecurrentCell, RecurrentConfig
from robopolicy.policies.base import PolicySpec
from robopolicy.policies.heads.autoregressive import AutoregressiveConfig
from robopolicy.policies.heads.gaussian import GaussianConfig
from robopolicy.policies.heads.mixture import MixtureConfig
from robopolicy.policies.registry import make_policy
from robopolicy.sim.checker import check_simulator
from robopolicy.spec import HIDDEN_STATE
from robopolicy.training.checkpoint import load_policy, save_checkpoint, verify_checkpoint

PRIVILEGED = ValueConfig(privileged_obs={"state": 2, "critic": 1})


def test_cue_simulator_satisfies_the_contract() -> None:
    assert check_simulator(CueSim(3), CueSim) == []


@pytest.mark.parametrize("kind", ["gru", "lstm"])
def test_stepping_a_cell_matches_the_torch_sequence(kind: str) -> None:
    torch.manual_seed(0)
    cell = RecurrentCell(RecurrentConfig(kind=kind, width=5), 3)
    whole: Any = (torch.nn.LSTM if kind == "lstm" else torch.nn.GRU)(3, 5)
    whole.load_state_dict({f"{key}_l0": value for key, value in cell.cell.state_dict().items()})
    x, memory = torch.randn(7, 2, 3), torch.zeros(2, cell.hidden_dim)
    expected, _ = whole(x)
    for t in range(7):
        memory = cell(x[t], memory)
        torch.testing.assert_close(cell.output(memory), expected[t])


def test_hidden_states_carry_through_episodes_and_start_at_zero() -> None:
    made = learner()
    sampler = sampler_for(made)
    first, second = sampler.collect(made.act), sampler.collect(made.act)
    for rollout, before in ((first, None), (second, first)):
        memory, done = rollout.obs[HIDDEN_STATE], rollout.terminated | rollout.truncated
        for t in range(1, 13):
            after = made.policy.next_hidden({key: value[t - 1] for key, value in rollout.obs.items()})
            assert torch.equal(memory[t], torch.where(done[t - 1][:, None, None], 0.0, after.detach()))
        assert torch.equal(memory[0], torch.zeros_like(memory[0]) if before is None else before.last_obs[HIDDEN_STATE])
        assert bool(done.any()) and not bool((memory[1] == 0).all())


@pytest.mark.parametrize("kind", ["gru", "lstm"])
def test_ratios_of_fresh_data_are_one_after_unrolling(kind: str) -> None:
    check_has_ratios_of_one_after_unrolling("ppo", kind)


def test_minibatches_hold_every_whole_sequence_once() -> None:
    made = learner()
    rollout = sampler_for(made, 10).collect(made.act)
    rows = made.process_rollout(rollout)
    parts = list(recurrent_minibatches(rows, rollout.shape, 52, made.generator))
    assert [last for _, last in parts] == [False, False, True] and sum(len(part) for part, _ in parts) == 130
    columns = torch.cat([part.advantage.view(13, -1) for part, _ in parts], 1)
    expected = rows.advantage.view(13, 10)
    torch.testing.assert_close(columns.sort(1).values, expected.sort(1).values)
    assert {tuple(column) for column in columns.T.tolist()} == {tuple(column) for column in expected.T.tolist()}


def test_gradients_flow_through_time_but_stop_at_episode_starts() -> None:
    made = learner()
    rollout = sampler_for(made, 4).collect(made.act)
    obs = {key: value.flatten(0, 1).clone() for key, value in rollout.obs.items()}
    obs["state"].requires_grad_(True)
    unrolled = made.policy.unroll_rnn(obs, 13)[HIDDEN_STATE].unflatten(0, (13, 4))

    def reach(step: int) -> Tensor:
        (gradient,) = torch.autograd.grad(unrolled[step].sum(), obs["state"], retain_graph=True)
        return gradient.unflatten(0, (13, 4)).abs().amax((1, 2, 3)) > 0

    assert reach(LENGTH - 1).tolist() == [True] * (LENGTH - 1) + [False] * (14 - LENGTH)
    assert reach(LENGTH + 2).tolist() == [False] * LENGTH + [True] * 2 + [False] * (11 - LENGTH)


def test_recurrent_policies_solve_the_cue_task_and_feedforward_ones_do_not() -> None:
    results = {}
    for kind in ("gru", "lstm", "none"):
        made = learner(kind=kind, num_steps=10, batch_size=160, lr=1e-2)
        sampler = sampler_for(made, 32)
        for _ in range(15):
            made.update(sampler.collect(made.act))
        results[kind] = float(evaluate(made.inference_policy(), CueSim(8), episodes=64).returns.mean())
    assert min(results["gru"], results["lstm"]) > 0.9 * BEST and results["none"] < 0.3, results


def test_evaluation_does_not_depend_on_the_number_of_environments() -> None:
    policy = learner().policy
    returns = [evaluate(policy, CueSim(count), episodes=20, deterministic=False).returns for count in (1, 7, 32)]
    assert all((returns[0] == other).all() for other in returns[1:])


def test_a_resumed_run_ends_with_the_same_weights() -> None:
    straight, other = tools.resumed(learner, sampling=sampler_for)
    assert all(torch.equal(a, b) for a, b in zip(straight.policy.parameters(), other.policy.parameters(), strict=True))


@pytest.mark.parametrize("name", ["gaussian", "mixture", "autoregressive"])
def test_explicit_heads_support_recurrence_and_checkpoints(name: str, tmp_path: Path) -> None:
    recurrent = RecurrentConfig(kind="gru", width=8)
    config: Any = {
        "gaussian": GaussianConfig(recurrent=recurrent),
        "mixture": MixtureConfig(recurrent=recurrent, hidden=(16,)),
        "autoregressive": AutoregressiveConfig(recurrent=recurrent),
    }[name]
    policy = make_policy(name, config, SPEC)
    statistics = {"state": {"min": [-1.0] * 2, "max": [1.0] * 2, "mean": [0.0] * 2, "std": [1.0] * 2, "count": [2]}}
    policy.fit_normalizer({**statistics, "action": {"min": [-1.0], "max": [1.0]}})
    assert policy.spec.observation == {"state": (2,), HIDDEN_STATE: (8,)}
    obs = {"state": torch.randn(4, 1, 2), HIDDEN_STATE: torch.zeros(4, 1, 8)}
    sample = policy.sample(obs, generator=torch.Generator().manual_seed(0))
    torch.testing.assert_close(policy.decisions(obs, sample.record).logp, sample.logp)
    assert policy.next_hidden(obs).shape == (4, 1, 8)
    save_checkpoint(tmp_path / "checkpoint", policy, task="toy/cue", obs_sample=obs)
    assert verify_checkpoint(tmp_path / "checkpoint").ok
    again, _ = load_policy(tmp_path / "checkpoint")
    torch.testing.assert_close(again.act(obs, deterministic=True), policy.act(obs, deterministic=True))


def test_a_privileged_critic_explains_more_variance() -> None:
    made = learner(kind="none", critic=PRIVILEGED, lr=1e-2)
    blind = learner(kind="none", lr=1e-2)
    errors = []
    for one in (made, blind):
        with torch.no_grad():
            one.policy.actor[-1].bias.fill_(1.0)  # a constant action: returns equal the cue
        one.optimizer.param_groups[0]["lr"] = 1e-2
        sampler = sampler_for(one, 64)
        for _ in range(10):
            metrics = one.update(sampler.collect(one.act))
        errors.append(metrics["critic/explained_variance"])
    assert "critic" not in made.policy.spec.observation and errors[0] > errors[1] + 0.2, errors


def test_unsupported_settings_are_refused() -> None:
    with pytest.raises(UserError, match="one observation at a time"):
        config = GaussianConfig(recurrent=RecurrentConfig(kind="gru"))
        make_policy("gaussian", config, PolicySpec({"state": (2,)}, 1, obs_horizon=2))
    with pytest.raises(UserError, match="pass 'memory'"):
        learner().policy.act({"state": torch.zeros(1, 1, 2)})
    with pytest.raises(UserError, match="gru, lstm, none"):
        RecurrentConfig(kind="rnn")
