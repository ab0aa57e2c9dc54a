"""Base of black-box policies: a function, a module, a file or an endpoint that can only be called.

A black box maps observations `{key: (B, To, ...)}` and optionally noise `(B, H, A)` to chunks `(B, H, A)` in action
units. Calls are split into batches, have no gradients, can be repeated after failures, and are timed. Equal noise must
always give equal chunks, as steering depends on it.
"""

from __future__ import annotations

import time
from abc import abstractmethod
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, ClassVar

import numpy as np
import torch
from torch import Tensor

from robopolicy.constraints import NonNegative, NonNegativeInt, PositiveInt, Validated
from robopolicy.errors import UserError
from robopolicy.nets.normalizer import Statistics, make_normalizer
from robopolicy.plugins import Registry
from robopolicy.policies.base import Observation, Policy, PolicySpec
from robopolicy.policies.noise import Randomness, normal
from robopolicy.worker_thread import WorkerThread

RECENT = 1000  # calls with stored times, for percentiles


@dataclass(frozen=True)
class BlackBoxConfig(Validated):
    """Known properties of a black box."""

    noise: bool = True  # whether it takes noise and is deterministic given the noise, as steering requires
    max_batch: NonNegativeInt = 0  # rows per call; 0 passes all of them at once
    network_calls: PositiveInt = 1  # network evaluations per chunk, if known; only reported
    action_normalization: str = "identity"  # minmax | meanstd | identity: units of its chunks for critics

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.action_normalization == "running":
            raise UserError("action_normalization cannot be 'running'; use minmax, meanstd or identity.")

    @property
    def retry_delays(self) -> tuple[float, ...]:
        """Seconds to wait before each further attempt after a failure."""
        return ()


@dataclass(frozen=True)
class RetryConfig(BlackBoxConfig):
    """A black box with timeout and retries."""

    timeout: NonNegative = 0.0  # seconds per attempt; 0 is unlimited
    retries: NonNegativeInt = 0  # further attempts after a failure or timeout
    retry_wait: NonNegative = 0.1  # seconds before the first further attempt, doubled for each later attempt

    @property
    def retry_delays(self) -> tuple[float, ...]:
        """Doubling delays."""
        return tuple(self.retry_wait * 2**attempt for attempt in range(self.retries))


class LatencyStats:
    """Latency statistics of the calls of a black box, shared by copies of a policy."""

    def __init__(self) -> None:
        self.calls = 0  # successful calls
        self.rows = 0  # chunks in them
        self.failures = 0  # attempts that failed or timed out
        self.seconds = 0.0  # spent in successful calls
        self._recent: deque[float] = deque(maxlen=RECENT)

    def __deepcopy__(self, memo: dict[int, Any]) -> LatencyStats:
        return self

    def record(self, rows: int, seconds: float) -> None:
        """Count a call for `rows` chunks."""
        self.calls, self.rows, self.seconds = self.calls + 1, self.rows + rows, self.seconds + seconds
        self._recent.append(seconds)

    @property
    def latency(self) -> float:
        """Mean time of a successful call [s]; 0 before the first."""
        return self.seconds / self.calls if self.calls else 0.0

    def percentile(self, q: float) -> float:
        """Percentile `q` of the times [s] of the last thousand successful calls; 0 before the first."""
        return float(np.percentile(self._recent, q)) if self._recent else 0.0


class BlackBoxPolicy(Policy):
    """Base of the black boxes: methods `act` and, with noise, `decode`; subclasses implement `call`."""

    is_external: ClassVar[bool] = True
    config: BlackBoxConfig

    def __init__(self, config: BlackBoxConfig, spec: PolicySpec) -> None:
        super().__init__()
        self.config = config
        self.spec = spec
        self.meter = LatencyStats()
        self.action_normalizer = make_normalizer(spec.action_dim, config.action_normalization)

    @property
    @abstractmethod
    def label(self) -> str:
        """Name in messages, with an article: "The function 'pi0'"."""

    @abstractmethod
    def call(self, obs: Observation, noise: Tensor | None) -> Any:
        """Return chunks `(B, H, A)` as a tensor or array, in one attempt.

        A `UserError` is final; any other exception counts as a failure and may be followed by another attempt.
        """

    @property
    def is_steerable(self) -> bool:
        """Whether the black box takes noise, as configured."""
        return self.config.noise

    def decode(self, obs: Observation, noise: Tensor) -> Tensor:
        """Chunk for `noise` `(B, H, A)`, without gradients."""
        if not self.config.noise:
            raise self._lacks("decode")
        if tuple(noise.shape[1:]) != self.noise_shape:
            raise UserError(
                f"{self.label} expects noise of shape {_shape(*self.noise_shape)}, found {_shape(*noise.shape[1:])}."
            )
        return self.compute(obs, lambda part, rows: self.call(part, noise[rows]))

    def act(self, obs: Observation, *, deterministic: bool = False, generator: Randomness = None) -> Tensor:
        """Chunk for fresh standard normal noise, or without noise if the black box takes none."""
        if not self.config.noise:
            return self.compute(obs, lambda part, rows: self.call(part, None))
        reference = next(iter(obs.values()))
        return self.decode(obs, normal((len(reference), *self.noise_shape), generator, reference.device))

    def fit_normalizer(self, statistics: Statistics) -> None:
        """Fit the units of the chunks for critics."""
        self.action_normalizer.fit_key(statistics, "action")

    @property
    def nfe(self) -> int:
        """Configured number of network evaluations."""
        return self.config.network_calls

    @torch.no_grad()
    def compute(self, obs: Observation, call: Callable[[Observation, slice], Any]) -> Tensor:
        """Chunks `(B, H, A)` of `call(observations, rows)` for parts of the batch, with retries and checks."""
        obs = self._select_inputs(obs)
        rows = len(next(iter(obs.values())))
        size = self.config.max_batch or rows
        parts: list[Tensor] = []
        for start in range(0, rows, size):
            part = slice(start, start + size)
            parts.append(self._call_with_retries({key: value[part] for key, value in obs.items()}, part, call))
        return parts[0] if len(parts) == 1 else torch.cat(parts)

    def _select_inputs(self, obs: Observation) -> Observation:
        """Check the observations; return the ones that the black box uses."""
        spec = self.spec
        for key, shape in spec.observation.items():
            if key not in obs:
                raise UserError(
                    f"{self.label} needs the observation '{key}', got {', '.join(sorted(obs))}; pass all inputs."
                )
            if tuple(obs[key].shape[1:]) != (spec.obs_horizon, *shape):
                raise UserError(
                    f"{self.label} expects '{key}' of shape {_shape(spec.obs_horizon, *shape)}, found "
                    f"{_shape(*obs[key].shape[1:])}."
                )
        return {key: obs[key] for key in spec.observation}

    def _call_with_retries(self, obs: Observation, rows: slice, call: Callable[[Observation, slice], Any]) -> Tensor:
        """Run one batch, with retries after failures."""
        failure = Exception()
        delays = (0.0, *self.config.retry_delays)
        for delay in delays:
            time.sleep(delay)
            start = time.monotonic()
            try:
                result = call(obs, rows)
            except UserError:
                raise
            except Exception as error:
                self.meter.failures += 1
                failure = error
                continue
            reference = next(iter(obs.values()))
            self.meter.record(len(reference), time.monotonic() - start)
            return self._chunk(result, reference)
        reason = f"{type(failure).__name__}: {failure}".splitlines()[0]
        raise UserError(
            f"{self.label} gave no chunk in {len(delays)} attempts ({reason}); check it, or allow more time or retries."
        ) from failure

    def _chunk(self, result: Any, reference: Tensor) -> Tensor:
        """Convert the result to a chunk `(B, H, A)`; raise a `UserError` if that is impossible."""
        expected = (len(reference), self.spec.horizon, self.spec.action_dim)
        try:
            chunk = torch.as_tensor(result, dtype=torch.float32, device=reference.device).detach()
        except (TypeError, ValueError, RuntimeError) as error:
            raise UserError(
                f"{self.label} returned {type(result).__name__} instead of chunks of shape {expected}."
            ) from error
        if tuple(chunk.shape) != expected:
            raise UserError(f"{self.label} returned shape {tuple(chunk.shape)} instead of chunks of shape {expected}.")
        if not bool(chunk.isfinite().all()):
            raise UserError(f"{self.label} returned a non-finite action; check its inputs and weights.")
        return chunk


def _shape(*sizes: int) -> str:
    return f"(B, {', '.join(map(str, sizes))})"


Function = Callable[..., Any]

PROVIDED: dict[str, Function] = {}
"""Functions by name for the checkpoints in this process."""

CALLABLES: Registry[Function] = Registry("callables", {})
"""Functions by name for checkpoints in every process: from contrib and installed packages."""


def register_callable(name: str, function: Function) -> None:
    """Register `function` under `name`, replacing an earlier function of that name."""
    PROVIDED[name] = function


@dataclass(frozen=True)
class CallableConfig(RetryConfig):
    """Settings of the calls of a function, which is passed to `register_callable` or `CallablePolicy.wrap`."""

    function: str = ""  # name of the function


class _Reference:
    """Reference to a function, shared by copies of a policy."""

    def __init__(self, function: Function) -> None:
        self.function = function

    def __deepcopy__(self, memo: dict[int, Any]) -> _Reference:
        return self


class CallablePolicy(BlackBoxPolicy):
    """A function as a policy."""

    name: ClassVar[str] = "callable"
    config_class = CallableConfig
    config: CallableConfig

    def __init__(self, config: CallableConfig, spec: PolicySpec) -> None:
        """Look up the function by its name in `config`; raise a `UserError` if it is not registered."""
        super().__init__(config, spec)
        registered = {name: found for found in (CALLABLES, PROVIDED) for name in found}
        if config.function not in registered:
            raise UserError(
                f"This policy calls the function '{config.function}', which a checkpoint cannot contain; pass it with "
                f"robopolicy.policies.wrappers.black_box.register_callable('{config.function}', function) first."
            )
        self._reference = _Reference(registered[config.function][config.function])

    @classmethod
    def wrap(cls, name: str, function: Function, spec: PolicySpec, **settings: Any) -> CallablePolicy:
        """Register `function` under `name` and wrap it; `settings` are fields of `CallableConfig`."""
        register_callable(name, function)
        return cls(CallableConfig(function=name, **settings), spec)

    @property
    def label(self) -> str:
        """Name of the function in messages."""
        return f"The function '{self.config.function}'"

    def call(self, obs: Observation, noise: Tensor | None) -> Any:
        """Call the function."""
        function = self._reference.function
        return _with_timeout(self.config.timeout, lambda: function(obs) if noise is None else function(obs, noise))


def _with_timeout(timeout: float, call: Callable[[], Any]) -> Any:
    """Return `call()`, or raise a TimeoutError after `timeout` seconds and drop the late result."""
    if not timeout:
        return call()
    worker = WorkerThread("black box")
    try:
        worker.send(torch.no_grad()(call))  # gradient mode is per thread
        return worker.receive(timeout)
    finally:
        worker.close()
