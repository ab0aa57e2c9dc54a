"""Tests of every head with every backbone: imitation and acting on all kinds of input, and padded steps."""

from typing import Any

import pytest
import torch
from head_rules import (
    check_crops_and_dropped_embeddings_are_for_imitation_alone,
    check_imitates_and_acts_from_every_kind_of_input,
    check_padded_steps_send_no_gradient_back,
    check_rows_of_a_loss_know_nothing_of_each_other,
    check_stays_finite_under_autocast_and_shows_a_nan,
    make,
    observations,
    pairs,
)

from robopolicy.nets.encoder import EmbeddingConfig
from robopolicy.plugins import PRODUCT
from robopolicy.training.checkpoint import load_policy, save_checkpoint, verify_checkpoint

every_head = pytest.mark.parametrize(("name", "backbone"), pairs((PRODUCT,), PRODUCT))


@every_head
def test_heads_imitate_and_act_from_every_kind_of_input(name: str, backbone: str) -> None:
    check_imitates_and_acts_from_every_kind_of_input(name, backbone)


@every_head
def test_loss_of_a_row_does_not_depend_on_other_rows(name: str, backbone: str) -> None:
    check_rows_of_a_loss_know_nothing_of_each_other(name, backbone)


@every_head
def test_padded_steps_have_no_gradient(name: str, backbone: str) -> None:
    check_padded_steps_send_no_gradient_back(name, backbone)


@every_head
def test_crops_and_embedding_dropout_apply_only_to_imitation_in_training_mode(name: str, backbone: str) -> None:
    check_crops_and_dropped_embeddings_are_for_imitation_alone(name, backbone)


@every_head
def test_losses_are_finite_under_autocast_and_propagate_nan(name: str, backbone: str) -> None:
    check_stays_finite_under_autocast_and_shows_a_nan(name, backbone)


@pytest.mark.parametrize("name", ["autoregressive", "mixture", "gaussian", "flow"])
def test_checkpoints_restore_cameras_and_embeddings(name: str, tmp_path: Any) -> None:
    policy, obs = make(name, "mlp", "vit", embedding=EmbeddingConfig(width=4, dropout=0.2)), observations(3)
    save_checkpoint(tmp_path / "checkpoint", policy, task="toy/point_mass", obs_sample=obs)
    again, _ = load_policy(tmp_path / "checkpoint")
    assert again.config_dict() == policy.config_dict() and verify_checkpoint(tmp_path / "checkpoint").ok
    for key, value in policy.state_dict().items():
        assert torch.equal(value, again.state_dict()[key])
