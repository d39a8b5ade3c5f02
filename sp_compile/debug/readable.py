"""Graphs as Python text for people: shapes over T, B and L, source lines without folders, nothing that changes from run to run."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from typing import Any

import torch
import torch.fx

from sp_compile.passes.metadata import propagate
from sp_compile.passes.stage import Context

_ANNOTATION = re.compile(r'(?<=: )"([^"]*)"')
_DELETION = re.compile(r";  (?:\w+ = )+None[ \t]*$", re.MULTILINE)
_NO_SOURCE = re.compile(r"^[ \t]*#[ \t]*No stacktrace found for following nodes\n", re.MULTILINE)
_SOURCE = re.compile(r"^([ \t]*#.*?)File: (.+?)(:\d+ in )", re.MULTILINE)
_INSTALLED = re.compile(r".*(?:site|dist)-packages[/\\]")


def code(graph: torch.fx.Graph, module: torch.fx.GraphModule, context: Context, title: str) -> str:
    """The text of a captured or rewritten graph and of the graphs it calls.

    Args:
        graph: not changed. Shapes are computed afresh on a copy; where that fails the text says so and leaves them out.
        module: the captured module, which holds the constants.
        context: the analysis, which has the captured graph's shapes.
        title: the first line.
    """
    copied, stale = _copy(graph)
    names: Mapping[str, str] = {}
    note = "# T physical tokens, B rows, L columns\n"
    if graph is module.graph:
        symbols = context.analysis.symbols
        names = {str(symbols.batch): "B", str(symbols.columns): "L"}
        for old, new in stale.items():
            if old in context.analysis.nodes:
                new.meta["val"] = context.analysis.nodes[old].value
    else:
        try:
            shapes = propagate(copied, module, context)
            names = {str(symbol.node.expr): name for name, symbol in shapes.symbols.items()}
        except Exception as error:  # a dump is for finding defects: it must not be stopped by one
            note = f"# shapes unknown: {type(error).__name__}: {' '.join(str(error).split())}\n"
            for node in copied.nodes:
                node.meta.pop("val", None)
    text = f"# {title}\n{note}\n" + _text(copied, names)
    for name, body in _called(graph, module):
        text += f"\n\n# called above as self.{name}\n" + _text(body, {}).replace("def forward(", f"def {name}(", 1)
    return text


def _copy(graph: torch.fx.Graph) -> tuple[torch.fx.Graph, dict[torch.fx.Node, torch.fx.Node]]:
    """A copy without values that describe another graph, and its nodes by the original ones."""
    copied = torch.fx.Graph()
    made: dict[torch.fx.Node, torch.fx.Node] = {}
    copied.output(copied.graph_copy(graph, made))
    for node in copied.nodes:
        for key in ("val", "tensor_meta", "example_value"):
            node.meta.pop(key, None)
    return copied, made


def _text(graph: torch.fx.Graph, names: Mapping[str, str]) -> str:
    text = graph.python_code("self", verbose=True).src
    text = _NO_SOURCE.sub("", _DELETION.sub("", text))
    text = _SOURCE.sub(lambda found: found[1] + _short(found[2]) + found[3], text)
    lines = [line if line.lstrip().startswith("#") else _renamed(line.rstrip(), names) for line in text.strip().splitlines()]
    lines[:1] = _signature(lines[0])
    kept = [line for number, line in enumerate(lines) if line.strip() or (number and lines[number - 1].strip())]
    return "\n".join(kept).rstrip() + "\n"


def _signature(line: str) -> list[str]:
    """One line for each parameter, so that a difference shows the one that came or went."""
    start, end = line.index("(") + 1, line.rindex(")")
    parameters = re.split(r', (?=(?:[^"]*"[^"]*")*[^"]*$)', line[start:end])
    return [line[:start], *(f"    {parameter}," for parameter in parameters), line[end:]]


def _renamed(line: str, names: Mapping[str, str]) -> str:
    """The line with symbols in its annotations replaced by what they stand for."""
    if not names:
        return line
    symbols = re.compile(r"\b(" + "|".join(map(re.escape, names)) + r")\b")
    return _ANNOTATION.sub(lambda found: '"' + symbols.sub(lambda symbol: names[symbol[1]], found[1]) + '"', line)


def _short(path: str) -> str:
    """A path from the installed package on, or the file's name: no folder of this machine."""
    if _INSTALLED.match(path):
        return _INSTALLED.sub("", path)
    return re.split(r"[/\\]", path)[-1]


def _called(graph: torch.fx.Graph, module: torch.fx.GraphModule) -> Iterator[tuple[str, torch.fx.Graph]]:
    """Graphs that higher-order calls run, such as the body of a checkpoint, innermost last."""
    seen: set[str] = set()
    for node in graph.nodes:
        body: Any = getattr(module, str(node.target), None) if node.op == "get_attr" else None
        if isinstance(body, torch.fx.GraphModule) and str(node.target) not in seen:
            seen.add(str(node.target))
            yield str(node.target), body.graph
            yield from _called(body.graph, body)
