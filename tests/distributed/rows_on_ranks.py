"""Steps of a model that is given whole rows, on the processes of a group."""

from __future__ import annotations

import contextlib
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.nn.parallel import DistributedDataParallel

import sp_compile
from sp_compile import region
from sp_compile.backend import shared_prefix
from tests.e2e import test_expert_forms as forms

FORMS = {"fine": forms.Fine, "sorted": forms.Sorted, "loop": forms.Loop}


def model_of(kind: str) -> nn.Module:
    return forms.Model(FORMS[kind]).double()


def loss_of(outputs: tuple[Tensor, Tensor]) -> Tensor:
    logits, balance = outputs
    return (logits * torch.sin(torch.arange(logits.numel())).view(logits.shape)).mean() + 0.1 * balance


def dense(kind: str, seeds: list[int]) -> dict[str, Any]:
    """Mean loss and gradients over batches, without ranks; counts of the last."""
    model = model_of(kind)
    losses = []
    for seed in seeds:
        start = {name: value.clone() for name, value in model.named_buffers()}
        loss = loss_of(model(forms.batch(seed=seed))) / len(seeds)
        loss.backward()
        losses.append(loss.detach())
        if seed != seeds[-1]:
            model.load_state_dict(start, strict=False)
    return {"loss": torch.stack(losses).sum(), **_state(model)}


def _state(model: nn.Module) -> dict[str, Any]:
    gradients = {name: p.grad.detach().clone() for name, p in model.named_parameters() if p.grad is not None}
    return {"gradients": gradients, "buffers": {name: value.clone() for name, value in model.named_buffers()}}


def step(rank: int, ranks: int, kind: str, inner: str, replicas: int) -> dict[str, Any]:
    """One step on a mesh of replicas x context parallel ranks, whose gradients DistributedDataParallel averages over all of them."""
    torch._dynamo.config.optimize_ddp = False
    size = ranks // replicas
    mesh = init_device_mesh("cpu", (replicas, size), mesh_dim_names=("dp", "cp"))
    model = model_of(kind)
    options = {"inner": inner, "context_parallel": mesh["cp"]}
    model.compile(backend=shared_prefix, options=options)
    call = DistributedDataParallel(model, broadcast_buffers=False)
    loss = loss_of(call(forms.batch(seed=rank // size)))
    account = sp_compile.last_run()
    assert account.shared
    (loss * size).backward()
    return {"loss": loss.detach(), **_state(model)}


def fully_sharded(rank: int, ranks: int, kind: str) -> dict[str, Any]:
    """The same under FSDP2, which averages too."""
    from torch.distributed.fsdp import fully_shard

    mesh = init_device_mesh("cpu", (ranks,), mesh_dim_names=("cp",))
    model = model_of(kind)
    fully_shard(model, mesh=mesh)
    model.compile(backend=shared_prefix, options={"inner": "eager", "context_parallel": mesh["cp"]})
    loss = loss_of(model(forms.batch()))
    assert sp_compile.last_run().shared
    (loss * ranks).backward()
    gradients = {name: p.grad.full_tensor() for name, p in model.named_parameters() if p.grad is not None}
    return {"loss": loss.detach(), "gradients": gradients, "buffers": {name: value.clone() for name, value in model.named_buffers()}}


def faulty(rank: int, ranks: int, fault: str) -> Any:
    """A call for which one rank has another batch, or fails to prepare it."""
    model = model_of("fine")
    call = torch.compile(model, backend=shared_prefix, options={"inner": "eager", "context_parallel": dist.group.WORLD})
    call(forms.batch())
    ids = forms.batch(seed=1 if rank == 1 and fault == "ids" else 0)
    if rank == 1 and fault == "rows":
        ids = ids[:3]
    failing = mock.patch.object(region, "make_forest", side_effect=MemoryError("no room")) if rank == 1 and fault == "raises" else None
    with failing or contextlib.nullcontext():
        loss_of(call(ids)).backward()
    return rank
