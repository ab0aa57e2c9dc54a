"""Tests of the command line: help, suggestions, exit codes, and no traceback for bad input."""

import subprocess
import sys
import time
from importlib.metadata import EntryPoint
from types import ModuleType

import pytest

from robopolicy import __version__, plugins
from robopolicy.cli import doctor
from robopolicy.cli.commands import COMMANDS, Command
from robopolicy.cli.main import main


def run(*args: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "robopolicy", *args]
    return subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)


def test_help_lists_every_command_and_starts_without_torch():
    imports = "import sys; from robopolicy.cli.main import main"
    code = f"{imports}\ntry: main(['--help'])\nfinally: assert 'torch' not in sys.modules"
    start = time.perf_counter()
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 0, done.stderr
    assert time.perf_counter() - start < 3.0  # 0.1 s on an idle machine; importing torch alone takes seconds
    for name in COMMANDS.product():
        assert f"\n    {name} " in done.stdout


@pytest.mark.parametrize(
    ("words", "code"),
    [
        (["list"], 0),
        (["train", "algorithm=ppoo"], 2),
        (["train", "policy=flwo", "task=lift"], 2),
        (["train", "task=lfit"], 2),
        (["train", "experiment=few_demonstratoins"], 2),
        (["train", "--multirun", "algorithm=ppo,ppoo"], 2),
    ],
)
def test_names_are_listed_and_checked_without_torch(words, code):
    imports = "import sys; from robopolicy.cli.main import main"
    check = f"{imports}\nassert main({words}) == {code}\nassert not {{'torch', 'hydra', 'mujoco'}} & sys.modules.keys()"
    done = subprocess.run([sys.executable, "-c", check], capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 0, done.stderr
    assert code == 0 or ("Unknown" in done.stderr and "Did you mean" in done.stderr)


@pytest.mark.parametrize("name", COMMANDS.product())
def test_help_of_every_command_shows_examples(name, capsys):
    with pytest.raises(SystemExit) as end:
        main([name, "--help"])
    assert end.value.code == 0
    text = capsys.readouterr().out
    assert "examples:" in text
    assert f"robopolicy {name}" in text.split("examples:")[1]


def test_commands_of_other_packages_are_listed_and_run(monkeypatch, capsys):
    module = ModuleType("doctor_again")
    module.add_parser = lambda subparsers: subparsers.add_parser("again")
    module.run = lambda args: 7
    module.COMMAND = Command("doctor_again", "the same")
    monkeypatch.setitem(sys.modules, "doctor_again", module)
    original, point = plugins.installed, EntryPoint("again", "doctor_again:COMMAND", "robopolicy.commands")
    monkeypatch.setattr(plugins, "installed", lambda kind: {"again": point} if kind == "commands" else original(kind))
    with pytest.raises(SystemExit):
        main(["--help"])
    assert "\n    again       the same\n" in capsys.readouterr().out
    assert main(["again"]) == 7
    assert main(["agian"]) == 2 and "Did you mean 'again'?" in capsys.readouterr().err


def test_version(capsys):
    with pytest.raises(SystemExit) as end:
        main(["--version"])
    assert end.value.code == 0
    assert capsys.readouterr().out == f"robopolicy {__version__}\n"


def test_arguments_may_precede_or_follow_an_option(capsys):
    assert main(["train", "task=point_mass", "--print-config", "algorithm=ppo", "policy=gaussian"]) == 0
    assert "name: ppo" in capsys.readouterr().out
    assert main(["collect", "lift", "--episodes", "1", "--out", "x", "extra"]) == 2
    assert "Unknown argument 'extra'." in capsys.readouterr().err


@pytest.mark.parametrize(
    "args, message",
    [
        ([], "the following arguments are required: COMMAND"),
        (["trian"], "Unknown command 'trian'. Did you mean 'train'?"),
        (["--verison"], "--help"),
        (["verify"], "the following arguments are required: CKPT_OR_BUNDLE"),
        (["verify", "x", "--jsno"], "Unknown argument '--jsno'. Did you mean '--json'?"),
        (["train", "--resum", "x"], "Unknown argument '--resum'. Did you mean '--resume'?"),
        (["doctor", "extra"], "Unknown argument 'extra'."),
        (["eval", "x", "--episodes", "many"], "invalid int value: 'many'"),
    ],
)
def test_wrong_arguments_give_one_line_and_exit_code_2(args, message, capsys):
    assert main(args) == 2
    captured = capsys.readouterr()
    assert captured.out == ""
    assert captured.err.startswith("robopolicy: error: ")
    assert captured.err.count("\n") == 1
    assert message in captured.err


@pytest.mark.parametrize(
    "error, code, message",
    [
        (KeyboardInterrupt(), 130, "interrupted"),
        (OSError(28, "No space left on device", "data/x"), 2, "data/x: No space left on device."),
        (PermissionError(13, "Permission denied", "runs"), 2, "runs: Permission denied."),
        (UnicodeEncodeError("utf-8", "a\udcff", 1, 2, ""), 2, "contains '\\udcff', which is not UTF-8"),
        (ValueError("embedded null byte"), 2, "a path contains a NUL character; choose another name"),
        (MemoryError(), 2, "Out of memory; use fewer environments"),
        (RuntimeError("DefaultCPUAllocator: can't allocate memory"), 2, "Out of memory; use fewer environments"),
    ],
)
def test_system_errors_give_one_line(error, code, message, monkeypatch, capsys):
    def fail(args):
        raise error

    monkeypatch.setattr(doctor, "run", fail)
    assert main(["doctor"]) == code
    assert message in capsys.readouterr().err


@pytest.mark.parametrize("choice", ["nonsense", "osmesa"])
def test_a_missing_renderer_is_refused_before_mujoco_is_imported(choice, monkeypatch, capsys):
    monkeypatch.setenv("MUJOCO_GL", choice)
    monkeypatch.setattr("ctypes.util.find_library", lambda name: None)
    assert main(["eval", "random", "--task", "lift"]) == 2
    assert "MUJOCO_GL" in capsys.readouterr().err


def test_programming_errors_are_not_hidden(monkeypatch):
    monkeypatch.setattr(doctor, "run", lambda args: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        main(["doctor"])


def test_a_closed_pipe_prints_no_error():
    command = f"{sys.executable} -m robopolicy train --print-config | head -n 1"
    done = subprocess.run(command, shell=True, capture_output=True, text=True, timeout=60, check=False)
    assert done.stderr == ""
    assert done.stdout.count("\n") == 1
