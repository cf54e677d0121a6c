"""Runs whose replicas rollstream launches itself: `rollstream serve` with the demo model."""

import os
import signal
import socket
import sys
import time
from pathlib import Path

from tests.faults.runs import has_rollouts, overrides
from tests.support.processes import holds_within
from tests.support.until import PATIENCE_S

LAUNCH = "actor_rollout_ref__rollout__launch__"


class Launched:
    """What a run has launched, found by a mark in its environment: also what left its process group."""

    def __init__(self, mark: str) -> None:
        self._mark = f"LAUNCHED_BY_TEST={mark}".encode()
        self.env = f"{{LAUNCHED_BY_TEST: {mark}}}"

    def processes(self) -> dict[int, str]:
        """Command lines by pid."""
        time.sleep(0.02)  # it is asked again and again, and the replicas need the processor
        found = {}
        for entry in Path("/proc").glob("[0-9]*"):
            try:
                if self._mark in (entry / "environ").read_bytes().split(b"\0"):
                    found[int(entry.name)] = (entry / "cmdline").read_bytes().replace(b"\0", b" ").decode()
            except OSError:  # it has just ended, or is somebody else's
                continue
        return found

    def ports(self) -> dict[int, int]:
        """Of the servers, by pid."""
        return {
            pid: int(command.split()[command.split().index("--port") + 1])
            for pid, command in self.processes().items()
            if "--port" in command and "reaper" not in command
        }

    def servers(self) -> list[int]:
        return list(self.ports())

    def serving(self) -> list[int]:
        """Servers that take connections."""
        return [pid for pid, port in self.ports().items() if _listens(port)]

    def reapers(self) -> list[int]:
        return [pid for pid, command in self.processes().items() if "reaper" in command]

    def workers(self) -> list[int]:
        """Of the servers' engines."""
        return [pid for pid, command in self.processes().items() if "openvino_worker" in command]

    def kill(self, pids: list[int], number: int = signal.SIGKILL) -> None:
        for pid in pids:
            try:
                os.kill(pid, number)
            except ProcessLookupError:
                continue

    def are_gone(self) -> bool:
        """Waits for that."""
        return holds_within(PATIENCE_S, lambda: not self.processes())


def stub_python(folder: Path, latency: str) -> Path:
    """An "interpreter" that says what it was given, and starts a stub server in a server's place.

    Servers that start later are as slow as `folder / "latency"` says by then.
    """
    path = folder / "python"
    (folder / "latency").write_text(latency)
    path.write_text(
        "#!/bin/sh\n"
        'echo "devices $CUDA_VISIBLE_DEVICES"\n'
        f"if [ -e {folder}/broken ]; then echo 'CUDA out of memory'; exit 9; fi\n"
        "while [ $# -gt 0 ]; do case $1 in --host) host=$2;; --port) port=$2;; esac; shift; done\n"
        f"exec {sys.executable} -m rollstream.testing.stub_server --response-tokens 32 "
        f'--latency "$(cat {folder}/latency)" '
        '--host "$host" --port "$port"\n'
    )
    path.chmod(0o755)
    return path


def _listens(port: int) -> bool:
    with socket.socket() as probe:
        return probe.connect_ex(("127.0.0.1", port)) == 0


def has_begun(root: Path) -> bool:
    """As `has_rollouts`, without taking the processor from the replicas that are waited for."""
    time.sleep(0.05)
    return has_rollouts(root)


def launch_overrides(
    run_dir: Path, prompts: Path, launched: Launched, *, replicas: int, **settings: object
) -> list[str]:
    """A run over replicas of its own, one thread each."""
    words = overrides(
        run_dir,
        prompts,
        "",
        **{
            f"{LAUNCH}server": "rollstream",
            f"{LAUNCH}replicas": replicas,
            f"{LAUNCH}args": "{engine_kwargs: {num_threads: 1}}",
            f"{LAUNCH}env": launched.env,
            **settings,
        },
    )
    return [word for word in words if "server_urls" not in word]
