"""Tensors by name, identity, determinism, sizes and speed."""

from __future__ import annotations

import copy
import pickle
import subprocess
import sys
import threading
import time

import numpy as np
import pytest
import torch

from sp_compile.errors import InvalidForest
from sp_compile.layout import BoundedCache, Forest, register, registered, tensors

BASE = ("row", "column", "count", "prev", "end", "index", "keep")


def forest() -> Forest:
    return Forest.from_rows([[1, 2, 3], [1, 2], [1, 4], [5]])


def test_base_tensors() -> None:
    f = forest()
    assert set(BASE) <= set(registered())
    for name, value in zip(BASE, f.tensors(BASE, "cpu"), strict=True):
        assert value.dtype == (torch.bool if name == "keep" else torch.int64)
        want = f.index >= 0 if name == "keep" else getattr(f, name)
        np.testing.assert_array_equal(value.numpy(), want)
        assert value.is_contiguous()
        assert not value._is_view()


def test_tensor_is_cached_per_device() -> None:
    f = forest()
    assert f.tensor("count", "cpu") is f.tensor("count", torch.device("cpu", 0))
    meta = f.tensor("count", "meta")
    assert meta.device.type == "meta"
    assert meta is f.tensor("count", "meta")
    assert f.tensor("count", "cpu") is f.tensors(("row", "count", "row"), "cpu")[1]


@pytest.mark.parametrize("name", BASE)
@pytest.mark.parametrize("array_first", [False, True])
def test_tensor_does_not_alias_the_forest(name: str, array_first: bool) -> None:
    """Nor another tensor: what is written to one by mistake stays there."""
    f, wanted = forest(), {other: value.clone() for other, value in zip(BASE, forest().tensors(BASE, "cpu"), strict=True)}
    if array_first:
        _ = f.row, f.column, f.count, f.prev, f.end, f.index
    f.tensor(name, "cpu").zero_()
    assert all(torch.equal(f.tensor(other, "cpu"), value) for other, value in wanted.items() if other != name)
    arrays = {other: getattr(f, other) for other in BASE if other != "keep"}
    assert all(array.tolist() == wanted[other].tolist() and not array.flags.writeable for other, array in arrays.items())


def test_no_inference_tensors() -> None:
    f = forest()
    with torch.inference_mode():
        value = f.tensor("row", "cpu")
        assert not value.is_inference()
        assert f.refined(1).tensor("row", "cpu").is_inference() is False
        assert Forest.from_tokens(torch.zeros(2, 3)).num_tokens == 3
    weight = torch.ones(4, requires_grad=True)
    weight[value].sum().backward()  # type: ignore[no-untyped-call]
    assert weight.grad is not None


def test_tensor_ignores_default_device() -> None:
    f = forest()
    with torch.device("meta"):
        assert f.tensor("row", "cpu").tolist() == forest().row.tolist()


def test_tensors_made_while_tracing_are_not_kept() -> None:
    f = forest()
    with torch._subclasses.FakeTensorMode():
        f.tensor("row", "cpu")
    assert type(f.tensor("row", "cpu")) is torch.Tensor


def test_unknown_name() -> None:
    with pytest.raises(InvalidForest, match=r"expected one of .*column.*, got 'rows'"):
        forest().tensor("rows", "cpu")


def test_register_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tensors, "_BUILDERS", dict(tensors._BUILDERS))
    monkeypatch.setattr(tensors, "_SHAPES", dict(tensors._SHAPES))
    register("test_depth", lambda f: f.depth.astype(np.int32))
    value = forest().tensor("test_depth", "cpu")
    assert value.dtype == torch.int32
    assert value.tolist() == forest().depth.tolist()
    for name in ("test_depth", "row"):
        with pytest.raises(InvalidForest, match="unused name"):
            register(name, lambda f: f.row)
    with pytest.raises(InvalidForest, match="empty string"):
        register("", lambda f: f.row)


def test_one_buffer_upload_equals_single_copies() -> None:
    arrays = [
        np.arange(7, dtype=np.int64),
        np.array([True, False, True]),
        np.arange(12, dtype=np.int32).reshape(3, 4).T,
        np.zeros((0, 5), dtype=np.int64),
        np.array(3, dtype=np.int16),
    ]
    for array, value in zip(arrays, tensors._upload_packed(arrays, torch.device("cpu")), strict=True):
        assert value.dtype == torch.from_numpy(np.ascontiguousarray(array)).dtype
        np.testing.assert_array_equal(value.numpy(), array)
        assert value.is_contiguous()
        assert not value._is_view()
        assert value.data_ptr() % 16 == 0


def test_threads_see_one_tensor() -> None:
    f = Forest.from_tokens(np.random.default_rng(0).integers(0, 2, (32, 200)))
    results: list[tuple[torch.Tensor, ...]] = []
    barrier = threading.Barrier(8)

    def ask() -> None:
        barrier.wait()
        results.append(f.tensors(BASE, "cpu"))

    threads = [threading.Thread(target=ask) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(results) == 8
    assert all(a is b for other in results for a, b in zip(results[0], other, strict=True))


def test_same_input_gives_the_identical_forest() -> None:
    ids = np.random.default_rng(1).integers(0, 2, (20, 30))
    keep = np.random.default_rng(2).integers(0, 4, (20, 30)) > 0
    first = Forest.from_tokens(ids, keep=keep)
    for other in (Forest.from_tokens(ids.copy(), keep=keep.copy()), Forest.from_tokens(torch.from_numpy(ids).int(), keep=keep)):
        assert other == first
        assert hash(other) == hash(first)
        assert other.key() == first.key()
        for name in BASE[:-1]:
            np.testing.assert_array_equal(getattr(other, name), getattr(first, name))


def test_key_tells_forests_apart() -> None:
    forests = [
        Forest.from_rows([[1, 2], [1, 3]]),
        Forest.from_rows([[1, 2], [1, 2]]),
        Forest.from_rows([[1, 2], [1]]),
        Forest.from_rows([[1], [1, 2]]),
        Forest([0, 1, 2], [1, 1, 1], [-1, 0, 0], [1, 2], num_columns=3),
        Forest([0, 1, 2], [1, 1, 1], [-1, 0, 0], [1, 2], column=[0, 2, 2]),
        Forest([0, 1, 2], [1, 1, 1], [-1, 0, 0], [2, 1]),
        Forest([0, 1, 2], [1, 1, 1], [-1, 0, 0], [1, 2, -1]),
    ]
    assert len({f.key() for f in forests}) == len(forests)
    assert len(forests[0].key()) == 32
    assert forests[0] != "forest"


def test_key_is_the_same_in_another_process() -> None:
    code = "from sp_compile.layout import Forest; print(Forest.from_rows([[1, 2, 3], [1, 2], [1, 4], [5]]).key().hex())"
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert result.stdout.strip() == forest().key().hex()


def test_copies_are_equal() -> None:
    f = forest()
    f.tensor("row", "cpu")
    for other in (pickle.loads(pickle.dumps(f)), copy.deepcopy(f), copy.copy(f)):
        assert other == f
        assert not other.node_start.flags.writeable
        np.testing.assert_array_equal(other.index, f.index)


def test_repr_gives_sizes() -> None:
    assert repr(forest()) == "Forest(rows=4, columns=3, nodes=5, tokens=5, logical=8, sharing=1.600)"


def test_sizes_beyond_32_bits() -> None:
    # Nothing of token size is made for these, only node arrays.
    half = 2**30
    f = Forest(np.array([0, half], dtype=np.int32), np.array([half, half - 1], dtype=np.int32), [-1, 0], [1] * 9)
    assert (f.num_tokens, f.num_columns, f.logical_tokens) == (2**31 - 1, 2**31 - 1, 9 * (2**31 - 1))
    assert f.node_count.tolist() == [9, 9]
    wide = Forest([0, 2**40], [2**40, 2**40], [-1, -1], [0, 1])
    assert (wide.num_tokens, wide.num_columns) == (2**41, 2**40)
    for name in ("node_start", "node_len", "parent", "row_node", "run_start", "run_column", "depth", "node_end", "node_row", "node_count"):
        assert getattr(wide, name).dtype == np.int64


def test_token_arrays_are_int64_for_narrow_inputs() -> None:
    f = Forest.from_tokens(np.zeros((3, 4), dtype=np.int8), keep=np.eye(3, 4, dtype=bool))
    for name in ("row", "column", "count", "prev", "end", "index"):
        assert getattr(f, name).dtype == np.int64


def test_bounded_cache() -> None:
    cache: BoundedCache[bytes, int] = BoundedCache(2)
    made: list[int] = []

    def make(value: int) -> int:
        made.append(value)
        return value

    for key, value in ((b"a", 1), (b"b", 2), (b"a", 1), (b"c", 3), (b"a", 1), (b"b", 2)):
        assert cache.get(key, lambda value=value: make(value)) == value  # type: ignore[misc]
    assert made == [1, 2, 3, 2]
    assert len(cache) == 2


def test_a_million_tokens_take_milliseconds_not_seconds() -> None:
    rng = np.random.default_rng(0)
    ids = rng.integers(0, 150_000, (64, 16384))
    for group in range(4):
        ids[group * 16 : group * 16 + 16, :8192] = ids[group * 16, :8192]
    times = []
    for _ in range(5):
        start = time.perf_counter()
        f = Forest.from_tokens(ids)
        assert f.index.shape == (64, 16384)
        assert f.row.size == f.num_tokens
        times.append(time.perf_counter() - start)
    assert f.num_tokens == 4 * 8192 + 64 * 8192
    # The planning goal is 10 ms on an idle core; the bound only has to catch Python steps per token.
    assert min(times) < 0.25


def test_many_short_rows_stay_linear() -> None:
    rng = np.random.default_rng(0)
    ids = np.concatenate([np.full((20_000, 4), 3), rng.integers(0, 1000, (20_000, 8))], axis=1)
    f = Forest.from_tokens(ids)
    assert f.num_tokens < ids.size
    assert int(f.count[0]) == 20_000
    np.testing.assert_array_equal(ids[f.row, f.column][f.index], ids)
