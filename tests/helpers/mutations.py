"""Single mutations of a file, which `tests/mutants.py` applies to losses, targets, returns, rewards and masks."""

import ast
import gc
import itertools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import CodeType, FunctionType
from typing import Any, cast

SWAPS = {ast.Add: ast.Sub, ast.Sub: ast.Add, ast.Mult: ast.Div, ast.Div: ast.Mult, ast.BitAnd: ast.BitOr}
SWAPS |= {ast.BitOr: ast.BitAnd, ast.And: ast.Or, ast.Or: ast.And, ast.Lt: ast.LtE, ast.LtE: ast.Lt, ast.Gt: ast.GtE}
SWAPS |= {ast.GtE: ast.Gt, ast.Eq: ast.NotEq, ast.NotEq: ast.Eq}
PAIRS = [("min", "max"), ("amin", "amax"), ("minimum", "maximum"), ("argmin", "argmax"), ("mean", "sum")]
PAIRS += [("any", "all"), ("logsumexp", "amax"), ("cummin", "cummax"), ("floor", "ceil")]
NAMES = {old: new for pair in PAIRS for old, new in (pair, pair[::-1])}
DROPPED = {"detach", "clamp", "masked_fill", "abs", "square", "exp"}  # methods that a mutant removes
NUMERIC = {"clamp", "where", "full_like", "masked_fill", "pow"}  # calls whose numbers are values, not dimensions
SILENT = {"__repr__", "__str__", "state_dict", "load_state_dict", "__post_init__"}


@dataclass(frozen=True)
class Mutant:
    """One mutation."""

    file: str
    line: int
    start: int  # line of its function
    function: str  # qualified name
    change: str
    site: tuple[int, int]  # index of the node in `ast.walk`, index of its variant

    def __str__(self) -> str:
        return f"{self.file}:{self.line} {self.function}: {self.change}"


def changed(node: ast.AST, **fields: Any) -> Any:
    """A copy of a node with other fields."""
    return type(node)(**{**dict(ast.iter_fields(node)), **fields})


def variants(node: ast.AST, parent: ast.AST) -> Iterator[ast.AST]:
    """Mutated replacements of an expression."""
    match node:
        case ast.BinOp(left, op, right) if type(op) in SWAPS:
            yield changed(node, op=SWAPS[type(op)]())
            if isinstance(op, ast.Mult):  # remove a factor
                yield left
                yield right
        case ast.BoolOp(op=op):
            yield changed(node, op=SWAPS[type(op)]())
        case ast.Compare(ops=[op]) if type(op) in SWAPS:
            yield changed(node, ops=[SWAPS[type(op)]()])
        case ast.UnaryOp(op=ast.USub() | ast.Not() | ast.Invert(), operand=operand):
            yield operand
        case ast.Call(func=ast.Attribute(value=value, attr=name) as func, keywords=keywords):
            if name in NAMES:
                yield changed(node, func=changed(func, attr=NAMES[name]))
            if name in DROPPED and not (isinstance(value, ast.Name) and value.id in ("torch", "math")):
                yield value
            if name in ("clamp", "clip") and [word.arg for word in keywords] in (["min"], ["max"]):
                other = {"min": "max", "max": "min"}[str(keywords[0].arg)]
                yield changed(node, keywords=[changed(keywords[0], arg=other)])
            if name == "where" and len(node.args) == 3:
                yield changed(node, args=[node.args[0], node.args[2], node.args[1]])
        case ast.Call(func=ast.Name(id=name) as func) if name in NAMES:
            yield changed(node, func=changed(func, id=NAMES[name]))
        case ast.Constant(value=value) if isinstance(value, int | float) and not isinstance(value, bool):
            call = parent.func.attr if isinstance(parent, ast.Call) and isinstance(parent.func, ast.Attribute) else ""
            if isinstance(value, float) or isinstance(parent, ast.BinOp | ast.Compare) or call in NUMERIC:
                yield changed(node, value=2 * value if value else value + 1)
        case ast.Return(value=ast.BinOp() | ast.Call() as value):
            yield changed(node, value=ast.UnaryOp(ast.USub(), value))
        case _:
            pass


def sites(tree: ast.Module) -> Iterator[tuple[int, ast.AST, ast.AST, str, ast.FunctionDef]]:
    """Index in `ast.walk`, node, parent, qualified name and function of all mutable nodes.

    Messages, checks that raise, annotations, decorators, defaults and subscripts stay unchanged.
    """
    number = {id(node): place for place, node in enumerate(ast.walk(tree))}

    def inside(node: ast.AST, name: str, top: ast.FunctionDef) -> Iterator[Any]:
        for child in ast.iter_child_nodes(node):
            if isinstance(
                child, ast.Raise | ast.Assert | ast.JoinedStr | ast.Subscript | ast.AnnAssign | ast.arguments
            ):
                held = child.value if isinstance(child, ast.Subscript | ast.AnnAssign) else None
                if held is not None:
                    yield from inside(ast.Expr(held), name, top)
            elif isinstance(child, ast.If) and isinstance(child.body[-1], ast.Raise):
                yield from inside(ast.Module(child.orelse, []), name, top)
            else:
                is_tensor = isinstance(top.returns, ast.Name) and top.returns.id == "Tensor"
                if not isinstance(child, ast.Return) or is_tensor:
                    yield number.get(id(child), -1), child, node, name, top
                yield from inside(child, name, top)

    def functions(body: Sequence[ast.stmt], prefix: str) -> Iterator[Any]:
        for node in body:
            if isinstance(node, ast.ClassDef):
                yield from functions(node.body, f"{prefix}{node.name}.")
            elif isinstance(node, ast.FunctionDef) and node.name not in SILENT:
                yield from inside(ast.Module(node.body, []), f"{prefix}{node.name}", node)

    yield from functions(tree.body, "")


def mutants_of(file: str) -> list[Mutant]:
    """Every mutant of a file."""
    found: list[Mutant] = []
    for place, node, parent, name, top in sites(ast.parse(Path(file).read_text(encoding="utf-8"))):
        for variant, new in enumerate(variants(node, parent)):
            change = f"{ast.unparse(node)} -> {ast.unparse(new)}"
            found.append(Mutant(file, getattr(node, "lineno", 0), top.lineno, name, change, (place, variant)))
    return found


def codes(code: CodeType) -> Iterator[CodeType]:
    """A code object and its nested code objects."""
    yield code
    for constant in code.co_consts:
        if isinstance(constant, CodeType):
            yield from codes(constant)


def install(mutant: Mutant) -> bool:
    """Set the mutated code on the live function; False if that is not possible."""
    tree = ast.parse(Path(mutant.file).read_text(encoding="utf-8"))
    (found,) = [(n, p) for place, n, p, *_ in sites(tree) if place == mutant.site[0]]
    node, parent = found
    new = next(itertools.islice(variants(node, parent), mutant.site[1], None))
    for holder in ast.walk(tree):
        for name, value in ast.iter_fields(holder):
            if value is node:
                setattr(holder, name, new)
            elif isinstance(value, list) and any(entry is node for entry in value):
                setattr(holder, name, [new if entry is node else entry for entry in cast(list[Any], value)])
    path = str(Path(mutant.file).resolve())
    module = compile(ast.fix_missing_locations(tree), path, "exec")
    code = next(code for code in codes(module) if code.co_qualname == mutant.function)
    live = [f for f in gc.get_objects() if isinstance(f, FunctionType) and f.__code__.co_filename == path]
    live = [f for f in live if f.__code__.co_qualname == mutant.function]
    try:
        for function in live:
            function.__code__ = code
    except ValueError:  # other free variables
        return False
    return bool(live)
