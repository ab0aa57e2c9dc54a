"""The methods table is complete, names only what exists, and the pages are generated from it."""

import ast
import importlib
import json
import re
import shlex
from functools import reduce
from pathlib import Path

import pytest
from source_tree import ROOT, parse

from docs.algorithm_sections import PREPARATIONS, AlgorithmRow
from docs.compatibility import all_heads, allowed
from docs.generate_methods import STATUSES, load, outdated, render
from docs.measured import measured, recipes_measured
from robopolicy.algorithms.common.off_policy import OffPolicy
from robopolicy.algorithms.registry import ALGORITHMS
from robopolicy.cli.main import parse as parse_command
from robopolicy.plugins import themes
from robopolicy.training.compose import compose_config

TABLES = load()
METHODS = TABLES.methods
WHOLE = load(whole=True)
RUNNING = {"works", "experimental", "reconstructed"}
BENCHMARKS = {
    "demo",
    "pixels",
    "sim_throughput",
    "ppo_vs_sb3",
    "sac_vs_sb3",
    "finetune",
    "few_step",
    "composition",
    "control",
    "rsl_rl",
    "worldmodel",
    "latency",
    "bridge",
    "text",
    "trl",
    "offline",
    "pendulum",
}


def test_every_source_has_one_row_in_order():
    assert [method.id for method in METHODS] == [f"S{number:03d}" for number in range(184)]


def test_rows_are_filled_in():
    for method in METHODS:
        assert method.title and method.family and method.part.endswith("."), method.id
        assert method.status in STATUSES, f"{method.id}: unknown status {method.status!r}"
        assert method.benchmark in BENCHMARKS | {""}, f"{method.id}: unknown benchmark {method.benchmark!r}"


def test_status_says_what_the_row_can_show():
    for method in WHOLE.methods:
        if method.status in RUNNING:
            assert method.symbols and method.tests, f"{method.id} is {method.status!r}: name its symbols and tests"
        else:
            assert not method.symbols and not method.tests, f"{method.id} is {method.status!r} but names what exists"
        if method.status == "works" and method.benchmark:
            module = ROOT / "benchmarks" / method.benchmark
            assert module.with_suffix(".py").is_file() or module.is_dir(), f"{method.id}: no benchmark {module.name}"
        if method.status in ("nothing-to-run", "reconstructed"):
            assert method.note, f"{method.id} is {method.status!r}: say why in its note"


def test_symbols_import():
    for method, symbol in [(row, symbol) for row in METHODS for symbol in row.symbols]:
        module, _, name = symbol.partition(":")
        assert name, f"{method.id}: write 'module:Name', found {symbol!r}"
        try:
            reduce(getattr, name.split("."), importlib.import_module(module))
        except (ImportError, AttributeError) as error:
            pytest.fail(f"{method.id}: {symbol} does not import: {error}")


def test_test_ids_exist():
    for method, test in [(row, test) for row in METHODS for test in row.tests]:
        file, *names = test.split("[")[0].split("::")
        assert (ROOT / file).is_file(), f"{method.id}: no file {file}"
        scope: ast.AST = parse(Path(file))
        for name in names:
            inside = {node.name: node for node in scope.body if isinstance(node, (ast.ClassDef, ast.FunctionDef))}
            assert name in inside, f"{method.id}: {file} has no {name}"
            scope = inside[name]


def test_verbs_are_those_of_the_policy_contract():
    contract = parse(Path("robopolicy/policies/base.py"))
    policy = next(node for node in contract.body if isinstance(node, ast.ClassDef) and node.name == "Policy")
    methods = {node.name for node in policy.body if isinstance(node, ast.FunctionDef)}
    assert {verb.name for verb in TABLES.verbs} <= methods


def test_every_algorithm_has_one_row():
    assert sorted(row.name for row in TABLES.algorithms) == sorted(ALGORITHMS)
    assert WHOLE.algorithms == TABLES.algorithms or not themes()


def test_algorithm_rows_are_filled_in():
    for row in TABLES.algorithms:
        assert row.family and row.use.endswith(".") and row.avoid.endswith(".") and row.deviations.endswith("."), (
            row.name
        )
        assert {*row.benchmarks} <= BENCHMARKS, f"{row.name}: unknown benchmark in {row.benchmarks}"


def dataset_use(algorithm: str) -> tuple[bool, bool]:
    """Whether an algorithm needs a dataset, and whether it accepts one."""
    kind = ALGORITHMS[algorithm]
    if issubclass(kind, OffPolicy):
        return kind.needs_dataset, not kind.chunk_starts_only
    needs = kind.data_source == "dataset" or kind.needs_dataset
    return needs, needs


@pytest.mark.parametrize("row", TABLES.algorithms, ids=lambda row: row.name)
def test_the_command_of_an_algorithm_composes_to_a_run_of_it(row: AlgorithmRow):
    program, verb, *settings = shlex.split(row.command)
    assert (program, verb) == ("robopolicy", "train")
    config = compose_config(settings)
    assert config.algorithm["name"] == row.name
    assert config.task.name or config.init_from
    assert (config.budget.updates > 0) != (config.budget.env_steps > 0)
    needs_dataset, takes_dataset = dataset_use(row.name)
    assert takes_dataset if config.dataset else not needs_dataset
    if not config.init_from:
        heads = {all_heads()[label][0] for label in allowed(row.name)} or {
            "text"
        }  # no head of a robot: they train text
        assert config.policy["name"] in heads


def test_the_preparations_are_valid_commands():
    for command in PREPARATIONS:
        arguments = parse_command(shlex.split(command)[1:])
        if arguments.command_name == "train":
            assert compose_config(arguments.settings).dataset


def test_the_chooser_names_algorithms_that_exist():
    for choice in (WHOLE if themes() else TABLES).choices:
        assert set(choice.use) <= set(ALGORITHMS), choice.have


def test_measured_results_are_the_rows_of_the_benchmark(tmp_path: Path):
    rows = [
        {"task": "lift", "method": name, "after": after} for name, after in (("a", 0.5), ("a-b", 1234.5), ("ab", 1))
    ]
    (tmp_path / "finetune.json").write_text(json.dumps({"task": "lift", "rows": rows}))
    assert measured("finetune", ["a"], tmp_path).splitlines() == [
        "- **Our result**, by `python -m benchmarks.finetune` on lift:",
        "",
        "| task | method | after |",
        "| --- | --- | --- |",
        "| lift | a | 0.5 |",
        "| lift | a-b | 1,234 |",
    ]
    assert measured("finetune", ["missing"], tmp_path) == measured("few_step", ["a"], tmp_path) == ""


def test_a_source_shows_what_its_text_recipes_did(tmp_path: Path):
    def entry(method, estimate, verdict=None):
        baseline = None if verdict is None else "grpo"
        return {"method": method, "task": "pits", "estimate": estimate, "baseline": baseline, "verdict": verdict}

    entries = [
        entry("(imitation)", 0.215),
        entry("grpo", 0.58),
        entry("pipo", 0.64, "ahead"),
        entry("gspo", 0.1, "level"),
    ]
    (tmp_path / "text.json").write_text(json.dumps({"entries": entries}))
    assert recipes_measured(["pipo", "grpo"], tmp_path) == [
        "`pipo` on pits: accuracy 21.5 -> 64.0 % (`grpo` 58.0 %): ahead"
    ]
    assert recipes_measured(["other"], tmp_path) == recipes_measured(["pipo"], tmp_path / "missing") == []


@pytest.mark.skipif(not themes(), reason="contrib is hidden")
def test_pages_are_up_to_date():
    assert not outdated(render(TABLES)), "Run `python -m docs.generate_methods`."


def test_every_family_has_one_page():
    families = [family for page in TABLES.pages for family in page.families]
    assert len(families) == len(set(families))
    assert set(families) == {row.family for row in (*WHOLE.algorithms, *WHOLE.methods)}


@pytest.mark.skipif(not themes(), reason="contrib is hidden")
def test_pages_show_no_ids_of_sources():
    for page, text in render(TABLES).items():
        assert not re.search(r"\bS\d{3}\b", text), page.name
