"""Tile sizes of the kernels: a table, and the first entry that a device's shared memory holds. No Triton here."""

from __future__ import annotations

from dataclasses import dataclass, replace


@dataclass(frozen=True)
class Variant:
    """How a kernel is cut.

    Attributes:
        queries, keys: tokens in a tile; powers of two that divide the block of the lists.
        warps, stages: of the kernel, and of its loops' software pipelines.
        descriptors: tiles are read through tensor descriptors (TMA on Hopper and later).
        specialize: loops are split between groups of warps by the compiler.
    """

    queries: int
    keys: int
    warps: int = 4
    stages: int = 2
    descriptors: bool = False
    specialize: bool = False


KERNELS = ("forward", "key_gradients", "query_gradients")

_WIDE: dict[str, tuple[Variant, ...]] = {
    "forward": (Variant(128, 128, 8, 2), Variant(128, 64, 8, 3), Variant(128, 64, 4, 2), Variant(64, 64, 4, 2), Variant(64, 32, 4, 2)),
    "key_gradients": (Variant(64, 128, 8, 2), Variant(64, 64, 4, 2), Variant(32, 64, 4, 2), Variant(32, 32, 4, 1), Variant(16, 32, 4, 1)),
    "query_gradients": (Variant(128, 64, 8, 2), Variant(64, 64, 4, 2), Variant(64, 32, 4, 2), Variant(32, 32, 4, 1), Variant(32, 16, 4, 1)),
}
# Fastest on an H200 at head dim 128, of 35 variants.
_MEASURED = {"forward": Variant(128, 64, 4, 2), "key_gradients": Variant(64, 128, 8, 3), "query_gradients": Variant(128, 64, 8, 3)}
# Without tensor cores products are written out term by term: large tiles take minutes to compile, and spill.
_FLOAT32: dict[str, tuple[Variant, ...]] = {
    "forward": (Variant(32, 16, 8, 1), Variant(16, 16, 4, 1)),
    "key_gradients": (Variant(16, 32, 8, 1), Variant(16, 16, 4, 1)),
    "query_gradients": (Variant(16, 16, 4, 1),),
}


def lanes(dim: int) -> tuple[int, int]:
    """`dim` lanes in two powers of two, the largest that fits and the smallest, at least 16, that holds the rest; 0 if there is none."""
    one = 1 << (dim.bit_length() - 1)
    rest = dim - one
    return one, max(16, 1 << (rest - 1).bit_length()) if rest else 0


def shared_memory(kernel: str, variant: Variant, dim: int, v_dim: int, size: int) -> int:
    """About how many bytes a kernel needs, for elements of `size` bytes."""
    width = sum(lanes(dim)) + sum(lanes(v_dim))
    kept, visited = (variant.keys, variant.queries) if kernel == "key_gradients" else (variant.queries, variant.keys)
    if kernel == "forward":
        return size * (kept * sum(lanes(dim)) + variant.stages * visited * width)
    return size * (kept * width + variant.stages * visited * width + kept * visited)


def choose(kernel: str, dim: int, v_dim: int, size: int, shared: int, capability: tuple[int, int]) -> Variant:
    """The variant for head dims `dim` and `v_dim` and elements of `size` bytes on a device with `shared` bytes a block."""
    width = max(sum(lanes(dim)), sum(lanes(v_dim)))
    table = (_WIDE if size == 2 else _FLOAT32)[kernel]
    if size == 2 and width > 64:
        table = (_MEASURED[kernel], *table)
    for variant in table:
        # Sums in registers: above this, they spill.
        kept = variant.keys if kernel == "key_gradients" else variant.queries
        sums = kept * (2 * width if kernel == "key_gradients" else width) // (32 * variant.warps)
        if sums <= 128 and shared_memory(kernel, variant, dim, v_dim, size) <= shared:
            break
    # Hopper's tensor cores read shared memory, which TMA fills without a register a pointer.
    return replace(variant, descriptors=size == 2 and capability[0] == 9)
