"""How much memory this machine has."""

import os

from rollstream.errors import ConfigError


def check_memory(needed: int, what: str) -> None:
    """Raises `ConfigError` where something needs more memory than this machine has at all."""
    there = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    if needed > there:
        raise ConfigError(
            f"{what}: needs {needed / 1e9:,.0f} GB of memory; this machine has {there / 1e9:.0f} GB"
        )
