"""verl's servers and manager of loops for a run: started, told where rollstream's engine is, ended."""

import asyncio
import contextlib
import sys
from collections.abc import Callable, Sequence
from types import SimpleNamespace
from typing import Any

from omegaconf import DictConfig

from rollstream.daemon_threads import in_daemon_thread
from rollstream.integrations.verl.plugin import register

_URLS_EVERY_S = 1.0
_URLS_TOLD_EVERY = 10
"""As workers on Ray are told: launched servers come back on other ports."""


async def start_verl(config: DictConfig) -> tuple[Any, Any]:
    """Starts servers and the manager of loops, both of verl. What it began ends with it when it fails."""
    managers = await in_daemon_thread(_import_verl)
    servers = managers.StreamingLLMServerManager(config)
    try:
        with contextlib.redirect_stdout(sys.stderr):  # it prints where servers are
            await servers.start()
        client = servers.get_client(client_cls=managers.StreamingLLMServerClient)
        manager = await managers.GenerationLoopManager.create(config, client)
    except BaseException:
        end_verl(servers)
        raise
    manager.server_handles = list(servers.server_handles)
    return servers, manager


def _import_verl() -> Any:
    from rollstream.integrations.verl import workers

    register()
    return SimpleNamespace(
        StreamingLLMServerManager=workers.StreamingLLMServerManager,
        GenerationLoopManager=workers.GenerationLoopManager,
        StreamingLLMServerClient=workers.StreamingLLMServerClient,
    )


def end_verl(servers: Any) -> None:
    """Ends what verl started and has no way to end: on a cluster that stays, it would stay, with its GPUs.

    Args:
        servers: an `LLMServerManager`, started or half so: then it lacks what comes later.
    """
    import ray
    from ray.util import remove_placement_group

    if not ray.is_initialized():
        return  # and to be asked for anything, it would start a cluster
    actors = [getattr(servers, "global_load_balancer", None), *getattr(servers, "server_handles", ())]
    groups: list[Any] = []
    for replica in getattr(servers, "rollout_replicas", ()):
        actors += [*replica.servers, *replica.workers]
        groups += getattr(replica.resource_pool, "pgs", None) or []
    for actor in filter(None, actors):
        with contextlib.suppress(Exception):  # Ray may be gone
            ray.kill(actor)
    for group in groups:
        with contextlib.suppress(Exception):
            remove_placement_group(group)


async def tell_urls(handles: Sequence[Any], urls: Callable[[], Sequence[str]]) -> None:
    """Tells the proxies where the servers are, whenever that changes and now and then. Never ends."""
    told: list[str] = []
    look = 0
    while True:
        now = list(urls())
        if now != told or look % _URLS_TOLD_EVERY == 0:
            for handle in handles:
                handle.follow.remote(now)
            told = now
        look += 1
        await asyncio.sleep(_URLS_EVERY_S)
