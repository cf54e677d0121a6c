"""Which checkpoint is resumed when its writer was killed."""

import json
from pathlib import Path

import pytest

from rollstream.errors import ConfigError
from rollstream.integrations.trl.checkpoints import STATE_FILE, last_whole, read_state, write_state


def checkpoint(folder: Path, step: int, *, torn: str | None = None, without: str | None = None) -> str:
    made = folder / f"checkpoint-{step}"
    made.mkdir()
    write_state(made, {"trained_batches": step})
    (made / "trainer_state.json").write_text(json.dumps({"global_step": step}))
    if torn is not None:
        (made / torn).write_text('{"global')
    if without is not None:
        (made / without).unlink()
    return str(made)


def test_the_newest_that_is_whole(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    assert last_whole(str(tmp_path)) is None and last_whole(str(tmp_path / "none")) is None
    checkpoint(tmp_path, 9)
    whole = checkpoint(tmp_path, 10)
    (tmp_path / "checkpoint-best").mkdir()
    assert last_whole(str(tmp_path)) == whole
    assert read_state(whole) == {"trained_batches": 10}
    checkpoint(tmp_path, 11, without="trainer_state.json")
    checkpoint(tmp_path, 12, torn="trainer_state.json")
    checkpoint(tmp_path, 13, without=STATE_FILE)
    write_state(Path(checkpoint(tmp_path, 14)), {"trained_batches": 7})  # over that of another training
    assert last_whole(str(tmp_path)) == whole
    assert [f"checkpoint-{step} is passed over" in caplog.text for step in range(10, 15)] == [
        False,
        *[True] * 4,
    ]


def test_when_none_is_whole_it_says_what_to_do(tmp_path: Path) -> None:
    torn = checkpoint(tmp_path, 3, without=STATE_FILE)
    with pytest.raises(ConfigError, match="no checkpoint in"):
        last_whole(str(tmp_path))
    with pytest.raises(ConfigError, match="give it as the model"):
        read_state(torn)
