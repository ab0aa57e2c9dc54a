"""The `meta` device as a stand-in for a GPU: its tensors have a device but no data."""

from typing import Any

import torch

from robopolicy.data.batches import Rollout
from robopolicy.policies.base import PolicySpec
from robopolicy.sim.contract import SimSpec, TensorSpec, VectorSim

GPU = torch.device("meta")
SPEC = PolicySpec({"state": (1,)}, 1)


class Elsewhere(VectorSim):
    """Three environments with nothing but a device."""

    def __init__(self) -> None:
        bound = torch.ones(1)
        self.spec = SimSpec("test/elsewhere", {"state": TensorSpec((1,))}, -bound, bound, 0.1, 100)
        self.num_envs, self.device = 3, GPU

    def reset(self, seed: Any = 0) -> dict[str, torch.Tensor]:
        return {"state": torch.zeros(3, 1, device=GPU)}

    def step(self, action: torch.Tensor, active: torch.Tensor | None = None) -> Any:
        raise NotImplementedError

    def load_state_dict(self, state: Any) -> dict[str, torch.Tensor]:
        return self.reset()


def rollout(device: torch.device) -> Rollout:
    """Four decisions of three environments."""
    with device:
        flags, ones = torch.zeros(4, 3, dtype=torch.bool), torch.ones(4, 3)
        last = {"state": torch.zeros(3, 1, 1)}
        return Rollout({"state": torch.zeros(4, 3, 1, 1)}, {}, ones, ones, ones.long(), flags, flags, last, last)
