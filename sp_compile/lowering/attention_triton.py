"""Our own kernels in attention's table (`lowering/attention.py`), reproducible, for NVIDIA GPUs with Triton.

Some versions of Triton compile some patterns for Hopper wrongly, so a kernel that is right in the interpreter may be wrong on a GPU.
`triton` stands before other implementations and takes only what was compared with float64 on a GPU
(`bench/results/attention_ordered.json`). `triton_all` takes everything that the kernels are written for, and only where options name it.
"""

from __future__ import annotations

import functools
import importlib
import importlib.metadata

import torch
from torch.torch_version import TorchVersion

from sp_compile.kernels.attention.forest_triton import ops
from sp_compile.layout.attention_tiles import tile_names
from sp_compile.lowering.registry import PADDING_HIDES, Arguments, Implementation

OLDEST = "3.3"
CAPABILITY = (8, 0)
LARGEST_HEAD = 256
CHECKED = ((64, 64), (128, 128))
DTYPES = (torch.bfloat16, torch.float16, torch.float32)

__all__ = ["TRITON", "TRITON_ALL", "ops"]


@functools.cache
def unusable() -> str | None:
    """Why Triton cannot be used here, None if it can."""
    try:
        found = importlib.metadata.version("triton")
    except importlib.metadata.PackageNotFoundError:
        return f"needs the package triton (>= {OLDEST}), which is not installed"
    if TorchVersion(found) < OLDEST:
        return f"needs triton >= {OLDEST}, found {found}"
    try:
        importlib.import_module("sp_compile.kernels.attention.forest_triton.launch")
    except Exception as error:  # whatever its own dependencies raise
        return f"triton {found} cannot be imported: {type(error).__name__}: {error}"
    return None


def supports(arguments: Arguments) -> str | None:
    """None, or why the kernels cannot compute a call."""
    q, v = arguments["q"], arguments["v"]
    if q.device.type != "cuda" or torch.version.hip is not None:
        return f"runs on NVIDIA GPUs, the tensors are on {q.device.type}"
    if q.dtype not in DTYPES:
        return f"computes in {', '.join(str(dtype).removeprefix('torch.') for dtype in DTYPES)}, not {q.dtype}"
    if max(q.shape[3], v.shape[3]) > LARGEST_HEAD:
        return f"head dim {max(q.shape[3], v.shape[3])} is above {LARGEST_HEAD}"
    for name in ("segments", "bias"):
        if arguments[name] is not None:
            return f"has no {name}"
    if not arguments["scale"] > 0:
        return f"needs a positive scale, not {arguments['scale']}"
    if arguments["key_valid"] is not None and arguments.get("padding") is None:
        return "the host cannot tell whether key_valid hides anything"
    found = torch.cuda.get_device_capability(q.device)
    if found < CAPABILITY:
        return f"needs compute capability {'.'.join(map(str, CAPABILITY))}, the device has {'.'.join(map(str, found))}"
    return unusable()


def checked(arguments: Arguments) -> str | None:
    """None, or why a call is none of those that were compared on a GPU."""
    reason = supports(arguments)
    if reason is not None:
        return reason
    q, v = arguments["q"], arguments["v"]
    dims = q.shape[3], v.shape[3]
    if q.dtype != torch.bfloat16 or dims not in CHECKED or torch.cuda.get_device_capability(q.device) != (9, 0):
        return f"was compared on Hopper in bfloat16 with head dims {', '.join(str(k) for k, _ in CHECKED)}; triton_all takes others"
    given = [name for name in ("key_valid", "sinks", "window", "chunk", "softcap") if arguments[name] is not None]
    return f"was not compared with {', '.join(given)}; triton_all takes it" if given else None


def tiles(arguments: Arguments) -> tuple[str, ...]:
    """Names of the forest tensors under the call's window and chunk."""
    return (*tile_names(arguments["window"], arguments["chunk"]), PADDING_HIDES)


TRITON, TRITON_ALL = (
    Implementation(name, torch.ops.sp_compile.attention_triton.default, accepts, deterministic=True, forest_tensors=tiles, output=0)
    for name, accepts in (("triton", checked), ("triton_all", supports))
)
