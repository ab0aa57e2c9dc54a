"""Tests of agents per parameter group with a shared score: credit, trial counts and pitfalls of the source."""

import pytest
import torch
from torch.testing import assert_close

from robopolicy.contrib.drone_volleyball.factored import FactoredAgents, Parameter, nearness
from robopolicy.errors import UserError

SIX = [[Parameter(f"gain{i}", 0.0, 8.0)] for i in range(6)]
OPTIMUM = torch.tensor([1.0, 7.0, 3.0, 0.0, 5.0, 8.0], dtype=torch.float64)
WEIGHT = torch.tensor([1.0, 0.5, 2.0, 1.0, 0.3, 1.0], dtype=torch.float64)


def bowl(vectors: torch.Tensor) -> torch.Tensor:
    """A separable score (P,), highest at `OPTIMUM`."""
    return -(WEIGHT * (vectors - OPTIMUM) ** 2).sum(1)


def trials_of_agents(seed: int, limit: int = 800, noise: float = 0.0) -> int:
    """Number of trials until the agents' best vector is the optimum."""
    agents = FactoredAgents(SIX, seed=seed)
    generator = torch.Generator().manual_seed(seed)
    for trials in range(8, limit + 1, 8):
        vectors = agents.ask()
        agents.tell(bowl(vectors) + noise * torch.randn(len(vectors), generator=generator))
        if torch.equal(agents.best(), OPTIMUM):
            return trials
    return limit


def trials_of_joint_policy(seed: int, lr: float, limit: int = 800) -> int:
    """Trial count of one joint policy with independent levels per parameter, trained by policy gradient."""
    logits = torch.zeros(6, 9, requires_grad=True)
    optimiser, generator = torch.optim.Adam([logits], lr), torch.Generator().manual_seed(seed)
    for trials in range(8, limit + 1, 8):
        levels = torch.multinomial(logits.detach().softmax(1), 8, replacement=True, generator=generator)  # (6, 8)
        score = bowl(levels.T.double())
        advantage = ((score - score.mean()) / (score.std() + 1e-6)).float()
        loss = -(logits.log_softmax(1).gather(1, levels).sum(0) * advantage).mean()
        optimiser.zero_grad()
        loss.backward()
        optimiser.step()
        if torch.equal(logits.argmax(1).double(), OPTIMUM):
            return trials
    return limit


def test_agents_find_a_separable_optimum_in_fewer_trials_than_a_joint_policy():
    """Row 43 of the general-RL table: 9^6 combinations, 48 to 88 trials against about 860 (ten and six seeds)."""
    factored = torch.tensor([trials_of_agents(seed) for seed in range(3)], dtype=torch.float64)
    rates = [[trials_of_joint_policy(seed, lr) for seed in range(3)] for lr in (0.03, 0.1, 0.3)]
    joint = torch.tensor(rates, dtype=torch.float64).mean(1).min()  # best of three learning rates
    assert factored.max() <= 160 and factored.mean() < 0.5 * joint


def test_agents_find_the_optimum_under_noise():
    assert trials_of_agents(0, noise=3.0) < 800


def test_agent_values_recover_the_terms_of_an_additive_score():
    """Differences between an agent's option values equal the score differences, which no single trial shows."""
    agents = FactoredAgents(SIX[:3], population=64, noise=1e-3)
    vectors = agents.ask()
    weight, optimum = WEIGHT[:3], OPTIMUM[:3]
    agents.tell(-(weight * (vectors - optimum) ** 2).sum(1))
    for i, values in enumerate(agents.values()):
        true = -weight[i] * (SIX[i][0].grid() - optimum[i]) ** 2
        assert_close(values - values.mean(), true - true.mean(), rtol=1e-2, atol=0.05)


def test_only_a_joint_agent_distinguishes_interacting_parameters():
    """For a product of signs, two separate agents see no difference, and one joint agent does."""
    signs = [Parameter("a", -1.0, 1.0, 2), Parameter("b", -1.0, 1.0, 2)]
    every = torch.tensor([[-1.0, -1.0], [-1.0, 1.0], [1.0, -1.0], [1.0, 1.0]], dtype=torch.float64)
    for groups, seen in (([signs], 1.0), ([[sign] for sign in signs], 0.0)):
        agents = FactoredAgents(groups, population=4)
        index = ((every + 1) / 2).long()
        agents._asked = index if len(groups) == 2 else (2 * index[:, :1] + index[:, 1:])
        agents.tell(every.prod(1))
        spread = max(float(values.max() - values.min()) for values in agents.values())
        assert (spread > 0.5) == bool(seen)


def test_a_group_contains_all_combinations_of_its_levels():
    agents = FactoredAgents([[Parameter("a", 1.0, 100.0, 3, log=True), Parameter("b", 0.0, 1.0, 2)], SIX[0]])
    assert agents.sizes == [6, 9]
    assert_close(agents.options[0][:, 0].unique(), torch.tensor([1.0, 10.0, 100.0], dtype=torch.float64))
    assert agents.ask().shape == (8, 3)


def test_a_finer_search_spans_the_neighbouring_levels():
    agents = FactoredAgents([[Parameter("a", 0.0, 8.0)], [Parameter("b", 1.0, 10000.0, 5, log=True)]], population=32)
    for _ in range(4):
        vectors = agents.ask()
        agents.tell(-((vectors[:, 0] - 8.0) ** 2) - (vectors[:, 1].log10() - 2.0) ** 2)
    (finer,), (gain,) = agents.about_best().groups
    assert (finer.low, finer.high) == (7.0, 8.0)
    assert (gain.low, gain.high) == (pytest.approx(10.0), pytest.approx(1000.0))


def test_agents_resume_exactly():
    agents, again = FactoredAgents(SIX, seed=1), FactoredAgents(SIX, seed=2)
    for _ in range(3):
        agents.tell(bowl(agents.ask()))
    again.load_state_dict(agents.state_dict())
    assert torch.equal(agents.ask(), again.ask()) and torch.equal(agents.best(), again.best())


def test_a_nan_score_ranks_last():
    agents = FactoredAgents([[Parameter("a", 0.0, 1.0, 2)]], population=8)
    for _ in range(4):
        vectors = agents.ask()
        agents.tell(torch.where(vectors[:, 0] > 0, torch.nan, vectors[:, 0]))
    assert float(agents.best()) == 0 or float(agents._scores.std()) == 0
    low, high = agents.values()[0].tolist()
    assert low >= high


@pytest.mark.parametrize("target", [5.0, -5.0])
def test_nearness_peaks_at_targets_of_either_sign(target: float):
    """The paper's `target / |x - target|` is infinite there; the inverse that its code maximises is lowest there."""
    values = [nearness(target + off, target) for off in (0.0, 1.0, -1.0, 10.0, -100.0)]
    assert values[0] == 1.0 and values[1] == values[2] and values == sorted(values, reverse=True) and min(values) > 0
    source_values = [abs(target) / abs(off) for off in (1.0, 10.0, 100.0)]
    assert source_values == sorted(source_values, reverse=True)  # the same order
    assert nearness(10.0, 5.0) == 0.5


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: Parameter("gain", 2.0, 1.0), "Parameter 'gain' needs low < high"),
        (lambda: Parameter("gain", 0.0, 1.0, log=True), "low > 0 with log"),
        (lambda: nearness(1.0, 0.0), "must not be 0"),
        (lambda: FactoredAgents([]), "one or more nonempty groups"),
        (lambda: FactoredAgents([[Parameter(str(i), 0.0, 1.0, 9) for i in range(4)]]), "fewer levels"),
    ],
)
def test_invalid_settings_are_refused(make, message: str):
    with pytest.raises(UserError, match=message):
        make()
