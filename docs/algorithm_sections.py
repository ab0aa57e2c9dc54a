"""The part of `docs/methods.md` about what can be run: a chooser, the compatible policies, a section per algorithm."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from docs.compatibility import all_heads, allowed
from docs.markdown import anchor, cite, table
from docs.measured import measured
from robopolicy.algorithms.registry import ALGORITHMS
from robopolicy.training.make_source import SOURCES

CHOOSER = """\
## What to use
"""

MATRIX = """\
## Which policy goes with which algorithm

As the classes of the algorithms state it; `tests/algorithms/test_compatibility.py` builds and updates every pair once.
Where a mark is missing, the algorithm refuses the policy with the reason. A squashed head is bounded by a tanh.
"""

SECTIONS = """\
## Algorithms

Papers that are not among the sources below are what those build on or are compared with. Defaults that differ from the
paper's are named under "Deviations", the paper's in brackets. Commands start from what these make, one from the
[world model](world_models.md) of push:

```bash
{preparations}
```
"""

PREPARATIONS = (
    "robopolicy collect lift --episodes 10 --out data/lift",
    "robopolicy train experiment=lift_flow_bc dataset=data/lift",
    "robopolicy train experiment=lift_diffusion_bc dataset=data/lift",
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
    """What a user should know of one registered algorithm."""

    name: str  # as registered
    family: str  # heading under which it is printed
    use: str  # when
    avoid: str  # when not
    deviations: str  # the main ones, all are in the docstring; and the defaults that differ from the source's
    benchmarks: list[str]  # under `benchmarks`, whose committed results are printed where there are any
    command: str  # a `robopolicy train` that works
    rows: list[str] = field(default_factory=list)  # names in the tables of the benchmarks; empty is `name`
    finding: str = ""  # what the results say, where it needs saying: why the method did not help there


def render_chooser(choices: Sequence[Choice]) -> str:
    """What there is -> what to use."""
    rows = [[choice.have, ", ".join(map(anchor, choice.use)) or "-", choice.why] for choice in choices]
    return CHOOSER + "\n" + table(["what you have", "use", "because"], rows)


def render_matrix(names: Sequence[str]) -> str:
    """Algorithms against policies."""
    trained = {name: allowed(name) for name in names}
    rows = [[anchor(name), *("x" if head in heads else "" for head in all_heads())] for name, heads in trained.items()]
    return MATRIX + "\n" + table(["algorithm", *all_heads()], rows)


def render_algorithms(algorithms: Sequence[AlgorithmRow]) -> str:
    """A section per algorithm, by family, in the order of the table."""
    parts = [SECTIONS.format(preparations="\n".join(PREPARATIONS))]
    for family in dict.fromkeys(row.family for row in algorithms):
        parts.append(f"### {family}\n")
        parts += [_section(row) for row in algorithms if row.family == family]
    return "\n".join(parts)


def _section(row: AlgorithmRow) -> str:
    results = [measured(name, row.rows or [row.name]) for name in row.benchmarks]
    result = "\n".join(filter(None, results)) or "- **Our result**: not measured yet.\n"
    if row.finding:
        result += f"\n{row.finding}\n"
    paper = cite(ALGORITHMS.attribute(row.name, "reference"))
    return f"""\
#### `{row.name}`

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
