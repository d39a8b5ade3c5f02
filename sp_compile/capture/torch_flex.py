"""torch's flex_attention, written out so that `torch_attention` reads it like attention by hand.

What: the higher-order op is replaced by `softmax(where(mask_mod(b, h, q, k), score_mod(q @ k^T * scale, b, h, q, k), -inf)) @ v`, in which
the two functions are applied to whole index tensors at once.
Why it is sound: the functions are pure and work element by element, which is checked op by op; only then are they the same on whole
tensors. A query that sees no key gives zeros in both. The block tables of the mask are not read; that they leave out nothing the mask
function shows, and show nothing it hides, is checked on every call (`blocks`), since a BlockMask may be put together by hand.

    before   out, lse, most = flex_attention(q, k, v, score_mod, (.., kv_num_blocks, kv_indices, .., mask_mod), scale, ..)
    after    scores = score_mod(q @ k.transpose(-2, -1) * scale, batch, head, query, key)
             out = where(mask_mod(batch, head, query, key), scores, -inf).softmax(-1) @ v

Leaves alone, with a refusal: results other than the output, functions that do more than elementwise arithmetic and table look-ups or that
attention by hand does not know, block tables made inside of the graph.
"""

from __future__ import annotations

import dataclasses
import math
import operator
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch.fx import Graph, GraphModule, Node
from torch.utils._python_dispatch import TorchDispatchMode

from sp_compile.capture.torch_products import NotAttention
from sp_compile.capture.torch_scores import read_attention
from sp_compile.capture.torch_spelling import Writes, example, written
from sp_compile.ops import sites as _sites  # noqa: F401  (registers the ops)

BLOCKS = "sp_compile_blocks"
"""Key, in the meta of a mask that was written out, of its `Blocks`."""

_LOOK_UPS = {"index", "_unsafe_index", "_to_copy", "where", "clamp", "select", "alias", "detach", "view", "unsqueeze", "lift_fresh",
             "scalar_tensor", "full", "expand", "floor_divide", "device", "clone", "new_ones", "full_like", "slice"}  # fmt: skip


@dataclasses.dataclass(frozen=True)
class Blocks:
    """The block tables of one BlockMask: names of graph inputs, None where there is no such table, and block sizes or their names.

    Attributes:
        counts, columns: [B|1, H|1, blocks] and [B|1, H|1, blocks, blocks], blocks to which the mask function is applied.
        full_counts, full_columns: blocks to which it is not.
        sizes: rows and columns of a block.
    """

    counts: str
    columns: str
    full_counts: str | None
    full_columns: str | None
    sizes: tuple[int | str, int | str]


class _NotWritten(Exception):
    """Why a call stays as it is."""


class _Elementwise(TorchDispatchMode):
    """Notes every op of which one element depends on more than one element of each operand; an error here would end the process."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.others: list[str] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = func._schema.name.split("::")[1]
        if torch.Tag.pointwise not in func.tags and name not in _LOOK_UPS:
            self.others.append(str(func))
        return func(*args, **(kwargs or {}))


def write_out_flex(module: GraphModule, needed: Callable[[Graph], set[Node]], packed: bool = False) -> GraphModule:
    """A copy of a captured graph without flex_attention where it can be written out; the module itself if there is none.

    Args:
        module: the captured graph.
        needed: the nodes of a graph that markers do not already stand for.
        packed: the inputs are packed, so that the batch is one row.
    """
    flex = torch.ops.higher_order.flex_attention
    if not any(node.target is flex for node in module.graph.nodes):
        return module
    graph = Graph()
    graph.output(graph.graph_copy(module.graph, {}))
    for old, new in zip(_inputs(module.graph), _inputs(graph), strict=True):
        new.meta = dict(old.meta)
        if hasattr(old, "_dynamo_source"):
            new._dynamo_source = old._dynamo_source
    wanted = needed(graph)
    for node in [n for n in graph.nodes if n.target is flex]:
        writer = _Writer(module, graph, node)
        try:
            results = [writer.write(packed)] if node in wanted else writer.stand_in(None)
        except (_NotWritten, NotAttention) as why:
            writer.undo()
            results = writer.stand_in(f"flex_attention is not known: {why}")
        for user in list(node.users):
            user.replace_all_uses_with(results[user.args[1]])
            graph.erase_node(user)
        graph.erase_node(node)
    _drop_dead(graph)
    graph.lint()
    return GraphModule(module, graph, class_name=type(module).__name__)


def _inputs(graph: Graph) -> list[Node]:
    return [node for node in graph.nodes if node.op == "placeholder"]


_VMAP = {"lazy_load_decompositions", "_vmap_increment_nesting", "_vmap_decrement_nesting", "_add_batch_dim", "_remove_batch_dim"}
_VIEWS = {"getitem", "view", "reshape", "expand", "unsqueeze", "squeeze", "transpose", "permute"}


def _drop_dead(graph: Graph) -> None:
    """Erases what only made block tables: it runs under vmap, and writes to memory of its own."""
    live = _live(graph)
    inside = any(_name(node).endswith("_batch_dim") for node in live)
    for node in reversed(list(graph.nodes)):
        if node not in live and node.op != "placeholder" and not (inside and _name(node) in _VMAP) and not node.users:
            graph.erase_node(node)


def _live(graph: Graph) -> set[Node]:
    """What the output needs, with all that writes to memory it needs or to inputs, and calls that make no value, such as assertions."""
    writers = {node: list(written(node)) for node in graph.nodes}
    found: set[Node] = set()

    def add(node: Node) -> None:
        todo = [node]
        while todo:
            one = todo.pop()
            if one not in found:
                found.add(one)
                todo += one.all_input_nodes

    for node in graph.nodes:
        silent = node.op in ("call_function", "call_method") and not node.users and not writers[node]
        if node.op in ("output", "placeholder") or (silent and example(node) is None and _name(node) not in _VMAP):
            add(node)
    count = -1
    while count != len(found):
        count = len(found)
        for node, targets in writers.items():
            if any(base in found for target in targets for base in _bases(target)):
                add(node)
    return found


def _bases(node: Node) -> list[Node]:
    """A value and those that it is a view of."""
    found = [node]
    while _name(node) in _VIEWS and node.args and isinstance(node.args[0], Node):
        node = node.args[0]
        found.append(node)
    return found


def _name(node: Node) -> str:
    return node.target if isinstance(node.target, str) else str(getattr(node.target, "__name__", ""))


class _Writer:
    """Adds the nodes of one call, with example values, before it."""

    def __init__(self, module: GraphModule, graph: Graph, node: Node) -> None:
        self.module, self.graph, self.node = module, graph, node
        self.made: list[Node] = []

    def call(self, target: Any, *args: Any, like: Node | None = None, **kwargs: Any) -> Node:
        with self.graph.inserting_before(self.node):
            op = "call_method" if isinstance(target, str) else "call_function"
            made = self.graph.create_node(op, target, args, kwargs)
        made.meta["stack_trace"] = (like or self.node).meta.get("stack_trace") or self.node.meta.get("stack_trace")
        self.made.append(made)
        given, named = torch.fx.map_arg((args, kwargs), _example)
        function = getattr(type(given[0]), target) if isinstance(target, str) else target
        made.meta["example_value"] = function(*given, **named)
        return made

    def undo(self) -> None:
        for made in reversed(self.made):
            self.graph.erase_node(made)
        self.made.clear()

    def stand_in(self, refusal: str | None) -> list[Node]:
        """Values of the results' shapes, for a call that a marker stands for already, or refused ones."""
        q, _, v, *_ = self.node.args
        with example(q).fake_mode:
            width = self.call("size", v, 3)
            out = self.call("expand", self.call("narrow", self.call(torch.empty_like, q), 3, 0, 1), -1, -1, -1, width)
            made = [out, *(self.call("select", out, 3, 0) for _ in range(2))]
            site = torch.ops.sp_compile.refusal_site.default
            return made if refusal is None else [self.call(site, value, refusal) for value in made]

    def write(self, packed: bool) -> Node:
        args: tuple[Any, ...] = self.node.args
        q, k, v, score_mod, blocks, scale, _, score_extra, mask_extra = args
        if self.node.kwargs or any(user.target is not operator.getitem or user.args[1] != 0 for user in self.node.users):
            raise _NotWritten("more than its output is used")
        assert isinstance(blocks, tuple), "a block mask is passed as its parts"
        assert isinstance(q, Node) and isinstance(k, Node) and isinstance(v, Node)  # noqa: PT018  (operands are values)
        mode = example(q).fake_mode
        with mode:
            heads, fewer = example(q).shape[1], example(k).shape[1]
            if heads != fewer:
                k, v = (self._repeated(x, int(heads) // int(fewer)) for x in (k, v))
            scores = self.call(operator.mul, self.call(operator.matmul, q, self.call("transpose", k, -2, -1)), scale)
            places = self._places(q, k)
            scores = self._inlined(score_mod, [scores, *places, *score_extra])
            mask = self._mask(blocks, places, mask_extra)
            if mask is not None:
                scores = self.call(torch.where, mask, scores, -math.inf)
            out = self.call(operator.matmul, self.call("softmax", scores, -1), v)
        read_attention(out, Writes(self.graph), packed)
        return out

    def _repeated(self, x: Node, times: int) -> Node:
        wide = self.call("expand", self.call("unsqueeze", x, 2), -1, -1, times, -1, -1)
        return self.call("flatten", wide, 1, 2)

    def _places(self, q: Node, k: Node) -> list[Callable[[], Node]]:
        """Batch, head, query and key numbers along the four dimensions of scores; made where they are used."""

        def numbers(node: Node, dim: int, at: int) -> Node:
            line = self.call(torch.arange, self._size(node, dim), device=example(node).device)
            return self.call("view", line, *(-1 if place == at else 1 for place in range(4)))

        kept: dict[int, Node] = {}

        def lazily(node: Node, dim: int, at: int) -> Callable[[], Node]:
            return lambda: kept[at] if at in kept else kept.setdefault(at, numbers(node, dim, at))

        return [lazily(q, 0, 0), lazily(q, 1, 1), lazily(q, 2, 2), lazily(k, 2, 3)]

    def _size(self, node: Node, dim: int) -> Node | int:
        """A size of a value, as an input of the graph where there is such a one: it does not depend on the value then."""
        size = example(node).shape[dim]
        if isinstance(size, int) or size.node.expr.is_Integer:
            return int(size)
        same = [n for n in _inputs(self.graph) if isinstance(example(n), torch.SymInt) and example(n).node.expr == size.node.expr]
        return same[0] if same else self.call("size", node, dim)

    def _mask(self, blocks: tuple[Any, ...], places: Sequence[Any], extra: Any) -> Node | None:
        _, _, counts, columns, full_counts, full_columns, *_, rows_size, columns_size, function = blocks
        done = [node.target for node in self._body(function).graph.nodes if node.op not in ("placeholder", "output")]
        if done == ["new_ones"]:  # what flex_attention makes of no block mask at all
            return None
        tables = (counts, columns, full_counts, full_columns)
        if any(table is not None and table.op != "placeholder" for table in tables):
            raise _NotWritten("its BlockMask is made inside of the compiled function; make it outside, and pass it in")
        mask = self._inlined(function, [*places, *extra])
        names = [None if table is None else table.name for table in tables]
        sizes = tuple(size if isinstance(size, int) else size.name for size in (rows_size, columns_size))
        if not isinstance(example(mask), torch.Tensor) or example(mask).dim() != 4:
            raise _NotWritten("its mask function looks at no index")
        mask.meta[BLOCKS] = Blocks(counts.name, columns.name, names[2], names[3], (sizes[0], sizes[1]))
        return mask

    def _body(self, node: Node) -> GraphModule:
        body = self.module.get_submodule(str(node.target))
        assert isinstance(body, GraphModule), "flex_attention takes traced functions"
        return body

    def _inlined(self, node: Node, given: Sequence[Any]) -> Node:
        """The value of a traced function on whole tensors."""
        env: dict[Node, Any] = {}
        body = self._body(node).graph
        for inner, value in zip(_inputs(body), given, strict=True):
            env[inner] = value() if callable(value) and inner.users else value
        result: Any = None
        with _Elementwise() as watch:
            for inner in body.nodes:
                if inner.op == "output":
                    result = env.get(inner.args[0] if isinstance(inner.args[0], Node) else inner.args[0][0])
                elif inner.op in ("call_function", "call_method"):
                    args, kwargs = torch.fx.map_arg((inner.args, inner.kwargs), lambda n: env[n])
                    try:
                        env[inner] = self.call(inner.target, *args, like=inner, **kwargs)
                    except (TypeError, ValueError, RuntimeError, IndexError) as error:
                        raise _NotWritten(f"{inner.target} does not work on whole tensors ({error})") from error
                elif inner.op != "placeholder":
                    raise _NotWritten(f"one of its functions reads {inner.target}")
        if watch.others:
            raise _NotWritten(f"{watch.others[0]} is no op on single elements")
        if not isinstance(result, Node):
            raise _NotWritten("one of its functions gives no tensor")
        return result


def _example(node: Node) -> Any:
    return node.meta["example_value"]
