"""Whole generation runs, as several benchmarks make them."""

import contextlib
import io
from collections.abc import Mapping
from typing import Any

from rollstream.generation import main


def generate(settings: Mapping[str, Any]) -> None:
    """Runs the command line's own entry point without its output. Raises `AssertionError` when it fails."""
    quiet = {"generation.show_progress": "false", "generation.log_level": "error"}
    words = [f"{key}={value}" for key, value in {**settings, **quiet}.items()]
    said = io.StringIO()
    with contextlib.redirect_stdout(said), contextlib.redirect_stderr(said):
        code = main.main(words)
    assert code == 0, said.getvalue()
