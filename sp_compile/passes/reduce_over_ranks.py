"""Context parallelism: what is reduced over tokens is reduced over the ranks, once, and gradients pass the borders between the two.

What: tells for every value whether it is of a rank's tokens or the same on all ranks. Reductions of tokens become those of
`ops/totals.py`; rows that are unpacked from tokens, and losses on them, are put together from all ranks; what looks ahead in a refined
forest is fetched from the rank that has it. Where a value that all ranks hold meets tokens, or parameters meet a value that is computed
from a reduction, an op says which part of its gradient a rank has (`ops/rank_values.py`).
Why it is sound: a value is one of tokens if its dimensions are, or if the analysis knows that sorted tokens are numbered by it; everything
that is computed without any is the same on all ranks, as parameters, buffers and the batch are. The analysis proved that what is left
works token by token.

    before   used = token_mean(probs, forest_count, forest_index, 'B L _', [0, 1], False, None)
             loss = cross_entropy_rows(logits, forest_index, labels)
    after    used = token_mean(probs, forest_count, forest_index, 'B L _', [0, 1], False, None, over=(2, group))
             loss = cross_entropy_rows(logits, forest_index, labels)          # zero where another rank has the token
             each = sp_compile.sum_over_ranks(loss[0], 2, group)

Refuses: `LayoutNotAccepted`, naming the op, for what needs other ranks' tokens in any other way: segments of paths, masks and biases over
(query, key) pairs, random numbers; in packed calls rows of the batch and the number of tokens as a value.
"""

from __future__ import annotations

import dataclasses
from typing import Any

import torch
import torch.fx

from sp_compile.analysis.interpret import NodeInfo
from sp_compile.capture.checkpoint import copy_tags
from sp_compile.capture.graphs import is_module_state, placeholders
from sp_compile.layout.fetches import Look
from sp_compile.layout.local_forest import PREFIX, look_names
from sp_compile.layout.refine import split_name
from sp_compile.ops import layout_conversion, multiplicity, rank_values, refined, scans, tokens, totals  # noqa: F401  (register the ops)
from sp_compile.ops.token_logprobs import token_logprobs_rows
from sp_compile.passes.metadata import propagate
from sp_compile.passes.rank_states import Gradient, State, Tells, draws, name_of, refused, source_of, take_origin
from sp_compile.passes.stage import Context, PassResult, Source, Stage, forest_input, input_of

_SP = torch.ops.sp_compile
_TOTALS = {
    getattr(multiplicity, name): getattr(totals, name)
    for name in ("token_sum", "token_nansum", "token_mean", "token_var", "token_std", "token_norm", "token_logsumexp",
                 "token_count_nonzero", "token_extreme", "token_histc", "token_bincount")
}  # fmt: skip
_LOSSES = frozenset({_SP.cross_entropy_rows.default, _SP.take_tokens.default, token_logprobs_rows})
"""What reads tokens by an index and gives rows, zeros where the index has none."""
_SCATTERS = frozenset({"scatter_add", "index_add", "scatter_add_", "index_add_"})
_MIXERS = frozenset(scans.op_of(kind) for kind in scans.FOREST)
_ATTENTION = _SP.attention.default
_CUTS = frozenset({"getitem", "narrow", "select", "index_select", "unsqueeze", "squeeze", "expand", "expand_as", "view", "reshape",
                   "flatten", "contiguous", "clone", "transpose", "permute"})  # fmt: skip


@dataclasses.dataclass(frozen=True)
class ReduceOverRanks:
    """The pass; see the module's docstring.

    Attributes:
        ranks: C.
        group: name of the process group.
    """

    ranks: int
    group: str
    name: str = "reduce_over_ranks"
    requires: Stage = Stage.SUNK
    provides: Stage = Stage.SUNK

    def __call__(self, graph: torch.fx.Graph, context: Context) -> PassResult:
        assert context.module is not None, "the runner sets the module"
        propagate(graph, context.module, context)
        reduce = _Reduce(graph, context, self.ranks, self.group)
        for node in list(graph.nodes):
            reduce.visit(node)
        reduce.clean()
        return PassResult(graph, reduce.changed)


class _Reduce:
    def __init__(self, graph: torch.fx.Graph, context: Context, ranks: int, group: str) -> None:
        self.graph, self.context, self.ranks, self.group = graph, context, ranks, group
        self.packed = context.analysis.symbols.packed
        self.tells = Tells(context)
        self.whole: dict[torch.fx.Node, torch.fx.Node] = {}
        self.made: dict[tuple[Any, ...], torch.fx.Node] = {}
        self.writes = any(info.writes for info in context.analysis.nodes.values())
        self.done: set[torch.fx.Node] = set()
        self.changed = 0

    # -- one node ----------------------------------------------------------------------------------------------------------------

    def visit(self, node: torch.fx.Node) -> None:
        if node in self.done:
            return
        if node.op == "placeholder":
            self._placeholder(node)
        elif node.op == "get_attr":
            self.tells.tell(node, State.SAME, self.tells.attribute(node))
        elif node.op == "output":
            self._output(node)
        elif node.users or self._acts(node):
            self._call(node)
            self._written(node)
        else:
            self.tells.tell(node, State.SAME)

    def _acts(self, node: torch.fx.Node) -> bool:
        """Whether a node does something besides giving a value that nobody reads."""
        info = self.tells.info(node)
        return node.is_impure() or name_of(node).endswith("_") or (info is not None and bool(info.writes))

    def _placeholder(self, node: torch.fx.Node) -> None:
        given, inputs = input_of(node), self.context.analysis.inputs
        assert inputs is not None, "the outermost graph has inputs"
        if given.source is Source.ARGUMENT:
            number = int(given.key)
            layout, dense = inputs.layouts[number], placeholders(self.context.analysis.graph)[number]
            if self.packed and layout is not None and len(layout.columns_dims) == 2:
                raise refused(dense, "a mask over (query, key) pairs is of one rank's tokens", "Let the compiled model make its mask.")
            local = self.packed and layout is not None and layout.has_tokens
            trained = bool(getattr(inputs.fakes[number], "requires_grad", False))
            kind = Gradient.PART if is_module_state(dense) else Gradient.UNKNOWN
            self.tells.tell(node, State.TOKENS if local else State.SAME, kind if trained and not local else Gradient.NONE)
        elif given.source is Source.FOREST:
            name = split_name(str(given.key))[0]
            if name == "keep":
                raise refused(next(iter(node.users)), "it reads which positions of all rows are real")
            self.tells.tell(node, State.INDEX if name == "index" else State.TOKENS)
        elif given.source is Source.HIDES or (given.source is Source.ROWS and self.packed and node.users):
            raise refused(next(iter(node.users)), f"it reads {given.source.value} of the batch, which no rank has")
        else:
            self.tells.tell(node, State.SAME)

    def _call(self, node: torch.fx.Node) -> None:
        info = self.tells.info(node)
        if self.packed and info is not None and info.numbers:
            raise refused(node, "it uses the number of tokens, and a rank has a part of them")
        if node.target is tokens.pack:
            self._pack(node)
        elif node.target in (tokens.unpack, _SP.unpack.default):
            self._unpack(node)
        elif node.target in _LOSSES:
            self._loss(node)
        elif node.target in _TOTALS:
            self._total(node)
        elif node.target is refined.regather:
            self._look(node)
        elif node.target is refined.places:
            self.tells.tell(node, State.TOKENS)
        elif name_of(node) in _SCATTERS and self.tells.state(node.args[0]) is State.SAME and self._scatters(node):
            self._scatter(node)
        else:
            self._generic(node, info)

    # -- what reads tokens by rows -----------------------------------------------------------------------------------------------

    def _pack(self, node: torch.fx.Node) -> None:
        factors = [factor for dim in str(node.args[-1]).split(" ") for factor in dim.split("*")]
        if factors.count("L") != 1:
            raise refused(node, "it pairs tokens, and the other ranks' are missing")
        if self.packed and "B" in factors:
            raise refused(node, "it reads rows of the batch, which no rank has")
        self._enter(node, [node.args[0]])
        self.tells.tell(node, State.TOKENS)

    def _unpack(self, node: torch.fx.Node) -> None:
        """All ranks' tokens side by side, which every rank unpacks."""
        values, index, *rest = node.args
        assert isinstance(values, torch.fx.Node), "physical tokens are computed"
        dim = 0
        if rest:
            dims = tokens.parse(str(rest[0]))
            dim = next(place for place, factors in enumerate(dims) if "L" in factors)
            if next(factor for factor in dims[dim] if factor != "B") != "L":
                raise refused(node, "tokens are not the outermost part of a dimension that is unpacked to rows")
        gathered = self._once(node, _SP.all_tokens.default, values, dim, self.ranks, self.group)
        self.tells.tell(gathered, State.SAME, self._of_total(values))
        node.args = (gathered, self._whole(index), *rest)
        self.tells.tell(node, State.SAME, self._of_total(values))
        self.changed += 1

    def _loss(self, node: torch.fx.Node) -> None:
        """Rows are zero where another rank has the token, so their sum over the ranks is what one rank has."""
        values, _, target, *rest = node.args
        if self.tells.state(values) is not State.TOKENS or self.tells.state(target) is not State.SAME:
            raise refused(node, "it reads rows where a rank has tokens")
        self._enter(node, [values, *rest])
        self.tells.tell(node, State.TOKENS)
        single = node.target is _SP.take_tokens.default
        for part in [node] if single else list(node.users):
            if not single and part.args[1] == 2:
                continue  # per token
            summed = self._after(part, _SP.sum_over_ranks.default, part, self.ranks, self.group)
            self.done |= {part, summed}
            part.replace_all_uses_with(summed, lambda user: user not in self.done)
            self.tells.tell(part, State.TOKENS)
            self.tells.tell(summed, State.SAME, Gradient.WHOLE)
            take_origin(summed, part)
        self.changed += 1

    def _whole(self, index: Any) -> torch.fx.Node:
        """What was made of the places of a rank's own tokens, made of those of all."""
        if not isinstance(index, torch.fx.Node) or self.tells.state(index) is not State.INDEX:
            return index  # type: ignore[no-any-return]
        if index not in self.whole:
            if index.op == "placeholder":
                suffix = str(input_of(index).key).removeprefix("index")
                made = forest_input(self.graph, f"{PREFIX}whole_index{suffix}")
            else:
                with self.graph.inserting_after(index):
                    made = self.graph.node_copy(index, self._whole)
            self.tells.tell(made, State.SAME)
            self.done.add(made)
            self.whole[index] = made
        return self.whole[index]

    # -- reductions --------------------------------------------------------------------------------------------------------------

    def _total(self, node: torch.fx.Node) -> None:
        node.target = _TOTALS[node.target]
        node.kwargs = {**node.kwargs, "over": (self.ranks, self.group)}
        self._enter(node, list(node.args))
        self.tells.tell(node, State.SAME, self._of_total(node.args[0]))
        self.changed += 1

    def _of_total(self, value: Any) -> Gradient:
        found = value.meta.get("val") if isinstance(value, torch.fx.Node) else None
        return Gradient.WHOLE if isinstance(found, torch.Tensor) and found.is_floating_point() else Gradient.NONE

    def _scatters(self, node: torch.fx.Node) -> bool:
        return any(self.tells.state(operand) is State.TOKENS for operand in node.all_input_nodes)

    def _scatter(self, node: torch.fx.Node) -> None:
        """A scattered sum into what all ranks hold: theirs are added to it once."""
        base, dim, places, source = node.args
        written, value = name_of(node), self.tells.value(base)
        if self.tells.gradient(base) is not Gradient.NONE or any(key != "alpha" for key in node.kwargs):
            raise refused(node, "it adds tokens to a value that gets a gradient")
        if value is None or any(self.tells.is_tokens(size) for size in value.shape):
            raise refused(node, "it adds tokens to places of all tokens")
        function = totals.scattered_ if written.endswith("_") else totals.scattered
        arguments = (written.removesuffix("_"), base, dim, places, source)
        made = self._before(node, function, *arguments, over=(self.ranks, self.group), **node.kwargs)
        node.replace_all_uses_with(made)
        take_origin(made, node)
        self.graph.erase_node(node)
        self.tells.tell(made, State.SAME, self._of_total(source))
        self.changed += 1

    # -- refined forests ---------------------------------------------------------------------------------------------------------

    def _look(self, node: torch.fx.Node) -> None:
        value, places, pattern = node.args
        assert isinstance(places, torch.fx.Node), "a gather has places"
        found: tuple[Any, ...] = places.args
        index, row, _, offset, wraps = found
        source, target = (split_name(str(input_of(source_of(n)).key))[1:] for n in (index, row))
        names = look_names(Look(source, target, int(offset), bool(wraps)))
        table, send, splits, received = (forest_input(self.graph, name) for name in names.values())
        for given in (table, send, splits, received):
            self.tells.tell(given, State.TOKENS)
        number = self._before(node, torch.ops.aten.sym_size.int, received, 0)
        exchange = (send, splits, number, self.group)
        node.target, node.args = rank_values.fetched, (value, table, *exchange, pattern)
        self._enter(node, [value])
        self.tells.tell(node, State.TOKENS)
        self.changed += 1

    # -- everything else ---------------------------------------------------------------------------------------------------------

    def _generic(self, node: torch.fx.Node, info: NodeInfo | None) -> None:
        self._require_tokenwise(node)
        operands = node.all_input_nodes
        states = [self.tells.state(operand) for operand in operands]
        local, indexed = State.TOKENS in states, State.INDEX in states
        if self.tells.makes_tokens(node, local):
            if indexed:
                raise refused(node, "it computes with the places of tokens in rows")
            self._enter(node, operands)
            self.tells.tell(node, State.TOKENS)
            return
        if local and not self.tells.is_free(node):
            raise refused(
                node, "it reduces tokens, and a rank has a part of them", "Reduce outside of the model: over_ranks.total adds up ranks."
            )
        if indexed and not local and self._cuts(node):
            self.tells.tell(node, State.INDEX)
            return
        if indexed:
            node.args, node.kwargs = torch.fx.map_arg((node.args, node.kwargs), self._whole)
        kinds = [self.tells.gradient(operand) for operand in node.all_input_nodes]
        if Gradient.WHOLE in kinds or Gradient.UNKNOWN in kinds:
            if info is not None and info.writes and self.tells.gradient(node.args[0]) is Gradient.PART:
                raise refused(node, "it writes a value of a reduction to one of parameters", "Write it as a new value.")
            for operand in node.all_input_nodes:
                if self.tells.gradient(operand) is Gradient.PART:
                    self._edge(node, operand, enters=False)
            self.tells.tell(node, State.SAME, self.tells.kept(node, Gradient.WHOLE if Gradient.WHOLE in kinds else Gradient.UNKNOWN))
        else:
            self.tells.tell(node, State.SAME, self.tells.kept(node, Gradient.PART if Gradient.PART in kinds else Gradient.NONE))

    def _cuts(self, node: torch.fx.Node) -> bool:
        """Whether what is made of places are places again: those of the other ranks stay -1."""
        first = node.args[0] if node.args else None
        return self.tells.state(first) is State.INDEX and name_of(node) in _CUTS

    def _require_tokenwise(self, node: torch.fx.Node) -> None:
        if node.target is _ATTENTION and node.args[7] is not None:
            raise refused(node, "a bias over (query, key) pairs is of one rank's tokens", "Use a window, or positions in q and k.")
        if node.target is _SP.path_segments.default:
            raise refused(node, "it reads the tokens before its own, which may lie on another rank")
        if draws(node):
            raise refused(node, "it draws random numbers, and each rank would draw others", "Draw them outside, the same on every rank.")
        if any(sum(map(self.tells.is_tokens, value.shape)) > 1 for value in self.tells.made(node)):
            raise refused(node, "it pairs tokens, and the other ranks' are missing")
        if node.target is _ATTENTION or node.target in _MIXERS:
            return
        for operand in node.all_input_nodes:
            if operand.op == "placeholder" and input_of(operand).source is Source.FOREST:
                name = split_name(str(input_of(operand).key))[0]
                if name in ("prev", "end"):
                    raise refused(node, f"it follows paths of tokens ({name}), and paths cross the borders of ranks")

    def _output(self, node: torch.fx.Node) -> None:
        for operand in node.all_input_nodes:
            state = self.tells.state(operand)
            if state is State.INDEX or (state is State.TOKENS and not self.packed):
                raise refused(operand, "places of tokens, or counts of sorted ones, leave the compiled model")
            if self.tells.gradient(operand) is Gradient.PART:
                self._edge(node, operand, enters=False)

    # -- gradients ---------------------------------------------------------------------------------------------------------------

    def _enter(self, node: torch.fx.Node, operands: list[Any]) -> None:
        """Values that all ranks hold and that a loss is made of get the sum of what all ranks' tokens give."""
        for operand in operands:
            kind = self.tells.gradient(operand)
            if kind is Gradient.UNKNOWN:
                raise refused(
                    node, f"{operand.name} has no tokens and gets a gradient, and is no parameter: nothing says whether a rank has a "
                    "part of it", "Make it inside of the compiled model.",
                )  # fmt: skip
            if kind is Gradient.WHOLE and self.tells.state(operand) is State.SAME:
                self._edge(node, operand, enters=True)

    def _edge(self, node: torch.fx.Node, operand: torch.fx.Node, enters: bool) -> None:
        op, args = (_SP.enter_tokens, (self.ranks, self.group)) if enters else (_SP.once_over_ranks, (self.ranks,))
        made = self._once(node, op.default, operand, *args)
        self.tells.tell(made, State.SAME, Gradient.PART if enters else Gradient.WHOLE)
        node.replace_input_with(operand, made)
        self.changed += 1

    def _written(self, node: torch.fx.Node) -> None:
        """What is written in place has the gradient of what is written, whatever node it is read by."""
        info, kind = self.tells.info(node), self.tells.gradient(node)
        if info is None or not info.writes or kind is Gradient.NONE:
            return
        for other, (state, known) in list(self.tells.states.items()):
            of = self.tells.info(other)
            if of is not None and of.storages & info.writes and state is State.SAME:
                self.tells.tell(other, state, kind if known is Gradient.NONE else known)

    # -- the graph ---------------------------------------------------------------------------------------------------------------

    def _before(self, node: torch.fx.Node, target: Any, *args: Any, **kwargs: Any) -> torch.fx.Node:
        with self.graph.inserting_before(node):
            made = self.graph.call_function(target, args, kwargs)
        copy_tags(node, made)
        return made

    def _once(self, node: torch.fx.Node, target: Any, *args: Any) -> torch.fx.Node:
        """A call in front of a node, or one that was made before, if nothing is written in place that it might have read."""
        if self.writes or (target, *args) not in self.made:
            made = self._before(node, target, *args)
            self.done.add(made)
            self.made[(target, *args)] = made
        return self.made[(target, *args)]

    def _after(self, node: torch.fx.Node, target: Any, *args: Any) -> torch.fx.Node:
        with self.graph.inserting_after(node):
            made = self.graph.call_function(target, args)
        copy_tags(node, made)
        return made

    def clean(self) -> None:
        """Drops places that nobody reads any more."""
        for node in reversed(list(self.graph.nodes)):
            places = node.target is refined.places or self.tells.state(node) is State.INDEX
            if not node.users and (places or (node.op == "placeholder" and input_of(node).source is Source.FOREST)):
                self.graph.erase_node(node)
