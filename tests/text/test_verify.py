"""Tests of answer verifiers."""

import logging

import pytest

from robopolicy.text.verify import exact, mathematics, number, stated_expression, stated_number


def test_verifiers():
    assert exact(" 42 ", "42") == 1.0 and exact("4 2", "42") == 0.0
    assert number("it is 1,000.0", "1000") == 1.0 and number("1/2", "0.5") == 1.0 and number("none", "1") == 0.0
    assert stated_number("it is 1,000.0") == stated_number("1000") == "1000" and stated_number("none") is None
    pytest.importorskip("math_verify")
    assert stated_expression(r"so $\frac{2}{4}$") == stated_expression("1/2") == "1/2"
    assert mathematics(r"$\frac{1}{2}$", "$0.5$") == 1.0 and mathematics("$2x$", "$3x$") == 0.0


@pytest.mark.parametrize(
    ("completion", "answer", "reward"),
    [
        *((".5", "0.5", 1), (".5", "5", 0), ("1e5", "5", 0), ("2e3", "2000", 1), ("1.5E-2", "0.015", 1)),
        *(("\N{MINUS SIGN}5", "-5", 1), ("\N{MINUS SIGN}5", "5", 0), ("10-5", "5", 1), ("it is -5.", "-5", 1)),
        *(("1000000000", "1000000001", 0), ("1000000000.5", "1000000001", 0), ("1e-12", "2e-12", 0)),
        *(("0.3333333333", "1/3", 1), ("0.333", "1/3", 0), ("1/0", "1", 0), ("1,234,567.5", "1234567.5", 1)),
        *(("(3,4)", "34", 0), ("1,5", "15", 0), ("9" * 5000, "9", 0), ("1e999", "1e999", 1), ("+7", "7", 1)),
    ],
)
def test_numbers_are_compared_as_they_are_written(completion: str, answer: str, reward: float):
    assert number(completion, answer) == reward


@pytest.mark.parametrize(
    ("answer", "wrong"),
    [(r"3\sqrt{5}", "3"), (r"2\pi", "$2$"), ("x+1", "$x$"), ("(1,2)", "$1$"), ("5x^2", "5"), (r"\frac{1}{2}", "1")],
)
def test_answers_without_dollars_are_expressions(answer: str, wrong: str):
    pytest.importorskip("math_verify")
    assert mathematics(rf"so \boxed{{{answer}}}", answer) == 1.0 and mathematics(wrong, answer) == 0.0
    assert mathematics(f"${answer}$", f"${answer}$") == 1.0


def test_math_verify_timeout_warnings_are_filtered(caplog):
    pytest.importorskip("math_verify")
    assert mathematics("$2$", "2") == 1.0 and stated_expression("$3$") == "3"
    assert not caplog.records
    logging.getLogger("math_verify.parser").warning("something else")
    assert caplog.messages == ["something else"]
