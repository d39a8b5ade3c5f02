"""Rules for the site ops: markers that say what a piece of the captured graph means (see `ops/sites.py`)."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from typing import Any

import torch
import torch.fx

from sp_compile.analysis.addends import mask_and_bias
from sp_compile.analysis.facts import Affine, Constant, MaskSpec
from sp_compile.analysis.layouts import Axis, Dim, Kind, Layout, Reach, Reason, Span
from sp_compile.analysis.masks import AttentionMask, NotCausal, read_mask
from sp_compile.ops import sites as ops  # noqa: F401  (registers the ops)

NameOf = Callable[[Any], "str | None"]


@dataclasses.dataclass
class Site:
    """One marker: its arguments by name, and the interpreter's view of them."""

    mode: Any
    name_of: NameOf
    given: dict[str, Any]
    op: str
    found: Mapping[torch.fx.Node, Any]

    def layout(self, name: str) -> Layout | None:
        value = self.given.get(name)
        return self.mode.layout_of(value) if isinstance(value, torch.Tensor) else None


def _refuse(site: Site, text: str, why: Reason | None = None, advice: str = "") -> Layout:
    found = why or site.mode.reason(text, site.op, advice)
    site.mode.fail(found)
    return site.mode.rows(site.given["dense"], found, False)  # type: ignore[no-any-return]


@dataclasses.dataclass(frozen=True)
class AttentionCall:
    """An attention layer as the rewrite sees it; values are names of dense graph nodes.

    `heads_first` tells whether the dense result is [B, H, L, D] (torch's function) or [B, L, H, D] (the libraries'). A scale that is
    computed from sizes is a symbolic number.
    """

    q: str
    k: str
    v: str
    mask: AttentionMask
    sinks: str | None
    bias: str | None
    scale: float | torch.SymFloat | torch.SymInt
    window: int | None
    softcap: float | None
    heads_first: bool
    dtype: torch.dtype


def attention(site: Site) -> Layout:
    """Attention is shared if q, k and v are, with matching tokens, under a mask that is proved causal."""
    return _attention(site, heads_first=False)


def torch_attention(site: Site) -> Layout:
    """torch's own function, [B, H, L, D] in and out; further leading dimensions are not heads and are refused."""
    return _attention(site, heads_first=True)


def _attention(site: Site, heads_first: bool) -> Layout:
    q, k, v = (site.layout(name) for name in ("q", "k", "v"))
    assert q is not None, "attention takes a query"
    assert k is not None, "attention takes a key"
    assert v is not None, "attention takes a value"
    for name, layout in (("query", q), ("key", k), ("value", v)):
        if layout.is_rows:
            return _refuse(site, f"the {name} of an attention layer is not shared", layout.why)
        if layout.reach.kind > Kind.TOKENS or (site.mode.symbols.packed and not layout.reach.shared):
            return _refuse(site, f"the {name} of an attention layer looks ahead of its own column")
        if not _attention_dims(layout, site.mode.symbols.rows_dim) or layout.dims[2] != q.dims[2]:
            return _refuse(site, f"the {name} of an attention layer is not [batch, heads, tokens, width] but {list(layout.dims)}")
    if site.given.get("dropout"):
        return _refuse(site, "attention dropout draws random numbers per token", advice="Set attention dropout to 0, or call eval().")
    given = site.given
    if given.get("bias") is None and isinstance(given["mask"], torch.Tensor):
        given["mask"], given["bias"] = mask_and_bias(site.mode, site.name_of(given["mask"]), site.found) or (given["mask"], None)
    mask_value = given["mask"]
    names = {name: site.name_of(given[name]) for name in ("q", "k", "v", "mask", "sinks", "bias") if given.get(name) is not None}
    heads, width = q.dims[1], v.dims[3]
    if given.get("enable_gqa") is False and k.dims[1] not in (heads, ()):
        return _refuse(site, f"{heads} query heads meet {k.dims[1]} key heads without enable_gqa")
    if k.dims[1] != v.dims[1] or (heads == () and k.dims[1] != ()):
        return _refuse(site, f"{heads} query heads meet {k.dims[1]} key heads and {v.dims[1]} value heads")
    bias = site.layout("bias")
    if bias is not None and (bias.is_rows or not bias.reach.shared):
        return _refuse(site, "the bias of an attention layer is not shared", bias.why)
    try:
        mask = read_mask(
            names.get("mask"),
            site.layout("mask"),
            bool(given["is_causal"]),
            mask_value is not None and mask_value.dtype == torch.bool,
            site.mode.symbols.rows_dim,
        )
    except NotCausal as refused:
        return _refuse(site, str(refused), advice="Only causal attention can be shared.")
    mask = dataclasses.replace(mask, finite=mask.finite or bool(given.get("finite")))
    scale = given.get("scale")
    site.mode.info.attention = AttentionCall(
        q=names["q"], k=names["k"], v=names["v"], mask=mask, sinks=names.get("sinks"), bias=names.get("bias"),  # type: ignore[arg-type]
        scale=_scale(scale, given["q"].shape[-1]),
        window=given.get("window"), softcap=given.get("softcap"), heads_first=heads_first, dtype=given["dense"].dtype,
    )  # fmt: skip
    reach = q.reach.join(k.reach).join(v.reach)
    order: tuple[Dim, ...] = (heads, q.dims[2]) if heads_first else (q.dims[2], heads)
    return Layout((site.mode.symbols.rows_dim, *order, width), reach)


def _scale(given: Any, width: int) -> float | torch.SymFloat | torch.SymInt:
    if isinstance(given, torch.SymFloat | torch.SymInt):
        return given
    return float(given) if given is not None else float(width) ** -0.5


def _attention_dims(layout: Layout, rows: Dim) -> bool:
    return (
        len(layout.dims) == 4
        and layout.dims[0] == rows
        and (layout.dims[2] == (Axis.COLUMNS,) or (len(layout.dims[2]) == 1 and isinstance(layout.dims[2][0], Span)))
        and not (layout.token_dim(1) or layout.token_dim(3))
    )


def mask(site: Site) -> Layout:
    """A library's causal mask: the structure is stated by its arguments; the tensor itself is only needed by the dense graph."""
    dense = site.given["dense"]
    padding, segments = site.layout("padding"), site.layout("segments")
    dims = tuple(site.mode.symbols.dim(size) for size in dense.shape)
    reach = Reach(Kind.COLUMN)
    for layout in (padding, segments):
        if layout is not None:
            reach = reach.join(layout.reach)
    one_document = segments is not None and isinstance(segments.fact, Constant)
    spec = MaskSpec(
        window=site.given.get("window"),
        chunk=site.given.get("chunk"),
        padding=site.name_of(site.given["padding"]) if padding is not None else None,
        segments=site.name_of(site.given["segments"]) if segments is not None and not one_document else None,
    )
    why = next((x.why for x in (padding, segments) if x is not None and x.why is not None), None)
    return Layout(dims, reach, entry=True, fact=spec, why=why)


def segments(site: Site) -> Layout:
    """Document numbers found from jumps in the positions; counted positions have no jump."""
    dense, positions = site.layout("dense"), site.layout("position_ids")
    assert dense is not None, "segments_site takes a tensor"
    assert positions is not None, "segments_site takes positions"
    fact = positions.fact
    if site.mode.symbols.packed and positions.has_tokens and positions.reach.shared:
        site.mode.info.segments = site.name_of(site.given["position_ids"])
        return Layout(dense.dims, positions.reach)
    counted = isinstance(fact, Affine) and not fact.batch and [c for _, c in fact.coefficients] == [1]
    return dense.with_(fact=Constant(0.0) if counted else None)


def refusal(site: Site) -> Layout:
    return _refuse(site, site.given["reason"])


def rows(site: Site) -> Layout:
    """What the nodes behind the marker have."""
    dense = site.layout("dense")
    assert dense is not None, "rows_site takes a tensor"
    return dense


RULES: dict[Any, Callable[[Site], Layout]] = {}
for _name, _function in (
    ("attention_site", attention), ("mask_site", mask), ("segments_site", segments), ("refusal_site", refusal), ("rows_site", rows),
):  # fmt: skip
    _packet = getattr(torch.ops.sp_compile, _name)
    RULES[_packet] = RULES[_packet.default] = _function
RULES[torch._C._nn.scaled_dot_product_attention] = torch_attention
"""torch.nn.functional.scaled_dot_product_attention is the same object."""

MIXERS = frozenset(target for target, function in RULES.items() if function in (attention, torch_attention, refusal))
"""Nodes that may not run on unpacked rows inside a shared graph."""

_TORCH_ATTENTION = ("q", "k", "v", "mask", "dropout", "is_causal")
_TORCH_NAMES = {"query": "q", "key": "k", "value": "v", "attn_mask": "mask", "dropout_p": "dropout"}


def named(target: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> dict[str, Any]:
    """A site's arguments by name, defaults filled in."""
    if RULES[target] is torch_attention:
        given = {"mask": None, "dropout": 0.0, "is_causal": False, "scale": None, "enable_gqa": False}
        given.update(zip(_TORCH_ATTENTION, args, strict=False))
        given.update({_TORCH_NAMES.get(name, name): value for name, value in kwargs.items()})
        return given
    overload = target if isinstance(target, torch._ops.OpOverload) else target.default
    given = dict(kwargs)
    for position, argument in enumerate(overload._schema.arguments):
        if argument.name not in given:
            given[argument.name] = args[position] if position < len(args) else argument.default_value
    return given


def apply(
    target: Any, mode: Any, name_of: NameOf, args: tuple[Any, ...], kwargs: dict[str, Any], found: Mapping[torch.fx.Node, Any]
) -> torch.Tensor:
    """Run a marker or an attention function: its value is a fresh tensor of the right shape, its layout what the rule says."""
    given = named(target, args, kwargs)
    if "dense" not in given:
        q, v = given["q"], given["v"]
        cast = torch.is_autocast_enabled(q.device.type) and q.is_floating_point() and q.dtype != torch.float64
        dtype = torch.get_autocast_dtype(q.device.type) if cast else q.dtype
        shape = (*q.shape[:-3], q.shape[-2], q.shape[-3], v.shape[-1]) if q.dim() > 2 else q.shape
        given["dense"] = q.new_empty(shape, dtype=dtype)
        if q.dim() > 2:
            given["dense"] = given["dense"].transpose(-2, -3)
    value: torch.Tensor = given["dense"].clone()
    mode.info.failure, mode.info.shapes, mode.info.numbers = None, False, False
    site = Site(mode, name_of, given, str(target), found)
    mode.give(value, RULES[target](site))
    return value
