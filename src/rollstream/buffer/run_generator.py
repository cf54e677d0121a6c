"""The process of a generator: `python -m rollstream.buffer.run_generator FILE PAYLOAD_FD REPORT_FD`."""

import asyncio
import inspect
import logging
import os
import sys
import traceback
from pathlib import Path

import msgspec

from rollstream.buffer.generator_process import GeneratorEnd
from rollstream.errors import ConfigError, DataError
from rollstream.user_code import run_file

_TRACEBACK_CHARS = 8_000


def main(file: str, payload: int, report: int) -> bool:
    """Calls the file's `run_rollout`, and reports how it ended. Returns whether it finished."""
    os.set_inheritable(report, False)
    logging.basicConfig(
        stream=sys.stderr, level=logging.INFO, format="%(asctime)s %(levelname)s %(name)s: %(message)s"
    )
    for noisy in ("httpx", "aiohttp.access"):  # a line for every request
        logging.getLogger(noisy).setLevel(logging.WARNING)
    end = GeneratorEnd(finished=True)
    try:
        with open(payload, "rb") as stream:
            data = msgspec.json.decode(stream.read())
        returned = run_file(Path(file), key="generator file").run_rollout(data)
        if inspect.iscoroutine(returned):
            asyncio.run(returned)
    except (Exception, SystemExit) as error:
        if not isinstance(error, SystemExit) or error.code not in (None, 0):
            text = "".join(traceback.format_exception(error))[-_TRACEBACK_CHARS:]
            sys.stderr.write(text)
            line = f"{type(error).__name__}: {error}".replace("\n", " ")[:1000]
            end = GeneratorEnd(False, isinstance(error, ConfigError | DataError), line, text)
    with open(report, "wb") as stream:
        stream.write(msgspec.json.encode(end))
    return end.finished


if __name__ == "__main__":
    if not main(sys.argv[1], int(sys.argv[2]), int(sys.argv[3])):
        # What the generator file left behind must not keep a process that failed: the guard ends it.
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(1)
    # Threads and processes that `run_rollout` began and did not wait for go on to their end, as in slime.
