"""Words: names and sentences belong to the field, and no two public classes share a name."""

import ast
import re
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path

import pytest
from source_tree import parse, project_files, python_files, read

SOURCES = python_files("robopolicy", "tasks", "real_robot")
PAGES = [path for path in project_files() if path.suffix == ".md" and path.parts[0] not in ("benchmarks", ".ci")]

# Parts of a public name (module, class, function, argument, field) that have a term of the field instead.
NAME_PARTS = {
    "aside": "annotator",
    "asides": "annotators",
    "beside": "the name of the thing",
    "duel": "compare",
    "dreamt": "imagined",
    "earned": "undiscounted, reward",
    "film": "video",
    "films": "videos",
    "goes": "resume, continue",
    "heard": "observations, received",
    "hear": "receive, poll",
    "heat": "temperature",
    "hire": "start_workers",
    "judged": "scored, evaluated",
    "laid": "flatten, layout",
    "ledger": "log",
    "lone": "singleton",
    "mend": "fix",
    "paid": "rewarded",
    "played": "executed, rolled out",
    "playing": "rollout",
    "plays": "needs_rollouts",
    "recall": "resample",
    "rehearsal": "dry_run",
    "said": "responses",
    "seats": "slots",
    "soup": "average_weights",
    "swaddled": "bounded",
    "tally": "episode statistics",
    "told": "conditioned, set",
    "wanted": "target, required",
    "wish": "request",
}
# Module -> parts it may use, with the reason.
ALLOWED_PARTS: dict[str, set[str]] = {
    "robopolicy/sim/registry.py": {"films"},  # the configuration key worldmodel.films
}

# Phrases that no docstring title, help text, message or page uses; the value is what to write instead.
PHRASES = {
    r"that of|those of": "name the thing",
    r"beside|besides": "next to, in addition to",
    r"lest|likewise|none but|alike": "plain English",
    r"one by one": "separately, each",
    r"go(?:es)? on|went on|going on": "continue, resume",
    r"told|tells?": "set, report",
    r"hears?|heard": "receive",
    r"said|says?": "state, report",
    r"wish(?:es|ed)?": "want, request",
    r"films?|filmed|filming": "video, record",
    r"judged|judges|judging": "evaluate, score",
    r"mend(?:s|ed)?": "fix",
    r"nobody|somebody": "no one, a user",
    r"played|plays|playing|play out": "run, execute, roll out",
    r"dreams?|dreamt": "imagine, predict",
}
PHRASE = re.compile(r"(?<![\w`./=-])(?:" + "|".join(PHRASES) + r")(?![\w`=-])", re.IGNORECASE)
QUOTED = re.compile(r"```.*?```|`[^`\n]*`|\]\([^)\n]*\)|\"[^\"\n]*\"", re.DOTALL)  # code, links and quotations
# Sentences of a page or title that may use a phrase: (file, fragment).
ALLOWED_SENTENCES: set[tuple[str, str]] = {
    ("docs/references.md", "SkyReels-V2: Infinite-length Film Generative Model"),  # titles of papers
    ("docs/references.md", "FiLM: Visual Reasoning with a General Conditioning Layer"),
}

# Class names that name one idea in several modules, with the reason.
ONE_IDEA = {
    "Duration": "the message builtin_interfaces/Duration and spans of time",
    "Pose": "the message geometry_msgs/Pose and poses of a tool: a position with an orientation",
}


def parts_of(name: str) -> list[str]:
    """Lower-case parts of a name in snake or camel case."""
    return [part.lower() for part in re.findall(r"[A-Z]+(?![a-z])|[A-Z]?[a-z]+", name)]


def public_names(path: Path) -> Iterator[tuple[int, str]]:
    """Line and name of the module, of its public classes and functions, and of their fields and arguments."""
    yield 1, path.stem
    yield from _names_in(parse(path).body)


def _names_in(body: list[ast.stmt]) -> Iterator[tuple[int, str]]:
    for node in body:
        if isinstance(node, ast.ClassDef) and not node.name.startswith("_"):
            yield node.lineno, node.name
            yield from _names_in(node.body)
        elif isinstance(node, ast.FunctionDef) and not node.name.startswith("_"):
            yield node.lineno, node.name
            arguments = (*node.args.posonlyargs, *node.args.args, *node.args.kwonlyargs)
            yield from ((argument.lineno, argument.arg) for argument in arguments)
        elif isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name) and node.target.id[0] != "_":
            yield node.lineno, node.target.id


def titles(path: Path) -> Iterator[tuple[int, str]]:
    """Line and first sentence of every docstring, and every help text."""
    for node in ast.walk(parse(path)):
        if isinstance(node, (ast.Module, ast.ClassDef, ast.FunctionDef)) and ast.get_docstring(node):
            text = ast.get_docstring(node) or ""
            yield getattr(node, "lineno", 1), text.split("\n\n")[0]
        if isinstance(node, ast.keyword) and node.arg in ("help", "description", "epilog"):
            for part in ast.walk(node.value):
                if isinstance(part, ast.Constant) and isinstance(part.value, str):
                    yield node.value.lineno, part.value


def phrases_in(text: str) -> list[str]:
    """Banned phrases of a text, code and quotations left out."""
    return [match[0] for match in PHRASE.finditer(QUOTED.sub(" ", text))]


@pytest.mark.parametrize("folder", ["robopolicy", "tasks", "real_robot"])
def test_public_names_are_terms_of_the_field(folder):
    found = [
        f"{path}:{line}: {name}: {part} -> {NAME_PARTS[part]}"
        for path in python_files(folder)
        for line, name in public_names(path)
        for part in parts_of(name)
        if part in NAME_PARTS and part not in ALLOWED_PARTS.get(path.as_posix(), ())
    ]
    assert not found, "\n".join(found)


@pytest.mark.parametrize("folder", ["robopolicy", "tasks", "real_robot"])
def test_titles_and_help_are_plain_english(folder):
    found = [
        f"{path}:{line}: {phrase}: {text}"
        for path in python_files(folder)
        for line, text in titles(path)
        for phrase in phrases_in(text)
        if not any(path.as_posix() == file and part in text for file, part in ALLOWED_SENTENCES)
    ]
    assert not found, f"{len(found)}\n" + "\n".join(found)


@pytest.mark.parametrize("page", PAGES, ids=str)
def test_pages_are_plain_english(page):
    text = QUOTED.sub(lambda match: re.sub(r"[^\n]", " ", match[0]), read(page))
    found = [
        f"{page}:{number}: {match[0]}"
        for number, line in enumerate(text.split("\n"), 1)
        for match in PHRASE.finditer(line)
        if not any(page.as_posix() == file and part in line for file, part in ALLOWED_SENTENCES)
    ]
    assert not found, "\n".join(found)


def test_module_docstrings_open_with_a_noun_phrase_or_a_verb():
    opening = ("What", "Who", "Where", "How", "Which", "Whether", "When", "That", "As", "See")
    found = [f"{path}: {ast.get_docstring(parse(path))}" for path in SOURCES if _opens_with(path, opening)]
    assert not found, "\n".join(found)


def _opens_with(path: Path, words: tuple[str, ...]) -> bool:
    text = ast.get_docstring(parse(path)) or ""
    return bool(text) and text.split()[0].strip(",:") in words


def test_public_classes_have_names_of_their_own():
    places = defaultdict(list)
    for path in SOURCES:
        for node in parse(path).body:
            if isinstance(node, ast.ClassDef) and not node.name.startswith("_"):
                places[node.name].append(str(path))
    found = {name: files for name, files in places.items() if len(files) > 1 and name not in ONE_IDEA}
    assert not found, "\n".join(f"{name}: {', '.join(files)}" for name, files in found.items())
