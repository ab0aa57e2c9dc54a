"""Gradients through a policy that is itself the solution of a problem with parameters.

Source: PARL, Chakraborty et al. 2023.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor


def implicit_gradient(
    upper: Tensor,
    lower: Tensor,
    policy: Sequence[Tensor],
    reward: Sequence[Tensor],
    *,
    damping: float = 1e-3,
    steps: int = 20,
) -> list[Tensor]:
    """Gradient of `upper` by the reward's parameters, counting how the best policy moves with them.

    At a minimum of `lower` in the policy, `dU/dv = U_v - L_vp L_pp^-1 U_p`. The inverse is applied by conjugate
    gradients on Hessian-vector products. Leaving out the second term is ordinary alternation of reward learning and
    policy optimisation.

    Args:
        upper: What the reward is chosen for, a scalar to be minimised, e.g. the loss of preferences over rollouts.
        lower: What the policy minimises under the reward, with its graph.
        policy: Parameters of the policy, at a minimum of `lower`.
        reward: Parameters of the reward.
        damping: Added to the diagonal of the Hessian.
        steps: Most conjugate gradient steps.

    Returns:
        One gradient per tensor of `reward`.
    """
    direct = _gradient(upper, reward)
    slope = _flat(_gradient(upper, policy))
    force = _gradient(lower, policy, graph=True)
    joint = _flat(force)

    def hessian(vector: Tensor) -> Tensor:
        return _flat(_gradient(torch.dot(joint, vector), policy)) + damping * vector

    solution = conjugate_gradients(hessian, slope, steps)
    moved = _gradient(torch.dot(joint, solution), reward)
    return [first - second for first, second in zip(direct, moved, strict=True)]


def conjugate_gradients(
    matrix: Callable[[Tensor], Tensor], right: Tensor, steps: int, tolerance: float = 1e-10
) -> Tensor:
    """Solve `matrix(x) = right` for a symmetric positive definite map of vectors `(n,)`.

    It ends once the squared residual is `tolerance` times that of zeros.
    """
    solution, residual = torch.zeros_like(right), right.clone()
    direction, size = residual.clone(), torch.dot(residual, residual)
    enough = tolerance * float(size)
    for _ in range(steps):
        if float(size) <= enough:
            break
        image = matrix(direction)
        rate = size / torch.dot(direction, image)
        solution, residual = solution + rate * direction, residual - rate * image
        size, before = torch.dot(residual, residual), size
        direction = residual + size / before * direction
    return solution


def _gradient(value: Tensor, inputs: Sequence[Tensor], *, graph: bool = False) -> list[Tensor]:
    """Gradients, 0 where `value` does not depend on an input."""
    return list(torch.autograd.grad(value, list(inputs), retain_graph=True, create_graph=graph, materialize_grads=True))


def _flat(tensors: Sequence[Tensor]) -> Tensor:
    return torch.cat([tensor.flatten() for tensor in tensors])
