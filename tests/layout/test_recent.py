"""Forests of recent batches are found again by content, never by identity."""

from __future__ import annotations

import threading

import pytest
import torch

from sp_compile.layout import Forest
from sp_compile.layout.recent import RecentForests


def batch(seed: int = 0, rows: int = 4, columns: int = 9) -> torch.Tensor:
    ids = torch.randint(1, 50, (rows, columns), generator=torch.Generator().manual_seed(seed))
    ids[:, :4] = ids[0, :4]
    return ids


def test_equal_content_gives_the_same_forest() -> None:
    recent, ids = RecentForests(2), batch()
    first = recent.get([ids], None)
    assert first == Forest.from_tokens(ids)
    assert recent.get([ids.clone()], None) is first


def test_a_buffer_that_is_filled_again_is_another_batch() -> None:
    """Also where the version counter does not see the write."""
    recent, ids = RecentForests(2), batch()
    first = recent.get([ids], None)
    ids.numpy()[1, 5] += 1
    second = recent.get([ids], None)
    assert second is not first
    assert second == Forest.from_tokens(ids)


@pytest.mark.parametrize("kind", ["keys", "keep", "dtype", "shape", "number"])
def test_everything_counts(kind: str) -> None:
    recent, ids = RecentForests(4), batch()
    keep = torch.ones_like(ids, dtype=torch.bool)
    first = recent.get([ids, ids], keep)
    others = {
        "keys": ([ids, ids + (torch.arange(9) == 3)], keep),
        "keep": ([ids, ids], keep & (torch.arange(9) < 8)),
        "dtype": ([ids, ids.int()], keep),
        "shape": ([ids[:3], ids[:3]], keep[:3]),
        "number": ([ids], keep),
    }
    keys, kept = others[kind]
    found = recent.get(keys, kept)
    assert found is not first
    assert found == Forest.from_tokens(*keys, keep=kept)
    assert recent.get([ids, ids], keep) is first


def test_bits_of_floats() -> None:
    recent, ids = RecentForests(4), batch()
    zeros = torch.zeros(4)
    negative = torch.tensor([0.0, -0.0, 0.0, 0.0])
    first = recent.get([ids, zeros], None)
    assert recent.get([ids, negative], None) == Forest.from_tokens(ids, negative)
    assert recent.get([ids, negative], None) != first
    nan = torch.full((4,), float("nan"))
    assert recent.get([ids, nan], None) is recent.get([ids, nan.clone()], None)


def test_only_the_latest_are_kept() -> None:
    recent = RecentForests(2)
    first = recent.get([batch(0)], None)
    recent.get([batch(1)], None)
    recent.get([batch(2)], None)
    assert recent.get([batch(0)], None) is not first


def test_threads() -> None:
    recent = RecentForests(3)
    wrong: list[int] = []

    def work(seed: int) -> None:
        for turn in range(50):
            ids = batch((seed + turn) % 5)
            if recent.get([ids], None) != Forest.from_tokens(ids):
                wrong.append(seed)

    threads = [threading.Thread(target=work, args=(seed,)) for seed in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not wrong


def test_empty_batches() -> None:
    recent = RecentForests(2)
    for shape in ((0, 5), (3, 0)):
        ids = torch.zeros(shape, dtype=torch.int64)
        assert recent.get([ids], None) is recent.get([ids], None)


def test_forgotten_batches_lend_their_memory() -> None:
    """Also between inference and training, and never that of a batch which is still known."""
    recent = RecentForests(2)
    batches = [batch(seed) for seed in range(5)]
    for number, ids in enumerate(batches):
        with torch.inference_mode(number % 2 == 0):
            assert recent.get([ids, ids.T.contiguous().T], ids > 3) == Forest.from_tokens(ids, keep=ids > 3)
    known = [recent.get([ids, ids], ids > 3) for ids in batches[3:]]
    assert known == [Forest.from_tokens(ids, keep=ids > 3) for ids in batches[3:]]
    assert all(recent.get([ids, ids], ids > 3) is one for ids, one in zip(batches[3:], known, strict=True))
