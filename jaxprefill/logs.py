"""What people see of the log on stderr. Host only."""

import logging
import sys


def stderr_handler(*, is_verbose: bool) -> logging.Handler:
    """Shows every record from INFO up if verbose, else errors, and warnings of jaxprefill's own.

    Those say what became of an option; other libraries' are noise to whoever runs a command.
    """
    handler = logging.StreamHandler(sys.stderr)
    handler.setLevel(logging.INFO if is_verbose else logging.WARNING)
    handler.setFormatter(logging.Formatter("%(levelname)s %(name)s: %(message)s"))
    if not is_verbose:
        handler.addFilter(_is_error_or_own)
    return handler


def _is_error_or_own(record: logging.LogRecord) -> bool:
    return record.levelno >= logging.ERROR or record.name.split(".")[0] == "jaxprefill"
