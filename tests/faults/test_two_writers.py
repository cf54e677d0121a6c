"""Two runs in one folder: the second is refused by name, the first does not notice."""

from pathlib import Path

from rollstream.store.validate import validate_run
from tests.faults.runs import Runner, overrides, stub_server, write_prompts


def test_the_second_writer_is_refused(tmp_path: Path) -> None:
    prompts = write_prompts(tmp_path / "prompts.jsonl", 200)
    run_dir = tmp_path / "run"
    with stub_server("--response-tokens", "64", "--latency", "fixed:0.2") as url:
        command = overrides(run_dir, prompts, url, generation__max_in_flight=8)
        first = Runner(command, log=tmp_path / "first.log")
        assert first.wait_until(lambda: any((run_dir / "journal").glob("*.rsj")))
        second = Runner(command, log=tmp_path / "second.log")
        assert second.wait() == 2
        assert f"process {first.process.pid}" in second.output()
        assert first.wait() == 0, first.output()[-2000:]
    assert validate_run(run_dir).sound
