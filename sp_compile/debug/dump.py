"""Writes what the passes did: the code before and after each, the difference, and the final graph.

Per pass `NN_<pass>.before.py`, `.after.py` and `.diff`; before the first `00_captured.py`; after the last `final.py`. They go
* into the folder of `options={"dump": folder}`, one subfolder for each captured graph and each way to read its inputs' sizes;
* beside depyf's own files while `depyf.prepare_debug(folder)` is active;
* first and last graph as artifacts `shared_prefix_before` and `shared_prefix_after` into the trace of `TORCH_TRACE`, which tlparse shows.
"""

from __future__ import annotations

import difflib
import logging
import re
import sys
from collections.abc import Callable
from pathlib import Path

import torch.fx
from torch._logging._internal import trace_structured

from sp_compile.debug import readable, regions
from sp_compile.passes.runner import Watcher
from sp_compile.passes.stage import Context

LAST = "select_kernels"
"""The pass whose result is the final graph."""

_OURS = re.compile(r"\d\d_\w+\.(?:before\.py|after\.py|py|diff)|final\.py")

Write = Callable[[str, str], None]


def watcher(folder: str | None, module: torch.fx.GraphModule, context: Context) -> Watcher | None:
    """What the runner calls after each pass; None if nobody asked for a dump.

    Args:
        folder: where to write, made if it does not exist; None writes only where depyf or a trace listens.
        module: the captured graph.
        context: what the passes know; shapes are computed from it.
    """
    depyf, traced = depyf_folder(), bool(logging.getLogger("torch.__trace").handlers)
    if folder is None and depyf is None and not traced:
        return None
    number = regions.number_of(module)
    name = regions.folder_name(number, regions.next_rewrite(number))
    writes: list[Write] = []
    if folder is not None:
        writes.append(_into(Path(folder, name)))
    if depyf is not None:
        writes.append(_beside(depyf, name))
    return _Watch(module, context, name, writes, traced)


def depyf_folder() -> Path | None:
    """The folder of the active `depyf.prepare_debug`, None outside of one. Does not import depyf."""
    state = getattr(sys.modules.get("depyf.explain.global_variables"), "data", None)
    if not isinstance(state, dict) or not state.get("is_inside_prepare_debug"):
        return None
    return Path(state["dump_src_dir"])


class _Watch:
    """One rewrite, from the captured graph to the final one."""

    def __init__(self, module: torch.fx.GraphModule, context: Context, name: str, writes: list[Write], traced: bool) -> None:
        self.module, self.context, self.name, self.writes, self.traced = module, context, name, writes, traced
        self.latest: tuple[torch.fx.Graph, str] = (module.graph, self._code(module.graph))
        self._write("00_captured.py", self.latest[1])
        self._trace("shared_prefix_before", self.latest[1])

    def __call__(self, number: int, name: str, before: torch.fx.Graph, after: torch.fx.Graph) -> None:
        stem = f"{number:02}_{name}"
        old = self.latest[1] if self.latest[0] is before else self._code(before)
        new = self._code(after)
        self.latest = (after, new)
        self._write(f"{stem}.before.py", old)
        self._write(f"{stem}.after.py", new)
        if self.writes:
            changes = difflib.unified_diff(old.splitlines(True), new.splitlines(True), f"{stem}.before.py", f"{stem}.after.py")
            self._write(f"{stem}.diff", "".join(changes))
        if name == LAST:
            self._write("final.py", new)
            self._trace("shared_prefix_after", new)

    def _code(self, graph: torch.fx.Graph) -> str:
        return readable.code(graph, self.module, self.context, self.name)

    def _write(self, file: str, text: str) -> None:
        for write in self.writes:
            write(file, text)

    def _trace(self, artifact: str, text: str) -> None:
        if self.traced:
            trace_structured(
                "artifact", metadata_fn=lambda: {"name": artifact, "encoding": "string"}, payload_fn=lambda: text, expect_trace_id=False
            )


def _into(folder: Path) -> Write:
    folder.mkdir(parents=True, exist_ok=True)
    for old in folder.iterdir():
        if _OURS.fullmatch(old.name):
            old.unlink()
    return lambda file, text: _save(folder / file, text)


def _beside(folder: Path, name: str) -> Write:
    folder.mkdir(parents=True, exist_ok=True)
    return lambda file, text: _save(folder / f"shared_prefix.{name}.{file}", text)


def _save(path: Path, text: str) -> None:
    path.write_text(text, encoding="utf-8")
