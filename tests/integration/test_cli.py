"""The command line in processes of their own: signals on a terminal, clean standard output, dry runs."""

import contextlib
import os
import pty
import shlex
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import orjson
import pytest

from rollstream.cli import main as cli
from rollstream.stop_signals import TOGETHER_S
from rollstream.store.paths import RunPaths
from rollstream.testing.stub_faults import Faults
from tests.faults.runs import overrides, stub_in_thread, write_prompts
from tests.support.until import wait_until

MODULE = [sys.executable, "-m", "rollstream.cli", "generate"]


class Terminal:
    """A process on a pseudo-terminal of 80 columns; keeps what it shows."""

    def __init__(self, command: list[str], columns: int = 80) -> None:
        self._master, slave = pty.openpty()
        self.process = subprocess.Popen(
            command,
            stdin=slave,
            stdout=slave,
            stderr=slave,
            env={**os.environ, "COLUMNS": str(columns), "TERM": "xterm"},
        )
        os.close(slave)
        self._chunks: list[bytes] = []
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()

    def _read(self) -> None:
        with contextlib.suppress(OSError):  # how a terminal says that nobody is there any more
            while chunk := os.read(self._master, 1 << 16):
                self._chunks.append(chunk)

    @property
    def shown(self) -> str:
        return b"".join(self._chunks).decode(errors="replace")

    def wait_for(self, text: str) -> None:
        wait_until(lambda: text in self.shown or self.process.poll() is not None, text)
        assert text in self.shown, self.shown

    def wait(self) -> int:
        code = self.process.wait(120)
        self._reader.join(20)
        return code


def test_the_resume_command_after_two_interrupts_on_a_terminal(tmp_path: Path) -> None:
    prompts = write_prompts(tmp_path / "prompts.jsonl", 40)
    paths = RunPaths(tmp_path / "a run")
    with stub_in_thread(response_tokens=64, faults=Faults(hang=0.5)) as server:
        words = overrides(
            paths.root, prompts, server.url, generation__grace_period=1000, generation__max_in_flight=4
        )
        terminal = Terminal([*MODULE, *words])
        terminal.wait_for("/40 [")
        terminal.process.send_signal(signal.SIGINT)
        terminal.wait_for("stopping:")
        time.sleep(TOGETHER_S)  # sooner it would be the same one
        terminal.process.send_signal(signal.SIGINT)
        assert terminal.wait() == 130
    last = terminal.shown.replace("\r\n", "\n").rstrip("\n").splitlines()[-1]
    assert last == f"resume with: {shlex.join([*MODULE, *words])}"


def test_json_is_all_there_is_on_standard_output(tmp_path: Path) -> None:
    prompts = write_prompts(tmp_path / "prompts.jsonl", 6)
    reward = tmp_path / "reward.py"
    reward.write_text(
        "import os\nprint('while importing')\n"
        "def compute_score(data_source, solution_str, ground_truth, extra_info):\n"
        "    print('while scoring')\n    os.system('echo from a child')\n    return 1.0\n"
    )
    with stub_in_thread(response_tokens=8) as server:
        words = overrides(tmp_path / "run", prompts, server.url, custom_reward_function__path=reward)
        done = subprocess.run([*MODULE, *words, "--json"], capture_output=True, text=True, check=True)
    assert orjson.loads(done.stdout)["completed"] == 6
    for text in ("while importing", "while scoring", "from a child"):
        assert text in done.stderr


def test_a_dry_run_against_another_run_says_what_differs(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    prompts = write_prompts(tmp_path / "prompts.jsonl", 6)
    with stub_in_thread(response_tokens=8) as server:
        words = overrides(tmp_path / "run", prompts, server.url)
        assert cli(["generate", *words, "--dry-run"]) == 0
        assert "holds: nothing yet" in capsys.readouterr().out
        assert not (tmp_path / "run").exists()
        assert cli(["generate", *words, "generation.show_progress=false"]) == 0
        assert cli(["generate", *words, "--dry-run"]) == 0
        capsys.readouterr()
        other = [*words, "--dry-run", "generation.seed=12"]
        assert cli(["generate", *other]) == 2
        printed = capsys.readouterr()
        assert "  generation.seed: 11 -> 12\n" in printed.err
        assert "everything resolves" not in printed.out
        assert cli(["generate", *other, "--json"]) == 2
        assert orjson.loads(capsys.readouterr().out)["would_differ"] == [["generation.seed", 11, 12]]
        assert cli(["generate", *words, "--dry-run", "generation.resume=never"]) == 2
        assert "resume=never" in capsys.readouterr().err
