"""Tests of the examples: they run end to end, and their hand-written parts are correct."""

import pytest
import torch

from examples import flow_bc, reinflow
from robopolicy.sim.registry import SimOptions, get_task, make_sim

TASKS = ["toy/point_mass", "manipulation/lift"]


def make_flow(**options: int) -> flow_bc.Flow:
    torch.manual_seed(0)
    flow = flow_bc.Flow(6, 2, flow_bc.Config(hidden=16, horizon=3, action_horizon=3, **options))
    flow.state_norm.fit({"min": -torch.ones(6), "max": torch.ones(6)})
    flow.action_norm.fit({"min": -torch.ones(2), "max": torch.ones(2)})
    return flow


@pytest.mark.parametrize("task", TASKS)
def test_quick_example_trains_and_fine_tunes_a_flow_policy(task, tmp_path):
    base, tuned = tmp_path / "base", tmp_path / "tuned"
    options = ["--flow", str(base / "flow.safetensors"), "--task", task, "--out", str(tuned), "--quick"]
    before, after = reinflow.main(options)
    assert before.n == after.n == flow_bc.QUICK["eval_episodes"]
    first, config = flow_bc.load(base / "flow.safetensors")
    second, _ = flow_bc.load(tuned / "flow.safetensors")
    assert config.task == task
    weights = zip(first.state_dict().values(), second.state_dict().values(), strict=True)
    assert any(not torch.equal(old, new) for old, new in weights)


def test_saved_policy_computes_the_same_chunk(tmp_path):
    flow, state, noise = make_flow(), torch.randn(5, 6), torch.randn(5, 3, 2)
    flow_bc.save(flow, flow_bc.Config(hidden=16, horizon=3, action_horizon=3), tmp_path / "flow.safetensors")
    loaded, _ = flow_bc.load(tmp_path / "flow.safetensors")
    assert torch.equal(loaded.decode(state, noise), flow.decode(state, noise))


def test_demonstrations_are_whole_successful_episodes():
    sim = make_sim("toy/point_mass", SimOptions(num_envs=3))
    expert = get_task("toy/point_mass").make_expert()
    for state, action in flow_bc.demonstrate(sim, expert, demos=5, seed=0):
        assert len(state) == len(action)
        assert torch.equal(state[0, 2:4], torch.zeros(2))  # at rest, as every episode starts
        assert torch.equal(state[:, 4:], state[:1, 4:].expand(len(state), 2))  # one goal per episode


def test_chunks_contain_the_following_actions_and_repeat_the_last():
    actions = torch.arange(4.0)[:, None]
    states, chunks = flow_bc.slice_chunks([(torch.zeros(4, 2), actions)], horizon=3)
    assert states.shape == (4, 2)
    assert chunks.squeeze(-1).tolist() == [[0, 1, 2], [1, 2, 3], [2, 3, 3], [3, 3, 3]]


def test_evaluation_does_not_depend_on_the_number_of_environments():
    flow = make_flow()
    results = [
        flow_bc.evaluate(flow, make_sim("toy/point_mass", SimOptions(num_envs=n)), action_horizon=3, episodes=12)
        for n in (1, 5)
    ]
    assert results[0] == results[1]


def test_new_chains_have_ratio_one_and_noise_free_chains_equal_the_flow():
    flow, state = make_flow(), torch.randn(7, 6)
    noise_net = reinflow.NoiseNet(flow, 0.05, 0.2)
    chain = reinflow.sample_chain(flow, noise_net, state)
    logp, _ = reinflow.score_chain(flow, noise_net, state, chain)
    single = torch.cat([reinflow.score_chain(flow, noise_net, state[i : i + 1], chain[i : i + 1])[0] for i in range(7)])
    assert torch.allclose((single - logp).exp(), torch.ones(7), atol=1e-5)
    still = reinflow.sample_chain(flow, reinflow.NoiseNet(flow, 1e-9, 2e-9), state)
    assert torch.allclose(flow.action_norm.denormalize(still[:, -1]), flow.decode(state, still[:, 0]), atol=1e-5)


def test_advantages_equal_hand_computed_values():
    column = lambda *values: torch.tensor(values)[:, None]  # noqa: E731
    rollout = reinflow.Rollout(
        state=torch.zeros(3, 1, 6),
        chain=torch.zeros(3, 1, 5, 3, 2),
        value=column(1.0, 2.0, 3.0),
        next_value=column(2.0, 10.0, 4.0),  # 10 is the value of the last observation of the truncated episode
        reward=column(1.0, 0.0, 5.0),
        discount=column(0.5, 0.25, 0.5),  # the second chunk executed two steps
        terminated=column(False, False, True),
        truncated=column(False, True, False),
        success=column(False, False, True),
    )
    # 5 - 3; 0.25 * 10 - 2, trace cut by the truncation; 1 + 0.5 * 2 - 1 + 0.5 * 0.8 * 0.5
    assert reinflow.advantages(rollout, lam=0.8).squeeze(1).tolist() == pytest.approx([1.2, 0.5, 2.0])


def test_clipped_surrogate_has_zero_gradient_beyond_the_bound():
    old = torch.zeros(4)
    logp = torch.tensor([0.5, -0.5, 0.5, -0.5], requires_grad=True)
    advantage = torch.tensor([1.0, 1.0, -1.0, -1.0])
    reinflow.ppo_loss(logp, old, advantage, clip=0.2).backward()
    assert (logp.grad != 0).tolist() == [False, True, True, False]
