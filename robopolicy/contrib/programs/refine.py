"""Proposers of Python programs and behavior trees: a language model, or random changes.

Sources: Aravindan et al. 2025, IPP, and Xu et al. 2025, PORTAL. The prompt of the language model contains the language,
observations and actions of the task, and the best programs so far with their scores and feedback. The last fenced block
of its answer is the next candidate. With `pseudocode` it first writes a plan, which the program then follows. Random
changes affect constants, comparisons, operators and the order of statements of a Python program; `search.py` has the
changes of trees.

Deviation from Aravindan et al. 2025: the curriculum of prompts is omitted, because the abstract does not list its
stages.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Callable, Mapping, Sequence

import numpy as np
import torch

from robopolicy.contrib.programs.search import WORST, ScoredProgram
from robopolicy.errors import UserError
from robopolicy.text.policy import TextPolicy

Write = Callable[[str, int], str]
"""Prompt and seed to text."""

STRATEGIES = ("direct", "pseudocode")
_BLOCK = re.compile(r"```[\w-]*\n(.*?)```", re.S)
_SPREAD, _SHIFT = 0.5, 0.5  # of a changed number: of its logarithm, and of the added value


def written_by(policy: TextPolicy, tokens: int = 1024) -> Write:
    """Use a text policy as a writer of at most `tokens` tokens."""

    def write(prompt: str, seed: int) -> str:
        generator = torch.Generator().manual_seed(seed)
        made = policy.generate([policy.tokenizer.prompt([prompt])], generator, budget=tokens)
        return policy.decode_message(made.completions()[0])

    return write


class TextProposer:
    """Proposes programs with a language model."""

    def __init__(
        self, write: Write, briefing: str, accept: Callable[[str], object], *, strategy: str = "direct"
    ) -> None:
        """Create the proposer.

        Args:
            write: The model.
            briefing: Language and task, see `tree_briefing` and `python_briefing`.
            accept: Raises `UserError` for a program that cannot run.
            strategy: direct | pseudocode.

        Raises:
            UserError: The strategy is unknown.
        """
        if strategy not in STRATEGIES:
            raise UserError(f"The strategy must be one of {', '.join(STRATEGIES)}, got '{strategy}'.")
        self.write, self.briefing, self.accept, self.strategy = write, briefing, accept, strategy
        self.refusal = ""  # error of the last answer, for the next prompt

    def propose(self, best: Sequence[ScoredProgram], rng: np.random.Generator) -> str | None:
        """Answer of the model, None if it cannot run."""
        prompt = self.prompt(best)
        if self.strategy == "pseudocode":
            plan = self.write(f"{prompt}\nFirst describe in pseudocode what it should do.", _seed(rng))
            prompt = f"{prompt}\nFollow this plan:\n{plan}\n"
        program = last_block(self.write(f"{prompt}\nAnswer with one fenced block that holds it all.", _seed(rng)))
        try:
            self.accept(program)
        except UserError as error:
            self.refusal = str(error)
            return None
        self.refusal = ""
        return program

    def prompt(self, best: Sequence[ScoredProgram]) -> str:
        """Briefing, the best programs in ascending order, and the instruction."""
        parts = [self.briefing]
        for trial in reversed(best):
            score = "could not be scored" if trial.score == WORST else f"scored {trial.score:.3g}"
            parts.append(f"This one {score}; {trial.feedback or 'nothing to report'}:\n```\n{trial.program}\n```")
        if self.refusal:
            parts.append(f"Your last answer could not be run: {self.refusal}")
        parts.append("Write a better one." if best else "Write one.")
        return "\n\n".join(parts)


def last_block(answer: str) -> str:
    """The last fenced block of an answer, or the whole answer without one."""
    blocks = _BLOCK.findall(answer)
    return (blocks[-1] if blocks else answer).strip()


def tree_briefing(
    task: str, meanings: Mapping[str, Sequence[str]], actions: Sequence[str], skills: Sequence[str]
) -> str:
    """Prompt for a model that writes behavior trees.

    Args:
        task: Name of the task.
        meanings: Vector observations and the meaning of their numbers.
        actions: Meaning of the numbers of an action.
        skills: Names of the available policies.
    """
    return "\n".join(
        [
            f"Write a behaviour tree for the robot task '{task}' as JSON.",
            'Nodes: {"kind": "sequence" or "selector", "children": [...], "resume": true or false},',
            '{"kind": "condition", "holds": FORMULA}, {"kind": "action", "skill": NAME or "control": [FORMULA, ...],',
            '"until": FORMULA (then it succeeds), "unless": FORMULA (then it fails), "limit": DECISIONS}.',
            "FORMULA: a text with observations, [i] and [i:j], numbers, + - * / < > and or not, abs clip cos exp max",
            "min norm sign sin sqrt sum tanh. 'control' has one number per action.",
            *_meanings(meanings, actions),
            f"Skills: {', '.join(skills) or 'none'}.",
        ]
    )


def python_briefing(task: str, meanings: Mapping[str, Sequence[str]], actions: Sequence[str], *, text: bool) -> str:
    """Prompt for a model that writes Python programs; arguments as in `tree_briefing`; `text` selects a text task."""
    if text:
        form = "act(messages): the world's and your messages in turn, the world's first; return your next message."
        return f"Write a Python function for the text task '{task}'.\n{form}"
    form = "act(obs): obs is a dictionary of lists of numbers; return a list with one number per action."
    return "\n".join([f"Write a Python function for the robot task '{task}'.", form, *_meanings(meanings, actions)])


def _meanings(meanings: Mapping[str, Sequence[str]], actions: Sequence[str]) -> list[str]:
    lines = [
        f"Observation {key}: {', '.join(f'[{i}] {name}' for i, name in enumerate(names))}."
        for key, names in meanings.items()
    ]
    return [*lines, f"Actions: {', '.join(actions) or 'without names'}."]


class PythonMutation:
    """Random changes of the best Python programs, for a search without a model."""

    def __init__(self, accept: Callable[[str], object], most: int = 2) -> None:
        """Create the proposer; `accept` raises `UserError` for a program that cannot run, `most` bounds the changes."""
        self.accept, self.most = accept, most

    def propose(self, best: Sequence[ScoredProgram], rng: np.random.Generator) -> str | None:
        """Change a program at random; better ones are selected more often."""
        weight = 0.5 ** np.arange(len(best))
        tree = ast.parse(best[int(rng.choice(len(best), p=weight / weight.sum()))].program)
        for _ in range(int(rng.integers(1, self.most + 1))):
            _CHANGES[rng.integers(len(_CHANGES))](tree, rng)
        program = ast.unparse(tree)
        try:
            self.accept(program)
        except UserError:
            return None
        return program


def _number(tree: ast.Module, rng: np.random.Generator) -> None:
    numbers = [n for n in ast.walk(tree) if isinstance(n, ast.Constant) and type(n.value) in (int, float)]
    if numbers:
        node = numbers[rng.integers(len(numbers))]
        value: float = node.value  # type: ignore[assignment]
        moved = abs(value * np.exp(_SPREAD * rng.normal()) + _SHIFT * rng.normal())
        node.value = round(moved) if isinstance(value, int) else float(f"{moved:.3g}")


def _texts(tree: ast.Module, rng: np.random.Generator) -> None:
    """Swap two texts."""
    texts = [n for n in ast.walk(tree) if isinstance(n, ast.Constant) and isinstance(n.value, str)]
    if len(texts) > 1:
        first, second = (texts[i] for i in rng.choice(len(texts), 2, replace=False))
        first.value, second.value = second.value, first.value


def _operators(tree: ast.Module, rng: np.random.Generator) -> None:
    """Replace a comparison, or an operator of a sum or product."""
    found = [n for n in ast.walk(tree) if isinstance(n, ast.Compare | ast.BinOp)]
    if found:
        node = found[rng.integers(len(found))]
        if isinstance(node, ast.Compare):
            node.ops[0] = (ast.Lt, ast.Gt, ast.LtE, ast.GtE, ast.Eq, ast.NotEq)[rng.integers(6)]()
        else:
            node.op = (ast.Add, ast.Sub, ast.Mult)[rng.integers(3)]()


def _order(tree: ast.Module, rng: np.random.Generator) -> None:
    """Swap two statements of one block."""
    bodies = [n.body for n in ast.walk(tree) if isinstance(n, ast.FunctionDef | ast.If | ast.For | ast.While)]
    bodies = [body for body in bodies if len(body) > 1]
    if bodies:
        body = bodies[rng.integers(len(bodies))]
        first, second = rng.choice(len(body), 2, replace=False)
        body[first], body[second] = body[second], body[first]


_CHANGES: tuple[Callable[[ast.Module, np.random.Generator], None], ...] = (_number, _texts, _operators, _order)


def _seed(rng: np.random.Generator) -> int:
    return int(rng.integers(2**31 - 1))
