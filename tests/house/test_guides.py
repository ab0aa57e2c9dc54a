"""What the guides say is true: their Python runs, their commands parse, the files they name exist."""

import re
import shlex
from collections import defaultdict
from functools import cache
from pathlib import Path
from unittest.mock import patch

import pytest
from source_tree import ROOT, project_files, python_files, read

from robopolicy.algorithms.registry import ALGORITHMS
from robopolicy.cli.main import parse
from robopolicy.errors import UserError
from robopolicy.plugins import themes
from robopolicy.policies.registry import POLICIES
from robopolicy.training.compose import compose_config
from robopolicy.training.many_runs import combinations

PAGES = [path for path in project_files() if path.suffix == ".md" and path.parts[0] != "benchmarks"]
LINKED = PAGES  # generated pages included
PAGES = [path for path in PAGES if path.parent != Path("docs/methods")]
needs_contrib = pytest.mark.skipif(not themes(), reason="contrib is hidden, of which the guides speak as well")
TUTORIALS = Path("docs/extend")  # whose files and commands test_tutorials.py runs
GUIDES = [path for path in PAGES if path.parent != TUTORIALS]
COMMANDS = [
    (page, line.split("#")[0].strip())
    for page in GUIDES
    for block in re.findall(r"```(?:bash|sh|console)\n(.*?)```", read(page), re.S)
    for line in block.splitlines()
]
EXAMPLE = re.compile(r"^  robopolicy (.+)$", re.M)  # in the `examples:` of a command


def commands(start: str) -> list[tuple[Path, list[str]]]:
    """Words of every documented command that begins with `start`, without that."""
    found = [(page, line.removeprefix(".venv/bin/")) for page, line in COMMANDS]
    return [(page, shlex.split(line.removeprefix(start))) for page, line in found if line.startswith(start)]


@needs_contrib
@pytest.mark.parametrize("page", [page for page in GUIDES if "```python" in read(page)], ids=str)
def test_python_blocks_run(page):
    scope: dict[str, object] = {}
    with patch.dict(ALGORITHMS._rows), patch.dict(POLICIES._rows):  # a guide adds to them
        for block in re.findall(r"```python\n(.*?)```", read(page), re.S):
            exec(compile(block, str(page), "exec"), scope)


EXAMPLES = [(path, shlex.split(line)) for path in python_files("robopolicy") for line in EXAMPLE.findall(read(path))]
DOCUMENTED: dict[Path, list[list[str]]] = defaultdict(list)
for _page, _words in [*commands("robopolicy "), *EXAMPLES]:
    DOCUMENTED[_page].append(_words)


@needs_contrib
@pytest.mark.parametrize("page", DOCUMENTED, ids=str)
def test_command_lines_are_valid(page):
    for words in DOCUMENTED[page]:
        try:
            arguments = parse(words)
            if words[0] == "train" and arguments.multirun:
                combinations(arguments.settings)
            elif words[0] in ("train", "bench") and not getattr(arguments, "resume", None):
                budget = compose_config(arguments.settings).budget
                assert bool(budget.updates) != bool(budget.env_steps), f"{page}: {shlex.join(words)} sets no budget"
        except UserError as error:
            pytest.fail(f"{page}: robopolicy {shlex.join(words)}: {error}")


def test_make_targets_exist():
    targets = re.findall(r"^([a-z-]+):", read(Path("Makefile")), re.M)
    for page, words in commands("make "):
        target = next(word for word in words if "=" not in word and not word.startswith("-"))
        assert target in targets, f"{page}: the Makefile has no target {target}"


def test_modules_to_run_exist():
    for page, words in commands("python -m "):
        module = Path(*words[0].split("."))
        if module.parts[0] in ("examples", "benchmarks", "docs", "robopolicy"):
            found = (ROOT / module).with_suffix(".py").is_file() or (ROOT / module / "__main__.py").is_file()
            assert found, f"{page}: no module {words[0]}"


def test_links_lead_somewhere():
    for page in LINKED:
        for target, section in re.findall(r"\]\((?!https?:|mailto:)([^)\s#]*)(?:#([^)\s]+))?\)", read(page)):
            place = ROOT / page.parent / target if target else ROOT / page
            assert place.exists(), f"{page}: {target} does not exist"
            if section and place.suffix == ".md":
                assert section in anchors(place), f"{page}: {target} has no section {section}"


@cache
def anchors(page: Path) -> set[str]:
    """Names of the sections of a page, and those that it sets itself."""
    text = re.sub(r"```.*?```", "", page.read_text(encoding="utf-8"), flags=re.S)
    headings = re.findall(r"^#+ (.+)$", text, re.M)
    sections = {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}
    return sections | set(re.findall(r'<a id="([^"]+)">', text))
