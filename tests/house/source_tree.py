"""What the house tests look at: the project's own files, without what tools or runs leave behind."""

import ast
from functools import cache
from pathlib import Path

ROOT = Path(__file__).parents[2]
CODE = ("robopolicy", "tasks", "real_robot", "examples", "benchmarks", "docs")
FOLDERS = (*CODE, "sim_assets", "configs", "tests", "typings", ".ci")
TEXT = {".py", ".pyi", ".md", ".toml", ".yaml", ".yml", ".json", ".xml", ".txt", ".cfg", ".sh", ""}


@cache
def project_files() -> tuple[Path, ...]:
    """Every text file of the project, relative to its root."""
    inside = [path for folder in FOLDERS for path in (ROOT / folder).rglob("*") if "__pycache__" not in path.parts]
    top = [path for path in ROOT.iterdir() if not path.name.startswith(".setup") and path.name != ".git"]
    files = (path.relative_to(ROOT) for path in (*inside, *top) if path.is_file() and path.suffix in TEXT)
    return tuple(sorted(files))


def python_files(*folders: str) -> list[Path]:
    """The Python files under `folders`, relative to the root."""
    return [path for path in project_files() if path.suffix == ".py" and path.parts[0] in folders]


def read(path: Path) -> str:
    """Text of a file named relative to the root."""
    return (ROOT / path).read_text(encoding="utf-8")


@cache
def parse(path: Path) -> ast.Module:
    """Syntax tree of a Python file named relative to the root."""
    return ast.parse(read(path), filename=str(path))


def module_name(path: Path) -> str:
    """Dotted name of a Python file: `robopolicy/sim/chunk.py` is `robopolicy.sim.chunk`."""
    parts = path.with_suffix("").parts
    parts = parts[1:] if parts[0] in ("tasks", "real_robot") else parts  # folders that hold a package
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


def imported_modules(path: Path) -> list[tuple[int, str]]:
    """Line and dotted name of everything the file imports, lazily and for type checking too.

    `from a import b` counts as `a.b`, since `b` may be a module.
    """
    package = path.parent.parts
    found: list[tuple[int, str]] = []
    for node in ast.walk(parse(path)):
        if isinstance(node, ast.Import):
            found += [(node.lineno, alias.name) for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            base = ".".join(package[: len(package) - node.level + 1]) if node.level else ""
            origin = ".".join(part for part in (base, node.module) if part)
            found += [(node.lineno, f"{origin}.{alias.name}") for alias in node.names]
    return found
