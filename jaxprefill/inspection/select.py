"""What executables can be inspected from, and how one is named."""

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from typing import Protocol

from jaxprefill.errors import RequestError, listed
from jaxprefill.inspection.records import Chip, Inspected


class Source(Protocol):
    """A model, a store or a server."""

    @property
    def chip(self) -> Chip:
        """Where the executables run."""
        ...

    @property
    def names(self) -> Sequence[str]:
        """Every executable."""
        ...

    def open(self, name: str) -> Inspected:
        """One of them.

        Raises:
            InspectionError: it cannot be had.
            CompileError: it could not be compiled.
        """
        ...


def select(names: Sequence[str], key: str) -> list[str]:
    """The executables that a key means: its own name, else whole words of it, else a part.

    Raises:
        RequestError: there is none.
    """
    if key in names:
        return [key]
    words = key.split()
    whole = [name for name in names if _has_words(name, words)]
    found = whole or [name for name in names if key in name]
    if not found:
        raise RequestError(f"no executable is called {key!r}; there are {listed(names)}")
    return found


def select_one(names: Sequence[str], key: str) -> str:
    """The one executable that a key means.

    Raises:
        RequestError: there is none, or several.
    """
    found = select(names, key)
    if len(found) > 1:
        raise RequestError(f"{key!r} must mean one executable, but means {listed(found)}; name one")
    return found[0]


def pair_up(one: Mapping[str, str | None], other: Mapping[str, str | None]) -> dict[str, str]:
    """Which names of two sources mean the same executable, in the order of the first.

    Those of one name, then of one fingerprint, then of one name without the fingerprint that a
    store of several engines puts behind it; never where another of the same source would do.
    Both sources are fingerprints by name, None where one is not known.
    """
    keys: tuple[Callable[[str, str | None], str | None], ...] = (
        lambda name, _: name,
        lambda _, fingerprint: fingerprint,
        lambda name, _: name.partition(" @")[0],
    )
    found: dict[str, str] = {}
    for key in keys:
        mine = [(key(*item), item[0]) for item in one.items() if item[0] not in found]
        theirs = [(key(*item), item[0]) for item in other.items() if item[0] not in found.values()]
        often = [Counter(each for each, _ in side) for side in (mine, theirs)]
        by_key = dict(theirs)
        found |= {
            name: by_key[each]
            for each, name in mine
            if each is not None and often[0][each] == often[1][each] == 1
        }
    return {name: found[name] for name in one if name in found}


def _has_words(name: str, words: Sequence[str]) -> bool:
    """Each word is one of the name's, or the tokens of its shape."""
    own = name.replace("/", " ").split()
    return all(any(word == mine or mine.startswith(f"{word}x") for mine in own) for word in words)
