"""Tests of recurrent policies with the on-policy learners of the control theme."""

from __future__ import annotations

import pytest
from recurrent_learners import check_has_ratios_of_one_after_unrolling, learner

from robopolicy.errors import UserError


@pytest.mark.parametrize("name", ["mdpo", "bpo"])
@pytest.mark.parametrize("kind", ["gru", "lstm"])
def test_ratios_of_fresh_data_are_one_after_unrolling(name: str, kind: str) -> None:
    check_has_ratios_of_one_after_unrolling(name, kind)


@pytest.mark.parametrize("name", ["npg_igt", "props"])
def test_learners_without_unrolling_refuse_recurrent_policies(name: str) -> None:
    with pytest.raises(UserError, match="recurrent 'gaussian'"):
        learner(name)
