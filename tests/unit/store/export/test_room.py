"""Memory that is left: the least of the machine's and the container's."""

from pathlib import Path

from rollstream.store.export.room import available_memory


def test_the_container_counts_where_it_is_narrower(tmp_path: Path) -> None:
    (tmp_path / "meminfo").write_text("MemTotal: 100 kB\nMemAvailable:      64 kB\n")
    assert available_memory(tmp_path, tmp_path) == 64 << 10
    (tmp_path / "memory.max").write_text("20000\n")
    (tmp_path / "memory.current").write_text("15000\n")
    (tmp_path / "memory.stat").write_text("anon 1\ninactive_file 3000\n")
    assert available_memory(tmp_path, tmp_path) == 8000
    (tmp_path / "memory.max").write_text("max\n")
    assert available_memory(tmp_path, tmp_path) == 64 << 10
    assert available_memory(tmp_path / "none", tmp_path / "none") is None


def test_this_machine_has_some() -> None:
    found = available_memory()
    assert found is None or 1 << 20 < found < 1 << 50
