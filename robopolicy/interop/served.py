"""A torch policy as a chunk server calls it."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from robopolicy.deploy.batching import Batch, Streams
from robopolicy.deploy.wire import Greeting
from robopolicy.errors import UserError
from robopolicy.policies.base import Policy
from robopolicy.policies.continuation import act_on, can_continue, continue_chunk, held
from robopolicy.policies.noise import RowStreams


class ServedPolicy:
    """Any policy of this process: noise of a client is decoded, without it every row draws from its own stream."""

    def __init__(self, policy: Policy, model: str = "", *, deterministic: bool = True) -> None:
        """Put the policy into evaluation mode.

        Args:
            policy: What to serve.
            model: What to call it, e.g. its checkpoint.
            deterministic: Switch exploration noise off.

        Raises:
            UserError: It is recurrent: a request has no memory of the one before.
        """
        spec = policy.spec
        if spec.memory_dim:
            raise UserError("A recurrent policy cannot be served: a request knows nothing of the one before.")
        self._policy, self._deterministic = policy.eval(), deterministic
        noise = policy.takes_noise and policy.noise_shape == (spec.horizon, spec.action_dim)
        self.greeting = Greeting(spec, model, noise, can_continue(policy), policy.network_calls)
        self._device = policy.device

    def chunks(
        self, obs: Batch, noise: NDArray[Any] | None, prefix: NDArray[Any] | None, streams: Streams
    ) -> NDArray[np.float32]:
        """As `Served.chunks`."""
        batch = {key: self._tensor(value) for key, value in obs.items()}
        rows = RowStreams([seed for seed, _ in streams], [step for _, step in streams])
        with torch.no_grad():  # not inference mode, in which a prefix could not be continued
            if prefix is not None:
                given, weight = held(self._tensor(prefix), self.greeting.spec.horizon)
                if noise is None:
                    chunk = act_on(self._policy, batch, given, weight, generator=rows)
                else:
                    chunk = continue_chunk(self._policy, batch, self._tensor(noise), given, weight)  # type: ignore
            elif noise is not None:
                chunk = self._policy.decode(batch, self._tensor(noise))
            else:
                chunk = self._policy.act(batch, deterministic=self._deterministic, generator=rows)
        return chunk.float().cpu().numpy()

    def _tensor(self, value: NDArray[Any]) -> Tensor:
        return torch.from_numpy(np.ascontiguousarray(value)).to(self._device)
