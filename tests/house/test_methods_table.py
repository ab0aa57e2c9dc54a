"""The methods table is complete, names only what exists, and the page is generated from it."""

import ast
import importlib
from functools import reduce
from pathlib import Path

import pytest
from source_tree import ROOT, parse

from docs.generate_methods import PAGE, STATUSES, load, render

METHODS, VERBS = load()
RUNNING = {"works", "experimental", "reconstructed"}
BENCHMARKS = {
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
}


def test_every_source_has_one_row_in_order():
    assert [method.id for method in METHODS] == [f"S{number:03d}" for number in range(184)]


def test_rows_are_filled_in():
    for method in METHODS:
        assert method.title and method.family and method.part.endswith("."), method.id
        assert method.status in STATUSES, f"{method.id}: unknown status {method.status!r}"
        assert method.benchmark in BENCHMARKS | {""}, f"{method.id}: unknown benchmark {method.benchmark!r}"


def test_status_says_what_the_row_can_show():
    for method in METHODS:
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
    assert {verb.name for verb in VERBS} <= methods


def test_page_is_up_to_date():
    assert PAGE.read_text(encoding="utf-8") == render(METHODS, VERBS), "Run `python -m docs.generate_methods`."
