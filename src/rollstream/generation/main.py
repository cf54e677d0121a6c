"""`rollstream generate key=value …`, the same as `python -m rollstream.generation.main key=value …`.

Only the words of the command line are here, so that the imports at the top are light: an interrupt while
the others are loaded finds `main` already there to answer it. What the command does is in `command`.
"""

import argparse
import os
import platform
import shlex
import sys
import threading
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import rollstream
import rollstream.config
from rollstream.command_line import HYDRA_HINT, Command, guarded, parse
from rollstream.demo import MODEL_PATH

EPILOG = """\
examples:
  rollstream generate --model MODEL --prompts prompts.parquet -n 4 --reward reward.py --temperature 0.8 \\
      --output outputs/run1
  rollstream generate --model MODEL --engine vllm --server http://127.0.0.1:8000 --prompts prompts.parquet
  rollstream generate --model MODEL --prompts prompts.parquet --agent 'python my_agent.py'
  rollstream generate --config outputs/run1/config.yaml          resumes this run
  rollstream generate --config outputs/run1/config.yaml --dry-run

exit codes: 0 done (also if damage was found and repaired at the start, with a warning);
1 finished with more failed or unscored rollouts than generation.max_failed_share, or stopped by a lost
engine, a full disk or damage found while merging; 2 wrong usage or configuration, or a run directory that
cannot be used; 129/130/143 stopped by a signal: the same command resumes.
"""


_SHORT: tuple[tuple[str, str, str, dict[str, Any]], ...] = (
    (
        "--model",
        "actor_rollout_ref.model.path",
        "folder or hub name of the model; demo: the one that comes with rollstream",
        {},
    ),
    (
        "--prompts",
        "data.train_files",
        "a file of prompts; may be repeated",
        {"action": "append", "metavar": "FILE"},
    ),
    (
        "--server",
        "actor_rollout_ref.rollout.server_urls",
        "URL of a running server; may be repeated",
        {"action": "append", "metavar": "URL"},
    ),
    (
        "--engine",
        "actor_rollout_ref.rollout.name",
        "openvino, hf, sglang, vllm, openai; default: by model and machine",
        {"metavar": "NAME"},
    ),
    (
        "--temperature",
        "actor_rollout_ref.rollout.temperature",
        "sampling temperature; default 1",
        {"type": float, "metavar": "T"},
    ),
    (
        "--max-tokens",
        "actor_rollout_ref.rollout.response_length",
        "most tokens of a response; default 512",
        {"type": int, "metavar": "N"},
    ),
    (
        "--agent",
        "gateway.command",
        "command of an agent program, run by the loop command_agent",
        {"type": shlex.split, "metavar": "COMMAND"},
    ),
    (
        "-n",
        "actor_rollout_ref.rollout.n",
        "rollouts per prompt; default 1, for demo 4",
        {"type": int, "metavar": "N"},
    ),
    (
        "--reward",
        "custom_reward_function.path",
        "a Python file with a function compute_score",
        {"metavar": "FILE"},
    ),
    (
        "--output",
        "trainer.default_local_dir",
        "run directory; default outputs/rollstream/generation, for demo outputs/demo",
        {"metavar": "DIR"},
    ),
)
"""Flags for what every run sets: flag, key, help, and what argparse is told besides."""


def _short_settings(options: argparse.Namespace) -> dict[str, Any]:
    """What short flags set, as a tree."""
    tree: dict[str, Any] = {}
    for _, key, _, _ in _SHORT:
        if (value := getattr(options, key)) is not None:
            *parents, name = key.split(".")
            branch = tree
            for parent in parents:
                branch = branch.setdefault(parent, {})
            branch[name] = value
    if "gateway" in tree:
        agent = {"default_agent_loop": "command_agent"}
        tree.setdefault("actor_rollout_ref", {}).setdefault("rollout", {})["agent"] = agent
    return tree


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The options and words of `generate`; words and options may stand in any order, see `parse`."""
    parser.add_argument(
        "overrides", nargs="*", metavar="key=value", help="settings, in Hydra's grammar (all: --help-config)"
    )
    for flag, key, text, more in _SHORT:
        more = {"metavar": flag.removeprefix("--").upper(), **more}
        parser.add_argument(flag, dest=key, help=f"{text} ({key})", **more)
    parser.add_argument(
        "--config",
        type=Path,
        action="append",
        default=[],
        metavar="FILE",
        help="a YAML file of settings; may be repeated: later files win",
    )
    parser.add_argument(
        "--dry-run",
        action="store_true",
        help="check everything (data, tokenizer, engine, identity) without generating",
    )
    parser.add_argument(
        "--show-config", action="store_true", help="print the resolved configuration and exit"
    )
    # As Hydra has it, whose users look for it; what is printed is always resolved.
    parser.add_argument(
        "-c", "--cfg", dest="show_config", type=_job, metavar="job", help="as --show-config (Hydra's option)"
    )
    parser.add_argument("--resolve", action="store_true", help=argparse.SUPPRESS)
    parser.add_argument(
        "--help-config", action="store_true", help="print every key with its default and meaning, and exit"
    )
    parser.add_argument("--json", action="store_true", help="print only the result, as JSON")


def _job(word: str) -> str:
    letter = word.partition("=")[0]
    if letter in ("n", "d", "p"):  # argparse takes it for -c with a word behind it
        raise argparse.ArgumentTypeError(f"-c{letter} is not taken{HYDRA_HINT}")
    if word != "job":
        raise argparse.ArgumentTypeError(f"want job, not {word!r}{HYDRA_HINT}")
    return word


_SLOW_S = 2.0
"""Longer than a person waits without asking."""


def main(arguments: Sequence[str] | None = None) -> int:
    """Entry point of `python -m rollstream.generation.main`; returns the exit code."""
    parser = argparse.ArgumentParser(
        prog="rollstream generate",
        description="Generate trajectories for every prompt of a dataset; the same command resumes.",
        epilog=EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    add_arguments(parser)
    return guarded(lambda: run(parse(parser, arguments)))


def run(options: argparse.Namespace, layers: Sequence[Mapping[str, Any] | Path] = ()) -> int:
    """Executes a parsed `generate` command line; `layers` are laid under its `--config`."""
    if options.help_config:
        sys.stdout.write(Path(rollstream.config.__file__).with_name("generation.yaml").read_text("utf-8"))
        return 0
    loading = threading.Timer(_SLOW_S, sys.stderr.write, ["loading Python's packages …\n"])
    loading.daemon = True
    if not options.show_config:  # before the imports below, which take a second
        sys.stderr.write(f"rollstream {rollstream.__version__} on {platform.node()}, process {os.getpid()}\n")
        sys.stderr.flush()
        loading.start()
    try:
        from rollstream.generation import command
    finally:
        loading.cancel()
    return command.run(options, layers, _short_settings(options))


def run_demo(options: argparse.Namespace) -> int:
    """Executes a parsed `demo` command line."""
    demo = Path(rollstream.config.__file__).with_name("demo.yaml")
    return run(options, [demo, {"actor_rollout_ref": {"model": {"path": str(MODEL_PATH)}}}])


GENERATE = Command("generate n rollouts of every prompt of a dataset, or resume", run, add_arguments, EPILOG)

DEMO = Command(
    "generate with the shipped model, task and reward: 256 rollouts into outputs/demo",
    run_demo,
    add_arguments,
    "Takes the same settings as `rollstream generate`, for example:\n"
    "  rollstream demo train_tasks.0.size=1000 --output outputs/big\n",
)


if __name__ == "__main__":
    sys.exit(main())
