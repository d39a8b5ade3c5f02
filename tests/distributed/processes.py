"""Runs one function on the ranks of a gloo group, each in a process of its own, and brings back what it returns."""

from __future__ import annotations

import datetime
import tempfile
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing as mp

Work = Callable[..., Any]

# Long enough for a loaded machine that compiles; a rank that waits for ever fails its test instead of the whole run.
TIMEOUT = datetime.timedelta(seconds=400)


def _rank(rank: int, ranks: int, folder: str, work: Work, args: tuple[Any, ...]) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{folder}/store", rank=rank, world_size=ranks, timeout=TIMEOUT)
    try:
        found = (True, work(rank, ranks, *args))
    except Exception as error:
        found = (False, (type(error).__name__, str(error), traceback.format_exc()))
    torch.save(found, f"{folder}/{rank}")
    dist.barrier()
    dist.destroy_process_group()


def run(ranks: int, work: Work, *args: Any) -> list[Any]:
    """`work(rank, ranks, *args)` of every rank.

    A rank that raises yields its error as (class name, text); anything that was not meant to raise should be looked at by the caller.
    """
    with tempfile.TemporaryDirectory() as folder:
        context = mp.get_context("forkserver")
        context.set_forkserver_preload(["torch._dynamo", "tests.distributed.cases"])
        started = [context.Process(target=_rank, args=(rank, ranks, folder, work, args)) for rank in range(ranks)]
        try:
            for process in started:
                process.start()
            for process in started:
                process.join(TIMEOUT.total_seconds())
                assert process.exitcode == 0, f"a rank did not finish: exit code {process.exitcode}"
        finally:
            for process in started:
                if process.is_alive():
                    process.kill()
        return [torch.load(Path(folder) / str(rank), weights_only=False) for rank in range(ranks)]


def results(ranks: int, work: Work, *args: Any) -> list[Any]:
    """As `run`, where no rank may raise."""
    found = run(ranks, work, *args)
    wrong = [value[2] for fine, value in found if not fine]
    assert not wrong, wrong[0]
    return [value for _, value in found]
