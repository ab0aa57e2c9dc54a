"""Policies on websocket servers, as black boxes; `robopolicy.deploy.wire` defines the protocol.

    policy = open_remote("ws://127.0.0.1:8765")
    steered = LatentPolicy.from_base(policy, NoiseSpace(kind="repeat"), STEERING_ACTOR)

The connection is opened for the first chunk, reopened after a failure, and shared by copies. The policy of an endpoint
must not change: its greeting is compared at every connection. Requests to an endpoint that is unreachable or late are
retried with exponential backoff; refusals and invalid replies are errors.
"""

from __future__ import annotations

import threading
from dataclasses import dataclass, replace
from typing import Any, ClassVar, Generic, TypeVar

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from robopolicy.constraints import NonNegative, NonNegativeInt
from robopolicy.deploy.batching import Batch, Streams
from robopolicy.deploy.client import Connection
from robopolicy.deploy.websocket import reason_of
from robopolicy.deploy.wire import Greeting
from robopolicy.device import use_configured_threads
from robopolicy.errors import UserError
from robopolicy.plurals import counted
from robopolicy.policies.base import Observation, Policy, PolicySpec
from robopolicy.policies.noise import PerRowGenerator, Randomness, row_streams
from robopolicy.policies.real_time_chunking import act_with_prefix, can_continue, continue_chunk, pad_prefix
from robopolicy.policies.wrappers.black_box import BlackBoxPolicy, RetryConfig


@dataclass(frozen=True)
class RemoteConfig(RetryConfig):
    """Address and timeouts of the endpoint; created by `open_remote`."""

    timeout: NonNegative = 30.0
    retries: NonNegativeInt = 2
    url: str = ""  # ws://HOST:PORT | wss://...
    model: str = ""  # name of the served policy; another name is an error, "" accepts any


class RemotePolicy(BlackBoxPolicy):
    """Policy computed by another process or machine."""

    name: ClassVar[str] = "remote"
    config_class = RemoteConfig
    config: RemoteConfig

    def __init__(self, config: RemoteConfig, spec: PolicySpec) -> None:
        """Check the address without connecting; a UserError is raised if it is invalid."""
        super().__init__(config, spec)
        self._line = SharedConnection(Connection(config.url, config.timeout, self._check))

    @property
    def label(self) -> str:
        """Name for messages."""
        return f"The endpoint {self.config.url}"

    def act(self, obs: Observation, *, deterministic: bool = False, generator: Randomness = None) -> Tensor:
        """Chunks of the policy's own `act` with the streams of `generator`; the server chooses `deterministic`."""
        reference = next(iter(obs.values()))
        streams = row_streams(len(reference), generator, reference.device)
        return self.compute(obs, lambda part, rows: self._request(part, streams=streams[rows]))

    def call(self, obs: Observation, noise: Tensor | None) -> Any:
        """Chunks for `noise`, or with random streams of the server."""
        return self._request(obs) if noise is None else self._request(obs, noise=noise)

    def _request(self, obs: Observation, **by_row: Tensor) -> NDArray[Any]:
        """Send a batch, in requests of the size that the server accepts, and wait for its chunks."""
        arrays = {key: value.cpu().numpy() for key, value in obs.items()}
        rows, connection = len(next(iter(arrays.values()))), self._line.connection
        chunks: list[NDArray[Any]] = []
        with self._line.lock:
            size = connection.greeting().max_rows
            for start in range(0, rows, size):
                part = slice(start, start + size)
                more = {key: value[part].cpu().numpy() for key, value in by_row.items()}
                found = {key: value[part] for key, value in arrays.items()}
                chunks.append(connection.request(obs=found, **more).chunk)
        return np.concatenate(chunks)

    def close(self) -> None:
        """Close the connection; the next call opens another."""
        self._line.connection.close()

    def _check(self, greeting: Greeting) -> None:
        """Raise an error if the endpoint serves another policy than before."""
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


AnyConnection = TypeVar("AnyConnection")


class SharedConnection(Generic[AnyConnection]):
    """Connection that copies of a policy share, with a lock for threads."""

    def __init__(self, connection: AnyConnection) -> None:
        self.connection = connection
        self.lock = threading.Lock()

    def __deepcopy__(self, memo: dict[int, Any]) -> SharedConnection[AnyConnection]:
        return self


def open_remote(url: str, *, action_horizon: int = 0, **settings: Any) -> RemotePolicy:
    """Read the specification of the endpoint at `url` and wrap it; `settings` are further fields of `RemoteConfig`.

    `action_horizon` 0 is the value of the endpoint. A UserError is raised if it is unreachable or no policy server.
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
    if action_horizon:
        if action_horizon > spec.horizon:
            excess = f"chunks of {counted(spec.horizon, 'action')}, so action_horizon={action_horizon} is too many"
            raise UserError(f"The endpoint {url} returns {excess}.")
        spec = replace(spec, action_horizon=action_horizon)
    known = {"noise": greeting.noise, "model": greeting.model, "network_calls": greeting.network_calls}
    return RemotePolicy(RemoteConfig(url=url, **(known | settings)), spec)


class ServedPolicy:
    """Batched server interface of a policy; noise of a client is decoded, otherwise every row has its own stream."""

    def __init__(self, policy: Policy, model: str = "", *, deterministic: bool = True) -> None:
        """Put a feedforward policy into evaluation mode; `model` is its name for clients, e.g. its checkpoint."""
        spec = policy.spec
        if spec.hidden_dim:
            raise UserError("A recurrent policy cannot be served, since requests are stateless.")
        self._policy, self._deterministic = policy.eval(), deterministic
        noise = policy.is_steerable and policy.noise_shape == (spec.horizon, spec.action_dim)
        self.greeting = Greeting(spec, model, noise, can_continue(policy), policy.nfe)
        self._device = policy.device

    def chunks(
        self, obs: Batch, noise: NDArray[Any] | None, prefix: NDArray[Any] | None, streams: Streams
    ) -> NDArray[np.float32]:
        """Compute chunks, see `Served.chunks`."""
        use_configured_threads()  # the server has a thread for the policy
        batch = {key: self._tensor(value) for key, value in obs.items()}
        rows = PerRowGenerator([seed for seed, _ in streams], [step for _, step in streams])
        with torch.no_grad():  # not inference mode, in which a prefix could not be continued
            if prefix is not None:
                given, weight = pad_prefix(self._tensor(prefix), self.greeting.spec.horizon)
                if noise is None:
                    chunk = act_with_prefix(self._policy, batch, given, weight, generator=rows)
                else:
                    chunk = continue_chunk(self._policy, batch, self._tensor(noise), given, weight)  # type: ignore
            elif noise is not None:
                chunk = self._policy.decode(batch, self._tensor(noise))
            else:
                chunk = self._policy.act(batch, deterministic=self._deterministic, generator=rows)
        return chunk.float().cpu().numpy()

    def _tensor(self, value: NDArray[Any]) -> Tensor:
        return torch.from_numpy(np.ascontiguousarray(value)).to(self._device)
