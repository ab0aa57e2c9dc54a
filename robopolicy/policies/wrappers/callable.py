"""Any function of observation and noise as a policy: a vision-language-action model behind a server, another library.

    policy = CallablePolicy.wrap("pi0", ask_server, spec, timeout=5.0, retries=2)
    steered = LatentPolicy.steer(policy, NoiseSpace(kind="repeat"), STEERING_ACTOR)

The function is called in batches, without gradients, as `function(obs, noise) -> chunk`: observations
`{key: (B, To, ...)}` and noise `(B, H, A)` as tensors, the chunk `(B, H, A)` in action units as a tensor or array. The
same noise must always give the same chunk, or steering has nothing to hold on to.

A function has no weights to store. A checkpoint of a policy that wraps one names it, and loading such a checkpoint
needs the function again: call `provide(name, function)` first.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from queue import Empty, SimpleQueue
from typing import Any, ClassVar

import torch
from torch import Tensor

from robopolicy.errors import UserError
from robopolicy.nets.normalizer import Statistics, make_normalizer
from robopolicy.policies.base import Observation, Policy, PolicySpec
from robopolicy.policies.noise import Randomness, normal

Function = Callable[[Observation, Tensor], Any]

PROVIDED: dict[str, Function] = {}
"""Functions that checkpoints may name in this process."""


def provide(name: str, function: Function) -> None:
    """Make `function` known under `name`, in place of an earlier one of that name."""
    PROVIDED[name] = function


@dataclass(frozen=True)
class CallableConfig:
    """How a function is called; the function itself is passed to `provide` or `CallablePolicy.wrap`."""

    function: str = ""  # its name
    max_batch: int = 0  # rows per call; 0 passes all of them at once
    timeout: float = 0.0  # seconds to wait for an answer; 0 waits for ever
    retries: int = 0  # further attempts after a failure or timeout
    retry_wait: float = 0.1  # seconds before the first further attempt, doubled before each later one
    network_calls: int = 1  # network evaluations per chunk, as far as known; only reported
    action_normalization: str = "identity"  # minmax | meanstd | identity: units in which critics see its chunks

    def __post_init__(self) -> None:
        if min(self.max_batch, self.timeout, self.retries, self.retry_wait) < 0 or self.network_calls < 1:
            raise UserError(
                "max_batch, timeout, retries and retry_wait must not be negative, network_calls at least 1."
            )
        if self.action_normalization == "running":
            raise UserError("action_normalization cannot be 'running'; use minmax, meanstd or identity.")


class BlackBox:
    """One function with its attempts and a count of what it cost; copies of a policy share it."""

    def __init__(self, function: Function, config: CallableConfig) -> None:
        self.function, self.config = function, config
        self.calls = 0  # answered calls
        self.rows = 0  # chunks in them
        self.failures = 0  # attempts that failed or took too long
        self.seconds = 0.0  # spent in answered calls

    def __deepcopy__(self, memo: dict[int, Any]) -> BlackBox:
        return self

    @property
    def latency(self) -> float:
        """Mean time of an answered call [s]; 0 before the first."""
        return self.seconds / self.calls if self.calls else 0.0

    def __call__(self, obs: Observation, noise: Tensor) -> Any:
        """Ask until there is an answer.

        Raises:
            UserError: All attempts failed; names the last reason.
        """
        reason = ""
        for attempt in range(self.config.retries + 1):
            if attempt:
                time.sleep(self.config.retry_wait * 2 ** (attempt - 1))
            start = time.monotonic()
            try:
                answer = _within(self.config.timeout, self.function, obs, noise)
            except UserError:
                raise
            except Exception as error:
                self.failures += 1
                reason = f"{type(error).__name__}: {error}".splitlines()[0]
                continue
            self.calls, self.rows = self.calls + 1, self.rows + len(noise)
            self.seconds += time.monotonic() - start
            return answer
        raise UserError(
            f"The function '{self.config.function}' gave no chunk in {self.config.retries + 1} attempts ({reason}); "
            "check it, or allow more time or retries."
        )


class CallablePolicy(Policy):
    """A function as a policy; verbs `act` and `decode`."""

    name: ClassVar[str] = "callable"

    def __init__(self, config: CallableConfig, spec: PolicySpec) -> None:
        """Look up the function that `config` names.

        Raises:
            UserError: It has not been provided in this process.
        """
        super().__init__()
        if config.function not in PROVIDED:
            raise UserError(
                f"This policy calls the function '{config.function}', which no checkpoint can hold; pass it with "
                f"robopolicy.policies.wrappers.callable.provide('{config.function}', function) first."
            )
        self.config = config
        self.spec = spec
        self.box = BlackBox(PROVIDED[config.function], config)
        self.action_normalizer = make_normalizer(spec.action_dim, config.action_normalization)

    @classmethod
    def wrap(cls, name: str, function: Function, spec: PolicySpec, **settings: Any) -> CallablePolicy:
        """Provide `function` under `name` and wrap it; `settings` are those of `CallableConfig`."""
        provide(name, function)
        return cls(CallableConfig(name, **settings), spec)

    @torch.no_grad()
    def decode(self, obs: Observation, noise: Tensor) -> Tensor:
        """Chunk of the function for `noise` `(B, H, A)`, without gradients."""
        size = self.config.max_batch or len(noise)
        parts = [
            self._ask({key: value[i : i + size] for key, value in obs.items()}, noise[i : i + size])
            for i in range(0, len(noise), size)
        ]
        return parts[0] if len(parts) == 1 else torch.cat(parts)

    def act(self, obs: Observation, *, deterministic: bool = False, generator: Randomness = None) -> Tensor:
        """Call the function with fresh standard normal noise."""
        reference = next(iter(obs.values()))
        shape = (len(reference), self.spec.horizon, self.spec.action_dim)
        return self.decode(obs, normal(shape, generator, reference.device))

    def fit_normalizer(self, statistics: Statistics) -> None:
        """Fit the units in which critics see the chunks."""
        self.action_normalizer.fit_key(statistics, "action")

    @property
    def network_calls(self) -> int:
        """As configured: nobody else knows."""
        return self.config.network_calls

    def _ask(self, obs: Observation, noise: Tensor) -> Tensor:
        chunk = torch.as_tensor(self.box(obs, noise), dtype=torch.float32, device=noise.device)
        if chunk.shape != noise.shape:
            raise UserError(
                f"The function '{self.config.function}' returned a chunk of shape {tuple(chunk.shape)} for noise of "
                f"shape {tuple(noise.shape)}; it must return one action per noise vector."
            )
        return chunk.detach()


def _within(timeout: float, function: Function, obs: Observation, noise: Tensor) -> Any:
    """`function(obs, noise)`, or TimeoutError after `timeout` seconds; a late answer is dropped."""
    if not timeout:
        return function(obs, noise)
    answers: SimpleQueue[tuple[Any, Exception | None]] = SimpleQueue()

    def ask() -> None:
        try:
            with torch.no_grad():  # gradients are switched off per thread
                answers.put((function(obs, noise), None))
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
