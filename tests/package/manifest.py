"""The determinism manifest: what it says, what it ought to cover, and what is missing from it."""

from __future__ import annotations

import importlib
import pkgutil
import re
import subprocess
import sys
from collections.abc import Collection, Iterable, Mapping
from pathlib import Path
from typing import Any

import torch

from sp_compile.lowering import registry

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

ROOT = Path(__file__).resolve().parents[2]
PATH = ROOT / "sp_compile" / "lowering" / "determinism.toml"
SECTIONS = ("ops", "implementations")

# Ops that pass their first argument on and compute nothing.
MARKER = re.compile(r"_site$")


def read() -> dict[str, dict[str, str]]:
    return tomllib.loads(PATH.read_text(encoding="utf-8"))


def load_every_table() -> None:
    """Imports the rooms in which ops are registered; a kernel whose library is absent registers nothing."""
    for room in ("ops", "lowering"):
        package = importlib.import_module(f"sp_compile.{room}")
        for module in pkgutil.walk_packages(package.__path__, f"sp_compile.{room}."):
            importlib.import_module(module.name)


def registered() -> dict[str, set[str]]:
    """What must be in the manifest, by section."""
    load_every_table()
    names = {name.split(".")[0] for name in torch._C._dispatch_get_all_op_names() if name.startswith("sp_compile::")}
    tables = {f"{registry.option_name(op)}.{item.name}" for op in registry.semantic_ops() for item in registry.implementations(op)}
    return {"ops": {name for name in names if not MARKER.search(name)}, "implementations": tables}


def collected(files: Iterable[str]) -> set[str]:
    """Node ids of the tests in the files, as pytest itself sees them; files that do not exist have none."""
    present = [name for name in sorted(set(files)) if (ROOT / name).is_file()]
    if not present:
        return set()
    command = [sys.executable, "-m", "pytest", "--collect-only", "-q", "-p", "no:cacheprovider", "-p", "no:xdist", *present]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stdout + done.stderr
    return {line.strip() for line in done.stdout.splitlines() if "::" in line}


def gaps(wanted: Mapping[str, Collection[str]], manifest: Mapping[str, Mapping[str, Any]], tests: Collection[str]) -> list[str]:
    """One sentence for each registered name without a line, each line without a test, and each unknown section."""
    found = [f"unknown section [{section}]" for section in manifest if section not in SECTIONS]
    for section in SECTIONS:
        lines = manifest.get(section, {})
        found += [f"[{section}] has no line for {name}" for name in sorted(set(wanted[section]) - set(lines))]
        found += [f"[{section}] {name} names {test}, which does not exist" for name, test in lines.items() if test not in tests]
    return found
