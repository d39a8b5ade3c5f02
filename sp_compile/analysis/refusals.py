"""From a reason that the analysis found to the error that a user reads."""

from __future__ import annotations

import os
import warnings
from collections.abc import Callable, Iterable

import torch
import torch.fx

from sp_compile import capture
from sp_compile.analysis.layouts import Layout, Reason
from sp_compile.errors import CannotShare

_ADVICE = (
    "Before the last layer that mixes tokens, only causal attention, causal convolutions and known recurrences may mix them: "
    "move the op behind it, or out of the compiled model."
)


def refusal(why: Reason) -> CannotShare:
    return CannotShare(why.text, op=why.op, node=why.node, source=why.source, advice=why.advice or _ADVICE)


_LEFT_ALONE = "Write it with the library function that the message names, unchanged, or leave out strict to run it on rows."


def tell_rows(nodes: Iterable[torch.fx.Node], layout: Callable[[torch.fx.Node], Layout | None], strict: bool) -> None:
    """Warns of library functions that were not captured and run on rows inside of a shared graph.

    Raises:
        CannotShare: there is one, and `strict`.
    """
    for node in nodes:
        found = layout(node) if "rows_site" in str(node.target) else None
        if found is None or not found.is_rows:
            continue
        reason = str(node.args[1])
        if strict:
            raise CannotShare(reason, op=reason.split(" ")[0], node=node.name, source=source_line(node), advice=_LEFT_ALONE)
        warnings.warn(f"shared_prefix: {reason}.", stacklevel=2)


_NOT_THE_USERS = tuple(f'File "{folder}{os.sep}' for folder in (os.path.dirname(torch.__file__), os.path.dirname(capture.__file__)))
"""Beginnings of the stack lines of code that only carries out what the user's code asked for."""


def source_line(node: torch.fx.Node | None) -> str:
    """`file:line, in function` of the user's code that made a node, or an empty string."""
    text = node.meta.get("stack_trace") if node is not None else None
    if not text:
        return ""
    lines = [line.strip() for line in text.strip().splitlines() if line.strip().startswith("File ")]
    lines = [line for line in lines if not line.startswith(_NOT_THE_USERS)] or lines
    if not lines:
        return ""
    place = lines[-1]
    file, _, rest = place[len('File "') :].partition('", line ')
    number, _, function = rest.partition(", in ")
    return f"{file}:{number}" + (f", in {function}" if function else "")
