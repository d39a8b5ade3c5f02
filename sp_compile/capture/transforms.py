"""What differentiates inside of the captured graph: torch.func transforms, and hooks on the gradients of values.

A gradient that is read inside of the graph is a value per row there, and one summed over rows on physical tokens. Neither can be shared.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

import torch
import torch.fx

from sp_compile.errors import CannotShare

_TRANSFORMS = {"_grad_increment_nesting": "torch.func.grad or vjp", "_jvp_increment_nesting": "torch.func.jvp"}
_ADVICE = {
    "register_hook": "A hook inside of the model sees the gradient of a value per row: hook parameters, or compile without it.",
}


def refuse_transforms(module: torch.fx.GraphModule) -> None:
    """Looks for gradients that are taken or seen inside of a captured graph.

    Raises:
        CannotShare: there is one.
    """
    for node in module.graph.nodes:
        name = getattr(node.target, "__name__", "") if node.op == "call_function" else ""
        if isinstance(node.target, torch._ops.HigherOrderOperator):
            name = node.target.name()
        if name in _TRANSFORMS:
            text = f"the graph differentiates itself ({_TRANSFORMS[name]}), per row where sharing would sum over rows"
            raise CannotShare(text, op=name, node=node.name, advice="Compile the model alone and call backward() outside of it.")
        if name in _ADVICE:
            raise CannotShare("a gradient is read inside of the graph", op=name, node=node.name, advice=_ADVICE[name])


@contextlib.contextmanager
def restored_levels() -> Iterator[None]:
    """Leaves no torch.func level behind if what runs inside fails between entering and leaving one."""
    depth = torch._C._functorch.get_dynamic_layer_stack_depth()
    try:
        yield
    finally:
        torch._C._functorch.pop_dynamic_layer_stack_and_undo_to_depth(depth)
