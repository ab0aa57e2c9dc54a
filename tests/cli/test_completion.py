"""Tests of `robopolicy completion`: shell scripts and completions."""

import os
import subprocess
import sys

import pytest

from robopolicy.cli.main import main

argcomplete = pytest.importorskip("argcomplete")


@pytest.mark.parametrize("shell", ["bash", "zsh", "fish"])
def test_each_shell_has_a_script(shell, capsys):
    assert main(["completion", shell]) == 0
    assert "_ARGCOMPLETE" in capsys.readouterr().out


def complete(line: str, folder) -> set[str]:
    """Completions at the end of `line`."""
    place = folder / "offered"
    environment = os.environ | {
        "_ARGCOMPLETE": "1",
        "_ARGCOMPLETE_IFS": "\n",
        "_ARGCOMPLETE_STDOUT_FILENAME": str(place),
        "COMP_LINE": line,
        "COMP_POINT": str(len(line)),
        "COMP_TYPE": "9",
    }
    code = "import sys; from robopolicy.cli.main import main; main()"
    subprocess.run([sys.executable, "-c", code], env=environment, check=True, timeout=60, stderr=subprocess.DEVNULL)
    return set(place.read_text().split("\n"))


@pytest.mark.parametrize(
    ("line", "offered"),
    [
        ("robopolicy wor", {"worldmodel "}),
        ("robopolicy list al", {"algorithms "}),
        ("robopolicy verify --js", {"--json "}),
        ("robopolicy train exp", {"experiment="}),
        ("robopolicy train budget.e", {"budget.env_steps="}),
        ("robopolicy train algorithm=reinf", {"algorithm=reinflow "}),
        ("robopolicy train seed=1 task=point_m", {"task=point_mass "}),
        ("robopolicy eval X --task toy/pu", {"toy/push "}),
        ("robopolicy worldmodel ra", {"rank "}),
    ],
)
def test_names_are_completed(line, offered, tmp_path):
    assert complete(line, tmp_path) == offered
