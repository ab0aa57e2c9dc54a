"""Value head on the hidden states of a text policy, for recipes with a critic.

The head is part of the learner, not of the policy. Its input is the hidden state from which a token is sampled.
"""

from __future__ import annotations

from torch import Tensor, nn

from robopolicy.core.decisions import Decisions
from robopolicy.errors import UserError
from robopolicy.policies.base import DecisionOutput
from robopolicy.text.model import head_of
from robopolicy.text.policy import TextPolicy


class ValueHead(nn.Module):
    """MLP with one hidden layer in float32 and zero output weights: all initial values are 0."""

    def __init__(self, policy: TextPolicy) -> None:
        """Build a head for the input of the output layer; raise a UserError if that has no weight matrix."""
        super().__init__()
        weight = getattr(head_of(policy.model), "weight", None)
        if not isinstance(weight, Tensor) or weight.dim() != 2:
            kind = type(head_of(policy.model)).__name__
            raise UserError(f"This model cannot have a critic: its output layer ({kind}) is not linear.")
        width = weight.shape[1]
        last = nn.Linear(width, 1)
        nn.init.zeros_(last.weight)
        nn.init.zeros_(last.bias)
        self.layers = nn.Sequential(nn.Linear(width, width), nn.SiLU(), last).to(policy.device)

    def forward(self, states: Tensor) -> Tensor:
        """Compute values `(M,)` from hidden states `(M, D)`."""
        return self.layers(states.float()).squeeze(1)


def score_with_value(
    policy: TextPolicy, head: ValueHead, decisions: Decisions, *, detach: bool = False
) -> tuple[DecisionOutput, Tensor]:
    """Score the rows of a batch and compute values `(N, T)` before each decision, 0 elsewhere, in one pass.

    `decisions` are on the device of the policy. With `detach`, values have no gradient in the policy.
    """
    mask = decisions.valid()
    tokens, start, temperature = (decisions.extra[name] for name in ("tokens", "start", "temperature"))
    places = policy.locate(tokens, start, mask)
    states = policy.states(places)
    out = policy.score_states(states, places, temperature, decisions.extra.get("support"))
    return out, places.spread(head(states.detach() if detach else states))
