"""transformers with kernel packages behind it: in training its models call fused kernels, which are another function than the parts."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("transformers")


def test_fused_training() -> None:
    """The same loss and gradients as without a compiler, shared or not; a fused call that is not known is refused, never taken apart."""
    root = Path(__file__).parents[2]
    path = os.pathsep.join([str(root), os.environ.get("PYTHONPATH", "")])
    done = subprocess.run(
        [sys.executable, "-m", "tests.capture.fused_training"],
        cwd=root,
        env=os.environ | {"PYTHONPATH": path},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr[-2000:]
    kernels = "kernels" in done.stdout.splitlines()
    lines = [line.split() for line in done.stdout.splitlines() if len(line.split()) == 5]
    assert [line[0] for line in lines] == ["mamba"] * 4 + ["mamba2"] * 4 + ["falcon_mamba"] * 2
    for number, (family, shared, refused, loss, gradients) in enumerate(lines):
        refuses = family == "falcon_mamba" and kernels  # which norms inside of its fused kernel
        assert (shared == "True", refused == "True") == (not refuses and (number % 2 == 0 or number > 7), refuses), lines[number]
        assert float(loss) < 1e-5, lines[number]
        assert float(gradients) < 1e-4, lines[number]
