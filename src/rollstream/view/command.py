"""`rollstream view`: serves the page until it is told to stop."""

import argparse
import contextlib
import ctypes
import os
import secrets
import socket
import sys
import webbrowser
from pathlib import Path

from rollstream.command_line import Command
from rollstream.evaluate.command import add_reading

EPILOG = """\
examples:
  rollstream view outputs/demo                  one run, finished or running
  rollstream view outputs                       all runs in a folder
  rollstream view outputs/a outputs/b --open    two runs, to compare them
  rollstream view trajectories.parquet http://127.0.0.1:8889
  rollstream view outputs/demo --export demo.html   one file that any browser opens, to send to somebody

On another machine: ssh -L 8765:127.0.0.1:8765 MACHINE, and open the printed address here. docs/view.md

exit codes: 0 ended by SIGINT or SIGTERM; 2 wrong usage, nothing to open, or an address that cannot be used.
"""

DEFAULT_PORT = 8765

_MMAP_THRESHOLD = -3
"""Of glibc's `mallopt`: larger blocks are given back to the system when they are freed."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The options of `view`."""
    parser.add_argument(
        "places",
        nargs="+",
        metavar="DIR",
        help="run, folder of runs, Parquet file, buffer (folder or URL), output folder of a trainer",
    )
    parser.add_argument(
        "--port",
        type=int,
        help=f"0: any free port (default: {DEFAULT_PORT}, or a free one if that is taken)",
    )
    parser.add_argument("--host", default="127.0.0.1", help="address to listen on (default: %(default)s)")
    parser.add_argument(
        "--open",
        action="store_true",
        help="open the page in a browser (not with a token: other users would see it in the process list)",
    )
    parser.add_argument("--token", action="store_true", help="require a token on 127.0.0.1, too")
    parser.add_argument(
        "--allow-host",
        action="append",
        default=[],
        metavar="NAME",
        help="another name that browsers may call this machine by; may be repeated",
    )
    parser.add_argument(
        "--export",
        type=Path,
        metavar="FILE.html",
        help="write the page of one run to a file that needs no server, and exit",
    )
    add_reading(parser)
    parser.add_argument("--json", action="store_true", help='print {"url", "pid"} when ready')


def run(options: argparse.Namespace) -> int:
    """Executes a parsed command line. Raises `ConfigError`."""
    from rollstream.stderr_log import log_to_stderr

    log_to_stderr()
    import asyncio  # here: every command reads this module

    asyncio.run(_serve(options))
    return 0


COMMAND = Command("look at runs, groups, tokens and trainings in a browser", run, add_arguments, EPILOG)


async def _serve(options: argparse.Namespace) -> None:
    import orjson
    import pyarrow as pa

    from rollstream.errors import ConfigError
    from rollstream.stop_signals import stop_signals
    from rollstream.view.app import GRACE_S, ViewServer
    from rollstream.view.html_file import export_html
    from rollstream.web import Access

    # What is freed goes back at once: arrays of a million rows would leave holes that nothing fills.
    pa.set_memory_pool(pa.system_memory_pool())
    with contextlib.suppress(OSError, AttributeError):
        ctypes.CDLL(None).mallopt(_MMAP_THRESHOLD, 1 << 18)
    if options.export is not None:
        options.host, options.port, options.token = "127.0.0.1", 0, False
    signals = stop_signals(GRACE_S)
    # Whoever may reach this machine must not read what is on it.
    local = options.host in ("127.0.0.1", "localhost", "::1")
    token = None if local and not options.token else secrets.token_urlsafe(24)
    access = Access(token=token, allowed_hosts=frozenset(options.allow_host))
    ports = [DEFAULT_PORT, 0] if options.port is None else [options.port]
    server = ViewServer(options.places, access, options.solved_at, options.scores)
    for port in ports:
        try:
            url = await server.start(options.host, port)
            break
        except ConfigError:
            if port == ports[-1]:
                raise
    try:
        if options.export is not None:
            sys.stdout.write(f"{await export_html(url, options.export)}\n")
            return
        for everywhere in ("//0.0.0.0:", "//[::]:"):
            url = url.replace(everywhere, f"//{socket.gethostname()}:")
        address = f"{url}/" if token is None else f"{url}/?token={token}"
        ready = orjson.dumps({"url": address, "pid": os.getpid()}).decode()
        sys.stdout.write(f"{ready if options.json else f'rollstream view at {address}  (Ctrl-C ends it)'}\n")
        sys.stdout.flush()
        if options.open and (token is not None or not webbrowser.open(address)):
            # Others see the arguments of a browser that is started: a token must not be in them.
            sys.stderr.write("no browser was started: open the address above\n")
        await signals.requested.wait()
    finally:
        await server.stop()
