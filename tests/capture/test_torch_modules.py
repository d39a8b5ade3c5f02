"""torch's own transformer modules are captured in one graph and shared, although they are not told that their mask is causal."""

from __future__ import annotations

import torch
from torch import Tensor, nn

import sp_compile
from tests.capture.handwritten import WORDS, batch, close, compiled


class Encoder(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        layer = nn.TransformerEncoderLayer(16, 4, 32, dropout=0.0, batch_first=True)
        self.words, self.head = nn.Embedding(WORDS, 16), nn.Linear(16, WORDS)
        self.layers = nn.TransformerEncoder(layer, 1, enable_nested_tensor=False)
        for parameter in self.parameters():
            nn.init.normal_(parameter, std=0.3)
        self.double()

    def forward(self, ids: Tensor) -> Tensor:
        mask = nn.Transformer.generate_square_subsequent_mask(ids.shape[1], dtype=torch.float64)
        return self.head(self.layers(self.words(ids), mask=mask))  # type: ignore[no-any-return]


def test_encoder_with_a_causal_mask() -> None:
    torch.manual_seed(0)
    model = Encoder()
    ids, _ = batch()
    model(ids).logsumexp(-1).sum().backward()
    wanted = {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}
    model.zero_grad()
    compiled(model)(ids).logsumexp(-1).sum().backward()
    run = sp_compile.last_run()
    assert run.shared
    assert not run.refused
    assert (run.logical_tokens, run.physical_tokens) == (44, 29)
    for name, p in model.named_parameters():
        assert p.grad is not None
        close(p.grad, wanted[name], name)


def test_encoder_elsewhere_is_traced_as_it_is() -> None:
    ids, _ = batch()
    torch._dynamo.reset()
    counted = torch._dynamo.testing.CompileCounter()
    torch.compile(Encoder(), backend=counted)(ids)
    assert counted.frame_count > 1
