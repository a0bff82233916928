"""A bounded set that forgets what was least recently seen."""

from __future__ import annotations

from collections import OrderedDict


class Recent:
    """Holds at most `capacity` names. Looking one up makes it recent again."""

    def __init__(self, capacity: int) -> None:
        self._capacity = capacity
        self._names: OrderedDict[str, None] = OrderedDict()

    def add(self, name: str) -> None:
        self._names[name] = None
        self._names.move_to_end(name)
        if len(self._names) > self._capacity:
            self._names.popitem(last=False)

    def discard(self, name: str) -> None:
        self._names.pop(name, None)

    def __contains__(self, name: str) -> bool:
        if name not in self._names:
            return False
        self._names.move_to_end(name)
        return True

    def __len__(self) -> int:
        return len(self._names)
