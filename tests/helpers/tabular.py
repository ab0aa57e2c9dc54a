"""A softmax policy with one logit per state and action, for comparing a recipe with its written formula.

States are (prompt, position); 4 prompts with 4 rollouts each of up to 6 tokens over a vocabulary of 5, some of them
shorter or with a tool token in the middle, sampled by a policy that is a few updates older than the current one.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from robopolicy.core.decisions import Decisions, by_trajectory
from robopolicy.core.recipe import Recipe
from robopolicy.recipe_files import read_recipe

PROMPTS, ROLLOUTS, LENGTH, VOCABULARY = 4, 4, 6, 5
Extra = Callable[[torch.Generator, Decisions], Tensor]
EXTRAS: dict[str, Extra] = {
    "blamed_unit": lambda generator, d: torch.randint(-1, 2, (len(d),), generator=generator),  # (N,)
    "cluster": lambda generator, d: by_trajectory(d).squeeze(1) % 3,  # (N,)
    "finished": lambda generator, d: torch.arange(len(d)) % 3 != 1,  # (N,)
    "gate": lambda generator, d: (d.depths() == 0) & d.valid(),  # (N, T)
    "injected": lambda generator, d: (d.depths() == 1) & (torch.arange(len(d)) % 4 == 1)[:, None],  # (N, T)
    "likelihood": lambda generator, d: torch.where(d.require("group") % 2 == 0, 0.1, 0.9).to(d.logp_old),  # (N,)
    "logp_cool": lambda generator, d: 1.2 * d.logp_old,  # (N, T)
    "logp_teacher": lambda generator, d: d.logp_old - 0.1 * d.depths(),  # (N, T)
    "logp_warm": lambda generator, d: 0.8 * d.logp_old,  # (N, T)
    "seen": lambda generator, d: (d.depths() == 0) & (torch.arange(len(d)) % 4 == 2)[:, None],  # (N, T)
    "step_advantage": lambda generator, d: torch.randn(d.shape, generator=generator).to(d.logp_old),  # (N, T)
    "structural": lambda generator, d: (d.depths() == 0) & d.valid(),  # (N, T)
    "mean_ref": lambda generator, d: d.logp_old.new_full((len(d),), 0.3),  # (N,)
    "value_ref": lambda generator, d: d.logp_old.new_full((len(d),), 0.3),  # (N,)
    "greedy": lambda g, d: torch.rand(len(d), generator=g, dtype=torch.float64),
    "collision": lambda g, d: torch.rand(d.shape, generator=g, dtype=torch.float64),
    "collision3": lambda g, d: torch.rand(d.shape, generator=g, dtype=torch.float64),
    "drift": lambda g, d: 0.05 * torch.rand(len(d), generator=g, dtype=torch.float64),
    "features": lambda g, d: torch.randn(len(d), 3, generator=g, dtype=torch.float64),
    "prompt_features": lambda g, d: torch.randn(100, 2, generator=g, dtype=torch.float64)[d.require("group")],
    "chosen": lambda g, d: torch.randint(2, d.shape, generator=g),
    "answer": lambda g, d: torch.randint(2, (len(d),), generator=g),
    "signature": lambda g, d: torch.randint(3, (len(d),), generator=g),
    "waad": lambda g, d: torch.rand(d.shape, generator=g, dtype=torch.float64),
    "fai": lambda g, d: torch.rand(d.shape, generator=g, dtype=torch.float64),
    "probe_accuracy": lambda g, d: torch.rand(d.shape, generator=g, dtype=torch.float64),
    "probe_confidence": lambda g, d: torch.rand(d.shape, generator=g, dtype=torch.float64),
    "first_event": lambda g, d: torch.randint(-1, 4, (len(d),), generator=g),
    "prompt_confidence": lambda g, d: torch.rand(len(d), generator=g, dtype=torch.float64),
    "duration": lambda g, d: 0.1 + torch.rand(d.shape, generator=g, dtype=torch.float64),
    "rollout_value": lambda g, d: torch.randn(d.shape, generator=g, dtype=torch.float64),
    "observation": lambda g, d: torch.randint(2, d.shape, generator=g),
    "action": lambda g, d: torch.randint(2, d.shape, generator=g),
    "switch": lambda g, d: torch.rand(d.shape, generator=g) < 0.3,
    "subgoal": lambda g, d: torch.rand(d.shape, generator=g) < 0.3,
    "high_value": lambda g, d: torch.randn(d.shape, generator=g, dtype=torch.float64),
}
"""Name of `Decisions.extra` -> example values for parts that need it."""


@dataclass(frozen=True)
class Tabular:
    """Recorded tokens, and the logits that score them."""

    decisions: Decisions
    tokens: Tensor  # (N, T)
    logits: Tensor  # (PROMPTS, T, VOCABULARY) float64, requires grad
    state: Tensor = field(init=False)  # (N,) prompt of each row

    def __post_init__(self) -> None:
        object.__setattr__(self, "state", self.decisions.require("group"))

    def distribution(self) -> Tensor:
        """Log-probabilities of all actions (N, T, VOCABULARY)."""
        return self.logits.log_softmax(-1)[self.state]

    def logp(self) -> Tensor:
        """Log-probabilities (N, T) of the recorded tokens under the current parameters."""
        return self.distribution().gather(2, self.tokens.unsqueeze(2)).squeeze(2)

    def entropy(self) -> Tensor:
        """Entropy (N, T) under the current parameters."""
        distribution = self.distribution()
        return -(distribution.exp() * distribution).sum(2)


def tabular(seed: int = 0, drift: float = 0.3, rollouts: int = ROLLOUTS, **fields: Any) -> Tabular:
    """A batch and a policy `drift` away from its behaviour policy.

    Args:
        seed: Seed of all random numbers.
        drift: Standard deviation of the change of the logits since the batch was sampled; 0: on-policy data.
        rollouts: Rollouts per prompt.
        fields: Fields of `Decisions` that replace the sampled ones; `extra` replaces EXTRAS.
    """
    generator = torch.Generator().manual_seed(seed)
    draw = lambda *shape: torch.randn(*shape, generator=generator, dtype=torch.float64)  # noqa: E731
    old = draw(PROMPTS, LENGTH, VOCABULARY)
    group = torch.arange(PROMPTS).repeat_interleave(rollouts)
    tokens = torch.multinomial(old.softmax(-1)[group].flatten(0, 1), 1, generator=generator).view(-1, LENGTH)
    mask = torch.arange(LENGTH) < torch.randint(2, LENGTH + 1, (len(group), 1), generator=generator)
    mask[3, 1] = False  # a tool token
    mask[3, 2] = True
    logits = (old + drift * draw(*old.shape)).requires_grad_()

    def score(table: Tensor) -> Tensor:
        return table.log_softmax(-1)[group].gather(2, tokens.unsqueeze(2)).squeeze(2)

    last = mask & (mask.flip(1).cumsum(1).flip(1) == 1)
    success = (torch.rand(len(group), 1, generator=generator, dtype=torch.float64) < 0.5).double()
    success[:2] = torch.tensor([[1.0], [0.0]])  # at least one group with mixed outcomes
    success[rollouts : 2 * rollouts] = 0.0  # and one with equal outcomes
    full = old.log_softmax(-1)[group]
    known: dict[str, Any] = {
        "logp_old": score(old).detach(),
        "logp_behaviour": score(old + 0.1 * draw(*old.shape)),
        "logp_ref": score(old + 0.2 * draw(*old.shape)),
        "mask": mask,
        "reward": success * last,
        "value": draw(len(group), LENGTH),
        "entropy": -(full.exp() * full).sum(2),
        "unit": (torch.arange(LENGTH) // 3).expand(len(group), LENGTH),
        "group": group,
        "domain": group // 2,
        "source": torch.zeros(len(group), dtype=torch.long),
        "version": torch.zeros(len(group), dtype=torch.long),
    }
    decisions = Decisions(**(known | {key: value for key, value in fields.items() if key != "extra"}))
    return Tabular(with_extras(decisions, generator, fields.get("extra")), tokens, logits)


def with_extras(
    decisions: Decisions, generator: torch.Generator, extra: Mapping[str, Tensor] | None = None
) -> Decisions:
    """The batch with `extra`, or with all EXTRAS."""
    extras = {name: make(generator, decisions) for name, make in EXTRAS.items()} if extra is None else extra
    return decisions.with_fields(extra={**decisions.extra, **extras})


def recipe_of(name: str, **changes: Any) -> Recipe:
    """A recipe, some of its keys replaced."""
    return Recipe.from_dict(read_recipe(name) | changes)


def check(recipe: Recipe, case: Tabular, formula: Callable[[Tabular], Tensor]) -> None:
    """Value and gradient of the recipe equal the written formula's, with all rows in one minibatch."""
    chosen = case.decisions.select(recipe.select(case.decisions, torch.Generator().manual_seed(0)))
    assert len(chosen) == len(case.decisions), "write the formula for the selected rows and compare by hand"
    loss, _ = recipe.loss(chosen, recipe.advantage(chosen), case.logp(), case.entropy())
    expected = formula(case)
    (found,) = torch.autograd.grad(loss, case.logits)
    (reference,) = torch.autograd.grad(expected, case.logits)
    torch.testing.assert_close(loss, expected, rtol=1e-9, atol=1e-12)
    torch.testing.assert_close(found, reference, rtol=1e-8, atol=1e-11)


def check_recipe(name: str, formula: Callable[[Tabular], Tensor], *, drift: float = 0.3, **fields: Any) -> None:
    """`check` a recipe on on-policy data and `drift` away from it; `fields` as in `tabular`."""
    for distance in (0.0, drift):
        check(recipe_of(name), tabular(drift=distance, **fields), formula)


def rewards(case: Tabular) -> Tensor:
    """Outcome (N,) of each rollout."""
    return (case.decisions.require("reward") * case.decisions.valid()).sum(1)


def standardised(values: Tensor, group: Tensor, *, unbiased: bool = True, eps: float = 1e-6) -> Tensor:
    """Values (N,) minus the mean of their group, divided by its standard deviation, by a loop."""
    result = torch.zeros_like(values)
    for key in group.unique():
        rows = group == key
        result[rows] = (values[rows] - values[rows].mean()) / (values[rows].std(unbiased=unbiased) + eps)
    return result


def seq_mean(losses: Tensor, mask: Tensor) -> Tensor:
    """Mean over rows of the mean over their valid decisions."""
    return torch.stack([row[keep].mean() for row, keep in zip(losses, mask, strict=True)]).mean()


def ppo(case: Tabular, advantage: Tensor, low: float = 0.2, high: float = 0.2) -> Tensor:
    """Clipped loss of each decision (N, T) for advantages (N,) or (N, T)."""
    advantage = advantage.unsqueeze(1) if advantage.dim() == 1 else advantage
    ratio = (case.logp() - case.decisions.logp_old).exp()
    return -torch.minimum(ratio * advantage, ratio.clamp(1 - low, 1 + high) * advantage)
