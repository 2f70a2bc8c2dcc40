"""`python -m jaxprefill`: the command line."""

from jaxprefill.cli.main import run

run()
