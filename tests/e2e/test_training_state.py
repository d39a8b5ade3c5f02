"""What changes around a compiled model while it trains: weights, what requires grad, buffers, hooks, threads, ways to go backward."""

from __future__ import annotations

import copy
import threading
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import sp_compile
from sp_compile import inner
from sp_compile.errors import CannotShare
from tests.e2e import compare
from tests.e2e.models import Gpt, spread
from tests.e2e.test_modes import labelled
from tests.e2e.training_parts import assert_same, gradients, objective, with_adapters


@pytest.fixture(autouse=True)
def _fresh() -> None:
    torch._dynamo.reset()


class Small(Gpt):
    def __init__(self) -> None:
        super().__init__(width=16, heads=2, layers=1)


def small() -> nn.Module:
    return spread(Small())


def test_grad_modes_in_any_order() -> None:
    model, batch = small(), labelled()
    call = compare.compiled(model, "aot_eager")
    for mode in (torch.inference_mode, torch.no_grad, torch.inference_mode):
        with mode():
            assert not call(**batch.inputs)[0].requires_grad
        compare.assert_shared(sp_compile.last_run(), batch)
    compare.check(call, model, batch)
    with torch.inference_mode():
        inside = labelled(1)
        call(**inside.inputs)
        compare.assert_shared(sp_compile.last_run(), inside)
    compare.check(call, model, batch)


def test_adapters() -> None:
    model = with_adapters(small())
    call = compare.compiled(model, "aot_eager")
    for seed in range(2):
        compare.check(call, model, labelled(seed))


def no_guards(entries: Any) -> list[bool]:
    return [False for _ in entries]


@pytest.mark.parametrize("shared", [True, pytest.param(False, marks=pytest.mark.slow)])
def test_frozen_in_place_where_no_guard_sees_it(shared: bool) -> None:
    """Guards are dropped, so that the graph captured with frozen weights is run with trained ones."""
    model, batch = small(), labelled()
    options = {"inner": "aot_eager", "min_sharing": 1.0 if shared else 99.0, "guard_filter_fn": no_guards}
    call = torch.compile(model, backend="shared_prefix", options=options)
    for trained in (("ln_f",), ("lm_head", "wpe"), ("",), ("ln_f",)):
        for name, parameter in model.named_parameters():
            parameter.requires_grad_(any(part in name for part in trained))
        wanted = compare.step(model, model, batch)
        found = compare.step(call, model, batch)
        assert sp_compile.last_run().shared is shared
        compare.assert_close(found, wanted, batch.real)


def test_parameters_and_modules_replaced() -> None:
    model = small()
    call = compare.compiled(model, "eager")
    compare.check(call, model, labelled())
    model.lm_head.weight = nn.Parameter(torch.randn_like(model.lm_head.weight) * 0.1)  # type: ignore[union-attr, arg-type]
    compare.check(call, model, labelled())
    model.transformer["ln_f"].weight = nn.Parameter(torch.rand(16), requires_grad=False)  # type: ignore[index, union-attr]
    compare.check(call, model, labelled())


class Counting(Small):
    """A counter, a running value of the weights, and a buffer that is reassigned."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("calls", torch.zeros((), dtype=torch.long))
        self.register_buffer("running", torch.ones(16))
        self.register_buffer("assigned", torch.zeros(()))

    def forward(self, input_ids: Tensor, labels: Tensor | None = None) -> tuple[Tensor, Tensor | None]:
        self.calls += 1
        self.running.mul_(0.9).add_(self.lm_head.weight.detach().mean(0), alpha=0.1)
        self.assigned = self.assigned + 1
        logits, loss = super().forward(input_ids, labels)
        return logits * self.running.mean(), loss


@pytest.mark.parametrize("name", [pytest.param("eager", marks=pytest.mark.slow), "aot_eager"])
def test_buffers_are_written_once_per_call(name: str) -> None:
    model = spread(Counting())
    dense = copy.deepcopy(model)
    call = compare.compiled(model, name)
    for seed in range(2):
        batch = labelled(seed)
        wanted, found = compare.step(dense, dense, batch), compare.step(call, model, batch)
        compare.assert_shared(sp_compile.last_run(), batch)
        compare.assert_close(found, wanted, batch.real)
        for buffer, value in dense.named_buffers():
            torch.testing.assert_close(dict(model.named_buffers())[buffer], value)
        assert int(model.calls) == seed + 1  # type: ignore[arg-type]


def test_hooks_and_accumulation() -> None:
    """Hooks of parameters and of modules run as often as in the dense run, also when several batches add up."""
    model = small()
    seen: list[str] = []
    for name, parameter in model.named_parameters():
        parameter.register_hook(lambda grad, name=name: (seen.append(name), grad * 2)[1])
        parameter.register_post_accumulate_grad_hook(lambda _, name=name: seen.append(f"after {name}"))
    model.transformer["h"][0].register_forward_hook(lambda module, args, output: output * 1.5)  # type: ignore[index, union-attr]
    call = compare.compiled(model, "aot_eager")

    def accumulate(run: Any) -> dict[str, Tensor]:
        seen.clear()
        return gradients(model, lambda: [(objective(run, labelled(seed)) / 2).backward() for seed in range(2)])

    wanted, expected = accumulate(model), sorted(seen)
    assert_same(accumulate(call), wanted)
    assert sorted(seen) == expected
    compare.assert_shared(sp_compile.last_run(), labelled(1))


def test_gradient_hook_inside_of_the_model_is_refused() -> None:
    """It would see gradients that are summed over rows."""

    class Hooked(Small):
        def forward(self, input_ids: Tensor, labels: Tensor | None = None) -> tuple[Tensor, Tensor | None]:
            x = self.transformer["wte"](input_ids)
            x.register_hook(lambda grad: grad.clamp(-1e-3, 1e-3))
            return self.lm_head(self.transformer["h"][0](x)), None  # type: ignore[index]

    model, batch = spread(Hooked()), labelled()
    wanted = compare.step(model, model, batch)
    call = torch.compile(model, backend="shared_prefix", options={"inner": "aot_eager"})
    with pytest.warns(UserWarning, match="gradient is read inside|written backward"):
        found = compare.step(call, model, batch)
    compare.assert_close(found, wanted, batch.real)


def test_transform_inside_of_the_graph_is_refused() -> None:
    model, batch = small(), labelled()
    weights = {name: p.detach() for name, p in model.named_parameters()}

    def loss(values: dict[str, Tensor]) -> Tensor:
        return torch.func.functional_call(model, values, kwargs=batch.inputs)[1]

    def slope(values: dict[str, Tensor]) -> dict[str, Tensor]:
        return torch.func.grad(loss)(values)

    wanted = slope(weights)
    with pytest.warns(UserWarning, match="differentiates itself"):
        found = torch.compile(slope, backend="shared_prefix", options={"inner": "aot_eager"})(weights)
    assert_same(found, wanted)
    assert "torch.func.grad" in sp_compile.last_run().refused[0]


def test_loss_inside_of_the_compiled_function() -> None:
    model, batch = small(), labelled()

    def step(input_ids: Tensor, labels: Tensor) -> tuple[Tensor, Tensor]:
        logits, _ = model(input_ids)
        return logits, F.cross_entropy(logits[:, :-1].flatten(0, 1), labels[:, 1:].flatten())

    compare.assert_close(compare.step(compare.compiled(step, "eager"), model, batch), compare.step(step, model, batch), batch.real)
    compare.assert_shared(sp_compile.last_run(), batch)


@pytest.mark.parametrize("name", [pytest.param("eager", marks=pytest.mark.slow), "aot_eager"])
def test_retained_graph(name: str) -> None:
    model, batch = small(), labelled()
    call = compare.compiled(model, name)

    def twice(run: Any) -> dict[str, Tensor]:
        def body() -> None:
            loss = objective(run, batch)
            loss.backward(retain_graph=True)
            loss.backward()

        return gradients(model, body)

    with torch._functorch.config.patch(donated_buffer=False):
        assert_same(twice(call), twice(model))
    compare.assert_shared(sp_compile.last_run(), batch)


@pytest.mark.slow
def test_donated_buffers_name_the_remedy() -> None:
    model, batch = small(), labelled()
    loss = objective(compare.compiled(model, "aot_eager"), batch)
    with torch._functorch.config.patch(donated_buffer=True):
        try:
            loss.backward(retain_graph=True)
        except RuntimeError as error:
            assert "donated_buffer" in str(error)  # noqa: PT017  (no error is right too)


@pytest.mark.parametrize("name", [pytest.param("eager", marks=pytest.mark.slow), "aot_eager"])
def test_double_backward_is_an_error(name: str) -> None:
    model, batch = small(), labelled()
    with torch._functorch.config.patch(donated_buffer=False):
        loss = objective(compare.compiled(model, name), batch)
        first = torch.autograd.grad(loss, list(model.parameters()), create_graph=True)
        squares = torch.stack([g.square().sum() for g in first]).sum()
        with pytest.raises(RuntimeError, match=r"double backward|no autograd formula"):
            squares.backward()


def test_print_and_item_in_the_model() -> None:
    """Each breaks the graph; the part with the layers is still shared, and the account says what was not: the number that is printed,
    and what comes after the branch."""

    class Talking(Small):
        def forward(self, input_ids: Tensor, labels: Tensor | None = None) -> tuple[Tensor, Tensor | None]:
            print(input_ids.shape[0], "rows")
            logits, loss = super().forward(input_ids, labels)
            return (logits * 2 if loss is not None and loss.item() > 0 else logits), loss

    model, batch = spread(Talking()), labelled()
    call = torch.compile(model, backend="shared_prefix", options={"inner": "eager"})
    wanted, found = compare.step(model, model, batch), compare.step(call, model, batch)
    compare.assert_close(found, wanted, batch.real)
    account = sp_compile.last_run()
    assert account.shared
    assert (account.regions, account.dense_compiles) == (3, 2)


def in_threads(*runs: Any) -> list[Any]:
    results: list[Any] = [None] * len(runs)

    def one(number: int) -> None:
        try:
            results[number] = runs[number]()
        except BaseException as error:
            results[number] = error

    threads = [threading.Thread(target=one, args=(number,)) for number in range(len(runs))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(timeout=120)
    assert not any(thread.is_alive() for thread in threads), "no thread waits for another for ever"
    for result in results:
        if isinstance(result, BaseException):
            raise result
    return results


def test_two_models_in_two_threads() -> None:
    pairs = [(model, compare.compiled(model, "aot_eager")) for model in (small(), small())]
    wanted = [compare.step(model, model, labelled(n)) for n, (model, _) in enumerate(pairs)]
    found = in_threads(
        *(lambda n=n, model=model, call=call: compare.step(call, model, labelled(n)) for n, (model, call) in enumerate(pairs))
    )
    for n in range(2):
        compare.assert_close(found[n], wanted[n], labelled(n).real)


def test_one_model_in_two_threads() -> None:
    model = small()
    call = compare.compiled(model, "eager")
    batches = [labelled(n) for n in range(2)]
    wanted = [model(**batch.inputs)[0] for batch in batches]

    def runs(n: int) -> Tensor:
        for _ in range(3):
            result: Tensor = call(**batches[n].inputs)[0]
            compare.assert_shared(sp_compile.last_run(), batches[n])
        return result

    found = in_threads(lambda: runs(0), lambda: runs(1))
    for n in range(2):
        assert compare.relative(found[n], wanted[n]) <= compare.LOGITS


def test_fake_inputs_mean_a_split_graph() -> None:
    """A part of a split graph is refused at once: asking for symbols from within each part would never end."""
    from torch._subclasses.fake_tensor import FakeTensorMode

    from sp_compile.capture.split_graphs import split_refusal

    with FakeTensorMode():
        fake = torch.zeros(3, 4, dtype=torch.long)
    assert split_refusal([torch.zeros(3)]) is None
    assert isinstance(split_refusal([fake]), CannotShare)


def test_cache_tag_holds_what_code_does_not_say(monkeypatch: pytest.MonkeyPatch) -> None:
    def graph(tag: Any = None) -> torch.fx.GraphModule:
        made = torch.fx.symbolic_trace(lambda x: x.sin().cos())
        for node in made.graph.nodes:
            if tag is not None and node.op == "call_method":
                node.meta.update(recompute=tag, ac_graph_id=7)
        return made

    plain = inner.cache_tag(graph())
    assert inner.cache_tag(graph()) == plain
    assert inner.cache_tag(graph(torch.utils.checkpoint.CheckpointPolicy.PREFER_RECOMPUTE)) != plain
    with torch.compiler.config.patch(cache_key_tag="the user's"):
        assert "the user's" in inner.cache_tag(graph())
    before = torch.are_deterministic_algorithms_enabled()
    try:
        torch.use_deterministic_algorithms(not before)
        assert inner.cache_tag(graph()) != plain
    finally:
        torch.use_deterministic_algorithms(before)
    monkeypatch.setattr(sp_compile, "__version__", "another")
    assert inner.cache_tag(graph()) != plain
