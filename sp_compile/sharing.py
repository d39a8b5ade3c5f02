"""Packed mode: the caller holds one row of physical tokens, and says with `share` which rows they stand for.

`pack` and `unpack` lead from a dense batch to packed values and back. Inside of `share`, every region compiled with the backend computes
on the packed values it is given: attention follows the forest, positions that are counted by the model become the rows' columns, and
everything that works token by token stays as it is. What would need the rows themselves is an error, since there is no dense run.
"""

from __future__ import annotations

import contextvars
import dataclasses
import threading
from collections.abc import Mapping, Sequence
from types import TracebackType
from typing import Any

import torch
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef

from sp_compile.debug import calls
from sp_compile.errors import InvalidInput, InvalidOption, StaleForest, StaleRoute
from sp_compile.layout.forest import Forest
from sp_compile.layout.local_forest import LocalForest
from sp_compile.layout.rank_plans import RankPlan
from sp_compile.ops import rows as _rows  # noqa: F401  (registers sp_compile::unpack)

_current: contextvars.ContextVar[Forest | None] = contextvars.ContextVar("sp_compile_forest", default=None)


class share:
    """Says which rows the packed inputs [1, T, ...] of compiled regions stand for.

        packed = sp_compile.pack({"input_ids": ids, "attention_mask": mask})
        with sp_compile.share(packed.forest):
            logits = model(**packed.inputs).logits              # [1, T, V]
        rows = sp_compile.unpack(logits, packed.forest)         # [B, L, V]

    Works for a model compiled as a whole and for its blocks compiled one by one. Backward may run outside of the context, activation
    checkpointing included: what is recomputed uses the forest of its forward. Contexts nest, the innermost holds; each thread has its own.

    Args:
        forest: describes the T tokens of every call inside; or the plan of a rank of a context parallel group, inside of which regions
            compiled with that group as `context_parallel` are called on the rank's part of them (`take_local`).

    Raises:
        InvalidInput: `forest` is no Forest and no plan.
    """

    def __init__(self, forest: Forest | RankPlan) -> None:
        if isinstance(forest, RankPlan):
            forest = LocalForest.of(forest)
        if not isinstance(forest, Forest):
            raise InvalidInput(f"share: expected a Forest, got {type(forest).__name__}; sp_compile.pack makes one")
        self.forest = forest
        self._tokens: list[contextvars.Token[Forest | None]] = []

    def __enter__(self) -> Forest:
        self._tokens.append(_current.set(self.forest))
        return self.forest

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        _current.reset(self._tokens.pop())


def packed_tokens(tensors: Sequence[Tensor] = ()) -> int | None:
    """T of the forest in force, None outside of `share`; a capture in backward, by recomputation, is that of its inputs."""
    forest = forest_of_call(tensors, must_know=False)
    return None if forest is None else forest.num_tokens


def tokens_in_force() -> int | None:
    """T of the forest of a forward pass inside of `share`, else None; unlike `packed_tokens`, it remembers nothing."""
    forest = _current.get()
    return None if forest is None or calls.in_backward() else forest.num_tokens


def require_plan(forest: Forest | None, group: Any) -> None:
    """Raises unless a packed call's forest is that of a rank exactly if the region was compiled for the ranks of `group`.

    Raises:
        InvalidOption: one without the other.
        StaleRoute: the plan is for another rank or number of ranks than the group's.
    """
    plan = forest.plan if isinstance(forest, LocalForest) else None
    if group is None and plan is None:
        return
    if group is None:
        raise InvalidOption(
            "share(plan): the region was compiled without the option context_parallel, so its attention would see one rank's tokens"
        )
    if forest is None:
        return
    if plan is None:
        raise InvalidOption(
            "option context_parallel is set: expected a call outside of share, or inside of share(plan) with the plan of the rank "
            "(plan_over_ranks)"
        )
    plan.sequence.require(plan.forest)
    if (plan.rank, plan.ranks, plan.sequence.tensor_ranks) != (group.rank(), group.size(), 1):
        raise StaleRoute(
            f"share(plan): expected the plan of rank {group.rank()} of {group.size()} without tensor ranks, got that of "
            f"rank {plan.rank} of {plan.ranks} with {plan.sequence.tensor_ranks}; make it with plan_over_ranks and the group"
        )


# -- which forest a call belongs to -------------------------------------------------------------------------------------------------

_lock = threading.Lock()
Place = tuple[int, int, tuple[int, ...]]
"""Address of a storage, and offset and shape of a tensor in it."""

_seen: dict[Place, tuple[StorageWeakRef, Forest | None]] = {}  # what was given to packed calls; None: under different forests
_counts: set[int] = set()  # numbers of tokens of packed calls so far
_recomputing = threading.local()


def forest_of_call(tensors: Sequence[Tensor], must_know: bool = True) -> Forest | None:
    """The forest of a call with these inputs, module state left out; None for a dense call.

    Recomputation in backward may run in another thread and outside of `share`. It is given the very memory that was checkpointed in
    forward, which says what forest was in force; later regions of the same recomputation follow the first.

    Raises:
        StaleForest: a recomputation looks like that of a packed call, and nothing says of which (None if it need not be known).
    """
    forest = _current.get()
    if not calls.in_backward():
        if forest is not None:
            _remember(tensors, forest)
        return forest
    known, task = _recall(tensors), torch._C._current_graph_task_id()
    if known is not None:
        _recomputing.last = (task, known)
        return known
    last: tuple[int, Forest] | None = getattr(_recomputing, "last", None)
    guess = last[1] if last is not None and last[0] == task else forest
    if guess is not None and _only_one(guess):
        return guess
    if must_know and any(t.dim() > 1 and t.shape[0] == 1 and not _counts.isdisjoint(t.shape[1:]) for t in tensors):
        raise StaleForest(
            "a compiled region is recomputed in backward on one row of as many tokens as a packed call had, and nothing says which forest "
            "its forward ran with: its inputs are no memory that was checkpointed, or were used with several forests. Compile what is "
            "checkpointed as a whole, so that the region gets the checkpointed inputs themselves"
        )
    return None


def _only_one(forest: Forest) -> bool:
    """Whether no other forest of as many tokens has inputs that are still alive."""
    with _lock:
        alive = [other for storage, other in _seen.values() if not storage.expired()]
    return all(other is forest or (other is not None and other.num_tokens != forest.num_tokens) for other in alive)


def _remember(tensors: Sequence[Tensor], forest: Forest) -> None:
    with _lock:
        for tensor in tensors:
            if type(tensor) is Tensor and forest.num_tokens in tensor.shape:
                place, storage = _place(tensor), tensor.untyped_storage()
                known = _seen.get(place)
                other = known is not None and not known[0].expired() and known[1] is not forest
                _seen[place] = (StorageWeakRef(storage), None if other else forest)
        _counts.add(forest.num_tokens)
        if len(_seen) >= _seen_limit():
            for place in [place for place, (storage, _) in _seen.items() if storage.expired()]:
                del _seen[place]
            _recomputing.limit = 2 * len(_seen)


def _seen_limit() -> int:
    """Twice what was alive at the last cleaning, so that cleaning costs a constant per call."""
    return max(64, getattr(_recomputing, "limit", 0))


def _recall(tensors: Sequence[Tensor]) -> Forest | None:
    """The forest of the first input that was seen in forward; activations that carry gradient come first, as nothing else shares them."""
    with _lock:
        for tensor in sorted(tensors, key=lambda t: not t.requires_grad):
            if type(tensor) is Tensor:
                found = _seen.get(_place(tensor))
                if found is not None and found[1] is not None and not found[0].expired():
                    return found[1]
    return None


def _place(tensor: Tensor) -> Place:
    return tensor.untyped_storage()._cdata, int(tensor.storage_offset()), tuple(map(int, tensor.shape))


# -- from a dense batch to packed values and back -------------------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True)
class Packed:
    """A dense batch in packed form.

    Attributes:
        forest: which rows the tokens stand for.
        inputs: the batch's tensors [1, T, ...], ready to be passed to the model.
    """

    forest: Forest
    inputs: dict[str, Tensor]


@torch.compiler.disable  # type: ignore[untyped-decorator]  # work on the host
def pack(batch: Mapping[str, Tensor], *, mask: str = "attention_mask", positions: str | None = "position_ids") -> Packed:
    """Finds the shared prefixes of a dense batch and packs its tensors.

    Args:
        batch: token inputs [B, L] or [B, L, ...] by name, integers or bools: every one of them is part of what rows must agree in to
            share a token. Leave out what belongs to rows, such as labels, and use it on unpacked values.
        mask: name of the entry whose zeros mark padding, which is dropped; it need not be there. The packed mask is all ones.
        positions: name under which the dense columns are given to the model unless the batch holds it; None: not at all. A model whose
            positions are counted from the mask (OPT) needs its own ones in the batch.

    Returns:
        The forest and the packed inputs, on the batch's device.

    Raises:
        InvalidInput: an empty batch, tensors of different rows and columns or devices, a float tensor, a mask that is not [B, L].
    """
    shape, device = _batch_shape(batch, mask)
    keep = None
    if mask in batch:
        if batch[mask].shape != shape:
            raise InvalidInput(f"pack: expected {mask} of shape {list(shape)}, got {list(batch[mask].shape)}")
        keep = batch[mask].detach().cpu() != 0
    keys = [part for name, value in batch.items() if name != mask for part in _parts(value)]
    forest = Forest.from_tokens(*keys, keep=keep)
    row, column = forest.tensors(("row", "column"), device)
    inputs = {name: value[row, column][None] for name, value in batch.items()}
    if positions is not None and positions not in batch:
        inputs[positions] = column[None].clone()
    return Packed(forest, inputs)


def _batch_shape(batch: Mapping[str, Tensor], mask: str) -> tuple[torch.Size, torch.device]:
    if not batch:
        raise InvalidInput("pack: expected at least one tensor [B, L], got an empty batch")
    first: Tensor | None = None
    for name, value in batch.items():
        if not isinstance(value, Tensor) or value.dim() < 2:
            raise InvalidInput(f"pack: expected {name} to be a tensor [B, L, ...], got {_shape_text(value)}")
        if name != mask and (value.is_floating_point() or value.is_complex()):
            raise InvalidInput(f"pack: expected integers or bools, got {name} of {value.dtype}; a float would be compared bit by bit")
        first = value if first is None else first
        if value.shape[:2] != first.shape[:2] or value.device != first.device:
            raise InvalidInput(
                f"pack: expected {name} of {list(first.shape[:2])} rows and columns on {first.device}, "
                f"got {list(value.shape[:2])} on {value.device}"
            )
    assert first is not None, "an empty batch was refused"
    return first.shape[:2], first.device


def _shape_text(value: object) -> str:
    return str(list(value.shape)) if isinstance(value, Tensor) else type(value).__name__


def _parts(value: Tensor) -> list[Tensor]:
    """A tensor [B, L, ...] as keys [B, L]."""
    flat = value.detach().cpu().reshape(*value.shape[:2], -1)
    return [flat[..., i] for i in range(flat.shape[-1])]


@torch.compiler.disable  # type: ignore[untyped-decorator]  # work on the host
def unpack(values: Tensor, forest: Forest) -> Tensor:
    """One copy of each packed value per row that it stands for.

    Args:
        values: [1, T, ...].
        forest: of the T tokens.

    Returns:
        [B, L, ...]; zeros where a row has no token. The gradient of a token is the sum over its rows, in a fixed order.

    Raises:
        InvalidInput: values are not [1, T, ...].
        StaleForest: the forest has another number of tokens.
    """
    if not isinstance(values, Tensor) or values.dim() < 2 or values.shape[0] != 1:
        raise InvalidInput(f"unpack: expected values [1, T, ...], got {_shape_text(values)}")
    if values.shape[1] != forest.num_tokens:
        raise StaleForest(f"unpack: the forest has {forest.num_tokens} tokens, the values have {values.shape[1]}")
    result: Tensor = torch.ops.sp_compile.unpack(values[0].contiguous(), forest.tensor("index", values.device))
    return result
