"""Decode steps: the prefill body at one token a slot, in executables of their own."""
