"""The command line: one subcommand a file, `main.py` to choose among them."""
