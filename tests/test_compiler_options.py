"""Every compiler option is one that XLA knows, with a value that it takes: a GPU is not needed."""

import jax
import numpy as np
import pytest

from jaxprefill.prefill.compiler import CPU_OPTIONS, GPU_OPTIONS, NO_GRAPH


@pytest.mark.parametrize("options", [CPU_OPTIONS, GPU_OPTIONS, GPU_OPTIONS | NO_GRAPH])
def test_xla_takes_the_options(options):
    compiled = jax.jit(lambda x: x + 1).lower(np.int32(1)).compile(compiler_options=options)
    assert compiled(np.int32(1)) == 2
