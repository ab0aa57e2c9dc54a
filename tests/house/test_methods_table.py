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

from benchmarks.studies import STUDIES
from docs.algorithm_sections import PREPARATIONS, AlgorithmRow
from docs.compatibility import all_heads, allowed
from docs.evidence import evidence, exists, pointers
from docs.generate_methods import IMPLEMENTATIONS, load, outdated, render
from docs.measured import measured, recipes_measured
from robopolicy.algorithms.common.off_policy import OffPolicy
from robopolicy.algorithms.registry import ALGORITHMS
from robopolicy.cli.main import parse as parse_command
from robopolicy.plugins import themes
from robopolicy.recipe_files import read_recipe, recipe_names
from robopolicy.training.compose import compose_config

TABLES = load()
METHODS = TABLES.methods
WHOLE = load(whole=True)
RECIPES = [(name, str(read_recipe(name).get("source", ""))) for name in recipe_names()]


def test_every_source_has_one_row_in_order():
    assert [method.id for method in METHODS] == [f"S{number:03d}" for number in range(184)]


def test_rows_are_filled_in():
    for method in METHODS:
        assert method.title and method.family and method.part.endswith("."), method.id
        assert method.implementation in IMPLEMENTATIONS, f"{method.id}: unknown {method.implementation!r}"


def test_implementations_name_what_exists():
    for method in WHOLE.methods:
        if method.implementation == "none":
            assert not method.symbols and not method.tests, f"{method.id} has no implementation but names what exists"
        else:
            assert method.symbols and method.tests, f"{method.id} is {method.implementation}: name symbols and tests"
        if method.implementation != "complete":
            assert method.note, f"{method.id} is {method.implementation}: say why in its note"


def test_every_benchmark_of_a_source_has_a_row_of_that_source():
    missing = [
        f"{method.id}: {place}"
        for method in METHODS
        for place in method.pointers(RECIPES)
        if not exists(place) and not themes_hidden(place)
    ]
    assert not missing, "\n".join(missing)


def test_every_benchmark_of_an_algorithm_has_a_row_of_that_algorithm():
    missing = [
        f"{row.name}: {benchmark}"
        for row in TABLES.algorithms
        for benchmark in row.benchmarks
        if not any(exists(f"{benchmark}/{name}") for name in row.rows or [row.name])
    ]
    assert not missing, "\n".join(missing)


def themes_hidden(place: str) -> bool:
    """Whether contrib is hidden, and with it perhaps the row."""
    return not themes() and place.partition("/")[0] in STUDIES


def test_a_pointer_without_a_row_is_found(tmp_path: Path):
    (tmp_path / "offline.json").write_text(json.dumps({"rows": [{"method": "prdc"}]}))
    assert exists("offline/prdc", tmp_path) and not exists("offline/cdsa", tmp_path)
    assert exists("control/ppo", tmp_path) and not exists("control/cdsa", tmp_path)  # planned by the study, or not


@pytest.mark.parametrize(
    ("verdicts", "expected"),
    [
        (["ahead", "level", "behind", "ahead"], "ahead"),
        (["behind", "level"], "behind"),
        (["ahead", "behind"], "level"),
        (["level", None], "level"),
        (["too few seeds", "not applicable", None], "none"),
        ([], "none"),
    ],
)
def test_evidence_is_computed_from_verdicts(tmp_path: Path, verdicts: list[str | None], expected: str):
    entries = [{"method": f"x-{i}" if i else "x", "verdict": v, "reproduced": None} for i, v in enumerate(verdicts)]
    (tmp_path / "control.json").write_text(json.dumps({"entries": [*entries, {"method": "y", "verdict": "ahead"}]}))
    assert evidence(["control/x", "missing/x"], tmp_path) == expected
    if entries:
        entries[0]["reproduced"] = True
        (tmp_path / "again.json").write_text(json.dumps({"entries": entries}))
        assert evidence(["again/x"], tmp_path) == (expected if "behind" in verdicts else "reproduced")
        missed = {"method": "x", "verdict": None, "reproduced": False}
        (tmp_path / "partly.json").write_text(json.dumps({"entries": [*entries, missed]}))
        assert evidence(["partly/x"], tmp_path) == expected


def test_recipes_of_a_source_are_rows_of_the_study_of_texts():
    assert pointers(["control/mdpo"], ["mdpo", "unknown"], ["grpo", "mdpo"]) == ["control/mdpo", "text/mdpo"]


def test_a_recipe_has_the_implementation_of_its_source():
    for name, source in RECIPES:
        rows = [method for method in METHODS if method.reference == source]
        rows = [method for method in rows if f"`{name}`" in method.note] or rows
        found = read_recipe(name).get("implementation", "complete")
        assert not rows or found in {method.implementation for method in rows}, name


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
