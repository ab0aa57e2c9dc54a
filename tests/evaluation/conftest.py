"""A small simulator and a small policy whose results change with any error in the evaluation."""

from collections.abc import Callable, Sequence

import pytest
import torch
from torch import Tensor, nn

from robopolicy.policies.base import Observation, Policy, PolicySpec
from robopolicy.policies.noise import Randomness, normal
from robopolicy.sim.contract import SimSpec, Step, TensorSpec, VectorSim

ACTIONS = 3
STATE = 7


class PointSim(VectorSim):
    """A point pushed by actions; start, drift and time limit depend on the episode seed."""

    def __init__(self, num_envs: int, *, has_success: bool = True, momentary: bool = False) -> None:
        bound = torch.ones(ACTIONS)
        observation = {"state": TensorSpec((STATE,))}
        self.spec = SimSpec("fake/point", observation, -bound, bound, control_dt=0.1, max_episode_steps=30)
        self.num_envs = num_envs
        self.device = torch.device("cpu")
        self.has_success = has_success
        self.momentary = momentary  # success holds for a single control step and does not end the episode

    def reset(self, seed: int | Sequence[int] = 0) -> Observation:
        seeds = [seed + i for i in range(self.num_envs)] if isinstance(seed, int) else list(seed)
        self.episode_seed = torch.tensor(seeds)
        self.episode_step = torch.zeros(self.num_envs, dtype=torch.int64)
        self._next = max(seeds) + 1
        self.position = torch.stack([self._start(s) for s in seeds])
        return self._observe()

    def step(self, action: Tensor, active: Tensor | None = None) -> Step:
        active = torch.ones(self.num_envs, dtype=torch.bool) if active is None else active
        moved = self.position * 1.01 + 0.2 * action.clip(-1, 1)
        self.position = torch.where(active[:, None], moved, self.position)
        self.episode_step = self.episode_step + active
        near = self.position.norm(dim=1) < 0.4
        success = active & ((self.episode_step == 2 + self.episode_seed % 5) if self.momentary else near)
        terminated = success & (not self.momentary)
        truncated = active & (self.episode_step >= 20 + self.episode_seed % 11)
        reward = torch.where(active, -self.position.norm(dim=1) / 3, 0.0)
        final = self._observe()
        for i in (terminated | truncated).nonzero().flatten().tolist():
            self.episode_seed[i] = self._next
            self.position[i] = self._start(self._next)
            self.episode_step[i] = 0
            self._next += 1
        info = {"success": success} if self.has_success else {}
        return Step(self._observe(), reward, terminated, truncated, final, info)

    def render(self, camera: str | None = None, *, width: int = 320, height: int = 240, envs: int = 1) -> Tensor:
        shade = (self.position[:envs, :1, None, None].abs() * 100).clip(0, 255).to(torch.uint8)
        return shade.expand(envs, 3, height, width).contiguous()

    def _start(self, seed: int) -> Tensor:
        return torch.randn(ACTIONS, generator=torch.Generator().manual_seed(int(seed)))

    def _observe(self) -> Observation:
        p = self.position
        return {"state": torch.cat([p, p.sin(), p.norm(dim=1, keepdim=True)], 1)}


class NoisyPolicy(Policy):
    """A small network with a generative head: the chunk depends on observation and noise."""

    name = "noisy"

    def __init__(self, *, horizon: int = 4, action_horizon: int = 3, obs_horizon: int = 2) -> None:
        super().__init__()
        self.spec = PolicySpec({"state": (STATE,)}, ACTIONS, horizon, action_horizon, obs_horizon)
        torch.manual_seed(0)
        width = obs_horizon * STATE + horizon * ACTIONS
        self.net = nn.Sequential(nn.Linear(width, 61), nn.Mish(), nn.Dropout(0.5), nn.Linear(61, horizon * ACTIONS))
        self.batches: list[int] = []

    def act(self, obs: Observation, *, deterministic: bool = False, generator: Randomness = None) -> Tensor:
        state = obs["state"]
        self.batches.append(len(state))
        noise = normal((len(state), self.spec.horizon * ACTIONS), generator, state.device)
        chunk = self.net(torch.cat([state.flatten(1), noise], 1)).unflatten(1, (self.spec.horizon, ACTIONS))
        return chunk - 0.4 * state[:, -1:, :ACTIONS]

    @property
    def nfe(self) -> int:
        return 5


@pytest.fixture
def make_sim() -> Callable[..., PointSim]:
    return PointSim


@pytest.fixture
def make_policy() -> Callable[..., NoisyPolicy]:
    return NoisyPolicy
