"""Bounded memory for things computed per forest."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Hashable
from threading import RLock
from typing import Generic, TypeVar

Key = TypeVar("Key", bound=Hashable)
Value = TypeVar("Value")


class BoundedCache(Generic[Key, Value]):
    """Keeps the `capacity` most recently used values; safe to share between threads, each value is made once while it is kept."""

    def __init__(self, capacity: int) -> None:
        assert capacity > 0, f"a cache needs room for at least one value, got {capacity}"
        self.capacity = capacity
        self._lock = RLock()
        self._values: OrderedDict[Key, Value] = OrderedDict()

    def get(self, key: Key, make: Callable[[], Value]) -> Value:
        """The value kept under `key`, made by `make()` if there is none."""
        with self._lock:
            if key in self._values:
                self._values.move_to_end(key)
                return self._values[key]
            value = make()
            self._values[key] = value
            while len(self._values) > self.capacity:
                self._values.popitem(last=False)
            return value

    def __len__(self) -> int:
        return len(self._values)
