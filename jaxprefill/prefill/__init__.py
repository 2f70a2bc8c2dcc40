"""Prefill by ahead-of-time compiled executables.

Read in this order: buckets, policy, padding, forward, compiler, executable, runner. Nothing is
imported here, so that `buckets` and `policy` stay free of jax.
"""
