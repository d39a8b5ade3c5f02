"""The step bench on a GPU, small: every implementation passes its gate, experts are shared and counted exactly, steps are described."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

pytest.importorskip("transformers")
pytest.importorskip("rich")

from bench import step


@pytest.fixture(autouse=True)
def _full_precision() -> None:
    torch.backends.cuda.matmul.allow_tf32 = False


@pytest.mark.parametrize(
    "name, dtype, impls",
    [
        ("llama", "bfloat16", ("dense", "shared", "flex_tree", "gathered")),
        ("qwen3", "bfloat16", ("dense", "shared")),
        ("qwen3_moe", "float32", ("dense", "shared")),  # in bf16 so few tokens choose other experts by rounding
    ],
)
def test_small_step(name: str, dtype: str, impls: tuple[str, ...], tmp_path: Path) -> None:
    out = tmp_path / "step.json"
    sizes = ["--tiny", "--layers", "2", "--dtype", dtype, "--inner", "aot_eager", "--repeats", "1"]
    code = step.main([*sizes, "--models", name, "--cases", "0", "2", "--impls", *impls, "--out", str(out)])
    unshared, shared = json.loads(out.read_text())["cases"]
    assert unshared["gate"] == shared["gate"] == {one: [] for one in impls}
    assert code == 0
    assert shared["I"] == pytest.approx(5.0)
    assert all({"kernel_ms", "host_waits", "synchronisations", "peak_bytes"} <= set(entry) for entry in shared["steps"].values())
