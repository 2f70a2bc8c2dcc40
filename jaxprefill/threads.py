"""Threads that Ctrl-C need not wait for: what libraries run in them cannot be stopped."""

from collections.abc import Generator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager


@contextmanager
def thread_pool(num_threads: int | None = None, name: str = "") -> Generator[ThreadPoolExecutor]:
    """A pool whose threads have ended when the block ends, or are left to themselves by Ctrl-C.

    What no thread has begun when an exception leaves the block is not begun. `num_threads` and
    `name` are those of `ThreadPoolExecutor`.
    """
    pool = ThreadPoolExecutor(max_workers=num_threads, thread_name_prefix=name)
    is_interrupted = False
    try:
        yield pool
    except KeyboardInterrupt:
        is_interrupted = True
        raise
    finally:
        pool.shutdown(wait=not is_interrupted, cancel_futures=True)
