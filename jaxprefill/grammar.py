"""What the engine knows of grammars: which ids may come next, and that an id has come."""

from collections.abc import Callable, Mapping
from typing import Protocol

import numpy as np
from numpy.typing import NDArray


class Matcher(Protocol):
    """Follows one output through a grammar."""

    def mask(self) -> NDArray[np.int32]:
        """One bit for each id that may come next, 32 to a word, the lowest id in the lowest bit."""
        ...

    def accept(self, token: int) -> bool:
        """The output goes on with `token`; whether anything can follow it."""
        ...


# From the text of a grammar; raises RequestError for what is none. It may take a while.
Grammars = Callable[[str], Matcher]
# By request id: compiled before the engine hears of the requests, as no step waits for that.
Matchers = Mapping[str, Matcher]
NO_MATCHERS: Matchers = {}
