"""The process of a generator: `python -m rollstream.buffer.run_generator FILE --payload P --report R`.

It runs the generator file, calls its `run_rollout` with the payload, and says in its report why it failed.
Exit codes: see `generator_process`.
"""

import argparse
import asyncio
import inspect
import logging
import os
import sys
import traceback
from collections.abc import Sequence
from pathlib import Path

import orjson

from rollstream.buffer.generator_process import CRASHED, FINISHED, HOPELESS
from rollstream.errors import ConfigError, DataError
from rollstream.user_code import run_file

_TRACEBACK_CHARS = 8_000


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs one generator to its end; the exit code."""
    parser = argparse.ArgumentParser(prog="rollstream.buffer.run_generator")
    parser.add_argument("file", type=Path)
    parser.add_argument("--payload", type=Path, required=True)
    parser.add_argument("--report", type=Path, required=True)
    options = parser.parse_args(arguments)
    logging.basicConfig(
        stream=sys.stderr, level=logging.INFO, format="%(asctime)s %(levelname)s %(name)s: %(message)s"
    )
    try:
        data = orjson.loads(options.payload.read_bytes())
        module = run_file(options.file, key="generator file")
        returned = module.run_rollout(data)
        if inspect.iscoroutine(returned):
            asyncio.run(returned)
    except (Exception, SystemExit) as error:
        if isinstance(error, SystemExit) and error.code in (None, 0):
            return FINISHED
        text = "".join(traceback.format_exception(error))[-_TRACEBACK_CHARS:]
        sys.stderr.write(text)
        line = f"{type(error).__name__}: {error}".replace("\n", " ")[:1000]
        written = options.report.with_suffix(".tmp")
        written.write_bytes(orjson.dumps({"error": line, "traceback": text}))
        written.replace(options.report)
        return HOPELESS if isinstance(error, ConfigError | DataError) else CRASHED
    return FINISHED


if __name__ == "__main__":
    code = main()
    if code != FINISHED:
        # What the generator file left behind must not keep a process that failed: the guard ends it.
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)
    # Threads and processes that `run_rollout` began and did not wait for go on to their end, as in slime.
    sys.exit(code)
