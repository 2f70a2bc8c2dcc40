"""How the ranks of a group tell each other a few integers. Host only; imports no jax."""

import threading
from collections.abc import Sequence
from typing import Protocol, runtime_checkable

from jaxprefill.errors import ConfigError

_PATIENCE_S = 600.0  # a rank that says nothing for so long is taken for dead


@runtime_checkable
class Transport(Protocol):
    """One rank's end. All ranks call `gather` equally often, each with as many numbers."""

    rank: int

    def gather(self, numbers: Sequence[int]) -> list[tuple[int, ...]]:
        """Everyone's numbers in the order of ranks; waits for the last of them."""
        ...


class LocalGroup:
    """Ranks that are threads of this process."""

    def __init__(self, size: int) -> None:
        """`size` ranks, each in a thread of its own."""
        self.size = size
        self._told: list[tuple[int, ...]] = [()] * size
        self._barrier = threading.Barrier(size)

    def member(self, rank: int) -> "LocalTransport":
        """The end of one rank.

        Raises:
            ConfigError: the group has no such rank.
        """
        _check_rank(rank, self.size)
        return LocalTransport(self, rank)

    def exchange(self, rank: int, numbers: Sequence[int]) -> list[tuple[int, ...]]:
        """See `Transport.gather`.

        Raises:
            threading.BrokenBarrierError: another rank is gone.
        """
        self._told[rank] = tuple(numbers)
        self._barrier.wait(_PATIENCE_S)
        found = list(self._told)
        self._barrier.wait(_PATIENCE_S)  # nobody writes again until all have read
        return found


class LocalTransport:
    """`Transport` within one process."""

    def __init__(self, group: LocalGroup, rank: int) -> None:
        """Made by `LocalGroup.member`."""
        self.rank = rank
        self._group = group

    def gather(self, numbers: Sequence[int]) -> list[tuple[int, ...]]:
        """See `Transport.gather`."""
        return self._group.exchange(self.rank, numbers)


@runtime_checkable
class KeyValueClient(Protocol):
    """What is used of the key-value store of `jax.distributed` (see `compat.key_value_client`)."""

    def key_value_set(self, key: str, value: str, /) -> None:
        """Writes a key that nobody wrote yet."""
        ...

    def blocking_key_value_get(self, key: str, timeout_in_ms: int, /) -> str:
        """Waits for a key and reads it."""
        ...

    def key_value_delete(self, key: str, /) -> None:
        """Forgets a key."""
        ...


class KeyValueTransport:
    """`Transport` between processes, through a key-value store."""

    def __init__(self, client: KeyValueClient, *, rank: int, size: int, name: str) -> None:
        """`name` sets the group's keys apart from others, of groups that are gone too.

        Raises:
            ConfigError: the group has no such rank, or another process has it, or the name is used.
        """
        _check_rank(rank, size)
        try:
            client.key_value_set(f"{name}/{rank}", "")
        except Exception as error:  # the client's, which has no public class
            raise ConfigError(
                "name must be new, and every rank given to one process alone, but rank "
                f"{rank} of {name!r} is in use or was ({error}); choose another name"
            ) from error
        self.rank = rank
        self._client = client
        self._size = size
        self._name = name
        self._round = 0

    def gather(self, numbers: Sequence[int]) -> list[tuple[int, ...]]:
        """See `Transport.gather`.

        Raises:
            Exception: the store's own, where a rank does not answer in time.
        """
        self._client.key_value_set(self._key(self._round, self.rank), ",".join(map(str, numbers)))
        found: list[tuple[int, ...]] = []
        for rank in range(self._size):
            text = self._client.blocking_key_value_get(
                self._key(self._round, rank), int(_PATIENCE_S * 1000)
            )
            found.append(tuple(map(int, text.split(","))))
        # Whoever told this round has read the one before: its keys are of no use any more.
        if self._round:
            self._client.key_value_delete(self._key(self._round - 1, self.rank))
        self._round += 1
        return found

    def _key(self, number: int, rank: int) -> str:
        return f"{self._name}/{number}/{rank}"


def _check_rank(rank: int, size: int) -> None:
    if not 0 <= rank < size:
        raise ConfigError(f"rank must be 0 to {size - 1} in a group of {size}, got {rank}")
