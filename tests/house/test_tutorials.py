"""The tutorials of `docs/extend` work as written: their files, their tests, their entry point and their commands."""

import json
import re
import shlex
import sys
import tomllib
from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from unittest.mock import patch

import pytest
from source_tree import ROOT, read

from robopolicy import plugins
from robopolicy.cli.main import main
from robopolicy.interop.sources import CheckpointChunkPolicy
from robopolicy.policies.base import PolicySpec
from robopolicy.policies.registry import make_policy
from robopolicy.sim import registry as tasks

FOLDER = Path("docs/extend")
FILE = re.compile(r"^File `([^`]+)`:\n\n```python\n(.*?)^```$", re.M | re.S)
LINE = re.compile(r"^Line of `pyproject\.toml`:\n\n```toml\n(.*?)^```$", re.M | re.S)
COMMANDS = re.compile(r"^```bash\n(.*?)^```$", re.M | re.S)
SMALL = ("evaluation.episodes=2", "name=run")
ROLLOUT = ("budget.updates=2", "sim.num_envs=2", "algorithm.num_steps=8", "algorithm.batch_size=8", *SMALL)


@dataclass(frozen=True)
class Tutorial:
    """What a page adds, and how its commands become quick."""

    page: str
    kind: str  # of `robopolicy list`
    name: str  # that the list shows
    quick: tuple[str, ...]  # settings in place of the budget of `train`


TUTORIALS = [
    Tutorial("algorithm", "algorithms", "awr", ROLLOUT),
    Tutorial("policy_head", "policies", "regression", ("budget.updates=2", "algorithm.batch_size=8", *SMALL)),
    Tutorial("task", "tasks", "my/arm", ROLLOUT),
    Tutorial("backend", "backends", "ode", ROLLOUT),
    Tutorial("transport", "transports", "udp", ()),
]
each_tutorial = pytest.mark.parametrize("tutorial", TUTORIALS, ids=lambda tutorial: tutorial.page)


def parts(page: str) -> tuple[dict[str, str], str, list[list[str]]]:
    """Files by name, the entry point, and the words of the commands of a page."""
    text = read(FOLDER / f"{page}.md")
    (line,) = LINE.findall(text)
    commands = [shlex.split(command) for block in COMMANDS.findall(text) for command in block.splitlines()]
    return dict(FILE.findall(text)), line, commands


def forget_installed() -> None:
    """Let the metadata of packages be read again."""
    plugins.installed.cache_clear()
    plugins._entry_points.cache_clear()


@pytest.fixture
def package(tutorial: Tutorial, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """The reader's package in the present folder, installed for the time of a test."""
    files, line, _ = parts(tutorial.page)
    for name, text in {**files, "my_package/__init__.py": ""}.items():
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text(text)
    metadata = tmp_path / "my_package-0.1.0.dist-info"
    metadata.mkdir()
    (metadata / "METADATA").write_text("Metadata-Version: 2.1\nName: my-package\nVersion: 0.1.0\n")
    ((group, points),) = tomllib.loads(line)["project"]["entry-points"].items()
    lines = [f"[{group}]", *(f"{name} = {value}" for name, value in points.items())]
    (metadata / "entry_points.txt").write_text("\n".join(lines))
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setattr(tasks, "_register_installed", cache(tasks._register_installed.__wrapped__))
    before = set(sys.modules)
    with ExitStack() as stack:
        for table in (tasks._TASKS, tasks._FAMILIES, tasks._PACKAGES):
            stack.enter_context(patch.dict(table, clear=True))
        forget_installed()
        yield tmp_path
    monkeypatch.undo()
    forget_installed()
    for name in [name for name in sys.modules.keys() - before if name.split(".")[0] in ("my_package", "tests")]:
        del sys.modules[name]


def test_every_page_is_a_tutorial_and_is_listed():
    pages = {path.stem for path in (ROOT / FOLDER).glob("*.md")} - {"README"}
    assert pages == {tutorial.page for tutorial in TUTORIALS}
    assert pages == set(re.findall(r"\]\((\w+)\.md\)", read(FOLDER / "README.md")))


@each_tutorial
def test_an_addition_is_one_file_one_test_and_one_line(tutorial: Tutorial):
    files, line, _ = parts(tutorial.page)
    module, test = files
    assert module.startswith("my_package/") and test == f"tests/test_{Path(module).name}"
    (points,) = tomllib.loads(line)["project"]["entry-points"].values()
    (target,) = points.values()
    assert target.partition(":")[0] == module.removesuffix(".py").replace("/", ".")
    assert len(line.splitlines()) == 2  # the header of the group and the entry point


@each_tutorial
def test_the_test_of_a_tutorial_passes(tutorial: Tutorial, package: Path):
    if tutorial.page == "transport":
        pytest.importorskip("rosbags", reason="needs robopolicy[ros]")
    settings = package / "pytest.ini"
    settings.write_text("[pytest]\n")
    own = ["-q", "-p", "no:cacheprovider", "--import-mode=importlib", f"--rootdir={package}", "-c", str(settings)]
    assert pytest.main([*own, str(package / "tests")]) == 0


@each_tutorial
def test_list_names_an_addition(tutorial: Tutorial, package: Path, capsys: pytest.CaptureFixture[str]):
    assert main(["list", tutorial.kind, "--json"]) == 0
    (rows,) = json.loads(capsys.readouterr().out).values()
    (row,) = (row for row in rows if row["name"] == tutorial.name)
    assert row["ring"] == "my-package" and row["description"].endswith((".", "method"))


@each_tutorial
def test_the_commands_of_a_tutorial_run(tutorial: Tutorial, package: Path, monkeypatch: pytest.MonkeyPatch):
    if tutorial.page == "transport":
        pytest.importorskip("rosbags", reason="needs robopolicy[ros]")
        monkeypatch.setenv("PYTHONPATH", str(package), prepend=":")  # of the simulated robot, a process of its own
        lift = PolicySpec({"state": (39,)}, action_dim=5, horizon=8, action_horizon=4)
        source = CheckpointChunkPolicy(make_policy("gaussian", None, lift).eval())
        monkeypatch.setattr("robopolicy_robots.deployment.open_source", lambda name, device: source)
    _, _, commands = parts(tutorial.page)
    for program, command, *words in commands:
        assert program == "robopolicy"
        if command == "train":
            words = [*(word for word in words if not word.startswith("budget.")), *tutorial.quick]
        elif command == "collect":
            words[words.index("--episodes") + 1] = "3"
        elif command == "deploy":
            words[words.index("--episodes") + 1] = "1"
            words += ["--no-tui", "--connect", f"folder={package}", "--out", "report.json", "--seconds", "1"]
        assert main([command, *words]) == 0
    if tutorial.page == "transport":
        assert json.loads(Path("report.json").read_text())["ticks"] > 0
    else:
        assert Path("runs/run/checkpoints/last").is_dir()
