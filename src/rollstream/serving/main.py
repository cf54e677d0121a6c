"""The words of `rollstream serve`. What it does is in `command`, so that the imports here are light."""

import argparse
import os
from pathlib import Path

from rollstream.command_line import Command
from rollstream.demo import named_model

EPILOG = """\
examples:
  rollstream serve                                            the shipped demo model
  rollstream serve --model MODEL --engine-kwargs cache_size=4 max_num_seqs=64
  rollstream serve --model MODEL --port 0 --json --exit-with-parent    for a program that starts it

exit codes: 0 ended by SIGINT, SIGTERM or with its parent; 1 the engine cannot start; 2 wrong usage.
"""

ENGINES = ("openvino", "hf")
"""Engines that run in this process or below it; a server needs no server in front of it."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The options of `serve`."""
    add = parser.add_argument
    add(
        "--model",
        metavar="PATH",
        help="folder of the model (default: demo, the one that comes with rollstream)",
    )
    add("--engine", choices=ENGINES, default="openvino")
    add("--host", default="127.0.0.1", help="address to listen on (default: %(default)s)")
    add("--port", type=int, default=30000, help="0 takes a free one (default: %(default)s, as SGLang)")
    add("--max-model-len", type=int, metavar="TOKENS", help="prompt plus response at most")
    add(
        "--engine-kwargs",
        nargs="+",
        default=[],
        metavar="k=v",
        help="settings of the engine: docs/engines.md",
    )
    add("--served-model-name", metavar="NAME", help="what clients call it (default: the folder's name)")
    add(
        "--tool-parser",
        default="hermes",
        metavar="NAME",
        help="how the model writes tool calls: docs/parsers.md",
    )
    add(
        "--weights",
        type=Path,
        nargs="+",
        action="extend",
        default=[],
        metavar="DIR",
        help="folder below which POST /update_weights_from_disk may name weights (default: it names none)",
    )
    add(
        "--max-queue",
        type=int,
        default=8192,
        metavar="N",
        help="samples in flight at most, more are answered 503 (default: %(default)s)",
    )
    add("--api-key-env", metavar="NAME", help="environment variable with the key that clients have to show")
    add(
        "--allow-host",
        action="append",
        default=[],
        metavar="NAME",
        help="a further name of this server, as clients without a key write it; may be given again",
    )
    add("--insecure", action="store_true", help="listen also without a key where other machines can reach it")
    add(
        "--log-dir",
        type=Path,
        metavar="DIR",
        help="where the engine writes its log (default: a temporary folder)",
    )
    add("--exit-with-parent", action="store_true", help="end when the process that started this one ends")
    add("--json", action="store_true", help='print {"url", "pid", "model"} when ready')


def run(options: argparse.Namespace) -> int:
    """Executes a parsed `serve` command line; returns the exit code."""
    parent_pid = os.getppid()  # before the imports, which take a second
    if (model := named_model(options.model or "demo")) != options.model:
        options.model = model
        options.served_model_name = options.served_model_name or "demo"

    from rollstream.serving import command

    return command.run(options, parent_pid)


COMMAND = Command("serve a model over HTTP, by OpenAI's and SGLang's routes", run, add_arguments, EPILOG)
