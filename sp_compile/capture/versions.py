"""Which versions of captured libraries were tested, and the error for the others."""

from __future__ import annotations

import re
import sys
from typing import Any

import torch

from sp_compile.errors import UnsupportedVersion

# Half-open: [first tested, first untested).
TESTED = {"transformers": ((5, 17), (5, 25))}


def _number(text: str) -> tuple[int, int]:
    found = re.match(r"(\d+)\.(\d+)", text)
    return (int(found[1]), int(found[2])) if found else (0, 0)


def loaded_version(package: str) -> str | None:
    """Version text of an already imported package; None if it was not imported. Imports nothing."""
    module = sys.modules.get(package)
    version = getattr(module, "__version__", None)
    return version if isinstance(version, str) else None


def is_tested(package: str) -> bool:
    """Whether `package` is imported in a version that was tested."""
    version = loaded_version(package)
    if version is None:
        return False
    first, end = TESTED[package]
    return first <= _number(version) < end


def _packages_in(graph_module: torch.fx.GraphModule) -> set[str]:
    """Top-level packages whose modules the graph was traced through."""
    packages: set[str] = set()
    for module in graph_module.modules():
        if not isinstance(module, torch.fx.GraphModule):
            continue
        for node in module.graph.nodes:
            stack: dict[str, Any] = node.meta.get("nn_module_stack") or {}
            for _, kind in stack.values():
                name = kind if isinstance(kind, str) else getattr(kind, "__module__", "")
                packages.add(name.split(".")[0])
    return packages


def require_tested(graph_module: torch.fx.GraphModule) -> None:
    """Checks the libraries that a captured graph was traced through.

    Raises:
        UnsupportedVersion: one of them is imported in a version outside the tested range, for which nothing was captured.
    """
    for package in sorted(_packages_in(graph_module) & TESTED.keys()):
        if loaded_version(package) is not None and not is_tested(package):
            (major, minor), (end_major, end_minor) = TESTED[package]
            raise UnsupportedVersion(
                f"expected {package} >= {major}.{minor} and < {end_major}.{end_minor}, the versions sp_compile was tested with; "
                f"got {loaded_version(package)}. Install a version in that range, or compile this model with another backend."
            )
