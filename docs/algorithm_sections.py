"""Parts of the pages of `docs/methods`: a chooser, the compatible policies, a section per algorithm."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from docs.compatibility import all_heads, allowed
from docs.markdown import cite, section_link, table
from docs.measured import measured
from robopolicy.algorithms.registry import ALGORITHMS
from robopolicy.training.make_source import SOURCES

CHOOSER = """\
## What to use
"""

MATRIX = """\
# Which policy goes with which algorithm

The classes of the algorithms state it, and `tests/algorithms/test_compatibility.py` builds and updates every pair once.
Without a mark, the algorithm refuses the policy and states the reason. A tanh bounds a squashed head. The
[index](README.md) helps to choose an algorithm.
"""

COMMANDS = """\
## Files that the commands use

The commands of the algorithms start from the results of these commands. One command uses the
[world model](../world_models/README.md) of push.

```bash
{preparations}
```
"""

PREPARATIONS = (
    "robopolicy collect lift --episodes 10 --out data/lift",
    "robopolicy train experiment=few_demonstrations task=lift dataset=data/lift name=lift_flow_bc",
    "robopolicy train experiment=few_demonstrations task=lift policy=diffusion policy.sampler=ddpm policy.steps=10 "
    "dataset=data/lift name=lift_diffusion_bc",
    "robopolicy collect point_mass --episodes 100 --out data/point_mass",
    "robopolicy collect lift --policy runs/lift_flow_bc/checkpoints/best --stochastic --keep-failures --out data/mixed",
)


@dataclass(frozen=True)
class Choice:
    """One row of the chooser."""

    have: str  # what there is to learn from
    use: list[str]  # registered algorithms, the first choice first
    why: str


@dataclass(frozen=True)
class AlgorithmRow:
    """What a user should know about one registered algorithm."""

    name: str  # as registered
    family: str  # which page it is on
    use: str  # when
    avoid: str  # when not
    deviations: str  # the main ones, all are in the docstring; and the defaults that differ from the source's
    benchmarks: list[str]  # under `benchmarks`, whose committed results are printed where there are any
    command: str  # a `robopolicy train` that works
    rows: list[str] = field(default_factory=list)  # names in the tables of the benchmarks; empty is `name`
    finding: str = ""  # an explanation of the results, for example why the method did not help


def render_chooser(choices: Sequence[Choice], pages: Mapping[str, str]) -> str:
    """Algorithms to use, by what there is; `pages` maps each algorithm to the file of its page."""
    rows = [
        [choice.have, ", ".join(section_link(name, pages[name]) for name in choice.use) or "-", choice.why]
        for choice in choices
    ]
    return CHOOSER + "\n" + table(["what you have", "use", "because"], rows)


def render_matrix(pages: Mapping[str, str]) -> str:
    """Algorithms against policies; `pages` maps each algorithm to the file of its page."""
    trained = {name: allowed(name) for name in pages}
    rows = [
        [section_link(name, pages[name]), *("x" if head in heads else "" for head in all_heads())]
        for name, heads in trained.items()
    ]
    return MATRIX + "\n" + table(["algorithm", *all_heads()], rows)


def render_preparations() -> str:
    """Commands that make the files from which the commands of the algorithms start."""
    return COMMANDS.format(preparations="\n".join(PREPARATIONS))


def render_algorithm(row: AlgorithmRow) -> str:
    """The section of one algorithm."""
    results = [measured(name, row.rows or [row.name]) for name in row.benchmarks]
    result = "\n".join(filter(None, results)) or "- **Our result**: not measured yet.\n"
    if row.finding:
        result += f"\n{row.finding}\n"
    paper = cite(ALGORITHMS.attribute(row.name, "reference"), "../")
    return f"""\
## `{row.name}`

{ALGORITHMS.summary(row.name)}

- **Paper**: {paper}.
- **Data**: {SOURCES.summary(ALGORITHMS.attribute(row.name, "data_source"))}
- **When**: {row.use}
- **When not**: {row.avoid}
- **Deviations**: {row.deviations}
{result}
```bash
{row.command}
```
"""
