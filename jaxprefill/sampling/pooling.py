"""What reads hidden rows without an LM head: sums of a request's rows, and the classifier.

Executables of one row count, as a step asks for few rows and each costs little.
"""

from collections.abc import Mapping, Sequence
from functools import partial
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float32, Int32, Shaped

from jaxprefill.config import PoolingKind
from jaxprefill.device_state import DeviceState, StateShapes
from jaxprefill.models.layers import linear
from jaxprefill.prefill.compiler import Compiled, CompileJob
from jaxprefill.sampling.runner import PendingScores, dispatch_pairs

_SUM, _CLASSIFY = "sum_hidden", "classify"


class HiddenSpan(NamedTuple):
    """Consecutive rows of the hidden buffer."""

    start: int
    length: int


def last_rows(
    hidden: Shaped[Array, "tokens E"], spans: Int32[Array, "r 2"]
) -> Float32[Array, "r E"]:
    """The hidden row where each (start, length) begins: the sum, where every length is 1."""
    return hidden[spans[:, 0]].astype(jnp.float32)


def summed_rows(
    hidden: Shaped[Array, "tokens E"], spans: Int32[Array, "r 2"]
) -> Float32[Array, "r E"]:
    """The sum of each span's hidden rows; other rows are not even multiplied by zero.

    Rows past those of the last body, and other requests' rows, may hold NaN.
    """
    at = jnp.arange(len(hidden))

    def add_up(span: Int32[Array, " 2"]) -> Float32[Array, " E"]:
        is_inside = (at >= span[0]) & (at < span[0] + span[1])
        return jnp.sum(jnp.where(is_inside[:, None], hidden.astype(jnp.float32), 0), axis=0)

    return jax.lax.map(add_up, spans)


def class_logits(
    classifier: Shaped[Array, "labels E"],
    hidden: Shaped[Array, "tokens E"],
    spans: Int32[Array, "r 2"],
) -> Float32[Array, "r labels"]:
    """The classifier's logits at the row where each span begins."""
    return linear(hidden[spans[:, 0]], classifier)


def pooling_jobs(state: StateShapes, *, kind: PoolingKind, num_rows: int) -> list[CompileJob]:
    """The executable that embeddings need, and the classifier of models that have one."""
    spans = jax.ShapeDtypeStruct((num_rows, 2), np.int32)
    function = summed_rows if kind == "mean" else last_rows
    arguments = (state.hidden, spans)
    jobs = [CompileJob(name=_SUM, function=function, arguments=arguments, is_graph=False)]
    if state.classifier is not None:
        arguments = (state.classifier, *arguments)
        job = CompileJob(name=_CLASSIFY, function=class_logits, arguments=arguments, is_graph=False)
        jobs.append(job)
    return jobs


class PoolingRunner:
    """Owns the executables of `pooling_jobs`; takes rows in blocks."""

    def __init__(self, compiled: Mapping[str, Compiled], *, num_rows: int) -> None:
        """`num_rows` is what the jobs were made for."""
        self._call = {name: entry.call for name, entry in compiled.items()}
        self._num_rows = num_rows

    def warm(self, state: DeviceState) -> None:
        """Runs each once, for nobody; see `HeadRunner.warm` for why results are read."""
        self.sum_hidden(state, [HiddenSpan(0, 1)]).read()
        if state.classifier is not None:
            self.classify(state, [HiddenSpan(0, 1)]).read()

    def sum_hidden(self, state: DeviceState, spans: Sequence[HiddenSpan]) -> PendingScores:
        """Dispatches the sum of each span's rows; of one row, where the last one is all."""
        return self._run(_SUM, (state.hidden,), spans)

    def classify(self, state: DeviceState, spans: Sequence[HiddenSpan]) -> PendingScores:
        """Dispatches the class logits at each span's first row."""
        assert state.classifier is not None, "checked at admission"
        return self._run(_CLASSIFY, (state.classifier, state.hidden), spans)

    def _run(
        self, name: str, arrays: tuple[Array, ...], spans: Sequence[HiddenSpan]
    ) -> PendingScores:
        call = partial(self._call[name], *arrays)
        return dispatch_pairs(call, spans, (self._num_rows,))
