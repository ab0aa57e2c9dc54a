"""Tests of chains stored as seeds: exact ratios after weight updates, and the bytes of each storage format."""

from collections.abc import Callable

import pytest
import torch

from robopolicy.errors import UserError
from robopolicy.policies.base import PolicySpec, Record
from robopolicy.policies.exploration.chain import RecomputedChain, StochasticSampler, chain_dtype
from robopolicy.policies.exploration.diffusion_chain import DiffusionChain
from robopolicy.policies.exploration.flow_chains import NoiseConfig, SDEChain, StochasticFlow
from robopolicy.policies.heads.diffusion import DiffusionConfig, DiffusionPolicy
from robopolicy.policies.heads.flow import FlowConfig, FlowPolicy
from robopolicy.policies.wrappers.staged import make_staged

SPEC = PolicySpec({"state": (3,)}, action_dim=7, horizon=16, action_horizon=8)
OBS = {"state": torch.randn(12, 1, 3, generator=torch.Generator().manual_seed(0))}
RAW = {"hidden": (32, 32), "normalization": "identity", "action_normalization": "identity"}


def diffusion(seed: int) -> DiffusionPolicy:
    torch.manual_seed(seed)
    return DiffusionPolicy(DiffusionConfig(**RAW, steps=12), SPEC)  # type: ignore[arg-type]


def flow() -> FlowPolicy:
    torch.manual_seed(0)
    return FlowPolicy(FlowConfig(**RAW), SPEC)  # type: ignore[arg-type]


CHAINS: dict[str, Callable[[], StochasticSampler]] = {
    "diffusion": lambda: DiffusionChain(diffusion(0), make_staged((0,), [diffusion(1)]), first=2),
    "stochastic-flow": lambda: StochasticFlow(flow(), NoiseConfig()),
    "sde-flow": lambda: SDEChain(flow(), 0.3),
}


@pytest.mark.parametrize("name", CHAINS)
def test_seeds_reproduce_the_executed_chains(name: str) -> None:
    chain = CHAINS[name]()
    recorder = RecomputedChain(chain)
    original = recorder.sample(OBS, generator=torch.Generator().manual_seed(1))
    assert set(original.record) == {"seed"} and len(set(original.record["seed"].tolist())) == 12
    recorder.snapshot()
    with torch.no_grad():
        for parameter in chain.parameters():
            parameter.mul_(1.5)  # the policy changes, the snapshot does not
    for rows in (torch.arange(12), torch.tensor([7, 2, 11])):
        obs = {"state": OBS["state"][rows]}
        record, logp = recorder.resample(obs, {"seed": original.record["seed"][rows]})
        torch.testing.assert_close(logp, original.logp[rows], atol=1e-3, rtol=1e-4)
        chunk = chain.head.action_normalizer.denormalize(chain.head.clip(record["chain"][:, -1]))
        torch.testing.assert_close(chunk, original.chunk[rows], atol=1e-5, rtol=0)
        assert not torch.allclose(chain.decisions(obs, record).logp, logp, atol=1e-3)


@pytest.mark.parametrize("name", CHAINS)
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_the_ratio_of_resampled_chains_is_one(name: str, dtype: str) -> None:
    chain = CHAINS[name]()
    chain.chain_dtype = chain_dtype(dtype)
    recorder = RecomputedChain(chain)
    seeds = recorder.sample(OBS).record
    for _ in range(2):  # the snapshot is renewed
        recorder.snapshot()
        record, logp = recorder.resample(OBS, seeds)
        # summed over 112 dimensions, float32 is accurate to 1e-4 nats only
        scale = 1 if isinstance(chain, DiffusionChain | SDEChain) else 112
        assert float(((chain.decisions(OBS, record).logp.detach() - logp) / scale).exp().sub(1).abs().max()) < 1e-5
        with torch.no_grad():
            for parameter in chain.parameters():
                parameter.mul_(1.1)


def size(record: Record) -> float:
    return sum(value.nbytes for value in record.values()) / 12


def test_bytes_per_decision_match_the_documentation() -> None:
    chain = CHAINS["diffusion"]()  # T = 10, H = 16, A = 7
    assert size(chain.sample(OBS).record) == 4 * 11 * 16 * 7 == 4928
    chain.chain_dtype = torch.bfloat16
    assert size(chain.sample(OBS).record) == 2 * 11 * 16 * 7 == 2464
    assert size(RecomputedChain(chain).sample(OBS).record) == 8


def test_unknown_dtypes_and_resampling_before_a_snapshot_are_refused() -> None:
    with pytest.raises(UserError, match="Unknown chain_dtype 'float16'"):
        chain_dtype("float16")
    recorder = RecomputedChain(CHAINS["sde-flow"]())
    with pytest.raises(RuntimeError, match="snapshot"):
        recorder.resample(OBS, recorder.sample(OBS).record)
