"""Tests of rules U1, U2 and U4 for the sequence head: fresh data has ratio one, and a seed determines the chunk."""

from __future__ import annotations

import pytest
import torch
from ratio_rules import (
    ACTION,
    RANGE,
    STATE,
    check_a_seed_decides_the_chunk,
    check_every_ratio_is_one_in_any_minibatch,
    check_losses_stay_finite_and_show_a_nan,
    check_rows_do_not_depend_on_the_batch,
    check_sampling_leaves_no_graph,
    check_survives_a_state_dict,
)

from robopolicy.contrib.control.sequence import SequenceConfig, SequencePolicy


def sequence() -> SequencePolicy:
    torch.manual_seed(0)
    policy = SequencePolicy(SequenceConfig(hidden=(32, 32), normalization="meanstd"), STATE)
    policy.fit_normalizer({"state": RANGE, "action": ACTION})
    return policy


@pytest.mark.parametrize("mode", ["train", "eval"])
def test_every_ratio_of_fresh_data_is_one_in_any_minibatch(mode: str) -> None:
    check_every_ratio_is_one_in_any_minibatch(sequence(), mode)


def test_sampling_leaves_no_graph_and_gives_finite_chunks() -> None:
    check_sampling_leaves_no_graph(sequence())


def test_a_seed_determines_the_chunk() -> None:
    check_a_seed_decides_the_chunk(sequence())


def test_row_streams_make_rows_independent_of_the_batch() -> None:
    check_rows_do_not_depend_on_the_batch(sequence())


def test_the_whole_policy_survives_a_state_dict() -> None:
    check_survives_a_state_dict(sequence)


def test_losses_are_finite_under_autocast_and_propagate_nan() -> None:
    check_losses_stay_finite_and_show_a_nan(sequence())
