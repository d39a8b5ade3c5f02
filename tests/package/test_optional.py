"""Only torch and numpy are hard requirements, and the root links shadow no installed package."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
OPTIONAL = ("einops", "transformers", "triton", "transformer_engine", "mamba_ssm", "rich", "depyf")
ALL = (*OPTIONAL, "causal_conv1d", "fla", "flash_attn")

# Makes packages absent the way a machine without them does: no spec (so `find_spec` gives None, `import` raises
# ModuleNotFoundError) and no metadata (so `importlib.metadata.version` raises PackageNotFoundError).
HIDE = """
import sys
class Without:
    def __init__(self, finder, names):
        self.finder, self.names = finder, names
    def __getattr__(self, name):
        return getattr(self.finder, name)
    def find_spec(self, name, path=None, target=None):
        return None if name.partition(".")[0] in self.names else self.finder.find_spec(name, path, target)
    def find_distributions(self, context):
        asked = (context.name or "").lower().replace("-", "_")
        find = getattr(self.finder, "find_distributions", None)
        return iter(()) if find is None or asked in self.names else find(context)
def hide(*names):
    sys.meta_path[:] = [Without(finder, frozenset(names)) for finder in sys.meta_path]
"""

LOAD = """
import sp_compile, sp_compile.backend
from torch._dynamo.backends.registry import lookup_backend
assert callable(lookup_backend("shared_prefix"))
"""


def run(program: str, cwd: Path) -> subprocess.CompletedProcess[str]:
    return subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=300, cwd=cwd)


@pytest.mark.parametrize("names", [(name,) for name in OPTIONAL] + [ALL], ids=[*OPTIONAL, "all"])
def test_package_imports_without(names: tuple[str, ...], tmp_path: Path) -> None:
    done = run(f"{HIDE}\nhide(*{names!r})\n{LOAD}\nassert not set(sys.modules) & set({names!r})", tmp_path)
    assert done.returncode == 0, done.stderr


def test_hidden_package_is_absent(tmp_path: Path) -> None:
    program = f"""{HIDE}
import importlib.metadata, importlib.util
assert importlib.util.find_spec("rich") and importlib.metadata.version("rich")
hide("rich")
assert importlib.util.find_spec("rich") is None
try:
    import rich
except ModuleNotFoundError:
    try:
        importlib.metadata.version("rich")
    except importlib.metadata.PackageNotFoundError:
        sys.exit(7)
"""
    assert run(program, tmp_path).returncode == 7


def test_hard_requirement_is_noticed(tmp_path: Path) -> None:
    done = run(f"{HIDE}\nhide('numpy')\nimport sp_compile.layout.forest", tmp_path)
    assert done.returncode != 0
    assert "numpy" in done.stderr


def test_transformers_does_not_take_the_root_link_for_the_kernels_package() -> None:
    pytest.importorskip("transformers")
    program = """
import importlib.metadata, os, sys
assert os.path.isdir("kernels") and sys.path[0] == ""
import transformers
from transformers import Qwen3ForCausalLM
from transformers.utils.import_utils import is_kernels_available
try:
    installed = importlib.metadata.version("kernels")
except importlib.metadata.PackageNotFoundError:
    assert not is_kernels_available()
"""
    done = run(program, ROOT)
    assert done.returncode == 0, done.stderr


def test_root_link_has_no_code_under_its_own_name() -> None:
    program = """
import importlib
found = importlib.import_module("kernels")
assert getattr(found, "__file__", None) is None, found.__file__
assert not [name for name in vars(found) if not name.startswith("__")]
"""
    done = run(program, ROOT)
    assert done.returncode == 0 or "No module named 'kernels'" in done.stderr, done.stderr


def test_installed_kernels_package_wins_over_the_root_link(tmp_path: Path) -> None:
    (tmp_path / "kernels").mkdir()
    (tmp_path / "kernels" / "__init__.py").write_text("origin = 'installed'\n", encoding="utf-8")
    done = run(f"import sys\nsys.path.append({str(tmp_path)!r})\nimport kernels\nassert kernels.origin == 'installed'", ROOT)
    assert done.returncode == 0, done.stderr


def test_kernels_folder_has_no_init() -> None:
    assert not (ROOT / "sp_compile" / "kernels" / "__init__.py").exists()
