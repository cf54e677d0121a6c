"""What `rollstream` logs, on standard error: for the commands that are no generation run."""

import logging
import sys


def log_to_stderr(*, times: bool = True) -> None:
    """Shows what is logged at INFO and above; called again, it replaces the handler of before."""
    logger = logging.getLogger("rollstream")
    handler = logging.StreamHandler(sys.stderr)
    clock = "%(asctime)s " if times else ""
    handler.setFormatter(logging.Formatter(f"{clock}%(levelname)s: %(message)s", "%H:%M:%S"))
    logger.handlers[:] = [handler]
    logger.setLevel(logging.INFO)
    logger.propagate = False
