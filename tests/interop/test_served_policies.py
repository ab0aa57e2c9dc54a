"""Tests of policies behind both protocols: a remote policy acts exactly as the served one, whatever its `act` does."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch

from robopolicy.deploy.server import ServerConfig, running
from robopolicy.interop.openpi import open_openpi
from robopolicy.interop.remote import ServedPolicy, open_remote
from robopolicy.policies.base import Policy, PolicySpec
from robopolicy.policies.heads.diffusion import DiffusionConfig, DiffusionPolicy
from robopolicy.policies.heads.flow import FlowConfig, FlowPolicy
from robopolicy.policies.heads.gaussian import GaussianConfig, GaussianPolicy
from robopolicy.policies.noise import PerRowGenerator, row_streams
from robopolicy.policies.wrappers.latent import STEERING_ACTOR, LatentPolicy, NoiseSpace

pytest.importorskip("msgpack", reason="needs robopolicy[remote]")
pytest.importorskip("websockets", reason="needs robopolicy[remote]")
SPEC = PolicySpec({"state": (6,)}, action_dim=2, horizon=4, action_horizon=2)
OBS = {"state": torch.randn(5, 1, 6, generator=torch.Generator().manual_seed(0))}
BOUNDS = {key: {"min": -torch.ones(n), "max": torch.ones(n)} for key, n in (("state", 6), ("action", 2))}


def fitted(policy: Any) -> Any:
    policy.fit_normalizer(BOUNDS)
    return policy


def steered() -> Policy:
    """A flow whose actor chooses noise far from the mean."""
    policy = LatentPolicy.from_base(fitted(FlowPolicy(FlowConfig(hidden=(16,)), SPEC)), NoiseSpace(), STEERING_ACTOR)
    with torch.no_grad():
        for parameter in policy.actor.parameters():
            parameter.add_(0.3)
    return policy


MADE: dict[str, Callable[[], Policy]] = {
    "flow": lambda: fitted(FlowPolicy(FlowConfig(hidden=(16,)), SPEC)),
    "steered": steered,
    "ddpm": lambda: fitted(DiffusionPolicy(DiffusionConfig(hidden=(16,), sampler="ddpm"), SPEC)),
    "gaussian": lambda: fitted(GaussianPolicy(GaussianConfig(hidden=(16,), normalization="minmax"), SPEC)),
}


@contextmanager
def remote(policy: Policy, protocol: str) -> Iterator[Any]:
    """A client of the served policy, which samples."""
    served = ServedPolicy(policy, "made", deterministic=False)
    with running(served, ServerConfig(port=0, openpi_port=0)) as server:
        client = open_remote(server.url) if protocol == "wire" else open_openpi(server.openpi_url, {})
        try:
            yield client
        finally:
            client.close()


@pytest.mark.parametrize("protocol", ["wire", "openpi"])
@pytest.mark.parametrize("name", MADE)
def test_a_remote_policy_has_the_chunks_of_the_served_one(name: str, protocol: str) -> None:
    torch.manual_seed(0)
    policy = MADE[name]()
    own = policy.act(OBS, generator=PerRowGenerator(range(5), [3] * 5))
    with remote(policy, protocol) as client:
        for _ in range(2):  # earlier requests have no effect
            found = client.act(OBS, generator=PerRowGenerator(range(5), [3] * 5))
            torch.testing.assert_close(found, own, atol=2e-6, rtol=0)
        torch.manual_seed(1)
        first = client.act(OBS)
        torch.manual_seed(1)
        torch.testing.assert_close(client.act(OBS), first, atol=2e-6, rtol=0)


def test_streams_are_taken_once_and_are_valid_seeds() -> None:
    streams = PerRowGenerator([4, 9], [0, 7])
    assert row_streams(2, streams, torch.device("cpu")).tolist() == [[4, 0], [9, 7]]
    for source in (streams, torch.Generator().manual_seed(0), None):
        drawn = row_streams(2, source, torch.device("cpu"))
        assert drawn.dtype == torch.int64 and bool((drawn >= 0).all()) and drawn[0, 0] != drawn[1, 0]
