"""The Ray cluster of a run, for its workers, its replicas, or both."""

from contextlib import AsyncExitStack

from rollstream.config.settings import Settings
from rollstream.generation.stopping import StopSignals
from rollstream.rollout.ray_cluster import RayCluster


async def join_cluster(settings: Settings, *, stop: StopSignals, stack: AsyncExitStack) -> RayCluster:
    """Joins or starts the cluster that `ray_kwargs` names.

    Args:
        settings: of the run.
        stop: ends the start early.
        stack: gets what leaves it again, also after an error here.

    Raises:
        ConfigError: Ray does not take these arguments.
        EngineUnavailableError: no cluster is there.
    """
    ray_kwargs = settings.ray_kwargs
    cluster = RayCluster(ray_kwargs.ray_init, ray_kwargs.timeline_json_file)
    stack.push_async_callback(cluster.close)
    await stop.unless_stopped(cluster.start())
    return cluster
