"""A policy behind a websocket address as a black box; what is said there is defined in `robopolicy.deploy.wire`.

    policy = open_remote("ws://127.0.0.1:8765")
    steered = LatentPolicy.steer(policy, NoiseSpace(kind="repeat"), STEERING_ACTOR)

The connection is made when the first chunk is asked for, made again after a failure, and shared by copies. What an
endpoint serves must not change under a policy: its greeting is compared at every connection. An endpoint that cannot
be reached or is late is asked again, with doubling waits; one that refuses or talks nonsense is not.
"""

from __future__ import annotations

import threading
from dataclasses import dataclass, replace
from typing import Any, ClassVar

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from robopolicy.constraints import Natural, NotNegative
from robopolicy.deploy.batching import Batch, Streams
from robopolicy.deploy.client import Connection, reason_of
from robopolicy.deploy.wire import Greeting
from robopolicy.errors import UserError
from robopolicy.policies.base import Observation, Policy, PolicySpec
from robopolicy.policies.noise import RowStreams
from robopolicy.policies.real_time_chunking import act_on, can_continue, continue_chunk, held
from robopolicy.policies.wrappers.black_box import BlackBoxPolicy, PatientConfig


@dataclass(frozen=True)
class RemoteConfig(PatientConfig):
    """Where the endpoint is and how long to wait for it; `open_remote` fills in what it serves."""

    timeout: NotNegative = 30.0
    retries: Natural = 2
    url: str = ""  # ws://HOST:PORT | wss://...
    model: str = ""  # what the endpoint called its policy; another name is refused, "" takes any


class RemotePolicy(BlackBoxPolicy):
    """A policy that another process or machine computes."""

    name: ClassVar[str] = "remote"
    config_class = RemoteConfig
    config: RemoteConfig

    def __init__(self, config: RemoteConfig, spec: PolicySpec) -> None:
        """Check the address; nothing is sent yet.

        Raises:
            UserError: The address is none.
        """
        super().__init__(config, spec)
        self._line = _Shared(Connection(config.url, config.timeout, self._check))

    @property
    def label(self) -> str:
        """By the address."""
        return f"The endpoint {self.config.url}"

    def answer(self, obs: Observation, noise: Tensor | None) -> Any:
        """Send one batch and wait for its chunk."""
        arrays = {key: value.cpu().numpy() for key, value in obs.items()}
        with self._line.lock:
            return self._line.connection.ask(obs=arrays, noise=None if noise is None else noise.cpu().numpy()).chunk

    def close(self) -> None:
        """Close the connection; the next call opens another."""
        self._line.connection.close()

    def _check(self, greeting: Greeting) -> None:
        """Refuse an endpoint that serves something else than when it was wrapped."""
        ours, theirs = (spec.to_dict() for spec in (self.spec, greeting.spec))
        for key in ("observation", "action_dim", "horizon", "obs_horizon"):
            if ours[key] != theirs[key]:
                raise UserError(f"{self.label} now has {key} {theirs[key]}, expected {ours[key]}; import it again.")
        if self.config.noise and not greeting.noise:
            raise UserError(f"{self.label} no longer takes noise; import it again.")
        if self.config.model and greeting.model != self.config.model:
            raise UserError(
                f"{self.label} now serves '{greeting.model}', expected '{self.config.model}'; import it again."
            )


class _Shared:
    """The connection that copies of a policy share; threads take turns."""

    def __init__(self, connection: Connection) -> None:
        self.connection = connection
        self.lock = threading.Lock()

    def __deepcopy__(self, memo: dict[int, Any]) -> _Shared:
        return self


def open_remote(url: str, *, execute: int = 0, **settings: Any) -> RemotePolicy:
    """Ask the endpoint at `url` what it serves and wrap it.

    Args:
        url: Address, see `RemoteConfig.url`.
        execute: Actions played per chunk; 0 leaves it to the endpoint.
        **settings: Further fields of `RemoteConfig`.

    Raises:
        UserError: It cannot be reached, refuses, or is no policy server.
    """
    config = RemoteConfig(url=url, **settings)
    connection = Connection(url, config.timeout)
    try:
        greeting = connection.open()
    except OSError as error:
        raise UserError(
            f"The endpoint {url} cannot be reached ({reason_of(error)}); start it, or check the address."
        ) from error
    finally:
        connection.close()
    spec = greeting.spec
    if execute:
        if execute > spec.horizon:
            raise UserError(
                f"The endpoint {url} gives chunks of {spec.horizon} actions, so execute={execute} is too many."
            )
        spec = replace(spec, execute=execute)
    known = {"noise": greeting.noise, "model": greeting.model, "network_calls": greeting.network_calls}
    return RemotePolicy(RemoteConfig(url=url, **(known | settings)), spec)


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
