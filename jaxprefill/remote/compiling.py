"""Grammars are compiled on a few threads of their own: neither steps nor messages wait for one."""

from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field

from jaxprefill.grammar import Grammars, Matcher, Matchers
from jaxprefill.remote.messages import Submit
from jaxprefill.request import Request

_NUM_THREADS = 2


@dataclass(frozen=True)
class Compiled:
    """A submission whose grammars are compiled, or the error of the first that cannot be."""

    number: int
    requests: Sequence[Request]
    matchers: Matchers = field(default_factory=dict[str, Matcher])
    error: BaseException | None = None


class Compiling:
    """Compiles the grammars of submissions, few at a time."""

    def __init__(
        self, make_grammars: Callable[[], Grammars], on_compiled: Callable[[Compiled], None]
    ) -> None:
        """Both are called on the threads; the first at once, as it takes a while, and once."""
        self._on_compiled = on_compiled
        self._pool = ThreadPoolExecutor(_NUM_THREADS, thread_name_prefix="grammar")
        self._grammars = self._pool.submit(make_grammars)

    def submit(self, message: Submit) -> None:
        """Compiles what a message needs; does not wait."""
        self._pool.submit(self._compile, message)

    def close(self) -> None:
        """Forgets what has not begun; does not wait for the rest."""
        self._pool.shutdown(wait=False, cancel_futures=True)

    def _compile(self, message: Submit) -> None:
        try:
            grammars = self._grammars.result()
            matchers = {
                request.id: grammars(request.grammar)
                for request in message.requests
                if request.grammar is not None
            }
        except BaseException as error:  # it belongs to whoever sent the grammar
            self._on_compiled(Compiled(message.number, message.requests, error=error))
        else:
            self._on_compiled(Compiled(message.number, message.requests, matchers))
