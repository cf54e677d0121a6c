"""`rollstream buffer serve | status | show`. What is heavy is imported when a command runs."""

import argparse
import re
import stat
import sys
from collections.abc import Awaitable, Callable
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import orjson

from rollstream.command_line import Command
from rollstream.errors import ConfigError
from rollstream.stderr_log import log_to_stderr
from rollstream.untrusted import printable

if TYPE_CHECKING:
    from rollstream.buffer.app import BufferServer

GRACE_S = 10.0
"""For requests in flight, when the server stops."""

EXAMPLES = """\
examples:
  rollstream buffer serve --dir outputs/buffer                          writers and readers come by HTTP
  rollstream buffer serve --dir outputs/buffer --generators builtin     with the shipped generators
  rollstream buffer serve --dir /data/buffer --host 0.0.0.0 --token-file token
  rollstream buffer status outputs/buffer
  rollstream buffer show outputs/buffer --state dropped

The same --dir again goes on where the last server ended, also after a crash. Its /openapi.json has the routes.
docs/buffer.md

exit codes: """

SERVE_CODES = """0 ended by SIGINT or SIGTERM; 2 wrong usage, or a folder or address that cannot be used (a file,
in use by another server …); 1 the disk failed.
"""

ASK_CODES = """0 printed; 2 wrong usage, or no buffer's folder; 1 the server does not answer, there is no
such group, or the database is damaged.
"""

STATES = ("open", "judging", "ready", "leased", "quarantined", "delivered", "dropped")
"""The states of a group."""


def _add_serve(parser: argparse.ArgumentParser) -> None:
    place: Any = parser

    def add(flag: str, kind: Any, metavar: str, text: str, default: Any = None, **more: Any) -> None:
        shown = "" if default in (None, []) else " (default: %(default)s)"
        place.add_argument(flag, type=kind, metavar=metavar, default=default, help=text + shown, **more)

    several = {"action": "append", "default": []}
    text = "where everything is kept; made if it is not there"
    add("--dir", Path, "DIR", text, required=True, dest="directory")
    add("--host", str, "HOST", "address to listen on", "127.0.0.1")
    add("--port", int, "PORT", "slime's by default; 0 takes a free one", 8889)
    parser.add_argument("--json", action="store_true", help='print {"url", "pid"} when ready')
    add("--store", str, "URL", "postgresql://… keeps items there; --dir has the logs then (default: SQLite)")

    place = parser.add_argument_group("who may come in, and what a job may name")
    add("--token-file", Path, "FILE", "its first line is what clients have to show")
    place.add_argument("--insecure", action="store_true", help="listen beyond loopback without a token")
    add("--allow-host", str, "NAME", "a further name of this server", **several)
    text = "folder with input files of jobs (default: the working directory)"
    add("--inputs", Path, "DIR", text, **several)
    text = "inference server that jobs may use (default: any on this machine; with the token: any)"
    add("--engines", str, "URL", text, **several)
    add("--tools", Path, "FILE", "tool file; jobs choose from it by name")

    place = parser.add_argument_group("groups; a job's payload may say otherwise for its own")
    text = "folder of *_generator.py files, or builtin; more than once, too"
    add("--generators", str, "DIR", text, **several)
    add("--group-size", int, "N", "items of a group", 16)
    for name, default, text in (
        ("min-valid-group-size-ratio", 1.0, "items that finish a group, as a share of its size"),
        ("min-valid-item-size-ratio", 0.7, "items with a valid reward that it must have"),
        ("group-timeout-seconds", 300.0, "since a group's last item; then it is judged as it is"),
        ("min-timeout-group-size-ratio", 0.7, "items that such a group must have"),
    ):
        add(f"--{name}", float, "X", text, default)
    text = "hand groups out as they were written: any reward, nothing changed"
    place.add_argument("--raw", action="store_true", help=text)
    text = "for slime's trainer: its rollout_batch_size; a read of its route gives so many or none"
    add("--max-groups-per-read", int, "N", text)
    add("--hook-seconds", float, "S", "time limit of a hook", 60.0)

    place = parser.add_argument_group("limits")
    add("--max-buffer-size", int, "ITEMS", "writes wait beyond it", 10**9)
    text = "of delivered and dropped items that can still be looked at"
    add("--archive-bytes", int, "BYTES", text, 2**30)
    add("--lease-seconds", float, "S", "until groups that were handed out and not acked go back", 600.0)


def _add_where(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("buffer", metavar="URL|DIR", help="a server's URL, or its folder (read only)")
    parser.add_argument("--json", action="store_true")


def _add_show(parser: argparse.ArgumentParser) -> None:
    _add_where(parser)
    text = "number of a group: its items"
    parser.add_argument("group", nargs="?", type=_number, metavar="GROUP", help=text)
    parser.add_argument("--state", choices=STATES)
    parser.add_argument("--task", metavar="TASK")
    parser.add_argument("--job", metavar="ID")
    parser.add_argument("--limit", type=_number, default=20, metavar="N", help="(default: %(default)s)")
    text = "go on behind this number"
    parser.add_argument("--after", type=partial(_number, least=0), default=0, metavar="GROUP", help=text)


def _number(text: str, least: int = 1) -> int:
    """One that a database can hold."""
    if text.isdecimal() and len(text) < 20 and least <= (number := int(text)) < 2**63:
        return number
    raise argparse.ArgumentTypeError(f"{text!r:.50}, want a whole number from {least} to {2**63 - 1}")


# -- serve


def serve(options: argparse.Namespace) -> int:
    """Runs a server until it gets SIGINT or SIGTERM."""
    import msgspec

    from rollstream.buffer.app import BufferServer
    from rollstream.buffer.groups import GroupSettings
    from rollstream.buffer.service import BufferOptions
    from rollstream.web import Access

    values = vars(options)
    limits = {"items": options.max_buffer_size, "archive_bytes": options.archive_bytes}
    more = {"settings": GroupSettings().changed(values), "limits": limits}
    try:
        buffer = msgspec.convert({**values, **more}, BufferOptions)
    except msgspec.ValidationError as error:
        text, _, name = str(error).rstrip("`").partition(" - at `$.")
        name = {"limits.items": "max_buffer_size"}.get(name, name.removeprefix("limits."))
        raise ConfigError(f"--{name.replace('_', '-')}: {text}") from None
    _check_folder(options.directory)
    access = Access(
        token=read_token(options.token_file),
        allowed_hosts=frozenset(options.allow_host),
        insecure=options.insecure,
    )
    log_to_stderr()
    _run(_serve(BufferServer(buffer, access), options))
    return 0


async def _serve(server: "BufferServer", options: argparse.Namespace) -> None:
    import asyncio
    import gc
    import logging
    import os

    from rollstream.stop_signals import stop_signals

    stopping = asyncio.ensure_future(stop_signals(GRACE_S).requested.wait())
    starting = asyncio.ensure_future(server.start(options.host, options.port))
    await asyncio.wait({stopping, starting}, return_when=asyncio.FIRST_COMPLETED)
    if not starting.done():  # a generator file may hang
        starting.cancel()
        await asyncio.wait({starting})
        return
    url = starting.result()
    gc.collect()
    gc.freeze()  # what was loaded stays: the collector need not walk it again
    line = orjson.dumps({"url": url, "pid": os.getpid()}).decode() if options.json else f"buffer at {url}"
    sys.stdout.write(line + "\n")
    sys.stdout.flush()
    await stopping
    logging.getLogger(__name__).info("stopping")
    await server.stop(GRACE_S)


def _run(main: Any) -> None:
    try:
        import uvloop
    except ImportError:
        import asyncio

        asyncio.run(main)
    else:
        uvloop.run(main)


def _check_folder(folder: Path) -> None:
    if folder.exists() and not folder.is_dir():
        raise ConfigError(f"--dir {folder} is not a folder")
    if not folder.is_dir() or (folder / "buffer.lock").exists():
        return
    for path in sorted(folder.iterdir()):
        if not path.name.startswith(".") and path.name != "lost+found":
            raise ConfigError(f"--dir {folder} is not a buffer's folder and not empty: it has {path.name}")


def read_token(path: Path | None) -> str | None:
    if path is None:
        return None
    try:
        token = path.read_text().partition("\n")[0].strip()
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"--token-file {path}: {error}") from error
    if not token or not token.isascii():
        raise ConfigError(f"--token-file {path}: its first line has to be the token, in ASCII")
    if path.stat().st_mode & stat.S_IROTH:
        sys.stderr.write(f"warning: --token-file {path}: every account of this machine can read it\n")
    return token


# -- status and show


def status(options: argparse.Namespace) -> int:
    """Prints what is in a buffer."""
    answer = _ask(options, lambda buffer: buffer.stats())
    if options.json:
        return _print_json(answer)
    stats, job = answer["store"], answer["job"]
    groups = ", ".join(f"{count} {state}" for state, count in stats["groups"].items())
    dropped = ", ".join(f"{count} {reason}" for reason, count in stats["items_dropped"].items())
    rewards = ", ".join(
        f"mean of {stats[f'scored_{which}']} {which} {stats[f'reward_{which}'] / stats[f'scored_{which}']:.3f}"
        for which in ("written", "delivered")
        if stats[f"scored_{which}"]
    )
    lines = [
        f"groups   {groups}; {stats['groups_delivered']} delivered",
        f"items    {stats['items_written']} written: {stats['items']} here, {stats['items_delivered']} delivered, "
        f"{sum(stats['items_dropped'].values())} dropped",
        f"dropped  {dropped or 'none'}",
        f"rewards  {rewards or 'none'}",
        f"leases   {stats['leases']} out; the first ready group has waited {stats['oldest_ready_s']:.0f} s",
        f"disk     {stats['disk_bytes'] / 1e6:.1f} MB; items that have left: {stats['archive_bytes'] / 1e6:.1f} MB",
    ]
    if stats["disk_full"]:
        lines.append("full     the disk has no room for items; reads and acks go on")
    if job is not None:
        # Items that name no job are the last one's, too: there may be more than its generator writes.
        expected = f", its generator writes {job['expected']}" if job["expected"] else ""
        why = f"; last error: {job['error']}" if job["error"] else ""
        written = f"{stats['items_of_job']} items{expected}{why}"
        lines.append(f"job      {job['id']} of task {job['task_type']!r}: {job['state']}, {written}")
    lines += [f"failing  {failure['message']}" for failure in answer.get("failures", ())]
    sys.stdout.write("\n".join(lines) + "\n")
    return 0


def show(options: argparse.Namespace) -> int:
    """Prints groups, or the items of a group."""
    if options.group is None:
        which = {"state": options.state, "task_type": options.task, "job": options.job}
        limit = min(options.limit, 9_999)
        # One more than is printed tells whether there are more.
        groups = _ask(options, lambda buffer: buffer.groups(**which, after=options.after, limit=limit + 1))
        if options.json:
            return _print_json(groups[:limit])
        sys.stdout.writelines(f"{printable(_line(group))}\n" for group in groups[:limit])
        if len(groups) > limit:
            sys.stderr.write(f"and more: --after {groups[limit - 1]['id']}\n")
        return 0
    whole = _ask(options, lambda buffer: buffer.group(options.group))
    if options.json:
        return _print_json(whole)
    lines = [_line(whole["group"])]
    for item in whole["items"]:
        lines.append(f"--- {item.get('uid')}  reward {item.get('reward')}")
        lines += [f"[{message.get('role')}] {message.get('content')}" for message in item["messages"]]
        if (failure := item["extra_info"].get("failure")) is not None:
            if isinstance(failure, dict):
                failure = ": ".join(str(failure[key]) for key in ("stage", "error") if failure.get(key))
            lines.append(f"its rollout failed: {failure}")
    if whole.get("problem"):
        lines.append(f"its items cannot be shown: {whole['problem']}")
    sys.stdout.write(printable("\n".join(lines)) + "\n")
    return 0


def _line(group: dict[str, Any]) -> str:
    rewards = " ".join("-" if reward is None else f"{reward:g}" for reward in group["rewards"][:32])
    of = f"{group['task_type'] or '(no task)'} instance {group['instance_id']!r}"
    reason = f" ({group['reason']})" if group["reason"] else ""
    return f"{group['id']:>6}  {group['state']}{reason}  {of}  {group['n']} of {group['size']}  rewards {rewards}"


def _print_json(value: Any) -> int:
    sys.stdout.write(orjson.dumps(value, option=orjson.OPT_INDENT_2).decode() + "\n")
    return 0


def _ask(options: argparse.Namespace, question: Callable[[Any], Awaitable[Any]]) -> Any:
    """Asks a server, or its folder, which has the same calls."""
    import asyncio

    async def ask() -> Any:
        async with opened(options.buffer) as buffer:
            return await question(buffer)

    return asyncio.run(ask())


def opened(where: str) -> Any:
    """A context whose value answers the calls that look at a buffer, given by its server's URL or its folder."""
    if where.startswith(("http://", "https://")):
        from rollstream.buffer.client import AsyncBufferClient

        return AsyncBufferClient(where, give_up_after=5.0)
    from rollstream.buffer.folder import BufferFolder

    return BufferFolder(Path(where))


# -- for the commands that read runs


def buffer_address(place: Path) -> str | None:
    """The buffer that a path means, which may be a URL; None: it is something else."""
    from rollstream.buffer.store.sqlite import FILE

    if (url := re.match("(https?):/+", str(place))) is not None:  # a path has one slash where a URL has two
        return f"{url[1]}://{str(place)[url.end() :]}"
    is_buffer = any((place / name).is_file() for name in (FILE, "buffer.lock"))
    return str(place) if is_buffer and not (place / "run.json").exists() else None


def add_selection(parser: argparse.ArgumentParser) -> None:
    """Options that choose from a buffer's groups."""
    group = parser.add_argument_group("buffers", "DIR is the buffer's folder, or the URL of its server")
    text = "only groups in this state (default: all)"
    group.add_argument("--state", choices=STATES, help=text)
    group.add_argument("--job", metavar="ID", help="only groups of this job (default: all)")


COMMAND = Command(
    "a durable rollout buffer over HTTP: items in, complete groups out",
    commands={
        "serve": Command(
            "serve a buffer, by slime's routes and its own", serve, _add_serve, EXAMPLES + SERVE_CODES
        ),
        "status": Command("what is in a buffer", status, _add_where, EXAMPLES + ASK_CODES),
        "show": Command("groups of a buffer, or the items of one", show, _add_show, EXAMPLES + ASK_CODES),
    },
)
