"""Base of black-box policies: a function, a module, a file or an endpoint that is only called.

A black box maps observations `{key: (B, To, ...)}` and, where it takes noise, noise `(B, H, A)` to chunks `(B, H, A)`
in action units. Calls are split into batches, carry no gradients, are tried again where that may help, and their time
is recorded. The same noise must always give the same chunk, or steering has nothing to hold on to.
"""

from __future__ import annotations

import threading
import time
from abc import abstractmethod
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from queue import Empty, SimpleQueue
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

RECENT = 1000  # calls whose times are kept for percentiles


@dataclass(frozen=True)
class BlackBoxConfig(Validated):
    """Known properties of a black box."""

    noise: bool = True  # it takes noise and is deterministic given it; steering needs that
    max_batch: NonNegativeInt = 0  # rows per call; 0 passes all of them at once
    network_calls: PositiveInt = 1  # network evaluations per chunk, as far as known; only reported
    action_normalization: str = "identity"  # minmax | meanstd | identity: units in which critics see its chunks

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.action_normalization == "running":
            raise UserError("action_normalization cannot be 'running'; use minmax, meanstd or identity.")

    @property
    def waits(self) -> tuple[float, ...]:
        """Seconds to wait before each further attempt after a failure."""
        return ()


@dataclass(frozen=True)
class RetryConfig(BlackBoxConfig):
    """A black box with timeout and retries."""

    timeout: NonNegative = 0.0  # seconds to wait for an answer; 0 waits for ever
    retries: NonNegativeInt = 0  # further attempts after a failure or timeout
    retry_wait: NonNegative = 0.1  # seconds before the first further attempt, doubled before each later one

    @property
    def waits(self) -> tuple[float, ...]:
        """Doubling waits."""
        return tuple(self.retry_wait * 2**attempt for attempt in range(self.retries))


class LatencyStats:
    """Latency statistics of the calls of a black box; copies of a policy share it."""

    def __init__(self) -> None:
        self.calls = 0  # answered calls
        self.rows = 0  # chunks in them
        self.failures = 0  # attempts that failed or timed out
        self.seconds = 0.0  # spent in answered calls
        self._recent: deque[float] = deque(maxlen=RECENT)

    def __deepcopy__(self, memo: dict[int, Any]) -> LatencyStats:
        return self

    def record(self, rows: int, seconds: float) -> None:
        """Count a call for `rows` chunks."""
        self.calls, self.rows, self.seconds = self.calls + 1, self.rows + rows, self.seconds + seconds
        self._recent.append(seconds)

    @property
    def latency(self) -> float:
        """Mean time of an answered call [s]; 0 before the first."""
        return self.seconds / self.calls if self.calls else 0.0

    def percentile(self, q: float) -> float:
        """Time [s] within which `q` percent of the last thousand answered calls came back; 0 before the first."""
        return float(np.percentile(self._recent, q)) if self._recent else 0.0


class BlackBoxPolicy(Policy):
    """Base of the black boxes: verb `act`, and `decode` where noise is taken; subclasses implement `call`."""

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
        """Chunks `(B, H, A)` as a tensor or array: one attempt.

        A `UserError` ends the call; anything else raised is a failure, and the next attempt follows.
        """

    @property
    def is_steerable(self) -> bool:
        """As configured."""
        return self.config.noise

    def decode(self, obs: Observation, noise: Tensor) -> Tensor:
        """Chunk for `noise` `(B, H, A)`, without gradients."""
        if not self.config.noise:
            raise self._lacks("decode")
        return self._play(obs, noise)

    def act(self, obs: Observation, *, deterministic: bool = False, generator: Randomness = None) -> Tensor:
        """Chunk for fresh standard normal noise, or simply the answer where none is taken."""
        if not self.config.noise:
            return self._play(obs, None)
        reference = next(iter(obs.values()))
        shape = (len(reference), *self.noise_shape)
        return self._play(obs, normal(shape, generator, reference.device))

    def fit_normalizer(self, statistics: Statistics) -> None:
        """Fit the units in which critics see the chunks."""
        self.action_normalizer.fit_key(statistics, "action")

    @property
    def nfe(self) -> int:
        """The configured number."""
        return self.config.network_calls

    @torch.no_grad()
    def _play(self, obs: Observation, noise: Tensor | None) -> Tensor:
        obs = self._checked(obs, noise)
        rows = len(next(iter(obs.values())))
        size = self.config.max_batch or rows
        parts = [
            self._ask(
                {key: value[i : i + size] for key, value in obs.items()}, None if noise is None else noise[i : i + size]
            )
            for i in range(0, rows, size)
        ]
        return parts[0] if len(parts) == 1 else torch.cat(parts)

    def _checked(self, obs: Observation, noise: Tensor | None) -> Observation:
        """The observations that the box sees, and no others."""
        spec = self.spec
        for key, shape in spec.observation.items():
            if key not in obs:
                raise UserError(
                    f"{self.label} needs the observation '{key}', got {', '.join(sorted(obs))}; give it all of its "
                    "inputs."
                )
            if tuple(obs[key].shape[1:]) != (spec.obs_horizon, *shape):
                raise UserError(
                    f"{self.label} expects '{key}' of shape {_shape(spec.obs_horizon, *shape)}, found "
                    f"{_shape(*obs[key].shape[1:])}."
                )
        if noise is not None and tuple(noise.shape[1:]) != self.noise_shape:
            raise UserError(
                f"{self.label} expects noise of shape {_shape(*self.noise_shape)}, found {_shape(*noise.shape[1:])}."
            )
        return {key: obs[key] for key in spec.observation}

    def _ask(self, obs: Observation, noise: Tensor | None) -> Tensor:
        """One batch, with as many attempts as there are."""
        failure = Exception()
        waits = (0.0, *self.config.waits)
        for wait in waits:
            time.sleep(wait)
            start = time.monotonic()
            try:
                answer = self.call(obs, noise)
            except UserError:
                raise
            except Exception as error:
                self.meter.failures += 1
                failure = error
                continue
            reference = next(iter(obs.values()))
            self.meter.record(len(reference), time.monotonic() - start)
            return self._chunk(answer, reference)
        reason = f"{type(failure).__name__}: {failure}".splitlines()[0]
        raise UserError(
            f"{self.label} gave no chunk in {len(waits)} attempts ({reason}); check it, or allow more time or retries."
        ) from failure

    def _chunk(self, answer: Any, reference: Tensor) -> Tensor:
        """The answer as a chunk `(B, H, A)`, refused where it is none."""
        wanted = (len(reference), self.spec.horizon, self.spec.action_dim)
        try:
            chunk = torch.as_tensor(answer, dtype=torch.float32, device=reference.device).detach()
        except (TypeError, ValueError, RuntimeError) as error:
            raise UserError(
                f"{self.label} returned {type(answer).__name__} in place of chunks of shape {wanted}."
            ) from error
        if tuple(chunk.shape) != wanted:
            raise UserError(f"{self.label} returned shape {tuple(chunk.shape)} in place of chunks of shape {wanted}.")
        if not bool(chunk.isfinite().all()):
            raise UserError(f"{self.label} returned a non-finite action; check its inputs and weights.")
        return chunk


def _shape(*sizes: int) -> str:
    return f"(B, {', '.join(map(str, sizes))})"


Function = Callable[..., Any]


PROVIDED: dict[str, Function] = {}
"""Functions that checkpoints may name in this process."""


CALLABLES: Registry[Function] = Registry("callables", {})
"""Functions that checkpoints may name in every process: those of contrib and of installed packages."""


def register_callable(name: str, function: Function) -> None:
    """Make `function` known under `name`, in place of an earlier one of that name."""
    PROVIDED[name] = function


@dataclass(frozen=True)
class CallableConfig(RetryConfig):
    """How a function is called; the function itself is passed to `register_callable` or `CallablePolicy.wrap`."""

    function: str = ""  # its name


class _Reference:
    """One function, which copies of a policy share."""

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
        """Look up the function that `config` names.

        Raises:
            UserError: It has not been provided in this process.
        """
        super().__init__(config, spec)
        known = {name: found for found in (CALLABLES, PROVIDED) for name in found}
        if config.function not in known:
            raise UserError(
                f"This policy calls the function '{config.function}', which no checkpoint can hold; pass it with "
                f"robopolicy.policies.wrappers.black_box.register_callable('{config.function}', function) first."
            )
        self._called = _Reference(known[config.function][config.function])

    @classmethod
    def wrap(cls, name: str, function: Function, spec: PolicySpec, **settings: Any) -> CallablePolicy:
        """Provide `function` under `name` and wrap it; `settings` are those of `CallableConfig`."""
        register_callable(name, function)
        return cls(CallableConfig(function=name, **settings), spec)

    @property
    def label(self) -> str:
        """By the name of the function."""
        return f"The function '{self.config.function}'"

    def call(self, obs: Observation, noise: Tensor | None) -> Any:
        """Call the function."""
        function = self._called.function
        return _within(self.config.timeout, lambda: function(obs) if noise is None else function(obs, noise))


def _within(timeout: float, call: Callable[[], Any]) -> Any:
    """`call()`, or TimeoutError after `timeout` seconds; a late answer is dropped."""
    if not timeout:
        return call()
    answers: SimpleQueue[tuple[Any, Exception | None]] = SimpleQueue()

    def ask() -> None:
        try:
            with torch.no_grad():  # gradients are switched off per thread
                answers.put((call(), None))
        except Exception as error:
            answers.put((None, error))

    threading.Thread(target=ask, daemon=True, name="black box").start()
    try:
        answer, error = answers.get(timeout=timeout)
    except Empty:
        raise TimeoutError(f"no answer within {timeout:g} s") from None
    if error is not None:
        raise error
    return answer
