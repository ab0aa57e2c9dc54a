"""Checks for denoising networks that process whole chains at once."""

import torch
from torch import Tensor, nn

from robopolicy.nets.backbone import BackboneConfig, make_backbone

B, T, H, A, TO, F = 5, 3, 6, 2, 2, 4


def backbone(kind: str, times: int) -> nn.Module:
    torch.manual_seed(0)
    small = {"hidden": (16, 16), "unet_channels": (8, 16), "transformer_width": 16, "transformer_layers": 1}
    config = BackboneConfig(backbone=kind, **small)  # type: ignore[arg-type]
    return make_backbone(config, action_dim=A, horizon=H, feature_dim=F, obs_horizon=TO, times=times)


def inputs(times: int) -> tuple[Tensor, Tensor, Tensor]:
    generator = torch.Generator().manual_seed(1)
    shape = (T,) if times == 1 else (T, times)
    return tuple(torch.rand(*size, generator=generator) for size in ((B, T, H, A), shape, (B, TO, F)))  # type: ignore[return-value]


def check_reads_chains_as_their_iterates(kind: str, times: int) -> None:
    """A whole chain gives the same outputs as its iterates do separately."""
    network, (x, t, features) = backbone(kind, times), inputs(times)
    found = network(x, t, features)
    assert found.shape == x.shape
    for step in range(T):
        one = network(x[:, step], t[step].expand(B, *t.shape[1:]), features)
        torch.testing.assert_close(found[:, step], one)


def check_one_time_serves_all_rows(kind: str, times: int) -> None:
    """One time for all rows equals the time repeated per row."""
    network, (x, t, features) = backbone(kind, times), inputs(times)
    repeated = t[:1].expand(B, *t.shape[1:])
    torch.testing.assert_close(network(x[:, 0], t[:1], features), network(x[:, 0], repeated, features))
    torch.testing.assert_close(
        network.representation(x[:, 0], t[:1], features),  # type: ignore[operator]
        network.representation(x[:, 0], repeated, features),  # type: ignore[operator]
    )


def check_gradients_add_up_over_the_rows_that_share_a_time(kind: str) -> None:
    """Gradients of rows that share a time equal the gradients of separate rows."""
    (x, t, features), gradients = inputs(1), []
    weight = torch.rand(x.shape)
    for together in (True, False):
        network = backbone(kind, 1)
        if together:
            loss = (weight * network(x, t, features)).sum()
        else:
            rows = network(x.flatten(0, 1), t.repeat(B), features.repeat_interleave(T, 0))
            loss = (weight.flatten(0, 1) * rows).sum()
        loss.backward()
        gradients.append(torch.cat([p.grad.flatten() for p in network.parameters() if p.grad is not None]))
    torch.testing.assert_close(*gradients)
