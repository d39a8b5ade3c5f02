"""A program for `test_fused_training`: transformers' models in training, with stand-ins for mamba_ssm and causal_conv1d behind them.

transformers looks for the packages when its modules are imported, so this needs a process of its own. Prints one line a case:
family, whether it was shared and refused, largest relative differences of loss and gradients to the model under
`torch.compile(backend="eager")`. That is the uncompiled one, but in some versions of torch `torch.compiler.is_exporting()` is true inside
of a compiled function, so that transformers calls its PyTorch bodies in place of kernels. The first line says which.
"""

from __future__ import annotations

import copy
import importlib.machinery
import sys
import types
import warnings

import torch
from torch import Tensor, nn


def install() -> None:
    """Puts the stand-ins where imports find them, with their parent packages."""
    from tests.capture.test_kernel_scans import FAKE

    for name, module in FAKE.items():
        if name.split(".")[0] not in ("mamba_ssm", "causal_conv1d"):
            continue
        parts = name.split(".")
        for count in range(1, len(parts)):
            parent = ".".join(parts[:count])
            if parent not in sys.modules:
                sys.modules[parent] = types.ModuleType(parent)
                sys.modules[parent].__path__ = []
        sys.modules[name] = module
        for count in range(1, len(parts)):
            setattr(sys.modules[".".join(parts[:count])], parts[count], sys.modules[".".join(parts[: count + 1])])
    for name in ("mamba_ssm", "causal_conv1d"):
        sys.modules[name].__spec__ = importlib.machinery.ModuleSpec(name, None)


def padded(left: bool) -> dict[str, Tensor]:
    """Three rows with a prefix of six tokens, ids, mask and labels [3, 11]."""
    generator = torch.Generator().manual_seed(0)
    head = torch.randint(3, 60, (6,), generator=generator)
    rows = [torch.cat([head, torch.randint(3, 60, (length,), generator=generator)]) for length in (5, 5, 2)]
    ids, mask = torch.zeros(3, 11, dtype=torch.int64), torch.zeros(3, 11, dtype=torch.int64)
    for place, row in enumerate(rows):
        span = slice(11 - len(row), 11) if left else slice(len(row))
        ids[place, span], mask[place, span] = row, 1
    return {"input_ids": ids, "attention_mask": mask, "labels": ids.masked_fill(mask == 0, -100)}


def step(call: nn.Module, model: nn.Module, batch: dict[str, Tensor]) -> tuple[float, dict[str, Tensor]]:
    model.zero_grad()
    loss = call(**batch).loss
    loss.backward()
    return loss.item(), {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}


def exports() -> bool:
    """Whether compiled functions believe that they are exported."""
    call = torch.compile(lambda x: x + int(torch.compiler.is_exporting()), backend="eager")
    return bool(call(torch.zeros(1)))


def main() -> None:
    warnings.simplefilter("ignore")
    install()
    import sp_compile
    from tests.e2e import hybrids
    from tests.e2e.models import spread

    print("bodies" if exports() else "kernels", flush=True)
    for family in ("mamba", "mamba2", "falcon_mamba"):
        for left in (True, False):
            for sharing in (1.1, 99.0) if family != "falcon_mamba" else (1.1,):
                torch._dynamo.reset()
                model = spread(hybrids.make(family)).train()
                other, third = copy.deepcopy(model), copy.deepcopy(model)
                call = torch.compile(other, backend="shared_prefix", options={"inner": "eager", "min_sharing": sharing})
                reference = torch.compile(model, backend="eager")
                (want, wanted), (got, found) = step(reference, model, padded(left)), step(call, other, padded(left))
                if not exports():
                    assert abs(step(third, third, padded(left))[0] - want) < 1e-5
                norm = max(float(grad.norm()) for grad in wanted.values())
                worst = max(float((found[name] - grad).norm()) / max(float(grad.norm()), 1e-3 * norm) for name, grad in wanted.items())
                run = sp_compile.last_run()
                print(family, run.shared, bool(run.refused), f"{abs(got - want) / abs(want):.2e}", f"{worst:.2e}", flush=True)


if __name__ == "__main__":
    main()
