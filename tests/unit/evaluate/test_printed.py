"""What `rollstream eval` prints: data stays data, and a reader may go away."""

import os
import re
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from rollstream.cli import main
from tests.support.view_runs import HOSTILE, rollout, write_run


@pytest.mark.parametrize("form", ["text", "md"])
def test_names_and_values_stay_in_their_line(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], form: str
) -> None:
    """Nothing in data moves a terminal's cursor, ends a table's line or becomes Markdown or HTML."""
    values = [*HOSTILE, "a|b\r\nc", "x" * 5000]
    for name in ("one\n| two |", "<b>[x](y)"):
        records = [replace(rollout(at, 0), data_source=value) for at, value in enumerate(values)]
        write_run(tmp_path / name, records, n=1, prompts=len(values))
    assert main(["eval", str(tmp_path), "--by", "data_source", "--format", form]) == 0
    printed = capsys.readouterr().out
    assert all(one.isprintable() for one in printed.replace("\n", ""))
    assert max(map(len, printed.splitlines())) < 400
    by = next(block for block in printed.split("\n\n") if "data_source" in block).splitlines()
    assert len(by) == (1 if form == "text" else 2) + 2 * len(values)
    if form == "md":
        assert len({len(re.findall(r"(?<!\\)\|", line)) for line in by}) == 1
        assert not re.search(r"(?<!\\)<|(?<!\\)\](?<!\\)\(", printed)


def test_a_reader_that_went_away_changes_no_exit_code(tmp_path: Path) -> None:
    write_run(tmp_path, [rollout(0, 0, reward=0.5)], n=1, prompts=1)
    command = [sys.executable, "-m", "rollstream", "eval", str(tmp_path), "--min-mean", "0.9"]
    reader, writer = os.pipe()
    os.close(reader)
    try:
        done = subprocess.run(command, stdout=writer, stderr=subprocess.PIPE, text=True, timeout=120)
    finally:
        os.close(writer)
    assert (done.returncode, done.stderr.count("NOT MET"), "Traceback" in done.stderr) == (1, 1, False)
