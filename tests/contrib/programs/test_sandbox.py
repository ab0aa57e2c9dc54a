"""Programs of a model cannot wait, make_tree_policy, write, connect or import."""

import os

import pytest

from robopolicy.contrib.programs.sandbox import run_python


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
