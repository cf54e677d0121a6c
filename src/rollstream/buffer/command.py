"""What `rollstream buffer serve` does: opens the folder, answers until it is told to stop."""

import argparse
import asyncio
import gc
import ipaddress
import logging
import os
import sys
from pathlib import Path

import orjson
import uvloop

from rollstream.buffer.groups import GroupSettings
from rollstream.buffer.ledger import LedgerSettings
from rollstream.buffer.service import BufferService, ServiceOptions
from rollstream.errors import ConfigError
from rollstream.stop_signals import stop_signals

_LOG = logging.getLogger(__name__)

_OWN = ("buffer.lock", "log.json", "segments")
"""What every buffer's folder has from its first moments on; what is missing of it the ledger tells."""

_SWITCH_S = 0.001
"""How long a thread of hooks keeps the interpreter while the event loop wants it. Python's 5 ms, several
times over for one request, would be the latency of every write beside a read."""


def run(options: argparse.Namespace) -> int:
    """Executes a parsed command line.

    Raises:
        ConfigError: what was asked for cannot work.
        StorageError: the folder cannot be used.
    """
    check_folder(options.dir)
    _log_to_stderr()
    sys.setswitchinterval(_SWITCH_S)
    service = BufferService(options.dir, ledger_settings(options), service_options(options))
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        runner.run(_serve(service, as_json=options.json))
    return 0


def check_folder(folder: Path) -> None:
    """Refuses a folder with things in it that no buffer made: a buffer deletes old files of its own there.

    What a mount or the caller's own redirection puts there does not count: hidden files, lost+found, logs.

    Raises:
        ConfigError: it is not empty and not a buffer's.
    """
    try:
        names = sorted(path.name for path in folder.iterdir())
    except OSError:
        return  # it will be made, or cannot be used: the ledger says why
    if any(name in names for name in _OWN):
        return
    strange = [
        name for name in names if not (name.startswith(".") or name == "lost+found" or name.endswith(".log"))
    ]
    if strange:
        raise ConfigError(
            f"--dir {folder} is not a buffer's folder and not empty: it has {', '.join(strange[:3])}"
            f"{', …' if len(strange) > 3 else ''}. Give a new or empty folder, or that of an earlier buffer"
        )


def ledger_settings(options: argparse.Namespace) -> LedgerSettings:
    """The ledger's part of the options. Raises `ConfigError`."""
    for name in ("max_groups_per_read", "groups_per_cycle", "max_buffer_size", "max_bytes", "max_body"):
        value = getattr(options, name)
        if value is not None and value < 1:
            raise ConfigError(f"--{name.replace('_', '-')} is {value}, want 1 or more")
    if not 0.1 <= options.lease_seconds <= 30 * 86400:
        raise ConfigError(f"--lease-seconds is {options.lease_seconds}, want 0.1 to {30 * 86400}")
    return LedgerSettings(
        groups=GroupSettings(
            group_size=options.group_size,
            min_valid_group_size_ratio=options.min_valid_group_size_ratio,
            min_valid_item_size_ratio=options.min_valid_item_size_ratio,
            group_timeout_seconds=options.group_timeout_seconds,
            min_timeout_group_size_ratio=options.min_timeout_group_size_ratio,
        ),
        max_buffer_size=options.max_buffer_size,
        max_bytes=options.max_bytes,
        lease_seconds=options.lease_seconds,
        remember_uids=options.remember_uids,
        groups_per_cycle=options.groups_per_cycle,
    )


def service_options(options: argparse.Namespace) -> ServiceOptions:
    """The server's part of the options. Raises `ConfigError`."""
    if options.whole_reads and options.max_groups_per_read is None:
        raise ConfigError("--whole-reads needs --max-groups-per-read, which says what is whole")
    token = _read_token(options.token_file)
    if token is None and not options.insecure and not _is_loopback(options.host):
        raise ConfigError(
            f"--host {options.host} lets other machines in: give --token-file FILE, or --insecure if all may"
        )
    return ServiceOptions(
        host=options.host,
        port=options.port,
        token=token,
        open_metrics=options.open_metrics,
        generators=options.generators,
        max_groups_per_read=options.max_groups_per_read,
        whole_reads=options.whole_reads,
        max_body=options.max_body,
    )


async def _serve(service: BufferService, *, as_json: bool) -> None:
    stop = stop_signals()
    try:
        url = await service.start()
        # What was replayed stays; the collector would walk it again and again.
        gc.collect()
        gc.freeze()
        line = orjson.dumps({"url": url, "pid": os.getpid()}).decode() if as_json else f"buffer at {url}"
        sys.stdout.write(line + "\n")
        sys.stdout.flush()
        asked = asyncio.ensure_future(stop.wait())
        await asyncio.wait({asked, service.answering}, return_when=asyncio.FIRST_COMPLETED)
        asked.cancel()
        _LOG.info("stopping")
    finally:
        await service.stop()


def _read_token(path: Path | None) -> str | None:
    if path is None:
        return None
    try:
        token = path.read_text().partition("\n")[0].strip()
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"--token-file {path}: {error}") from error
    if not token or not token.isascii():
        raise ConfigError(f"--token-file {path}: its first line has to be the token, in ASCII")
    return token


def _is_loopback(host: str) -> bool:
    if host == "localhost":
        return True
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False


def _log_to_stderr() -> None:
    logger = logging.getLogger("rollstream")
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(logging.Formatter("%(asctime)s %(levelname)s: %(message)s", "%H:%M:%S"))
    logger.handlers[:] = [handler]
    logger.setLevel(logging.INFO)
    logger.propagate = False
