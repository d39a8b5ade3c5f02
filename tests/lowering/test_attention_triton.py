"""When attention's Triton kernels are offered, and what they ask of a forest."""

from __future__ import annotations

import subprocess
import sys
from typing import Any

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from sp_compile.lowering import attention_triton
from sp_compile.lowering.attention_triton import TRITON, checked, supports


def arguments(device: str = "cuda", dtype: torch.dtype = torch.bfloat16, dim: int = 64, **changed: Any) -> dict[str, Any]:
    with FakeTensorMode(allow_non_fake_inputs=True):
        q, k, v = (torch.empty(1, heads, 20, dim, dtype=dtype, device=device) for heads in (4, 2, 2))
    given = {
        "q": q,
        "k": k,
        "v": v,
        **dict.fromkeys(("key_valid", "segments", "bias", "sinks", "window", "chunk", "softcap")),
        "scale": 0.1,
    }
    return given | changed


@pytest.fixture(autouse=True)
def hopper(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (9, 0))
    monkeypatch.setattr(attention_triton, "unusable", lambda: None)


def test_stands_before_others_in_calls_that_were_compared() -> None:
    for dim in (64, 128):
        assert checked(arguments(dim=dim)) is None
    for changed in ({"dim": 96}, {"dtype": torch.float16}, {"dtype": torch.float32}):
        assert "was compared on Hopper" in str(checked(arguments(**changed)))
    assert checked(arguments(window=4, softcap=2.0)) == "was not compared with window, softcap; triton_all takes it"
    assert checked(arguments(device="cpu")) == "runs on NVIDIA GPUs, the tensors are on cpu"


@pytest.mark.parametrize("dtype", attention_triton.DTYPES)
def test_supports_what_other_kernels_do_not(dtype: torch.dtype) -> None:
    assert supports(arguments(dtype=dtype, dim=256, window=40, chunk=64, softcap=30.0, sinks=torch.zeros(4))) is None
    assert supports(arguments(dtype=dtype, key_valid=torch.ones(1, 20), padding=3)) is None


@pytest.mark.parametrize(
    ("changed", "reason"),
    [
        ({"device": "cpu"}, "runs on NVIDIA GPUs, the tensors are on cpu"),
        ({"dtype": torch.float64}, "computes in bfloat16, float16, float32, not torch.float64"),
        ({"dim": 264}, "head dim 264 is above 256"),
        ({"segments": torch.zeros(1, 20)}, "has no segments"),
        ({"bias": torch.zeros(1, 1, 20, 20)}, "has no bias"),
        ({"scale": -1.0}, "needs a positive scale, not -1.0"),
        ({"key_valid": torch.ones(1, 20)}, "the host cannot tell whether key_valid hides anything"),
    ],
)
def test_says_why_not(changed: dict[str, Any], reason: str) -> None:
    assert supports(arguments(**changed)) == reason


def test_older_devices_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (7, 5))
    assert supports(arguments()) == "needs compute capability 8.0, the device has 7.5"


@pytest.mark.parametrize(("version", "reason"), [(None, "which is not installed"), ("3.1.0", "found 3.1.0"), ("9.0", "cannot be imported")])
def test_missing_and_old_triton_are_named(version: str | None, reason: str, monkeypatch: pytest.MonkeyPatch) -> None:
    def found(package: str) -> str:
        if version is None:
            raise attention_triton.importlib.metadata.PackageNotFoundError(package)
        return version

    def broken(name: str) -> None:
        raise ImportError("no libtriton")

    monkeypatch.undo()
    attention_triton.unusable.cache_clear()
    monkeypatch.setattr(attention_triton.importlib.metadata, "version", found)
    monkeypatch.setattr(attention_triton.importlib, "import_module", broken)
    said = attention_triton.unusable()
    attention_triton.unusable.cache_clear()
    assert said is not None
    assert reason in said


def test_forest_tensors_follow_window_and_chunk() -> None:
    assert TRITON.forest_names(arguments()) == ("attention_tiles_shape", "attention_tiles", "padding_hides")
    names = TRITON.forest_names(arguments(window=9, chunk=4))
    assert names == ("attention_tiles_window_9_chunk_4_shape", "attention_tiles_window_9_chunk_4", "padding_hides")


def test_package_is_imported_without_triton() -> None:
    code = "import sys; sys.modules['triton'] = None; from sp_compile.lowering import attention_triton as a; print(a.TRITON.name)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.stdout.strip() == "triton", done.stderr
