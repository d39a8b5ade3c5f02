"""What is shipped: every module, the data files, the entry point, and nothing else."""

from __future__ import annotations

import shutil
import subprocess
import sys
import tarfile
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
DATA = {".py", ".toml", ".md"}
PROBE = "sp_compile/kernels/probe/forward.py"


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Builds the sdist, then the wheel from the sdist, out of a copy of the tree with one more kernel in it."""
    copy = tmp_path_factory.mktemp("source") / "tree"
    ignore = shutil.ignore_patterns(".*", "__pycache__", "build", "dist", "*.egg-info", "torch_compile_debug")
    shutil.copytree(ROOT, copy, symlinks=True, ignore=ignore)
    (copy / PROBE).parent.mkdir(parents=True, exist_ok=True)
    (copy / PROBE).write_text("", encoding="utf-8")
    out = tmp_path_factory.mktemp("dist")
    command = [sys.executable, "-m", "build", "--no-isolation", "--outdir", str(out), str(copy)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stdout + done.stderr
    return out


@pytest.fixture(scope="module")
def wheel(built: Path) -> set[str]:
    (path,) = built.glob("*.whl")
    with zipfile.ZipFile(path) as archive:
        return set(archive.namelist())


@pytest.fixture(scope="module")
def sdist(built: Path) -> set[str]:
    (path,) = built.glob("*.tar.gz")
    with tarfile.open(path) as archive:
        return {name.split("/", 1)[1] for name in archive.getnames() if "/" in name}


def expected() -> set[str]:
    files = (path for path in (ROOT / "sp_compile").rglob("*") if path.is_file() and "__pycache__" not in path.parts)
    return {PROBE} | {path.relative_to(ROOT).as_posix() for path in files if path.suffix in DATA or path.name == "py.typed"}


def test_wheel_holds_every_module_and_data_file(wheel: set[str]) -> None:
    assert expected() - wheel == set()


def test_sdist_holds_every_module_and_data_file(sdist: set[str]) -> None:
    assert expected() - sdist == set()


def test_wheel_holds_nothing_else(wheel: set[str]) -> None:
    tops = {name.split("/")[0] for name in wheel}
    assert {top for top in tops if not top.endswith(".dist-info")} == {"sp_compile"}


def test_sdist_has_no_tests_bench_or_root_links(sdist: set[str]) -> None:
    tops = {name.split("/")[0] for name in sdist}
    assert tops & {"tests", "bench", "passes", "lowering", "kernels", "examples", "docs"} == set()
    assert {"README.md", "LICENSE", "CHANGELOG.md", "pyproject.toml", "sp_compile"} <= tops


def test_wheel_registers_the_backend(built: Path) -> None:
    (path,) = built.glob("*.whl")
    with zipfile.ZipFile(path) as archive:
        (name,) = [item for item in archive.namelist() if item.endswith("entry_points.txt")]
        text = archive.read(name).decode()
    assert "[torch_dynamo_backends]" in text
    assert "shared_prefix = sp_compile.backend:shared_prefix" in text


def test_wheel_carries_the_licence_and_only_two_hard_requirements(built: Path) -> None:
    (path,) = built.glob("*.whl")
    with zipfile.ZipFile(path) as archive:
        (name,) = [item for item in archive.namelist() if item.endswith(".dist-info/METADATA")]
        metadata = archive.read(name).decode()
        assert any(item.endswith("LICENSE") for item in archive.namelist())
    required = [line for line in metadata.splitlines() if line.startswith("Requires-Dist:") and "extra ==" not in line]
    assert required == ["Requires-Dist: torch>=2.11", "Requires-Dist: numpy"]
    assert "License-Expression: BSD-3-Clause" in metadata


@pytest.mark.parametrize("name", ["passes", "lowering", "kernels"])
def test_root_link_is_relative_and_opens_the_package_folder(name: str) -> None:
    link = ROOT / name
    assert link.is_symlink()
    assert link.readlink() == Path("sp_compile") / name
