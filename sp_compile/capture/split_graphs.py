"""Graphs that something cut into parts between Dynamo and this backend, as DDPOptimizer does along its gradient buckets.

The parts are compiled with fake tensors. Only the first has token ids, so none can be shared, and a restart of the trace, which asks for
symbols, would never end: each part would ask anew.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch._subclasses.fake_tensor import FakeTensor

from sp_compile.errors import CannotShare


def split_refusal(values: Sequence[Any]) -> CannotShare | None:
    """Why a graph that was given with these inputs cannot be shared, if it is a part of a larger one."""
    if not any(isinstance(value, FakeTensor) for value in values):
        return None
    advice = "Set torch._dynamo.config.optimize_ddp = False before the first call: gradients are reduced as before, the graph stays whole."
    if not (torch.distributed.is_available() and torch.distributed.is_initialized()):
        advice = "Compile the model directly, without what splits its graph."
    return CannotShare(
        "the graph was split into parts (DistributedDataParallel does so along its buckets), of which one has token ids", advice=advice
    )
