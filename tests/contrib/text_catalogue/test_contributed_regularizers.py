"""Tests of the adaptive KL coefficient."""

import pytest

from robopolicy.contrib.text_catalogue.regularizers import AdaptiveKL


def test_adaptive_kl_moves_towards_its_target():
    controller = AdaptiveKL(1.0, target=0.1, horizon=10)
    controller.update(0.11, count=5)
    assert controller.value == pytest.approx(1.05)
    controller.update(10.0, count=5)  # the relative error is clipped to 0.2
    assert controller.value == pytest.approx(1.05 * 1.1)
    controller.update(0.0, count=5)
    assert controller.value == pytest.approx(1.05 * 1.1 * 0.9)
    controller.update(0.0, count=10**6)  # also clipped for a large batch
    assert controller.value == pytest.approx(1.05 * 1.1 * 0.9 * 0.8)
    other = AdaptiveKL(1.0, target=0.1, horizon=10)
    other.load_state_dict(controller.state_dict())
    assert other.value == controller.value
