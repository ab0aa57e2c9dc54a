"""Programs of a model cannot wait, grow, write, connect or import; verifiers."""

import logging
import os

import pytest

from robopolicy.contrib.programs.sandbox import run_python
from robopolicy.text.verify import exact, mathematics, number, stated_expression, stated_number


def test_a_program_prints_its_result():
    ran = run_python("import math\nprint(math.gcd(12, 18))")
    assert ran.ok and ran.output == "6\n" and ran.error == ""


@pytest.mark.parametrize(
    ("program", "error"),
    [
        ("while True: pass", "timed out"),
        ("x = [0] * 10**9", "MemoryError"),
        ("import os", "import of os is not allowed"),
        ("import socket", "import of socket is not allowed"),
        ("open('here', 'w')", "open is not allowed"),
        ("open('/etc/hostname')", "open is not allowed"),
        ("().__class__.__base__.__subclasses__()[0](1, 2, 3)", "TypeError"),
        ("import sys\nsys.modules['os'].system('true')", "import of sys is not allowed"),
        ("import collections\ncollections._sys.modules['os'].system('true')", "os.system is not allowed"),
        ("1/0", "ZeroDivisionError"),
        ("def", "SyntaxError"),
    ],
)
def test_what_a_program_must_not_do(program, error, tmp_path):
    ran = run_python(program, seconds=1.0)
    assert not ran.ok
    assert error in ran.error


def test_a_program_sees_no_environment():
    os.environ["SECRET"] = "1"
    ran = run_python("import collections\nprint(collections.abc.sys.modules['os'].environ)")
    assert "SECRET" not in ran.output


def test_verifiers():
    assert exact(" 42 ", "42") == 1.0 and exact("4 2", "42") == 0.0
    assert number("it is 1,000.0", "1000") == 1.0 and number("1/2", "0.5") == 1.0 and number("none", "1") == 0.0
    assert stated_number("it is 1,000.0") == stated_number("1000") == "1000.0" and stated_number("none") is None
    pytest.importorskip("math_verify")
    assert stated_expression(r"so $\frac{2}{4}$") == stated_expression("1/2") == "1/2"
    assert mathematics(r"$\frac{1}{2}$", "$0.5$") == 1.0 and mathematics("$2x$", "$3x$") == 0.0


def test_math_verify_does_not_say_at_every_call_that_its_time_limit_is_off(caplog):
    pytest.importorskip("math_verify")
    assert mathematics("$2$", "2") == 1.0 and stated_expression("$3$") == "3"
    assert not caplog.records
    logging.getLogger("math_verify.parser").warning("something else")
    assert caplog.messages == ["something else"]
