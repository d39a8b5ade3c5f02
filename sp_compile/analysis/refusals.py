"""From a reason that the analysis found to the error that a user reads."""

from __future__ import annotations

import os

import torch
import torch.fx

from sp_compile import capture
from sp_compile.analysis.layouts import Reason
from sp_compile.errors import CannotShare

_ADVICE = (
    "Before the last layer that mixes tokens, only causal attention, causal convolutions and known recurrences may mix them: "
    "move the op behind it, or out of the compiled model."
)


def refusal(why: Reason) -> CannotShare:
    return CannotShare(why.text, op=why.op, node=why.node, source=why.source, advice=why.advice or _ADVICE)


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
