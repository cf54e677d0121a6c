"""The words of `rollstream gateway serve`. What it does is in `serve`, so that the imports here are light."""

import argparse
from pathlib import Path

from rollstream.command_line import Command

EPILOG = """\
examples:
  rollstream gateway serve actor_rollout_ref.model.path=MODEL --buffer http://127.0.0.1:8889
  rollstream gateway serve actor_rollout_ref.model.path=MODEL actor_rollout_ref.rollout.name=sglang \\
      actor_rollout_ref.rollout.server_urls=[http://gpu1:30000] actor_rollout_ref.rollout.n=8 \\
      data.train_files=prompts.jsonl trainer.default_local_dir=outputs/agents
  rollstream gateway serve --config gateway.yaml --host 0.0.0.0 --token-file token --public-url http://gw:8900

The settings are those of `rollstream generate` (--help-config there prints them). The same command with the
same run directory goes on where the last one ended, also after a crash.

routes, whose bodies are JSON with optional fields; docs/gateway.md shows a program of it:
  POST /v1/sessions {id, row, instance_id}      opens a session: id, state, base_url, api_key, expires_in, messages
                                                (Anthropic's clients take base_url without /v1). Again: the same
                                                session, or its end; 409 if the row differs
  GET /v1/sessions/ID                           state, calls, tokens
  POST /v1/sessions/ID/finish {reward, answer, reward_extra, extra}
                                                answers when the rollout is durable. Again: the same answer, 409 for
                                                another result. 409 before any answer of the model, 404 after a kill
  DELETE /v1/sessions/ID                        makes it a failed rollout
  POST /v1/weights {model_path, version}        loads weights; calls in flight go on with them
  GET /v1/weights, /healthz, /metrics, /openapi.json

exit codes: 0 ended by SIGINT or SIGTERM; 2 wrong usage or configuration, or a run directory or address that
cannot be used; 1 the engine cannot start, or the disk failed.
"""


def _add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("overrides", nargs="*", metavar="key=value", help="settings, in Hydra's grammar")
    parser.add_argument(
        "--config", type=Path, action="append", default=[], metavar="FILE", help="a YAML file under them"
    )
    text = (
        "a rollout buffer gets the sessions, with the token of ROLLSTREAM_BUFFER_TOKEN (default: the run "
        "directory, trainer.default_local_dir)"
    )
    parser.add_argument("--buffer", metavar="URL", help=text)
    parser.add_argument("--task-type", metavar="TASK", help="of the buffer's items (default: the last job's)")
    parser.add_argument("--host", default="127.0.0.1", help="address to listen on (default: %(default)s)")
    parser.add_argument("--port", type=int, default=8900, help="0 takes a free one (default: %(default)s)")
    parser.add_argument(
        "--public-url", metavar="URL", help="how agents reach it, where that is not what it listens on"
    )
    text = "its first line is what clients of /v1 have to show; agents have their session's secret"
    parser.add_argument("--token-file", type=Path, metavar="FILE", help=text)
    parser.add_argument("--insecure", action="store_true", help="listen beyond loopback without a token")
    parser.add_argument(
        "--allow-host", action="append", default=[], metavar="NAME", help="a further name of this server"
    )
    for name, default, text in (
        ("expire-seconds", 3600.0, "without a call, after which a session fails"),
        ("grace-seconds", 30.0, "that open sessions get to finish after SIGTERM"),
    ):
        parser.add_argument(
            f"--{name}", type=float, default=default, metavar="S", help=f"{text} (default: %(default)s)"
        )
    text = "open at once, at most (default: %(default)s)"
    parser.add_argument("--max-sessions", type=int, default=1024, metavar="N", help=text)
    text = "folder below which POST /v1/weights may name weights; may be given again"
    parser.add_argument("--weights", type=Path, action="append", default=[], metavar="DIR", help=text)
    parser.add_argument("--json", action="store_true", help='print {"url", "pid"} when ready')


def serve(options: argparse.Namespace) -> int:
    """Executes a parsed `gateway serve` command line; returns the exit code."""
    from rollstream.sessions.serve import run

    return run(options)


COMMAND = Command(
    "a capture proxy for agents: their chat calls become exact-token trajectories",
    commands={
        "serve": Command(
            "answer agent programs that run elsewhere, and store their sessions as trajectories",
            serve,
            _add_arguments,
            EPILOG,
        )
    },
)
