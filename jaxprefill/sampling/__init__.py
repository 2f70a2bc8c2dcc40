"""From hidden rows to tokens and logprobs, in executables by row count."""
