"""Token mixers of a pack that is spread over the ranks of a context parallel group.

Values are a rank's contiguous stretch [1, ..., S, ...] of the padded pack, and so are results; `plan` is the rank's `RankPlan`, `group` the
name of the process group of its C ranks. Padding is computed on as roots of one token and influences nothing. Gradients of parameters are
those of the rank's own tokens: their sum over the ranks is the gradient. Every rank must make the same calls in the same order.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from sp_compile.errors import InvalidInput, InvalidShards, StaleRoute
from sp_compile.layout.rank_plans import RankPlan, most_links
from sp_compile.ops import causal_conv1d, head_exchange, layout_conversion, query_attention, rows, scans  # noqa: F401  (register the ops)
from sp_compile.ops.dense_scans import KINDS
from sp_compile.ops.states_over_ranks import BESIDE, TABLES, SpreadScan


def _check_tokens(op: str, given: int, plan: RankPlan) -> None:
    if plan.sequence.tensor_ranks != 1:
        raise InvalidShards(f"{op}: expected a plan without tensor ranks; gather the tokens of tensor ranks before")
    if given != plan.size:
        raise StaleRoute(f"{op}: the plan is for {plan.size} tokens a rank, the values have {given}; make the plan of this batch")


def convert(x: Tensor, plan: RankPlan, group: str, *, dim: int, back: bool = False) -> Tensor:
    """A rank's tokens (dimension `dim`) in the layout of attention, or with `back` from there in the contiguous one.

    Where both layouts are the same nothing is sent and `x` is returned.

    Raises:
        StaleRoute: `x` has another number of tokens than the plan.
    """
    plan.into.require(plan.forest.key(), plan.into.member, plan.sequence.members, x.shape[dim])
    if plan.into.identity:
        return x
    route = plan.tensors(("send", "place", "send_back", "place_back", "splits"), x.device)
    converted: Tensor = torch.ops.sp_compile.convert_layout(x, *route, dim, group, back)
    return converted


def attention(
    q: Tensor, k: Tensor, v: Tensor, plan: RankPlan, group: str, *, key_valid: Tensor | None = None, segments: Tensor | None = None,
    sinks: Tensor | None = None, scale: float, window: int | None = None, chunk: int | None = None, softcap: float | None = None,
) -> Tensor:  # fmt: skip
    """`sp_compile::attention` over the ranks: queries travel to the layout of attention and results back, keys and values to everyone.

    Keys and values are gathered from the contiguous layout, which puts them in the order of tokens: they need no conversion.

    Args:
        q: [1, Hq, S, D]; k: [1, Hkv, S, D]; v: [1, Hkv, S, Dv].
        key_valid, segments: [1, S], as `sp_compile::attention` has them.
        sinks: [Hq].

    Returns:
        [1, Hq, S, Dv].

    Raises:
        InvalidInput, StaleRoute: shapes outside the contract, or of another batch than the plan.
    """
    for name, value in (("q", q), ("k", k), ("v", v)):
        if value.dim() != 4:
            raise InvalidInput(f"attention over ranks: expected {name} [1, H, S, D], got {list(value.shape)}")
        _check_tokens("attention over ranks", value.shape[2], plan)
    end, column, queries = plan.tensors(("end", "column", "queries"), q.device)
    keys, values = (torch.ops.sp_compile.gather_tokens(x, 2, plan.ranks, group) for x in (k, v))
    flags = [None if x is None else torch.ops.sp_compile.gather_tokens(x, 1, plan.ranks, group) for x in (key_valid, segments)]
    out = torch.ops.sp_compile.query_attention(
        convert(q, plan, group, dim=2), keys, values, queries, end, column, *flags, sinks,
        scale=scale, window=window, chunk=chunk, softcap=softcap,
    )  # fmt: skip
    return convert(out, plan, group, dim=2, back=True)


def convolution(x: Tensor, weight: Tensor, bias: Tensor | None, plan: RankPlan, group: str, *, activation: str | None = None) -> Tensor:
    """`sp_compile::causal_conv1d` over the ranks: a halo of W - 1 rows from wherever the predecessors lie.

    Args:
        x: [1, S, C]; weight: [C, W]; bias: [C].

    Returns:
        [1, S, C].

    Raises:
        StaleRoute: `x` is of another batch than the plan.
    """
    _check_tokens("convolution over ranks", x.shape[1], plan)
    width, (prev,) = weight.shape[1], plan.tensors(("prev",), x.device)
    halo = None
    if width > 1:
        send, splits, table = plan.tensors((f"halo_send@{width}", f"halo_splits@{width}", f"halo@{width}"), x.device)
        received = torch.ops.sp_compile.exchange_rows(x[0], send, splits, plan.halo(width)[0].rows.size, group)
        halo = torch.ops.sp_compile.unpack(received, table)
    result: Tensor = torch.ops.sp_compile.causal_conv1d(x, weight, bias, prev, halo, activation=activation)
    return result


def scan(kind: str, given: Mapping[str, Tensor | None], plan: RankPlan, group: str, **options: Any) -> Tensor:
    """A recurrence over the ranks: one exchange of states, and of what each keeps of the one before it.

    The scan runs twice: from zeros, for the states that others ask for, and from the states that enter the rank. Both run on all ranks at
    once. States travel in accumulation dtype.

    Args:
        kind: `sp_compile::<kind>`, a recurrence of `ops/dense_scans.py`.
        given: its tensors by name, as the op has them on [1, S]; what is left out is absent.
        options: those of the op.

    Returns:
        The op's outputs.

    Raises:
        InvalidInput: no recurrence has that name.
        StaleRoute: the values are of another batch than the plan.
    """
    if kind not in BESIDE:
        raise InvalidInput(f"scan over ranks: expected a recurrence among {', '.join(BESIDE)}, got {kind!r}")
    tensors = dict.fromkeys(KINDS[kind].tensors) | dict(given)
    value = tensors[BESIDE[kind].value]
    assert value is not None, f"{kind} has values"
    _check_tokens(f"{kind} over ranks", value.shape[1], plan)
    links = most_links(plan.ranks)
    tables = dict(zip(TABLES, plan.tensors([f"chain@{links}" if name == "chain" else name for name in TABLES], value.device), strict=True))
    (tables["end"],) = plan.tensors(["local_end"], value.device)
    made = SpreadScan(kind, tensors, tensors, options, tables, lambda op, *args, **named: op(*args, **named))
    result: Tensor = made.outputs(made.entering(made.exchanged(made.leaving(), group), links))
    return result


def scan_by_heads(kind: str, given: Mapping[str, Tensor | None], plan: RankPlan, group: str, **options: Any) -> Tensor:
    """`scan` for ops that take no states: each rank gets all tokens of some heads, channels or groups, and runs the op on the whole pack.

    Everything of every token travels, where `scan` sends states of a few. For comparison: see `bench/cp_model.py`.

    Args:
        kind, given, options: as in `scan`; heads, channels and groups are multiples of the ranks.

    Raises:
        InvalidInput: no recurrence has that name, or its heads cannot be dealt to the ranks.
        StaleRoute: the values are of another batch than the plan.
    """
    if kind not in BESIDE:
        raise InvalidInput(f"scan over ranks: expected a recurrence among {', '.join(BESIDE)}, got {kind!r}")
    tensors = dict.fromkeys(KINDS[kind].tensors) | dict(given)
    ops, moved = torch.ops.sp_compile, dict[str, Tensor | None]()
    for name, value in tensors.items():
        if value is None:
            moved[name] = None
        elif value.dim() >= 3 and value.shape[0] == 1:
            _check_tokens(f"{kind} over ranks", value.shape[1], plan)
            moved[name] = ops.swap_heads(value, 1, 2, plan.ranks, group, False)
        else:
            if value.shape[0] % plan.ranks:
                raise InvalidInput(f"{kind}: expected a multiple of {plan.ranks} heads in {name}, got {list(value.shape)}")
            moved[name] = ops.own_tokens(value, 0, plan.ranks, group)
    like = moved[BESIDE[kind].value]
    assert like is not None, f"{kind} has values"
    prev, end = plan.tensors(("whole_prev", "end"), like.device)
    whole = scans.op_of(kind)(*moved.values(), prev, end, None, None, **options)[0]
    result: Tensor = ops.swap_heads(whole, 1, 2, plan.ranks, group, True)
    return result


def ssd(
    x: Tensor, dt: Tensor, A: Tensor, B: Tensor, C: Tensor, D: Tensor | None, dt_bias: Tensor | None, plan: RankPlan, group: str,
    **options: Any,
) -> Tensor:  # fmt: skip
    """`sp_compile::ssd_scan` over the ranks, see `scan`."""
    return scan("ssd_scan", {"x": x, "dt": dt, "A": A, "B": B, "C": C, "D": D, "dt_bias": dt_bias}, plan, group, **options)


def total(values: Tensor, plan: RankPlan, group: str) -> Tensor:
    """The sum over the ranks of counts or of a loss, the same bits on every rank.

    The gradient that comes back is that of one rank: every rank computes the same from the total, and each continues in its own tokens.
    So a loss counts once, though all ranks call backward on it.
    """
    result: Tensor = torch.ops.sp_compile.sum_over_ranks(values, plan.ranks, group)
    return result
