"""A refusal says what was not proved, in which op and graph node, in which line of the model, and what to do."""

from __future__ import annotations

import inspect
from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch._dynamo.exc import BackendCompilerFailed

from sp_compile.backend import compile_region
from sp_compile.errors import CannotShare, NothingToShare
from sp_compile.options import Options
from tests.analysis.programs import Program
from tests.analysis.test_traps import Between, refused
from tests.passes.harness import Tiny, batch, run

_SHARE = "Only causal attention can be shared."


def mean(x: Tensor, ids: Tensor) -> Tensor:
    return x + x.mean(1, keepdim=True)  # here


def running(x: Tensor, ids: Tensor) -> Tensor:
    return x + x.cumsum(1)  # here


def softmax(x: Tensor, ids: Tensor) -> Tensor:
    return x * x.softmax(1)  # here


def roll(x: Tensor, ids: Tensor) -> Tensor:
    return x + x.roll(1, 1)  # here


def ahead(x: Tensor, ids: Tensor) -> Tensor:
    return x + F.pad(ids[:, 1:], (0, 1))[..., None]


def product(x: Tensor, ids: Tensor) -> Tensor:
    weights = (x @ x.transpose(1, 2)).tanh()
    return weights @ x  # here


def batch_norm(x: Tensor, ids: Tensor) -> Tensor:
    y = F.batch_norm(x.flatten(0, 1), None, None, training=True)  # here
    return y.view(x.shape)


def lookup(x: Tensor, ids: Tensor) -> Tensor:
    return x + x[:, ids[0] % 4]  # here


def dropout(x: Tensor, ids: Tensor) -> Tensor:
    return F.dropout(x, 0.1)  # here


def squeezed(x: Tensor, ids: Tensor) -> Tensor:
    return x + x[..., :1].squeeze()[..., None]  # here


def written(x: Tensor, ids: Tensor) -> Tensor:
    x = x.clone()
    x[:, 0] = 0  # here
    return x


def zeros(x: Tensor, ids: Tensor) -> Tensor:
    return x + torch.cat([x.new_zeros(x.shape[0], 1, x.shape[2]), x], 1)[:, :-1]  # here


def convolved(x: Tensor, ids: Tensor) -> Tensor:
    weight = torch.ones(x.shape[2], 1, 3, dtype=x.dtype)
    return x + F.conv1d(x.mT, weight, padding=2, groups=x.shape[2]).mT.split([x.shape[1], 2], 1)[0]  # here


def unknown(x: Tensor, ids: Tensor) -> Tensor:
    return x + torch.fft.rfft(x).abs().sum(-1, keepdim=True)  # here


@pytest.mark.parametrize(
    ("between", "reason", "op", "node", "advice"),
    [
        (mean, "mean over dimension 1 reduces over tokens", "aten.mean.dim", "mean", ""),
        (running, "cumsum runs along the columns", "aten.cumsum.default", "cumsum", ""),
        (softmax, "softmax along dimension 1 runs over tokens", "aten._softmax.default", "softmax", ""),
        (roll, "roll moves tokens along dimension 1", "aten.roll.default", "roll", ""),
        (product, "a matrix product contracts over tokens, which mixes them", "aten.bmm.default", "x", "Attention written as"),
        (batch_norm, "batch normalisation mixes all tokens of the batch", "batch_norm", "y", "Use layer or RMS normalisation."),
        (lookup, "one row or column is selected", "aten.select.int", "getitem", ""),
        (dropout, "random numbers are drawn per token", "aten.", "x", "Set dropout to 0"),
        (squeezed, "squeeze() without a dimension would drop the batch axis", "aten.squeeze.default", "squeeze", "Name the dimension"),
        (written, "an op writes to a part of the rows or columns", "aten.fill_.Tensor", "setitem", "Write it without in-place ops."),
        (zeros, "tokens are joined to tokens", "aten.cat.default", "cat", "F.pad(x, (W - 1, 0))"),
        (convolved, "a convolution of tokens reads other ones", "aten.convolution.default", "conv1d", "conv(x)[..., :L]"),
        (unknown, "there is no rule for this op", "aten._fft_r2c.default", "fft_rfft", "register a rule"),
    ],
)
def test_refusal(between: Callable[[Tensor, Tensor], Tensor], reason: str, op: str, node: str, advice: str) -> None:
    found = refused(Between(between), batch())
    assert reason in found.reason
    assert op in found.op
    assert node in found.node
    assert advice in found.advice
    assert found.source == f"{__file__}:{_line_of(between)}, in {between.__name__}"
    assert all(part in str(found) for part in (found.reason, found.op, found.node, found.source, found.advice))


def _line_of(function: Callable[..., object]) -> int:
    lines, first = inspect.getsourcelines(function)
    return first + next(number for number, line in enumerate(lines) if "# here" in line)


def test_looking_ahead() -> None:
    """Refined forests are for that; without them the op that shifts is named."""
    _, found = run(Between(ahead), batch())
    assert found[0].context.refined == [(1, 0)]
    with pytest.raises(BackendCompilerFailed, match="columns are padded or shifted"):
        run(Between(ahead), batch(), disable=["refine_sharing"])


class Seeing(Tiny):
    """Attention under any mask."""

    def __init__(self, mask: Callable[[Tensor], Tensor | None], dropout: float = 0.0) -> None:
        super().__init__(lambda logits, ids: logits)
        self.mask, self.dropout = mask, dropout

    def forward(self, ids: Tensor) -> Tensor:
        x = self.words(ids)
        q, k, v = (layer(x).unflatten(-1, (2, 4)).transpose(1, 2) for layer in (self.q, self.k, self.v))
        mask = self.mask(ids)
        mixed = F.scaled_dot_product_attention(q, k, v, mask, self.dropout, is_causal=self.dropout > 0)  # here
        return self.head(x + mixed.transpose(1, 2).flatten(2))


def _columns(ids: Tensor) -> Tensor:
    return torch.arange(ids.shape[1])


@pytest.mark.parametrize(
    ("model", "reason", "advice"),
    [
        (Seeing(lambda ids: None), "without a mask and without is_causal sees later tokens", _SHARE),
        (Seeing(lambda ids: _columns(ids)[:, None] <= _columns(ids)), "lets a token see later columns", _SHARE),
        (Seeing(lambda ids: (_columns(ids)[:, None] - _columns(ids)).abs() < 3), "not proved to hide later columns", _SHARE),
        (Seeing(lambda ids: None, 0.1), "attention dropout draws random numbers per token", "Set attention dropout to 0"),
        (Seeing(lambda ids: torch.arange(ids.shape[0])[:, None, None, None] >= _columns(ids)), "numbers the rows", ""),
    ],
    ids=["none", "anti-causal", "band", "dropout", "by row"],
)
def test_refused_attention(model: nn.Module, reason: str, advice: str) -> None:
    found = refused(model, batch())
    assert reason in found.reason
    assert advice in found.advice
    assert found.node
    if advice:
        assert "scaled_dot_product_attention" in found.op
        assert found.source == f"{__file__}:{_line_of(Seeing.forward)}, in forward"


def test_no_tokens() -> None:
    with pytest.warns(UserWarning, match=r"no integer \[rows, columns\] input .* pass input_ids"):
        torch.compile(nn.Linear(4, 4), backend="shared_prefix", options={"inner": "eager"}, dynamic=True)(torch.randn(3, 5, 4))


def test_input_that_requires_grad() -> None:
    model = Between(lambda x, more, ids: x + more[..., None])
    more = torch.randn(4, 14, dtype=torch.float64, requires_grad=True)
    with pytest.raises(BackendCompilerFailed) as caught:
        torch.compile(model, backend="shared_prefix", options={"inner": "eager", "strict": True}, dynamic=True)(batch(), more)
    found = caught.value.inner_exception
    assert isinstance(found, CannotShare)
    assert "has one value per row and requires grad" in found.reason
    assert "remove the graph break" in found.advice


def test_nothing_to_share() -> None:
    """No mistake of the user's: not even `strict` objects."""
    p = Program()
    module = p.finish(p.call("mul", p.ids, 2))
    values = p.inputs(p.sample)
    with pytest.raises(NothingToShare, match="computes nothing that rows with a common prefix could share"):
        compile_region(module, values, Options(strict=True))
    torch._dynamo.reset()
    compiled = torch.compile(lambda ids: ids * 2, backend="shared_prefix", options={"inner": "eager", "strict": True})
    assert torch.equal(compiled(batch()), batch() * 2)
