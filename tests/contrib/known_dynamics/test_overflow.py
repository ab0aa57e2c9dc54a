"""Tests of numeric faults: overflow ends only the affected episode, and non-finite actions are refused."""

import torch
from sim_rules import check_refuses_actions_that_are_no_numbers

from robopolicy.contrib.known_dynamics.dynamics import DifferentiableDynamics, DynamicsSim, Outcome
from robopolicy.sim.contract import SimSpec, TensorSpec


class Doubling(DifferentiableDynamics):
    """Dynamics that multiply the state by 1e30 times the action at every step."""

    def __init__(self) -> None:
        bound = torch.ones(1)
        self.spec = SimSpec("test/doubling", {"state": TensorSpec((1,))}, -bound, bound, 0.1, 5)

    def scenario(self, seed: int) -> tuple[torch.Tensor, torch.Tensor]:
        return torch.ones(1), torch.zeros(5, 1)

    def step(self, state: torch.Tensor, action: torch.Tensor, noise: torch.Tensor) -> Outcome:
        return Outcome(state * 1e30 * action, state[:, 0])

    def observe(self, state: torch.Tensor) -> dict[str, torch.Tensor]:
        return {"state": state}


def test_overflow_ends_only_the_affected_episode() -> None:
    sim = DynamicsSim(Doubling(), 2)
    sim.reset(0)
    push = torch.tensor([[1e-30], [1.0]])
    assert not sim.step(push).done.any()
    step = sim.step(push)
    assert step.info["diverged"].tolist() == step.terminated.tolist() == [False, True]
    assert not step.truncated.any()
    torch.testing.assert_close(step.reward, torch.tensor([1.0, 0.0]))
    torch.testing.assert_close(step.final_obs["state"], torch.tensor([[1.0], [1e30]]))
    assert step.obs["state"].tolist() == [[1.0], [1.0]]
    assert sim.episode_step.tolist() == [2, 0]


def test_a_nan_action_is_refused() -> None:
    check_refuses_actions_that_are_no_numbers("differentiable/cart_pole")
