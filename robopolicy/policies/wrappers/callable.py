"""Any function of observation and noise as a policy: another library, a planner, your own client of a server.

    policy = CallablePolicy.wrap("pi0", ask_server, spec, timeout=5.0, retries=2)
    steered = LatentPolicy.steer(policy, NoiseSpace(kind="repeat"), STEERING_ACTOR)

The function is called in batches, without gradients, as `function(obs, noise) -> chunk`, or `function(obs)` where
`noise=False` says that it takes none.

A function has no weights to store. A checkpoint of a policy that wraps one names it, and loading such a checkpoint
needs the function again: call `provide(name, function)` first, or name it in the entry-point group
`robopolicy.callables` of a package. Modules, ONNX files and endpoints have policies of their
own in `robopolicy.interop`.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from dataclasses import dataclass
from queue import Empty, SimpleQueue
from typing import Any, ClassVar

import torch
from torch import Tensor

from robopolicy.errors import UserError
from robopolicy.plugins import Registry
from robopolicy.policies.base import Observation, PolicySpec
from robopolicy.policies.wrappers.black_box import BlackBoxPolicy, PatientConfig

Function = Callable[..., Any]

PROVIDED: dict[str, Function] = {}
"""Functions that checkpoints may name in this process."""

CALLABLES: Registry[Function] = Registry("callables", {})
"""Functions that checkpoints may name in every process: those of contrib and of installed packages."""


def provide(name: str, function: Function) -> None:
    """Make `function` known under `name`, in place of an earlier one of that name."""
    PROVIDED[name] = function


@dataclass(frozen=True)
class CallableConfig(PatientConfig):
    """How a function is called; the function itself is passed to `provide` or `CallablePolicy.wrap`."""

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
                f"robopolicy.policies.wrappers.callable.provide('{config.function}', function) first."
            )
        self._called = _Reference(known[config.function][config.function])

    @classmethod
    def wrap(cls, name: str, function: Function, spec: PolicySpec, **settings: Any) -> CallablePolicy:
        """Provide `function` under `name` and wrap it; `settings` are those of `CallableConfig`."""
        provide(name, function)
        return cls(CallableConfig(function=name, **settings), spec)

    @property
    def label(self) -> str:
        """By the name of the function."""
        return f"The function '{self.config.function}'"

    def answer(self, obs: Observation, noise: Tensor | None) -> Any:
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
