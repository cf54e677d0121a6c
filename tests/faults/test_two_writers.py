"""Two runs in one folder: the second is refused by name, the first does not notice."""

import signal
from pathlib import Path

from rollstream.store.summary import read_status
from rollstream.store.validate import validate_run
from tests.faults.runs import Runner, has_rollouts, overrides, stub_server, write_prompts


def test_the_second_writer_is_refused(tmp_path: Path) -> None:
    prompts = write_prompts(tmp_path / "prompts.jsonl", 20)
    run_dir = tmp_path / "run"
    options = ["--response-tokens", "64", "--latency", "pareto:0.05,0.3", "--latency-max", "600"]
    with stub_server(*options) as url:
        # Some of 20 Pareto latencies are minutes: the first run is still there, whatever the machine does.
        command = overrides(run_dir, prompts, url, generation__grace_period=0)
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
