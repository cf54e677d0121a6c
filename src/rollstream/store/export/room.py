"""What fits: memory and disk that are left."""

from pathlib import Path

_CGROUP = Path("/sys/fs/cgroup")


def available_memory(proc: Path = Path("/proc"), cgroup: Path = _CGROUP) -> int | None:
    """Bytes that a process may still take without swapping; None where the system does not say.

    The least of what the machine has and what a container (cgroup v2) is allowed. Memory that only holds
    copies of files counts as free: the kernel takes it back.
    """
    limits = []
    if (machine := _fields(proc / "meminfo").get("MemAvailable:")) is not None:
        limits.append(machine * 1024)
    try:
        allowed = int((cgroup / "memory.max").read_text())
        used = int((cgroup / "memory.current").read_text())
        limits.append(max(0, allowed - used + _fields(cgroup / "memory.stat").get("inactive_file", 0)))
    except (OSError, ValueError):  # no cgroup v2, or "max": no limit
        pass
    return min(limits, default=None)


def _fields(path: Path) -> dict[str, int]:
    """Lines of `name number …`."""
    try:
        lines = [line.split() for line in path.read_text().splitlines()]
    except OSError:
        return {}
    return {words[0]: int(words[1]) for words in lines if len(words) > 1 and words[1].isdigit()}
