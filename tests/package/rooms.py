"""Reads every import of a source tree and says which ones point up the list of rooms."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

PACKAGE = "sp_compile"

# The flow of the package, top first. A room may import itself and the rooms below it.
ROOMS = ("backend", "debug", "training", "planning", "lowering", "passes", "analysis", "capture", "kernels", "ops", "layout")

# Files beside backend.py that are parts of it: what compiles and what runs on each call.
BACKEND = ("batch", "blocks", "hidden", "inner", "packed", "ranks", "region", "sharing")

# Plain modules under every room: all may import them, they import only one another.
FOUNDATION = ("errors", "options")

# Directions that the list would allow, forbidden because both sides meet at ops/.
SEPARATE = frozenset({("passes", "kernels"), ("kernels", "passes")})


@dataclass(frozen=True)
class Import:
    """One import statement: where it stands and the module it names in full."""

    file: str
    line: int
    target: str


def level(room: str) -> int:
    """Height of a room, larger is higher; -1 for a name that has no place in the list."""
    if room == "":
        return len(ROOMS) + 1
    if room in FOUNDATION:
        return 0
    return len(ROOMS) - ROOMS.index(room) if room in ROOMS else -1


def room_of(module: str) -> str:
    """`sp_compile.passes.graph` -> `passes`; `sp_compile` itself -> the empty name, which stands above every room."""
    parts = module.split(".")
    room = parts[1] if len(parts) > 1 else ""
    return "backend" if room in BACKEND else room


def imports(root: Path, file: Path) -> Iterator[Import]:
    """Every import in a file: at module level, inside functions, under `TYPE_CHECKING`, and by a literal given to `import_module`."""
    relative = file.relative_to(root)
    package = relative.parent.parts
    for node in ast.walk(ast.parse(file.read_text(encoding="utf-8"), filename=str(file))):
        if isinstance(node, ast.Import):
            for alias in node.names:
                yield Import(str(relative), node.lineno, alias.name)
        elif isinstance(node, ast.ImportFrom):
            base = ".".join((*package[: len(package) - node.level + 1], *filter(None, [node.module]))) if node.level else node.module or ""
            for alias in node.names:
                # `from sp_compile import ops` names a room; `from sp_compile import Forest` names the package's own surface.
                known = alias.name in ROOMS + BACKEND + FOUNDATION
                yield Import(str(relative), node.lineno, f"{base}.{alias.name}" if base == PACKAGE and known else base)
        elif isinstance(node, ast.Call) and node.args and isinstance(node.args[0], ast.Constant) and isinstance(node.args[0].value, str):
            name = node.func.attr if isinstance(node.func, ast.Attribute) else getattr(node.func, "id", "")
            if name in {"import_module", "__import__"}:
                yield Import(str(relative), node.lineno, node.args[0].value)


def sources(root: Path) -> list[Path]:
    """Python files of the package under `root`, in a fixed order."""
    return sorted(path for path in (root / PACKAGE).rglob("*.py") if "__pycache__" not in path.parts)


def upward_imports(root: Path) -> list[str]:
    """One sentence for each import that breaks the order, empty when there is none. `root` holds the package folder."""
    found = []
    for file in sources(root):
        module = ".".join(file.relative_to(root).with_suffix("").parts)
        here = room_of(module.removesuffix(".__init__"))
        if level(here) < 0:
            found.append(f"{file.relative_to(root)}: `{here}` has no place in the list of rooms")
            continue
        for item in imports(root, file):
            if item.target.split(".")[0] != PACKAGE:
                continue
            there = room_of(item.target)
            if level(there) < 0:
                found.append(f"{item.file}:{item.line}: imports {item.target}, which has no place in the list of rooms")
            elif (here, there) in SEPARATE:
                found.append(f"{item.file}:{item.line}: {here} imports {item.target}; passes and kernels meet at ops")
            elif level(there) > level(here):
                found.append(f"{item.file}:{item.line}: {here} imports {item.target}, which is above it")
    return list(dict.fromkeys(found))


def outside_imports(root: Path, room: str) -> dict[str, list[str]]:
    """Top-level packages other than this one that a room imports, each with its `file:line` list."""
    found: dict[str, list[str]] = {}
    for file in sources(root):
        if room_of(".".join(file.relative_to(root).with_suffix("").parts)) == room:
            for item in imports(root, file):
                if item.target and item.target.split(".")[0] != PACKAGE:
                    found.setdefault(item.target.split(".")[0], []).append(f"{item.file}:{item.line}")
    return found
