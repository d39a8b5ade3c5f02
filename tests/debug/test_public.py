"""The package's own names: few, documented, and cheap to import."""

from __future__ import annotations

import inspect
import subprocess
import sys
from pathlib import Path

import pytest

import sp_compile
from sp_compile import errors

ROOT = Path(__file__).resolve().parents[2]


def run(program: str) -> subprocess.CompletedProcess[str]:
    program = f"import sys; sys.path.insert(0, {str(ROOT)!r})\n{program}"
    return subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=300)


def test_every_public_name_is_there_and_documented() -> None:
    for name in sp_compile.__all__:
        value = getattr(sp_compile, name)
        assert name == "__version__" or inspect.getdoc(value)
    assert set(sp_compile.__all__) <= set(dir(sp_compile))


def test_every_error_class_is_public() -> None:
    classes = {name for name, value in vars(errors).items() if isinstance(value, type) and issubclass(value, Exception)}
    assert classes <= set(sp_compile.__all__)


def test_unknown_name_is_an_attribute_error() -> None:
    with pytest.raises(AttributeError, match="no attribute 'nothing'"):
        sp_compile.nothing  # noqa: B018


def test_import_is_cheap() -> None:
    done = run("import sp_compile\nheavy = {'torch', 'numpy'} & set(sys.modules)\nassert not heavy, heavy")
    assert done.returncode == 0, done.stderr


def test_names_import_no_compiler_and_no_optional_package() -> None:
    done = run(
        "import torch, torch.fx, torch._dynamo\ntorchs = set(sys.modules)\n"  # a build of torch for GPUs imports triton itself
        "import sp_compile\nsp_compile.Forest, sp_compile.last_run\n"
        "heavy = {'transformers', 'triton', 'einops', 'rich', 'depyf', 'torch._inductor'} & set(sys.modules) - torchs\n"
        "assert not heavy, heavy\n"
        "sp_compile.explain\n"
        "heavy = {'transformers', 'triton', 'einops', 'rich', 'depyf'} & set(sys.modules) - torchs\n"
        "assert not heavy, heavy"
    )
    assert done.returncode == 0, done.stderr


def test_version_of_an_uninstalled_checkout() -> None:
    done = run(
        "import importlib.metadata\n"
        "def missing(name): raise importlib.metadata.PackageNotFoundError(name)\n"
        "importlib.metadata.version = missing\n"
        "import sp_compile\nassert sp_compile.__version__ == '0+unknown'"
    )
    assert done.returncode == 0, done.stderr
