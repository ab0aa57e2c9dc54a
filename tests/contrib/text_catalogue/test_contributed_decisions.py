"""Tests of concatenating batches of decisions."""

import pytest
import torch

from robopolicy.contrib.text_catalogue.windows import cat
from robopolicy.core.decisions import (
    Decisions,
)


def test_cat_undoes_select(decisions):
    again = cat([decisions.select(slice(0, 2)), decisions.select(slice(2, None))])
    for name in ("logp_old", "mask", "unit", "group", "trajectory", "version"):
        before, after = getattr(decisions, name), getattr(again, name)
        assert (before is None and after is None) or torch.equal(before, after)


def test_cat_refuses_rows_that_do_not_fit(decisions):
    with pytest.raises(ValueError, match="pad first"):
        cat([Decisions(torch.zeros(1, 2)), Decisions(torch.zeros(1, 3))])
    with pytest.raises(ValueError, match="have group and some do not"):
        cat([Decisions(torch.zeros(1, 2)), Decisions(torch.zeros(1, 2), group=torch.zeros(1))])
    with pytest.raises(ValueError, match="at least one"):
        cat([])
