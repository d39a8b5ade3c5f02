"""Imports point down the list of rooms, and the check that says so can fail."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from tests.package import rooms

ROOT = Path(__file__).resolve().parents[2]


def write(root: Path, files: dict[str, str]) -> Path:
    for name, text in files.items():
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text, encoding="utf-8")
    return root


def test_imports_point_down() -> None:
    assert rooms.sources(ROOT), "no source file was read"
    assert rooms.upward_imports(ROOT) == []


def test_planning_needs_no_tensor_library() -> None:
    allowed = sys.stdlib_module_names | {"numpy", "__future__"}
    foreign = {name: where for name, where in rooms.outside_imports(ROOT, "planning").items() if name not in allowed}
    assert foreign == {}


def test_meaning_of_ops_needs_no_triton() -> None:
    assert {"triton", "flash_attn", "transformer_engine", "mamba_ssm"} & set(rooms.outside_imports(ROOT, "ops")) == set()


@pytest.mark.parametrize(
    "file, text, said",
    [
        ("sp_compile/layout/a.py", "import sp_compile.ops.attention\n", "layout imports sp_compile.ops.attention, which is above it"),
        ("sp_compile/ops/a.py", "def f():\n    from sp_compile.capture import torch\n", "a.py:2: ops imports sp_compile.capture"),
        ("sp_compile/ops/a.py", "from sp_compile import backend\n", "ops imports sp_compile.backend"),
        ("sp_compile/ops/a.py", "from sp_compile import Forest\n", "ops imports sp_compile, which is above it"),
        ("sp_compile/ops/a.py", "from ..lowering import registry\n", "ops imports sp_compile.lowering"),
        ("sp_compile/ops/__init__.py", "from ..lowering import registry\n", "ops imports sp_compile.lowering"),
        ("sp_compile/ops/deep/a.py", "from ...lowering.registry import x\n", "ops imports sp_compile.lowering.registry"),
        ("sp_compile/ops/a.py", "import importlib\nimportlib.import_module('sp_compile.passes.x')\n", "ops imports sp_compile.passes.x"),
        ("sp_compile/ops/a.py", "import typing\nif typing.TYPE_CHECKING:\n    import sp_compile.passes\n", "a.py:3: ops imports"),
        ("sp_compile/passes/a.py", "import sp_compile.kernels.attention\n", "passes and kernels meet at ops"),
        ("sp_compile/kernels/attention/a.py", "from sp_compile.passes import graph\n", "passes and kernels meet at ops"),
        ("sp_compile/errors.py", "import sp_compile.layout\n", "errors imports sp_compile.layout"),
        ("sp_compile/attic/a.py", "import os\n", "`attic` has no place in the list of rooms"),
        ("sp_compile/backend.py", "import sp_compile.attic\n", "imports sp_compile.attic, which has no place"),
    ],
)
def test_upward_import_is_reported(tmp_path: Path, file: str, text: str, said: str) -> None:
    (reported,) = rooms.upward_imports(write(tmp_path, {file: text}))
    assert said in reported


def test_downward_imports_are_not_reported(tmp_path: Path) -> None:
    files = {
        "sp_compile/__init__.py": "from sp_compile.backend import shared_prefix\nfrom sp_compile.layout.forest import Forest\n",
        "sp_compile/backend.py": "from sp_compile import debug, errors, options\nimport sp_compile.passes.graph\n",
        "sp_compile/passes/graph.py": "from sp_compile.analysis import lattice\nfrom sp_compile.passes import order\nimport torch\n",
        "sp_compile/lowering/attention.py": "def load():\n    import sp_compile.kernels.attention.forward\n",
        "sp_compile/kernels/attention/forward.py": "import sp_compile.ops.attention\nfrom sp_compile.errors import InvalidInput\n",
        "sp_compile/ops/attention.py": "from sp_compile.layout.forest import Forest\n",
        "sp_compile/options.py": "from sp_compile.errors import InvalidOption\n",
    }
    assert rooms.upward_imports(write(tmp_path, files)) == []
