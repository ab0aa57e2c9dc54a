"""A policy of this process as a source of chunks for a robot."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from robopolicy.deploy.contract import Observed
from robopolicy.errors import UserError
from robopolicy.policies.base import Policy, PolicySpec
from robopolicy.policies.noise import RowStreams
from robopolicy.spec import IMAGE_PREFIX, MEMORY


class CheckpointSource:
    """Chunks of a policy through torch.

    Noise is a function of episode and decision, as in an evaluation: `reset(seed)` starts the episode `seed`.

    Args:
        policy: The policy; it is put into evaluation mode.
        deterministic: Switch exploration noise off.
    """

    takes_prefix = False

    def __init__(self, policy: Policy, *, deterministic: bool = True) -> None:
        self.policy = policy.eval()
        self.deterministic = deterministic
        self._device = policy.device
        self._memory: Tensor | None = None
        self.reset(0)

    @property
    def spec(self) -> PolicySpec:
        """What it takes and gives."""
        return self.policy.spec

    def reset(self, seed: int) -> None:
        """Start the episode `seed`."""
        self._seed, self._decision = seed, 0
        size = self.spec.memory_dim
        self._memory = torch.zeros(1, 1, size, device=self._device) if size else None

    def chunk(self, obs: Observed, prefix: NDArray[Any] | None = None) -> NDArray[np.float32]:
        """The chunk `(H, A)` for one observation `{key: (To, ...)}`.

        Raises:
            UserError: The observation does not fit the policy or is not finite, or a prefix is given.
        """
        if prefix is not None:
            raise UserError("This policy cannot continue given actions; join its chunks with 'replace'.")
        batch: dict[str, Tensor] = {}
        for key, shape in self.spec.observation.items():
            if key == MEMORY:
                continue
            expected, found = (self.spec.obs_horizon, *shape), np.shape(obs[key]) if key in obs else "nothing"
            if found != expected:
                raise UserError(f"The policy expects '{key}' of shape {expected}, found {found}.")
            value = np.ascontiguousarray(obs[key])
            if key.startswith(IMAGE_PREFIX) and value.dtype != np.uint8:
                raise UserError(f"The policy expects '{key}' in uint8, found {value.dtype}.")
            if value.dtype.kind == "f" and not np.isfinite(value).all():  # else remembered for good
                raise UserError(f"Observation '{key}' is not finite.")
            batch[key] = torch.from_numpy(value)[None].to(self._device)
        with torch.inference_mode():
            if self._memory is not None:
                batch[MEMORY] = self._memory
            noise = RowStreams([self._seed], [self._decision])
            chunk = self.policy.act(batch, deterministic=self.deterministic, generator=noise)
            if self._memory is not None:
                self._memory = self.policy.remember(batch)
        self._decision += 1
        return chunk[0].float().cpu().numpy()

    def close(self) -> None:
        """Nothing is held."""
