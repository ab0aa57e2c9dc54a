"""Formatting of behavior trees as indented lines."""

from __future__ import annotations

from robopolicy.contrib.programs.trees.nodes import BehaviorTree, Node


def to_text(tree: BehaviorTree) -> str:
    """One line per node, children below their parent."""
    return "\n".join(_lines(tree.root, 0))


def _lines(node: Node, depth: int) -> list[str]:
    own = "  " * depth + _described(node)
    return [own, *(line for child in node.children for line in _lines(child, depth + 1))]


def _described(node: Node) -> str:
    words = [node.kind]
    if node.name:
        words.append(f"'{node.name}'")
    if node.resume:
        words.append("(resumes)")
    if node.holds is not None:
        words.append(node.holds.text)
    if node.skill:
        words.append(node.skill)
    if node.control:
        words.append(f"[{', '.join(formula.text for formula in node.control)}]")
    for word, formula in (("until", node.until), ("unless", node.unless)):
        if formula is not None:
            words.append(f"{word} {formula.text}")
    if node.limit:
        words.append(f"at most {node.limit} decisions")
    return " ".join(words)
