"""Tests of the autoencoder: it fits vectors on a plane, and its error is large for other vectors."""

from __future__ import annotations

import torch

from robopolicy.contrib.quality_diversity.autoencoder import Autoencoder


def plane(count: int, seed: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    return (
        torch.randn(count, 2, generator=generator) @ torch.randn(2, 6, generator=torch.Generator().manual_seed(9)) + 3
    )


def test_it_fits_a_plane_and_has_a_large_error_off_the_plane() -> None:
    net, generator = Autoencoder(6, 2, (32,)), torch.Generator().manual_seed(0)
    data = plane(512, 1)
    before = net.error(data).mean().item()
    found = net.fit(data, epochs=60, batch_size=64, lr=3e-3, generator=generator)
    usual, unusual = plane(100, 2), plane(100, 2) + torch.randn(100, 6, generator=generator)
    assert found < 0.1 * before and net.error(usual).mean().item() < 0.1 < net.error(unusual).mean().item()
    assert net.encode(data).shape == (512, 2)


def test_constant_vectors_are_encoded_without_overflow() -> None:
    net = Autoencoder(3, 2, ())
    assert net.fit(torch.ones(10, 3), epochs=2, batch_size=4, lr=1e-3, generator=torch.Generator()) < 1e9
    assert bool(net.encode(torch.ones(1, 3)).isfinite().all())
