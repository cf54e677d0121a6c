"""Two runs in one folder: the second is refused by name, the first does not notice."""

import signal
from pathlib import Path

from rollstream.store.summary import read_status
from rollstream.store.validate import validate_run
from rollstream.testing.stub_faults import Faults
from tests.faults.runs import Runner, has_rollouts, overrides, stub_in_thread, write_prompts


def test_the_second_writer_is_refused(tmp_path: Path) -> None:
    prompts = write_prompts(tmp_path / "prompts.jsonl", 20)
    run_dir = tmp_path / "run"
    # Some requests are never answered: the first run is still there, whatever the machine does.
    with stub_in_thread(response_tokens=64, faults=Faults(hang=0.5)) as server:
        command = overrides(run_dir, prompts, server.url, generation__grace_period=0)
        first = Runner(command, log=tmp_path / "first.log")
        assert first.wait_until(lambda: has_rollouts(run_dir))
        second = Runner(command, log=tmp_path / "second.log")
        assert second.wait() == 2
        assert f"process {first.process.pid}" in second.output()
        assert first.process.poll() is None
        first.process.send_signal(signal.SIGTERM)
        assert first.wait() == 143, first.output()[-2000:]
    assert validate_run(run_dir).sound
    assert 0 < read_status(run_dir).completed < 20
