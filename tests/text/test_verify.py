"""Tests of answer verifiers."""

import logging

import pytest

from robopolicy.text.verify import exact, mathematics, number, stated_expression, stated_number


def test_verifiers():
    assert exact(" 42 ", "42") == 1.0 and exact("4 2", "42") == 0.0
    assert number("it is 1,000.0", "1000") == 1.0 and number("1/2", "0.5") == 1.0 and number("none", "1") == 0.0
    assert stated_number("it is 1,000.0") == stated_number("1000") == "1000.0" and stated_number("none") is None
    pytest.importorskip("math_verify")
    assert stated_expression(r"so $\frac{2}{4}$") == stated_expression("1/2") == "1/2"
    assert mathematics(r"$\frac{1}{2}$", "$0.5$") == 1.0 and mathematics("$2x$", "$3x$") == 0.0


def test_math_verify_timeout_warnings_are_filtered(caplog):
    pytest.importorskip("math_verify")
    assert mathematics("$2$", "2") == 1.0 and stated_expression("$3$") == "3"
    assert not caplog.records
    logging.getLogger("math_verify.parser").warning("something else")
    assert caplog.messages == ["something else"]
