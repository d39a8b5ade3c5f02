"""Training in several processes: DistributedDataParallel on two ranks, and compile caches that outlive a process."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
import textwrap
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).parents[2]

DDP = """
import json, os, sys, warnings
import torch, torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel
import sp_compile
from tests.e2e import compare, models, scenarios
from tests.e2e.training_parts import gradients, objective

kind, rank = sys.argv[1], int(os.environ["RANK"])
dist.init_process_group("gloo")
torch._dynamo.config.optimize_ddp = kind == "split"
if kind == "split":
    dist._DEFAULT_FIRST_BUCKET_BYTES = 4096
rows = {"uneven": scenarios.star(rank, rows=3 + 2 * rank, prompt=5 + 3 * rank),
        "nothing": scenarios.star() if rank == 0 else scenarios.different()}.get(kind, scenarios.star(rank))
ids, _, labels = scenarios.right_padded(rows)
batch = scenarios.Batch("", {"input_ids": ids, "labels": labels}, torch.ones_like(ids, dtype=torch.bool))
make = lambda: models.spread(models.Gpt(width=16, heads=2, layers=1))
plain, model = make(), make()
dense, wrapped = DistributedDataParallel(plain), DistributedDataParallel(model, bucket_cap_mb=0.005 if kind == "split" else 25)
call = torch.compile(wrapped, backend="shared_prefix", options={"inner": "aot_eager"})
with warnings.catch_warnings(record=True) as caught:
    warnings.simplefilter("always")
    for _ in range(2):
        wanted = gradients(plain, lambda: objective(dense, batch).backward())
        found = gradients(model, lambda: objective(call, batch).backward())
        run = sp_compile.last_run()
error = max(compare.relative(found[n], w, 1e-6) for n, w in wanted.items())
print(json.dumps({"shared": run.shared, "refused": run.refused, "notes": run.notes, "error": error, "physical": run.physical_tokens,
                  "logical": run.logical_tokens, "warned": [str(w.message) for w in caught if "shared_prefix" in str(w.message)]}))
dist.destroy_process_group()
"""

CACHED = """
import json, sys
import torch, sp_compile
from sp_compile import inner
from torch._dynamo.utils import counters
from tests.e2e import models, scenarios
from tests.e2e.test_modes import labelled
from tests.e2e.training_parts import objective

inner._sources = lambda: "the sources"  # so that only what the test changes differs
if sys.argv[1] == "version":
    sp_compile.__version__ = "another"
torch.use_deterministic_algorithms(sys.argv[1] == "deterministic")
model = models.spread(models.Gpt(width=16, heads=2, layers=1))
loss = objective(torch.compile(model, backend="shared_prefix"), labelled())
loss.backward()
assert sp_compile.last_run().shared
squares = sum(float(p.grad.double().square().sum()) for p in model.parameters())
print(json.dumps({"loss": loss.item(), "squares": squares, **{k: v for k, v in counters["inductor"].items() if "fxgraph_cache" in k}}))
"""


def start(code: str, *arguments: str, **environment: str) -> subprocess.Popen[str]:
    set_here = {"OMP_NUM_THREADS": "1", "TORCHINDUCTOR_COMPILE_THREADS": "1", **environment}
    variables = {**os.environ, **set_here, "PYTHONPATH": os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")])}
    command = [sys.executable, "-c", textwrap.dedent(code), *arguments]
    return subprocess.Popen(command, env=variables, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)


def result(process: subprocess.Popen[str], timeout: float) -> dict[str, Any]:
    try:
        out, err = process.communicate(timeout=timeout)
    except subprocess.TimeoutExpired:
        process.kill()
        raise
    assert process.returncode == 0, err[-3000:]
    found: dict[str, Any] = json.loads(out.strip().splitlines()[-1])
    return found


def ranks(kind: str) -> list[dict[str, Any]]:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = str(free.getsockname()[1])
    common = {"WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port, "TORCHINDUCTOR_FORCE_DISABLE_CACHES": "1"}
    started = [start(DDP, kind, RANK=str(rank), **common) for rank in range(2)]
    try:
        return [result(process, 240) for process in started]
    finally:
        for process in started:
            process.kill()


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["same", "uneven"])
def test_ddp_shares_and_equals_dense(kind: str) -> None:
    for rank in ranks(kind):
        assert rank["shared"]
        assert rank["physical"] < rank["logical"]
        assert rank["error"] <= 1e-4


@pytest.mark.slow
def test_ddp_with_nothing_to_share_on_one_rank() -> None:
    first, second = ranks("nothing")
    assert first["shared"]
    assert not second["shared"]
    assert "min_sharing" in second["notes"][0]
    assert max(first["error"], second["error"]) <= 1e-4


def test_ddp_split_is_refused_with_the_remedy() -> None:
    """Its parts used to restart one another's capture for ever."""
    for rank in ranks("split"):
        assert not rank["shared"]
        assert "optimize_ddp = False" in rank["refused"][0]
        assert rank["warned"]
        assert rank["error"] <= 1e-4


@pytest.mark.slow
def test_warm_caches_across_processes(tmp_path: Path) -> None:
    """A second process finds the graphs of the first, unless the package's version or the determinism policy differ."""
    runs = [result(start(CACHED, kind, TORCHINDUCTOR_CACHE_DIR=str(tmp_path), TORCHINDUCTOR_FORCE_DISABLE_CACHES="0"), 400)
            for kind in ("first", "again", "version", "deterministic")]  # fmt: skip
    hits = [run.get("fxgraph_cache_hit", 0) for run in runs]
    assert hits[0] == 0
    assert hits[1] == runs[0]["fxgraph_cache_miss"] > 0
    assert hits[2:] == [0, 0]
    for run in runs:
        assert (run["loss"], run["squares"]) == pytest.approx((runs[0]["loss"], runs[0]["squares"]), rel=1e-6)
