"""The words of `rollstream buffer`. What it does is in `command`, so that the imports here are light."""

import argparse
from pathlib import Path

EPILOG = """\
examples:
  rollstream buffer serve --dir outputs/buffer                          writers and readers come by HTTP
  rollstream buffer serve --dir outputs/buffer --generators builtin     with the shipped generators
  rollstream buffer serve --dir /data/buffer --host 0.0.0.0 --token-file token

The same --dir again goes on where the last server ended, also after a crash. docs/buffer.md has the routes.

exit codes: 0 ended by SIGINT or SIGTERM; 2 wrong usage, or a folder or address that cannot be used (a file,
in use by another server …); 1 the disk failed.
"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The options of `buffer serve`."""
    parser.add_argument(
        "--dir",
        type=Path,
        required=True,
        metavar="DIR",
        help="where everything is kept; made if it is not there",
    )
    parser.add_argument("--host", default="127.0.0.1", help="address to listen on (default: %(default)s)")
    parser.add_argument(
        "--port", type=int, default=8889, help="0 takes a free one (default: %(default)s, as slime)"
    )
    parser.add_argument("--json", action="store_true", help='print {"url", "pid"} when ready')

    access = parser.add_argument_group("who may come in")
    access.add_argument(
        "--token-file", type=Path, metavar="FILE", help="its first line is what clients have to show"
    )
    access.add_argument(
        "--insecure",
        action="store_true",
        help="listen on other addresses than this machine's own without a token",
    )
    access.add_argument("--open-metrics", action="store_true", help="/metrics needs no token")

    groups = parser.add_argument_group("groups")
    groups.add_argument(
        "--generators",
        metavar="DIR",
        help="folder of *_generator.py files, or builtin (default: none, items come from outside)",
    )
    groups.add_argument(
        "--group-size",
        type=int,
        default=16,
        metavar="N",
        help="of tasks that no rollout was started for (default: %(default)s)",
    )
    for name, default, text in (
        ("min-valid-group-size-ratio", 1.0, "items that finish a group, as a share of its size"),
        ("min-valid-item-size-ratio", 0.7, "items with a valid reward that it must have"),
        ("group-timeout-seconds", 300.0, "since a group's last item; then it is judged as it is"),
        ("min-timeout-group-size-ratio", 0.7, "items that such a group must have"),
    ):
        groups.add_argument(
            f"--{name}", type=float, default=default, metavar="X", help=f"{text} (default: %(default)s)"
        )
    groups.add_argument(
        "--groups-per-cycle",
        type=int,
        metavar="N",
        help="a trainer's cycle: in it no instance comes twice, and no read of slime's route goes beyond it "
        "(default: --max-groups-per-read, else no rule)",
    )

    limits = parser.add_argument_group("limits")
    limits.add_argument(
        "--max-groups-per-read",
        type=int,
        metavar="N",
        help="of reads that do not say how much they want (default: all that is ready); "
        "for slime's stock trainer: its rollout_batch_size",
    )
    limits.add_argument(
        "--whole-reads",
        action="store_true",
        help="such reads of slime's route give --max-groups-per-read groups or none: its stock trainer "
        "throws away what a part and a whole have too much",
    )
    limits.add_argument(
        "--max-buffer-size",
        type=int,
        default=10**9,
        metavar="ITEMS",
        help="writes wait beyond it (default: 1e9)",
    )
    limits.add_argument("--max-bytes", type=int, metavar="BYTES", help="the same, of the items' bytes")
    limits.add_argument(
        "--max-body", type=int, default=64 * 2**20, metavar="BYTES", help="of one request (default: 64 MiB)"
    )
    limits.add_argument(
        "--lease-seconds",
        type=float,
        default=600.0,
        metavar="S",
        help="until groups that were handed out and not acked go back (default: %(default)s)",
    )
    limits.add_argument(
        "--remember-uids",
        type=int,
        default=1_000_000,
        metavar="N",
        help="of delivered items, so that a retried write is not stored twice (default: %(default)s)",
    )


def run(options: argparse.Namespace) -> int:
    """Executes a parsed `buffer serve` command line; returns the exit code."""
    from rollstream.errors import ConfigError

    try:
        import httptools  # noqa: F401
        import uvicorn  # noqa: F401
        import uvloop  # noqa: F401
    except ImportError as error:
        raise ConfigError(
            f"rollstream buffer serve needs the extra buffer ({error}): pip install 'rollstream[buffer]'"
        ) from error
    from rollstream.buffer import command

    return command.run(options)
