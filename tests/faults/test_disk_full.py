"""A full disk stops the run with a clear message, loses nothing, and the same command goes on afterwards."""

import resource
from collections.abc import Callable
from pathlib import Path

import pytest

from rollstream.store.summary import read_status
from rollstream.store.validate import validate_run
from tests.faults.runs import Runner, overrides, run_to_end, stub_in_thread, write_prompts


def limited(kilobytes: int) -> Callable[[], None]:
    """Makes every write beyond this file size fail (EFBIG), as on a full disk: Python ignores SIGXFSZ."""

    def limit_files() -> None:
        resource.setrlimit(resource.RLIMIT_FSIZE, (kilobytes << 10, kilobytes << 10))

    return limit_files


@pytest.mark.parametrize("what", ["journal", "merge"])
def test_full_disk_stops_the_run_and_resume_finishes_it(tmp_path: Path, what: str) -> None:
    prompts = write_prompts(tmp_path / "prompts.jsonl", 600)
    run_dir = tmp_path / "run"
    with stub_in_thread(response_tokens=64) as server:
        kilobytes, in_flight = 24, 8  # few at once: the first are durable before the disk is full
        if what == "merge":  # the journals and batches fit, the artifact does not
            whole = tmp_path / "whole"
            run_to_end(
                overrides(whole, prompts, server.url, generation__save_batch_size=30), tmp_path / "whole.log"
            )
            in_flight = 64
            kilobytes = (whole / "trajectories.parquet").stat().st_size * 3 // 4 >> 10
            assert max(path.stat().st_size for path in (whole / "batches").iterdir()) < kilobytes << 10
        command = overrides(
            run_dir,
            prompts,
            server.url,
            generation__save_batch_size=30 if what == "merge" else 400,
            generation__max_in_flight=in_flight,
        )
        stopped = Runner(command, log=tmp_path / "full.log", preexec=limited(kilobytes))
        assert stopped.wait() == 1, stopped.output()[-3000:]
        assert "cannot write" in stopped.output()
        assert "run the same command again" in stopped.output()
        before = read_status(run_dir)
        assert not before.damage
        assert validate_run(run_dir).sound
        if what == "merge":
            assert before.completed == 600
            assert not (run_dir / "trajectories.parquet").exists()
        else:
            assert 0 < before.completed < 600
        run_to_end(command, tmp_path / "resumed.log")
    after = read_status(run_dir)
    assert (after.completed, after.quarantined) == (600, [])
    assert validate_run(run_dir).sound
