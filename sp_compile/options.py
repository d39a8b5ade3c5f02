"""The options of `torch.compile(..., options={...})`."""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Mapping
from typing import Any

from sp_compile.errors import InvalidOption

ROUTER_BLOCK = 1024
"""Tokens in a block of router logits."""


@dataclasses.dataclass(frozen=True)
class Options:
    """Everything a user can set.

    Attributes:
        strict: raise `CannotShare` instead of warning and running the dense graph.
        min_sharing: logical tokens over physical tokens below which the dense graph runs.
        inner: compiler of the rewritten graph: "inductor", "aot_eager" or "eager".
        kernels: names of implementations to prefer, in order (`explain()` lists them).
        disable: names of passes to leave out.
        count_padding: whether row padding counts in reductions over tokens; None: as in the dense graph, where it does unless a mask
            multiplies it. Setting it where nothing is shared is an error.
        router_blocks: compute the logits of routers on shared tokens in blocks of this many tokens (True: 1024), so that a token's have the
            same bits in every batch; False: as one product. `last_run().kernels["router_blocks"]` says for how many.
        dump: folder for the graph before and after every pass.
        context_parallel: process group, or DeviceMesh of one dimension, whose ranks compute a batch together. Each is called on the whole
            batch, or inside of `share(plan)` on its part of a pack.
        context_attention: what attention sends over `context_parallel` ranks: "gather" (keys and values to all of them), "heads" (each gets
            all tokens of some heads), or "auto", whichever sends less.
    """

    strict: bool = False
    min_sharing: float = 1.1
    inner: str = "inductor"
    kernels: tuple[str, ...] = ()
    disable: tuple[str, ...] = ()
    count_padding: bool | None = None
    router_blocks: int = 0
    dump: str | None = None
    context_parallel: Any = None
    context_attention: str = "auto"


def parse(given: Mapping[str, Any] | None) -> Options:
    """Check a user's options.

    Raises:
        InvalidOption: an unknown name, a wrong type or a value out of range.
    """
    known = {field.name for field in dataclasses.fields(Options)}
    values: dict[str, Any] = dict(given or {})
    unknown = sorted(set(values) - known)
    if unknown:
        raise InvalidOption(f"unknown options {unknown}; known options are {sorted(known)}")
    for name in ("kernels", "disable"):
        if name in values:
            given_names = values[name]
            items = (given_names,) if isinstance(given_names, str) else given_names
            if not isinstance(items, list | tuple | set | frozenset) or not all(isinstance(item, str) for item in items):
                raise InvalidOption(f"option {name} takes names, got {given_names!r}")
            values[name] = tuple(items)
    if not isinstance(values.get("strict", False), bool):
        raise InvalidOption(f"option strict takes True or False, got {values['strict']!r}")
    sharing = values.get("min_sharing", 1.0)
    if isinstance(sharing, bool) or not isinstance(sharing, int | float) or not sharing >= 1:
        raise InvalidOption(f"option min_sharing takes a number of at least 1 (logical over physical tokens), got {sharing!r}")
    if values.get("inner", "inductor") not in ("inductor", "aot_eager", "eager"):
        raise InvalidOption(f"option inner takes 'inductor', 'aot_eager' or 'eager', got {values['inner']!r}")
    if not isinstance(values.get("count_padding"), bool | None):
        raise InvalidOption(f"option count_padding takes None, True or False, got {values['count_padding']!r}")
    blocks = values.get("router_blocks", False)
    if not isinstance(blocks, int) or blocks < 0:
        raise InvalidOption(f"option router_blocks takes True, False or a number of tokens, got {blocks!r}")
    values["router_blocks"] = ROUTER_BLOCK if blocks is True else int(blocks)
    if values.get("context_attention", "auto") not in ("auto", "gather", "heads"):
        raise InvalidOption(f"option context_attention takes 'auto', 'gather' or 'heads', got {values['context_attention']!r}")
    if values.get("context_parallel") is not None:
        values["context_parallel"] = _group(values["context_parallel"])
    dump = values.get("dump")
    if dump is not None:
        if not isinstance(dump, str | os.PathLike):
            raise InvalidOption(f"option dump takes a folder, got {dump!r}")
        values["dump"] = os.fspath(dump)
    return Options(**values)


def _group(value: Any) -> Any:
    """The process group that an option names."""
    import torch.distributed as dist

    if dist.is_available():
        from torch.distributed.device_mesh import DeviceMesh

        if isinstance(value, DeviceMesh):
            if value.ndim != 1:
                given = f"{value.ndim} ({value.mesh_dim_names})"
                raise InvalidOption(f"option context_parallel takes a DeviceMesh of one dimension, got {given}; name one: mesh['cp']")
            return value.get_group()
    if not _is_group(value):
        raise InvalidOption(f"option context_parallel takes a torch.distributed process group or a DeviceMesh dimension, got {value!r}")
    return value


def _is_group(value: object) -> bool:
    import torch.distributed as dist

    return dist.is_available() and isinstance(value, dist.ProcessGroup)
