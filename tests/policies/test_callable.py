"""Tests of functions as policies: batches, retries, time limits, accounting."""

import copy
import time

import numpy as np
import pytest
import torch
from torch import Tensor

from robopolicy.errors import UserError
from robopolicy.policies.base import Observation, PolicySpec
from robopolicy.policies.noise import PerRowGenerator
from robopolicy.policies.wrappers.black_box import CallablePolicy

SPEC = PolicySpec({"state": (3,)}, action_dim=2, horizon=4)
OBS = {"state": torch.arange(21.0).view(7, 1, 3)}


def double(obs: Observation, noise: Tensor) -> Tensor:
    return 2 * noise + obs["state"][:, :, :1]


def test_chunk_is_the_output_of_the_function() -> None:
    policy = CallablePolicy.wrap("double", double, SPEC)
    noise = torch.randn(7, 4, 2)
    assert torch.equal(policy.decode(OBS, noise), 2 * noise + OBS["state"][:, :, :1])
    assert policy.act(OBS).shape == (7, 4, 2) and not list(policy.parameters())
    chunks = [policy.act(OBS, generator=PerRowGenerator(range(7), [0] * 7)) for _ in range(2)]
    assert torch.equal(*chunks)


def test_functions_may_return_arrays_and_run_without_gradients() -> None:
    weight = torch.nn.Parameter(torch.ones(2))
    graphs: list[bool] = []

    def function(obs: Observation, noise: Tensor) -> np.ndarray:
        graphs.append((noise * weight).requires_grad)
        return noise.double().numpy()

    for timeout in (0.0, 5.0):  # in the caller's thread and in a separate thread
        policy = CallablePolicy.wrap("numpy", function, SPEC, timeout=timeout)
        chunk = policy.decode(OBS, torch.ones(7, 4, 2))
        assert chunk.dtype == torch.float32 and not chunk.requires_grad
    assert graphs == [False, False]


def test_large_batches_are_split() -> None:
    sizes: list[int] = []

    def function(obs: Observation, noise: Tensor) -> Tensor:
        sizes.append(len(noise))
        return double(obs, noise)

    policy = CallablePolicy.wrap("split", function, SPEC, max_batch=3)
    noise = torch.randn(7, 4, 2)
    assert torch.equal(policy.decode(OBS, noise), double(OBS, noise))
    assert sizes == [3, 3, 1]
    assert (policy.meter.calls, policy.meter.rows, policy.meter.failures) == (3, 7, 0)


def test_failures_are_retried_and_counted() -> None:
    left = [2]

    def function(obs: Observation, noise: Tensor) -> Tensor:
        if left[0]:
            left[0] -= 1
            raise ConnectionError("reset by peer\nsecond line")
        return double(obs, noise)

    policy = CallablePolicy.wrap("flaky", function, SPEC, retries=2, retry_wait=0.0)
    assert policy.act(OBS).shape == (7, 4, 2)
    assert (policy.meter.calls, policy.meter.failures) == (1, 2)
    left[0] = 3
    with pytest.raises(UserError, match=r"'flaky' gave no chunk in 3 attempts \(ConnectionError: reset by peer\)"):
        policy.act(OBS)


def test_timeouts_count_as_failures() -> None:
    waits = [0.5, 0.0, 0.5]

    def function(obs: Observation, noise: Tensor) -> Tensor:
        time.sleep(waits.pop(0))
        return double(obs, noise)

    policy = CallablePolicy.wrap("late", function, SPEC, timeout=0.1, retries=1, retry_wait=0.0)
    assert policy.act(OBS).shape == (7, 4, 2) and policy.meter.failures == 1
    impatient = CallablePolicy.wrap("late", function, SPEC, timeout=0.05)
    with pytest.raises(UserError, match=r"no answer within 0\.05 s"):
        impatient.act(OBS)


def test_latency_is_the_mean_of_successful_calls_and_shared_by_copies() -> None:
    def function(obs: Observation, noise: Tensor) -> Tensor:
        time.sleep(0.02)
        return noise

    policy = CallablePolicy.wrap("slow", function, SPEC)
    assert policy.meter.latency == 0.0
    copy.deepcopy(policy).act(OBS)
    policy.act(OBS)
    assert policy.meter.calls == 2 and 0.02 <= policy.meter.latency < 0.5


def test_invalid_outputs_and_settings_are_refused() -> None:
    policy = CallablePolicy.wrap("short", lambda obs, noise: noise[:, :1], SPEC)
    with pytest.raises(UserError, match=r"returned shape \(7, 1, 2\) instead of chunks of shape \(7, 4, 2\)"):
        policy.act(OBS)
    with pytest.raises(UserError, match="retries must be at least 0"):
        CallablePolicy.wrap("bad", double, SPEC, retries=-1)
    with pytest.raises(UserError, match="cannot be 'running'"):
        CallablePolicy.wrap("bad", double, SPEC, action_normalization="running")
