"""Files in, files out: the server's own handlers over an engine, without HTTP. Imports no jax."""
