"""Rules for every file: size, docstrings, no pickle, nothing about the machine it was written on, files that parse."""

import ast
import json
import re
import runpy
import tomllib
from collections.abc import Iterator
from pathlib import Path
from xml.etree import ElementTree

import pytest
import yaml
from source_tree import CODE, ROOT, imported_modules, parse, project_files, python_files, read

PICKLES = {"pickle", "cPickle", "_pickle", "cloudpickle", "dill", "joblib", "shelve", "marshal"}
LOADERS = {"torch.load", "yaml.load", "yaml.unsafe_load", "yaml.full_load", "pandas.read_pickle", "pd.read_pickle"}
BUILTINS = {"eval", "exec"}
SANDBOX = Path("robopolicy/contrib/programs/sandbox/server.py")  # runs programs, in a confined process
# Written with character classes so that this file does not match itself.
MACHINE = {
    "a path of one machine": r"(?<![\w.~])/(?:wor[k]|hom[e]/[a-z]\w*|roo[t]|User[s])/",
    "a private package index": r"(?i)index[-_]url[= ]+[\"']?(?:https?|file):/{2,3}(?!download\.pytorch\.org|pypi\.org)",
    "a trusted host": r"(?i)trusted[-]host",
}


def line_limit(path: Path) -> int:
    """Most lines a Python file may have."""
    return 350 if path.parts[0] == "examples" or path.parts[:2] == ("robopolicy", "algorithms") else 400


def test_files_stay_small():
    sizes = {path: len(read(path).splitlines()) for path in python_files(*CODE, "tests")}
    long = [f"{path}: {n} lines, at most {line_limit(path)}" for path, n in sizes.items() if n > line_limit(path)]
    assert not long, "Split these files along their ideas:\n" + "\n".join(long)


def test_no_two_test_files_have_one_name():
    names = [path.name for path in project_files() if path.parts[0] == "tests" and path.name.startswith("test_")]
    assert len(names) == len(set(names)), "pytest imports test files by their bare names"


def test_every_package_says_what_it_is():
    folders = sorted({path.parent for path in python_files("robopolicy", "tasks", "real_robot")})
    silent = [
        str(folder)
        for folder in folders
        if not (ROOT / folder / "__init__.py").is_file() or not ast.get_docstring(parse(folder / "__init__.py"))
    ]
    assert not silent, f"These folders need an __init__.py with a docstring: {silent}"


def unsafe_loads(path: Path) -> Iterator[str]:
    """Places of a file that unpickle or run foreign text."""
    for line, name in imported_modules(path):
        if name.split(".")[0] in PICKLES:
            yield f"{path}:{line}: imports {name}"
    for node in ast.walk(parse(path)):
        if not isinstance(node, ast.Call):
            continue
        words = {str(word.arg): ast.unparse(word.value) for word in node.keywords}
        if ast.unparse(node.func) == "torch.load" and words.get("weights_only") == "True":
            continue  # tensors and plain values alone: how files of other libraries are read
        if path == SANDBOX and ast.unparse(node.func) == "exec":
            continue
        if ast.unparse(node.func) in LOADERS | BUILTINS:
            yield f"{path}:{node.lineno}: calls {ast.unparse(node.func)}"
        if words.get("allow_pickle", "False") != "False":
            yield f"{path}:{node.lineno}: allows pickle"


def test_nothing_is_unpickled():
    wrong = [place for path in python_files(*CODE) for place in unsafe_loads(path)]
    assert not wrong, "Load safetensors, JSON, Parquet or plain arrays instead:\n" + "\n".join(wrong)


@pytest.mark.parametrize("what", MACHINE)
def test_files_do_not_mention(what: str):
    pattern = re.compile(MACHINE[what])
    wrong = [
        f"{path}:{number}: {line.strip()[:100]}"
        for path in project_files()
        for number, line in enumerate(read(path).splitlines(), 1)
        if pattern.search(line)
    ]
    assert not wrong, f"These lines name {what}:\n" + "\n".join(wrong)


def test_what_only_slow_tests_cover_is_still_there():
    paths = re.findall(r"^\w+/\S+$", read(Path(".ci/needs_test_all")), re.MULTILINE)
    assert paths and not [path for path in paths if not (ROOT / path).exists()], "Correct .ci/needs_test_all"


@pytest.mark.parametrize(
    ("suffixes", "load"),
    [
        ({".toml"}, tomllib.loads),
        ({".yaml", ".yml"}, yaml.safe_load),
        ({".json"}, json.loads),
        ({".xml"}, ElementTree.fromstring),
    ],
    ids=["toml", "yaml", "json", "xml"],
)
def test_structured_files_parse(suffixes, load):
    for path in project_files():
        if path.suffix in suffixes:
            try:
                load(read(path))
            except Exception as error:
                pytest.fail(f"{path}: {error}")


def test_mutation_runs_name_existing_files_and_tests():
    table = runpy.run_path(str(ROOT / "tests" / "mutants.py"))["TABLE"]
    empty = [pattern for pattern in table if not any(ROOT.glob(pattern))]
    missing = {test for tests in table.values() for test in tests if not (ROOT / test).exists()}
    assert not empty and not missing


def test_extras_have_names_that_every_pip_knows():
    extras = tomllib.loads(read(Path("pyproject.toml")))["project"]["optional-dependencies"]
    assert not [name for name in extras if not re.fullmatch(r"[a-z0-9-]+", name)]


def test_every_dependency_has_an_upper_bound():
    project = tomllib.loads(read(Path("pyproject.toml")))["project"]
    listed = [
        *project["dependencies"],
        *(entry for extra in project["optional-dependencies"].values() for entry in extra),
    ]
    unbounded = [entry for entry in listed if not re.search(r"<\d|==\d", entry.split(";")[0])]
    assert all(entry.startswith("robopolicy[") for entry in unbounded), unbounded
