"""Gradients through a policy that is the solution of an inner problem.

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
    """Compute the gradient of `upper` in the reward's parameters, including the response of the optimal policy.

    At a minimum of `lower` in the policy, `dU/dv = U_v - L_vp L_pp^-1 U_p`. Conjugate gradients on Hessian-vector
    products apply the inverse. Without the second term, this is alternating reward learning and policy optimisation.

    Args:
        upper: Scalar objective of the reward, to be minimised, e.g. a preference loss over rollouts.
        lower: Scalar objective of the policy, to be minimised, with its graph.
        policy: Parameters of the policy, at a minimum of `lower`.
        reward: Parameters of the reward.
        damping: Addition to the diagonal of the Hessian.
        steps: Maximum number of conjugate gradient steps.

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

    It stops once the squared residual is `tolerance` times the initial one.
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
    """Compute gradients, 0 for inputs that `value` does not depend on."""
    return list(torch.autograd.grad(value, list(inputs), retain_graph=True, create_graph=graph, materialize_grads=True))


def _flat(tensors: Sequence[Tensor]) -> Tensor:
    return torch.cat([tensor.flatten() for tensor in tensors])
