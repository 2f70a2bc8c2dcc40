"""Decoders as flax.nnx modules, one architecture a file; they know no scheduler and no bucket."""
