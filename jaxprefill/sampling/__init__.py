"""From hidden rows to tokens and logprobs: the LM head and the sampler, in executables by row count."""
