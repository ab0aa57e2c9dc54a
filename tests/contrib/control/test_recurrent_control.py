"""Recurrent policies with the on-policy learners of this theme: which unroll them, and which refuse them."""

from __future__ import annotations

import pytest
from recurrent_learners import check_has_ratios_of_one_after_unrolling, learner

from robopolicy.errors import UserError


@pytest.mark.parametrize("name", ["mdpo", "bpo"])
@pytest.mark.parametrize("kind", ["gru", "lstm"])
def test_ratios_of_fresh_data_are_one_after_unrolling(name: str, kind: str) -> None:
    check_has_ratios_of_one_after_unrolling(name, kind)


@pytest.mark.parametrize("name", ["npg_igt", "props"])
def test_learners_without_unrolling_refuse_policies_that_remember(name: str) -> None:
    with pytest.raises(UserError, match="recurrent 'gaussian'"):
        learner(name)
