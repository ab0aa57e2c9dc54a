"""Checks U1, U2 and U4 for one policy: ratios of new data are 1, and a seed determines the chunk."""

from collections.abc import Callable

import torch

from robopolicy.policies.base import Observation, Policy, PolicySpec
from robopolicy.policies.heads.explicit import ExplicitPolicy
from robopolicy.policies.noise import PerRowGenerator

STATE = PolicySpec({"state": (7,)}, action_dim=2, horizon=5, action_horizon=3, obs_horizon=2)
RANGE = {"min": [-2.0] * 7, "max": [2.0] * 7, "mean": [0.1] * 7, "std": [1.3] * 7, "count": [50]}
ACTION = {"min": [-0.5, -3.0], "max": [0.5, 3.0], "mean": [0.0, 0.1], "std": [0.2, 2.0]}


def observations(rows: int, spec: PolicySpec = STATE) -> Observation:
    """Random observations; images are noise."""
    generator = torch.Generator().manual_seed(1)
    obs: Observation = {}
    for key, shape in spec.observation.items():
        size = (rows, spec.obs_horizon, *shape)
        image = key.startswith("image.")
        draw = torch.randint(0, 256, size, generator=generator) if image else torch.randn(size, generator=generator)
        obs[key] = draw.to(torch.uint8) if image else draw
    return obs


def check_every_ratio_is_one_in_any_minibatch(policy: Policy, mode: str) -> None:
    """Ratios of new data are 1 in any minibatch."""
    policy.train(mode == "train")
    obs = observations(64, policy.spec)
    policy.update_stats(obs)
    sample = policy.sample(obs, generator=torch.Generator().manual_seed(0))
    order = torch.randperm(64, generator=torch.Generator().manual_seed(2))
    for index in (torch.arange(64), order, order[:1], order[:13], order[13:30]):
        picked = {key: value[index] for key, value in sample.record.items()}
        output = policy.decisions({key: value[index] for key, value in obs.items()}, picked)
        assert output.logp.shape == output.entropy.shape == sample.logp[index].shape
        assert float((torch.exp(output.logp.detach() - sample.logp[index]) - 1).abs().max()) < 1e-5


def check_sampling_leaves_no_graph(policy: Policy) -> None:
    """Samples have no gradient, are finite and have the shape of the specification."""
    sample = policy.sample(observations(3, policy.spec))
    assert sample.chunk.shape == (3, policy.spec.horizon, policy.spec.action_dim)
    assert sample.logp.shape == (3, policy.nfe)
    for tensor in (sample.chunk, sample.logp, *sample.record.values()):
        assert not tensor.requires_grad and bool(tensor.isfinite().all())


def check_a_seed_decides_the_chunk(policy: Policy) -> None:
    """Chunks of one seed are equal; chunks of two seeds differ if sampling is random."""
    obs = observations(4, policy.spec)
    for deterministic in (True, False):
        chunks = [
            policy.act(obs, deterministic=deterministic, generator=torch.Generator().manual_seed(s)) for s in (5, 5, 6)
        ]
        assert torch.equal(chunks[0], chunks[1])
        is_random = not (deterministic and isinstance(policy, ExplicitPolicy))
        assert torch.equal(chunks[0], chunks[2]) != is_random


def check_rows_do_not_depend_on_the_batch(policy: Policy) -> None:
    """With a generator per row, the chunk of a row does not depend on the other rows."""
    obs = observations(6, policy.spec)
    whole = policy.sample(obs, generator=PerRowGenerator(range(10, 16), [3] * 6))
    rows = torch.tensor([4, 1])
    picked = {key: value[rows] for key, value in obs.items()}
    some = policy.sample(picked, generator=PerRowGenerator([14, 11], [3, 3]))
    torch.testing.assert_close(some.chunk, whole.chunk[rows], atol=1e-5, rtol=1e-5)
    other = policy.sample(picked, generator=PerRowGenerator([14, 11], [4, 4]))
    assert not torch.allclose(other.chunk, some.chunk, atol=1e-3)


def check_survives_a_state_dict(make: Callable[[], Policy]) -> None:
    """A policy with the loaded state of another policy acts the same."""
    policy, other = make(), make()
    with torch.no_grad():
        for parameter in other.parameters():
            parameter.add_(1.0)
    other.load_state_dict(policy.state_dict())
    obs = observations(3, policy.spec)
    chunks = [p.act(obs, generator=torch.Generator().manual_seed(0)) for p in (policy, other)]
    assert torch.equal(chunks[0], chunks[1])


def check_losses_stay_finite_and_show_a_nan(policy: Policy) -> None:
    """Losses are finite in bfloat16; a NaN row affects only its own loss."""
    obs = observations(8, policy.spec)
    chunk = torch.zeros(8, policy.spec.horizon, policy.spec.action_dim)
    with torch.autocast("cpu", torch.bfloat16):
        sample = policy.sample(obs)
        output = policy.decisions(obs, sample.record)
        loss, _ = policy.imitation_loss(obs, chunk)
    assert bool(output.logp.isfinite().all() & output.entropy.isfinite().all()) and bool(loss.isfinite().all())
    obs["state"][2] = float("nan")
    loss, _ = policy.imitation_loss(obs, chunk)
    assert loss.isnan().nonzero().flatten().tolist() == [2]
