"""Executables kept between processes: files, what makes them valid, and who may be trusted."""
