"""Kill -9 of a process that writes and acks: what was acknowledged is there, what was acked is gone, once."""

import asyncio
import random
import signal
import subprocess
import sys
import threading
from collections import Counter
from pathlib import Path

import pytest

from rollstream.buffer.ledger import Ledger
from tests.unit.buffer.ledger_worlds import settings

ROOT = Path(__file__).parents[2]
KILLS = 6


def run_until_killed(root: Path, turn: int, lines: int) -> list[list[str]]:
    """Kills the program once it has said so much, in the middle of whatever it does then."""
    process = subprocess.Popen(
        [sys.executable, "-m", "tests.unit.buffer.kill_ledger", str(root), str(turn)],
        cwd=ROOT,
        stdout=subprocess.PIPE,
        text=True,
    )
    timer = threading.Timer(120, process.kill)
    timer.start()
    said = []
    assert process.stdout is not None
    for line in process.stdout:
        said.append(line)
        if len(said) == lines:
            process.send_signal(signal.SIGKILL)
    assert process.wait() == -signal.SIGKILL
    timer.cancel()
    assert len(said) >= lines
    return [line.split() for line in said if line.endswith("\n")]


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_what_was_acknowledged_survives_kills(tmp_path: Path) -> None:
    chance = random.Random()
    written: set[str] = set()
    tried: dict[str, list[str]] = {}
    acked: set[str] = set()
    for turn in range(KILLS):
        for what, *words in run_until_killed(tmp_path, turn, chance.randrange(1, 1500)):
            if what == "wrote":
                written.update(words)
            elif what == "acks":
                tried[words[0]] = words[1:]
            else:
                acked.add(words[0])
    ledger = Ledger.open(tmp_path, settings(group_size=4, segment_bytes=8000))
    assert not ledger.report.damage

    async def what_is_left() -> list[str]:
        state = ledger._state
        bodies = [ledger.load(state.view(group)) for group in state.groups.values()]
        left = [payload[8:].split(b'"')[0].decode() for items in bodies for payload, _ in items]
        done = {lease for lease in tried if state.ended.get(lease, ("", 0))[0] == "acked"}
        assert acked <= done
        gone = Counter(uid for lease in done for uid in tried[lease])
        assert max(gone.values()) == 1  # nothing was acked twice
        assert not set(gone) & set(left)
        assert written <= set(gone) | set(left)
        assert len(left) == len(set(left)) == ledger.stats().items
        assert ledger.stats().items_delivered == len(gone)
        await ledger.close()
        return left

    assert len(asyncio.run(what_is_left())) < len(written)
