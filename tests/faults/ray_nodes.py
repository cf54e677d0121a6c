"""Ray nodes on this machine for tests, and what kills them."""

import contextlib
import os
import signal
from collections.abc import Iterator
from typing import Any

import psutil
import pytest

from tests.without_torch import without_torch

NOTICED_SOON = {
    "health_check_initial_delay_ms": 0,
    "health_check_period_ms": 300,
    "health_check_timeout_ms": 1000,
    "health_check_failure_threshold": 3,
}
"""A node that is gone is noticed within seconds, not fifteen."""

AS_QUICK_AS_OTHERS = {
    "prestart_worker_first_driver": False,
    "enable_worker_prestart": False,
    "worker_niceness": 0,
}
"""No idle process for each CPU of each node, most of which would never be used; and those that are used do
not wait for whatever else runs here, as by Ray's default (nice 15)."""


@contextlib.contextmanager
def nodes(*cpus: int, gpus: int = 0) -> Iterator[Any]:
    """A cluster with a node for each number of CPUs, each with so many GPUs that it only says it has.

    The first one is its head.
    """
    import ray
    from ray.cluster_utils import Cluster

    os.environ["RAY_USAGE_STATS_ENABLED"] = "0"
    cluster = Cluster()
    try:
        for number, count in enumerate(cpus):
            extra: dict[str, Any] = (
                {"_system_config": NOTICED_SOON | AS_QUICK_AS_OTHERS} if number == 0 else {}
            )
            add_node(cluster, num_cpus=count, num_gpus=gpus, **extra)
        yield cluster
    finally:
        ray.shutdown()
        cluster.shutdown()


def add_node(cluster: Any, **options: Any) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PYTHONPATH", without_torch()["PYTHONPATH"])  # of the node, and of workers on it
        cluster.add_node(object_store_memory=128 << 20, include_dashboard=False, **options)


def working_pids(driver: int | None = None) -> list[int]:
    """Processes of this program's Ray workers, or another's, that have started, and of nobody else; oldest first.

    Ray names a process after the method that it began last, and after the class when that has returned.
    """
    at_work = {"ray::WorkerHost", "ray::WorkerHost.reports", "ray::WorkerHost.give"}
    found = []
    for process in psutil.Process(driver).children(recursive=True):
        with contextlib.suppress(psutil.NoSuchProcess, IndexError):
            if process.cmdline()[0].rstrip("\0 ") in at_work:
                found.append((process.create_time(), process.pid))
    return [pid for _, pid in sorted(found)]


def lose_node(cluster: Any, node: Any) -> None:
    """A node goes as with its power: nothing on it has time for anything."""
    raylet = psutil.Process(node.all_processes["raylet"][0].process.pid)
    for process in [raylet, *raylet.children(recursive=True)]:
        with contextlib.suppress(psutil.NoSuchProcess):
            process.send_signal(signal.SIGKILL)
    cluster.remove_node(node, allow_graceful=False)
