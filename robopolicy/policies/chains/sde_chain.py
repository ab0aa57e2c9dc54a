"""A flow policy sampled by a stochastic differential equation with the marginals of its ODE (Flow-GRPO, Flow-SDE).

For any noise level g(t) the equation `dx = [u + g^2 / 2 * S] dt + g dW` has the same distribution at every time as the
flow `dx = u dt`, where `S = -(x - t u) / (1 - t)` is the score. With `g = c sqrt((1 - t) / t)` its Euler steps are
Gaussian transitions whose noise needs no training and fades towards the data. In this library t = 0 is noise; the
published code runs the other way. The first step, where g is infinite, takes `t = 1/K` in the denominator.

The velocity is read back from the head's own step, so that c = 0 is the deployed sampler exactly, its action bounds
included. For heads that take Euler steps the equation is exact as K grows; for those that jump (shortcut, MeanFlow)
the mean velocity of the step stands in for u.
"""

from __future__ import annotations

from typing import ClassVar

from torch import Tensor

from robopolicy.errors import UserError
from robopolicy.policies.chains.chain import ChainPolicy
from robopolicy.policies.density import normal_entropy, normal_log_density
from robopolicy.policies.heads.generative import GenerativePolicy
from robopolicy.policies.path import left_grid


class SDEChain(ChainPolicy):
    """A flow head with analytic noise; T = K decisions per chunk, scored per dimension."""

    name: ClassVar[str] = "sde_flow"
    diffusion: Tensor

    def __init__(self, head: GenerativePolicy, noise_level: float) -> None:
        """Wrap `head` (any of the flow family).

        Args:
            head: Shared, not copied.
            noise_level: c; the last step has the standard deviation `c / sqrt(K (K - 1))`, in normalised units.
        """
        super().__init__(head)
        if noise_level < 0:
            raise UserError(f"noise_level must not be negative, got {noise_level}.")
        steps = head.config.steps
        t = left_grid(steps)
        diffusion = noise_level * ((1 - t) / t.clamp(min=1 / steps)).sqrt()
        self.register_buffer("diffusion", diffusion, persistent=False)  # (K,) g at the start of each step

    def transition(self, features: Tensor, x: Tensor, k: Tensor) -> tuple[Tensor, Tensor]:
        """Euler-Maruyama step of the equation."""
        steps = self.head.config.steps
        t, g = (k / steps)[:, None, None], self.diffusion[k][:, None, None]
        after = self.head.advance(features, x, k)
        velocity = (after - x) * steps
        score = -(x - t * velocity) / (1 - t)
        mean = self.head.clip(after + 0.5 * g.square() * score / steps)
        return mean, (g / steps**0.5).log().expand_as(mean)

    def step_logp(self, x: Tensor, mean: Tensor, log_std: Tensor) -> Tensor:
        """Mean over all dimensions of the chunk: each enters the later steps, also those that are not executed."""
        return normal_log_density(x, mean, log_std).flatten(1).mean(1)

    def step_entropy(self, log_std: Tensor) -> Tensor:
        """Mean over all dimensions."""
        return normal_entropy(log_std).flatten(1).mean(1)
