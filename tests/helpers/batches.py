"""Fixtures with one batch per layout: every part of the core must treat the layouts equally."""

import pytest
import torch
from torch import Tensor

from robopolicy.core.decisions import Decisions


def token_batch() -> Decisions:
    """6 sequences of 5 tokens, 2 prompts; a prompt token, a tool token and padding are not decisions."""
    generator = torch.Generator().manual_seed(0)
    draw = lambda: torch.randn(6, 5, generator=generator, dtype=torch.float64)  # noqa: E731
    mask = torch.ones(6, 5, dtype=torch.bool)
    mask[:, 0] = False
    mask[1, 3] = False
    mask[2, 3:] = False
    mask[4, 2:] = False
    logp = -draw().abs()
    return Decisions(
        logp,
        logp_behaviour=logp + 0.1 * draw(),
        logp_ref=logp + 0.1 * draw(),
        mask=mask,
        reward=draw(),
        value=draw(),
        entropy=draw().abs(),
        unit=torch.tensor([[0, 0, 0, 1, 1]]).expand(6, 5),
        group=torch.tensor([0, 0, 0, 7, 7, 7]),
        domain=torch.tensor([0, 0, 1, 1, 1, 1]),
        source=torch.tensor([0, 0, 1, 0, 0, 1]),
        version=torch.zeros(6, dtype=torch.long),
    )


def rows_of_chain(logp_old: Tensor, **others: Tensor) -> Decisions:
    """View a denoising chain `(T_env, N_env, K)` as T_env * N_env rows of K decisions."""
    return Decisions(logp_old.flatten(0, 1), **{name: value.flatten(0, 1) for name, value in others.items()})


def denoising_chain() -> Decisions:
    """3 chunks of 4 environments with 4 denoising steps each; episodes of environments 0 and 2 end between chunks."""
    generator = torch.Generator().manual_seed(1)
    draw = lambda: torch.randn(3, 4, 4, generator=generator, dtype=torch.float64)  # noqa: E731
    logp = -draw().abs()
    return rows_of_chain(
        logp,
        logp_behaviour=logp + 0.1 * draw(),
        logp_ref=logp + 0.1 * draw(),
        reward=draw(),
        value=draw(),
        entropy=draw().abs(),
        group=torch.tensor([0, 0, 1, 1]).expand(3, 4),
        trajectory=torch.tensor([[0, 1, 2, 3], [4, 1, 2, 3], [4, 1, 6, 3]]),
        domain=torch.tensor([0, 0, 1, 1]).expand(3, 4),
        source=torch.tensor([0, 1, 0, 0]).expand(3, 4),
        version=torch.zeros(3, 4, dtype=torch.long),
    )


@pytest.fixture(params=["tokens", "chain"])
def decisions(request: pytest.FixtureRequest) -> Decisions:
    return token_batch() if request.param == "tokens" else denoising_chain()


@pytest.fixture
def shift(decisions: Decisions) -> torch.Tensor:
    """A small change of the log-probabilities, (N, T)."""
    return 0.1 * torch.randn(decisions.shape, generator=torch.Generator().manual_seed(2), dtype=torch.float64)
