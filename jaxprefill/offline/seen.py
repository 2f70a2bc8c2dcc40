"""Which names have been seen, in 16 to 32 bytes a name, however long the names."""

from array import array
from hashlib import blake2b

_FIRST_SLOTS = 2**12


class SeenNames:
    """A set of 64-bit hashes with open addressing.

    Of ten million names, the chance that any two are taken for one is three in a million.
    """

    def __init__(self) -> None:
        """Empty."""
        self._slots = array("Q", bytes(8 * _FIRST_SLOTS))  # 0: free
        self._count = 0

    def add(self, name: str) -> bool:
        """Adds a name; whether it is new."""
        digest = blake2b(name.encode("utf-8", "surrogatepass"), digest_size=8).digest()
        is_new = self._insert(int.from_bytes(digest, "little") or 1)
        self._count += is_new
        if 2 * self._count > len(self._slots):
            self._grow()
        return is_new

    def _insert(self, value: int) -> bool:
        slots, mask = self._slots, len(self._slots) - 1
        at = value & mask
        while slots[at]:
            if slots[at] == value:
                return False
            at = (at + 1) & mask
        slots[at] = value
        return True

    def _grow(self) -> None:
        old, self._slots = self._slots, array("Q", bytes(16 * len(self._slots)))
        for value in old:
            if value:
                self._insert(value)
