"""The machinery, on functions of this file."""

from __future__ import annotations

import functools
import os
import subprocess
import sys
from typing import Any

import pytest
import torch

from sp_compile.capture import install, is_ours, set_backend, unset_backend
from sp_compile.capture.polyfills import Parameters, bind, constant, ours, rescan, substitute
from tests.capture.recording import GRAPHS, OTHERS, capture, recording, sites, stranger


def target(x: torch.Tensor, scale: float = 2.0) -> torch.Tensor:
    return x * scale


def marked(original: Any, raw: Any) -> Any:
    return lambda x, scale=2.0: torch.ops.sp_compile.refusal_site(raw(x, scale), "marked")


def caller(x: torch.Tensor) -> torch.Tensor:
    return target(x) + 1


def test_polyfill_acts_under_our_backend_only_and_registers_once() -> None:
    assert substitute(target, marked)
    assert substitute(target, lambda original, raw: pytest.fail("built twice"))
    x = torch.randn(3)
    assert torch.equal(torch.compile(caller, backend=recording)(x), caller(x))
    assert torch.equal(torch.compile(caller, backend=stranger)(x), caller(x))
    assert len(sites(GRAPHS[0], "refusal_site")) == 1
    assert len(sites(OTHERS[0], "refusal_site")) == 0
    torch._dynamo.reset()
    assert len(sites(capture(caller, x), "refusal_site")) == 1


def test_declined_and_foreign_functions_are_left_alone() -> None:
    assert not substitute(torch.sin, marked)
    assert not substitute(functools.partial(target), marked)
    assert not substitute(None, marked)

    def plain(x: torch.Tensor) -> torch.Tensor:
        return x

    assert not substitute(plain, lambda original, raw: None)


def test_wrapped_backends_are_recognised() -> None:
    from torch._dynamo.repro.after_dynamo import wrap_backend_debug

    assert is_ours(recording)
    assert not is_ours(stranger)
    assert not is_ours(None)
    assert not ours()
    assert is_ours(functools.partial(recording, options={}))
    assert is_ours(torch._TorchCompileWrapper(recording, None, {}, None))
    assert is_ours(wrap_backend_debug(torch._TorchCompileWrapper(recording, None, {}, None), "recording"))
    assert not is_ours(wrap_backend_debug(torch._TorchCompileWrapper(stranger, None, {}, None), "stranger"))


def test_a_backend_under_the_ddp_optimizer_is_recognised() -> None:
    distributed = pytest.importorskip("torch._dynamo.backends.distributed")
    optimizer = distributed.DDPOptimizer(bucket_bytes_cap=1 << 20, backend_compile_fn=torch._TorchCompileWrapper(recording, None, {}, None))
    assert is_ours(optimizer.compile_fn)


def test_backends_can_be_withdrawn() -> None:
    def temporary(graph: Any, inputs: Any) -> Any:
        return graph

    assert is_ours(set_backend(temporary))
    unset_backend(temporary)
    assert not is_ours(temporary)


def test_arguments_are_bound_by_the_originals_names() -> None:
    def original(a: int, b: int = 2, *, c: int = 3, **rest: int) -> None: ...

    parameters = Parameters(original, {"old_b": "b", "gone": "nowhere"})
    assert parameters.aliases == {"old_b": "b"}
    bound = bind(parameters.names, parameters.defaults, parameters.aliases, (1,), {"old_b": 5, "extra": 7})
    assert bound == {"a": 1, "b": 5, "c": 3, "extra": 7}


def test_numbers_are_constants_even_when_shapes_are_dynamic() -> None:
    holder = torch.nn.Module()
    holder.scale, holder.window, holder.absent = 0.3, 7, None

    def function(x: torch.Tensor) -> torch.Tensor:
        number = constant(holder.scale)
        return torch.ops.sp_compile.mask_site(
            x * number, None, None, kind="causal", window=constant(holder.window), chunk=constant(holder.absent)
        )

    (site,) = sites(capture(function, torch.randn(3)), "mask_site")
    assert (site.kwargs["window"], site.kwargs["chunk"]) == (7, None)
    assert site.args[0].args[1] == 0.3


def test_install_survives_a_reset_and_says_whether_it_added_anything() -> None:
    handler = torch._dynamo.callback.callback_handler
    torch._dynamo.reset()
    assert rescan not in handler.start_callbacks
    assert install() is False
    install()
    assert handler.start_callbacks.count(rescan) == 1


SCRIPT = """
import sys
class Hide:
    def find_spec(self, name, path=None, target=None):
        if name.split(".")[0] == "transformers":
            raise ImportError(name)
sys.meta_path.insert(0, Hide())
import torch
from sp_compile.capture import install, set_backend
set_backend(lambda graph, inputs: graph)
install()
print(torch.compile(lambda x: x + 1, backend="eager")(torch.zeros(1)).item(), "transformers" in sys.modules)
"""


def test_capture_works_without_transformers() -> None:
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    done = subprocess.run([sys.executable, "-c", SCRIPT], capture_output=True, text=True, env=environment, check=False)
    assert done.stdout.split() == ["1.0", "False"], done.stderr
