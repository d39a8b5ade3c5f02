"""Ranks as threads of one process: a region that was captured once runs on every one of them, with parameters of its own.

What ranks send each other is handed over at a barrier, so that any number of ranks is cheap. One rank that raises breaks the barrier,
and the others raise too.
"""

from __future__ import annotations

import contextlib
import dataclasses
import threading
from collections.abc import Callable, Iterator, Sequence
from typing import Any
from unittest import mock

import torch
from torch import Tensor, nn

import sp_compile
from sp_compile.backend import shared_prefix
from sp_compile.layout.rank_plans import RankPlan, take_local
from sp_compile.ops import layout_conversion, rank_values
from sp_compile.region import Region


class Group:
    """Stands for a process group."""

    group_name = "simulated"

    def __init__(self, ranks: int) -> None:
        self.ranks, self.slots = ranks, [None] * ranks
        self.barrier, self.own = threading.Barrier(ranks), threading.local()
        self.sent: list[str] = []

    def size(self) -> int:
        return self.ranks

    def rank(self) -> int:
        return getattr(self.own, "rank", 0)

    def exchange(self, what: str, value: Any) -> list[Any]:
        """What every rank gave for this call, of which all must make the same."""
        if self.rank() == 0:
            self.sent.append(what)
        self.slots[self.rank()] = (what, value)
        self.barrier.wait()
        found = list(self.slots)
        self.barrier.wait()
        assert {name for name, _ in found} == {what}, f"ranks make different calls: {[name for name, _ in found]}"
        return [value for _, value in found]

    # the functional collectives

    def all_to_all_single(self, rows: Tensor, receive: list[int], send: list[int], group: str) -> Tensor:
        parts = self.exchange("all_to_all", rows.detach().split(send))
        mine = [part[self.rank()] for part in parts]
        assert [len(part) for part in mine] == list(receive)
        return torch.cat(mine)

    def all_gather_into_tensor(self, rows: Tensor, ranks: int, group: str) -> Tensor:
        return torch.cat(self.exchange("all_gather", rows.detach()))

    def wait_tensor(self, value: Tensor) -> Tensor:
        return value

    def all_gather_object(self, found: list[Any], value: Any, group: Any = None) -> None:
        found[:] = self.exchange("objects", value)


@dataclasses.dataclass
class Found:
    """What one rank computes."""

    outputs: list[Tensor]
    loss: Tensor
    gradients: dict[str, Tensor]
    buffers: dict[str, Tensor]


class _Stop(Exception):
    pass


@contextlib.contextmanager
def standing_in(group: Group) -> Iterator[None]:
    """Calls of torch.distributed go to the simulated group."""
    with contextlib.ExitStack() as stack:
        stack.enter_context(mock.patch.object(layout_conversion, "_functional", return_value=group))
        stack.enter_context(mock.patch.object(rank_values, "own_rank", side_effect=lambda name: group.rank()))
        stack.enter_context(mock.patch("torch.distributed.all_gather_object", group.all_gather_object))
        stack.enter_context(mock.patch("sp_compile.options._is_group", return_value=True))
        yield


def together(group: Group, work: Callable[[int], Any]) -> list[Any]:
    """`work(rank)` on every rank; raises the first error of a rank that was not waiting for another."""
    found: list[Any] = [None] * group.ranks
    errors: list[BaseException] = []

    def run(rank: int) -> None:
        group.own.rank = rank
        try:
            found[rank] = work(rank)
        except BaseException as error:
            errors.append(error)
            group.barrier.abort()

    threads = [threading.Thread(target=run, args=(rank,)) for rank in range(group.ranks)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    causes = [error for error in errors if not isinstance(error, threading.BrokenBarrierError)]
    if causes or errors:
        raise (causes or errors)[0]
    return found


class Captured:
    """The one region of a model, and what it was called with.

    Args:
        model: without graph breaks.
        inputs: of the first rank; tensors among them are told apart by identity.
        plan: of the first rank, for a packed call.
    """

    def __init__(self, model: nn.Module, inputs: Sequence[Any], group: Group, plan: RankPlan | None = None, **options: Any) -> None:
        self.group = group
        calls: list[tuple[Region, tuple[Any, ...]]] = []

        def stop(region: Region, *given: Any) -> Any:
            calls.append((region, given))
            raise _Stop

        torch._dynamo.reset()
        self.names = {id(value): name for name, value in [*model.named_parameters(), *model.named_buffers()]}
        self.places = {id(value): number for number, value in enumerate(inputs) if isinstance(value, Tensor)}
        context = contextlib.nullcontext() if plan is None else sp_compile.share(plan)
        settings = {"inner": "eager", "context_parallel": group, **options}
        with standing_in(group), context, contextlib.suppress(_Stop), mock.patch.object(Region, "__call__", stop):
            torch.compile(model, backend=shared_prefix, options=settings)(*inputs)  # type: ignore[call-overload]
        assert calls, "the model was not captured"
        self.call, self.given = calls[-1]

    def on_rank(self, inputs: Sequence[Any], loss_of: Callable[[list[Tensor]], Tensor], plan: RankPlan | None = None) -> Found:
        """One step on the calling rank, from the state of the captured model."""
        state: dict[str, Tensor] = {}
        values = []
        for value in self.given:
            if id(value) in self.names:
                state[self.names[id(value)]] = value.detach().clone().requires_grad_(value.requires_grad)
                values.append(state[self.names[id(value)]])
            elif id(value) in self.places:
                values.append(inputs[self.places[id(value)]])
            else:
                values.append(value)
        with contextlib.nullcontext() if plan is None else sp_compile.share(plan):
            outputs = [value for value in self.call(*values) if isinstance(value, Tensor)]
        loss = loss_of(outputs)
        loss.backward()
        gradients = {name: value.grad for name, value in state.items() if value.grad is not None}
        return Found([x.detach() for x in outputs], loss.detach(), gradients, {n: v for n, v in state.items() if not v.requires_grad})


def on_rows(model: nn.Module, inputs: Sequence[Any], ranks: int, loss_of: Callable[[list[Tensor]], Tensor], **options: Any) -> list[Found]:
    """Every rank is given the whole batch."""
    return repeated(model, inputs, ranks, loss_of, 1, **options)[0]


def repeated(
    model: nn.Module, inputs: Sequence[Any], ranks: int, loss_of: Callable[[list[Tensor]], Tensor], times: int, **options: Any
) -> list[list[Found]]:
    """`on_rows` several times, from one state and one capture."""
    group = Group(ranks)
    captured = Captured(model, inputs, group, **options)
    with standing_in(group):
        return [together(group, lambda rank: captured.on_rank(inputs, loss_of)) for _ in range(times)]


def on_pack(
    model: nn.Module, packed: Sequence[Tensor], plans: Sequence[RankPlan], loss_of: Callable[[list[Tensor], RankPlan], Tensor],
    **options: Any,
) -> list[Found]:  # fmt: skip
    """Every rank is given its part of packed inputs [1, T, ...]."""
    group = Group(len(plans))
    parts = [[take_local(value, plan, fill=1) for value in packed] for plan in plans]
    captured = Captured(model, parts[0], group, plans[0], **options)
    with standing_in(group):
        return together(group, lambda rank: captured.on_rank(parts[rank], lambda outs: loss_of(outs, plans[rank]), plans[rank]))
