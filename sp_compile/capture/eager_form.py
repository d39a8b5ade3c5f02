"""Recognises plain softmax attention in the source of a Python function.

Modelling code holds hundreds of functions called `eager_attention_forward` which differ in scale, softcap, sinks, position bias and
casts. Names say nothing about that, so the source is read: each statement is normalised (types, docstring and spelling removed) and
looked up as a step, and the sequence of steps must be one of a few sentences. Every global that the function reads is checked to be
what the statement says. Anything else is not recognised.
"""

from __future__ import annotations

import ast
import builtins
import dis
import inspect
import re
import textwrap
import types
from dataclasses import dataclass
from typing import Any

import torch


@dataclass(frozen=True)
class EagerForm:
    """What a recognised function does besides matmul, mask, softmax, dropout, matmul.

    Attributes:
        scale: "given" (argument `scaling`), or, where `scaling` is None, "query" for 1 / sqrt(D) or "module" for
            1 / sqrt(module.head_dim).
        softcap: honours an argument `softcap`.
        bias: honours an argument `position_bias`.
        sinks: adds `module.sinks` to the softmax denominator, unless that is None.
    """

    scale: str
    softcap: bool
    bias: bool
    sinks: bool


_RENAMED = {"query_states": "query", "key_states": "key", "value_states": "value"}
_PARAMETERS = ("module", "query", "key", "value", "attention_mask")
_OPTIONS = {"scaling", "dropout", "softcap", "position_bias", "sliding_window"}

_REPEAT = "key = repeat_kv(key, {0})\nvalue = repeat_kv(value, {0})"
_SINKS = "sinks = module.sinks.reshape(1, -1, 1, 1).expand(query.shape[0], -1, query.shape[-2], -1)"
_ADD_MASK = "attn_weights = attn_weights + attention_mask"
_DROPOUT = "attn_weights = F.dropout({}, p=dropout, training=module.training)"

_STEPS: dict[str, tuple[str, ...]] = {
    "scale_query": ("if scaling is None:\n    scaling = query.size(-1) ** (-0.5)",),
    "scale_module": ("if scaling is None:\n    scaling = module.head_dim ** (-0.5)",),
    "groups": ("n_rep = getattr(module, 'num_key_value_groups', 1)",),
    "repeat_key": ("key = repeat_kv(key, module.num_key_value_groups)", "key = repeat_kv(key, n_rep)"),
    "repeat_value": ("value = repeat_kv(value, module.num_key_value_groups)", "value = repeat_kv(value, n_rep)"),
    "repeat": ("if hasattr(module, 'num_key_value_groups'):\n" + textwrap.indent(_REPEAT.format("module.num_key_value_groups"), "    "),),
    "scores": (
        "attn_weights = torch.matmul(query, key.transpose(2, 3)) * scaling",
        "attn_weights = torch.matmul(query.to(torch.float32), key.to(torch.float32).transpose(2, 3)) * scaling",
        "with maybe_autocast(device_type=query.device.type, enabled=False):\n"
        "    attn_weights = torch.matmul(query.float(), key.float().transpose(2, 3)) * scaling",
    ),
    "softcap": (
        "if softcap is not None:\n    attn_weights = attn_weights / softcap\n    attn_weights = torch.tanh(attn_weights)\n"
        "    attn_weights = attn_weights * softcap",
    ),
    "bias": ("if position_bias is not None:\n    attn_weights = attn_weights + position_bias",),
    "mask": (
        f"if attention_mask is not None:\n    {_ADD_MASK}",
        _ADD_MASK,
        "if attention_mask is not None:\n    causal_mask = attention_mask[:, :, :, :key.shape[-2]]\n"
        "    attn_weights = attn_weights + causal_mask",
    ),
    "softmax": (
        "attn_weights = F.softmax(attn_weights, dim=-1)",
        "attn_weights = F.softmax(attn_weights, dim=-1).to(value.dtype)",
        "attn_weights = F.softmax(attn_weights, dim=-1, dtype=torch.float32).to(query.dtype)",
    ),
    "cast": ("attn_weights = attn_weights.type(value.dtype)",),
    "dropout": (_DROPOUT.format("attn_weights"),),
    "output": ("attn_output = torch.matmul(attn_weights, value)", "attn_output = torch.matmul(attn_weights.to(value.dtype), value)"),
    "layout": ("attn_output = attn_output.transpose(1, 2).contiguous()", "attn_output = attn_output.transpose(1, 2)"),
    "return": ("return (attn_output, attn_weights)",),
    # Sinks as one more column, dropped after the softmax.
    "sinks": (_SINKS, "sinks = module.sinks.reshape(1, -1, 1, 1).expand(*attn_weights.shape[:-1], 1)"),
    "with_sinks": ("combined_logits = torch.cat([attn_weights, sinks], dim=-1)",),
    "shift": ("combined_logits = combined_logits - combined_logits.max(dim=-1, keepdim=True).values",),
    "softmax_sinks": (
        "probs = F.softmax(combined_logits, dim=-1, dtype=combined_logits.dtype)",
        "probs = F.softmax(combined_logits, dim=-1, dtype=torch.float32)",
    ),
    "drop_sinks": ("scores = probs[..., :-1]",),
    "dropout_scores": (_DROPOUT.format("scores") + ".to(value.dtype)",),
    "softmax_drop_sinks": ("attn_weights = F.softmax(torch.cat([attn_weights, sinks], dim=-1), dim=-1)[..., :-1].to(value.dtype)",),
    # The same, where the module may have none.
    "maybe_sinks": (f"if module.sinks is not None:\n    {_SINKS}\n    attn_weights = torch.cat([attn_weights, sinks], dim=-1)",),
    "shift_weights": ("attn_weights = attn_weights - attn_weights.max(dim=-1, keepdim=True).values",),
    "softmax_probs": ("probs = F.softmax(attn_weights, dim=-1, dtype=attn_weights.dtype)",),
    "maybe_drop_sinks": ("if module.sinks is not None:\n    probs = probs[..., :-1]",),
    "dropout_probs": (_DROPOUT.format("probs") + ".to(value.dtype)",),
    # Sinks as a gate: sigmoid(lse - sink) * softmax(x) is the softmax with exp(sink) added to its denominator.
    "lse": ("lse = torch.logsumexp(attn_weights, dim=-1)",),
    "gate": ("sink_scale = (lse - module.sinks.view(1, -1, 1)).to(torch.float32).sigmoid()",),
    "gated": ("attn_output = attn_output * sink_scale.unsqueeze(-1).to(attn_output.dtype)",),
}
_STEP_OF = {text: step for step, texts in _STEPS.items() for text in texts}

_SENTENCE = re.compile(
    r"((?P<scale>scale_query|scale_module) )?(groups )?(repeat |repeat_key repeat_value )?scores "
    r"(?P<softcap>softcap )?(?P<bias>bias )?mask "
    r"(softmax (cast )?dropout output"
    r"|(?P<sinks>sinks with_sinks (shift )?softmax_sinks drop_sinks dropout_scores output"
    r"|sinks softmax_drop_sinks dropout output"
    r"|maybe_sinks shift_weights softmax_probs maybe_drop_sinks dropout_probs output"
    r"|lse gate softmax dropout output gated))"
    r" layout return"
)

_REPEAT_KV = (
    "batch, num_key_value_heads, slen, head_dim = hidden_states.shape",
    "if n_rep == 1:\n    return hidden_states",
    "hidden_states = hidden_states[:, :, None, :, :].expand(batch, num_key_value_heads, n_rep, slen, head_dim)",
    "return hidden_states.reshape(batch, num_key_value_heads * n_rep, slen, head_dim)",
)


class _Normalise(ast.NodeTransformer):
    def visit_Name(self, node: ast.Name) -> ast.AST:
        return ast.copy_location(ast.Name(id=_RENAMED.get(node.id, node.id), ctx=node.ctx), node)

    def visit_Attribute(self, node: ast.Attribute) -> ast.AST:
        self.generic_visit(node)
        if node.attr == "functional" and ast.unparse(node.value) in ("nn", "torch.nn"):
            return ast.copy_location(ast.Name(id="F", ctx=node.ctx), node)
        return node


def _parse(function: types.FunctionType) -> ast.FunctionDef | None:
    if hasattr(function, "__wrapped__"):
        return None
    try:
        tree = ast.parse(textwrap.dedent(inspect.getsource(function)))
    except (OSError, TypeError, SyntaxError, ValueError):
        return None
    node = tree.body[0] if len(tree.body) == 1 else None
    return node if isinstance(node, ast.FunctionDef) and not node.decorator_list else None


def _statements(node: ast.FunctionDef) -> list[str]:
    body = node.body
    if isinstance(body[0], ast.Expr) and isinstance(body[0].value, ast.Constant) and isinstance(body[0].value.value, str):
        body = body[1:]
    texts = []
    for statement in body:
        text = ast.unparse(_Normalise().visit(statement)).replace(".transpose(-1, -2)", ".transpose(2, 3)")
        target, _, value = text.partition(" = ")
        if target != value:
            texts.append(text)
    return texts


def _resolves(function: types.FunctionType, name: str) -> bool:
    """Whether the global that a recognised statement reads is the one it seems to be."""
    expected: dict[str, Any] = {"torch": torch, "nn": torch.nn, "F": torch.nn.functional}
    value = function.__globals__.get(name)
    if name in expected:
        return value is expected[name]
    if name == "repeat_kv":
        node = _parse(value) if isinstance(value, types.FunctionType) else None
        return node is not None and tuple(_statements(node)) == _REPEAT_KV
    if name == "maybe_autocast":
        return getattr(value, "__module__", "").split(".")[0] == "transformers"
    return name not in function.__globals__ and hasattr(builtins, name)


def recognise(function: types.FunctionType) -> EagerForm | None:
    """The form of `function`, or None if its source is missing or is not known to be plain attention. Never raises on source."""
    if function.__closure__ or (node := _parse(function)) is None:
        return None
    names = [_RENAMED.get(p.arg, p.arg) for p in node.args.posonlyargs + node.args.args]
    extra = set(names[len(_PARAMETERS) :]) | {p.arg for p in node.args.kwonlyargs}
    if tuple(names[: len(_PARAMETERS)]) != _PARAMETERS or not extra <= _OPTIONS or node.args.vararg is not None:
        return None
    steps = [_STEP_OF.get(text, "unknown") for text in _statements(node)]
    match = _SENTENCE.fullmatch(" ".join(steps))
    if match is None or not all(_resolves(function, name) for name in _globals_read(function.__code__)):
        return None
    needed = {"scaling", "dropout"} | {name for step, name in (("softcap", "softcap"), ("bias", "position_bias")) if match[step]}
    if not needed <= extra:
        return None
    scale = (match["scale"] or "given").removeprefix("scale_")
    return EagerForm(scale=scale, softcap=bool(match["softcap"]), bias=bool(match["bias"]), sinks=bool(match["sinks"]))


def _globals_read(code: types.CodeType) -> set[str]:
    return {i.argval for i in dis.get_instructions(code) if i.opname in ("LOAD_GLOBAL", "LOAD_NAME")}
