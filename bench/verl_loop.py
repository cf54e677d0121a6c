"""verl's own agent loops with an engine that answers at once: a row of `bench.ray`, which runs this.

    python -m bench.verl_loop WORKERS PROMPT RESPONSE ROLLOUTS

Needs an environment that has verl (and psutil). It is verl's `AgentLoopManager.generate_sequences` over its
`AgentLoopWorker`s and `single_turn_agent`, log-probs on. Each worker has the engine in its own process, as
rollstream's have in `bench.ray`: its client answers without asking a server. So what is measured is verl's:
messages to ids, padding, batches, and their way through Ray. Batches are of `bench.ray`'s number in flight.
"""

import asyncio
import logging
import sys
import time
from typing import Any

import numpy as np
import orjson

from bench.ray import IN_FLIGHT, Sizes, cpu_of_family, load_row
from rollstream.demo import MODEL_PATH


def make_config(workers: int, sizes: Sizes) -> Any:
    """A configuration of verl for these sizes."""
    from rollstream.config.load import compose, to_settings
    from rollstream.integrations.verl.compose import compose_verl

    words = [
        f"actor_rollout_ref.model.path={MODEL_PATH}",
        f"actor_rollout_ref.rollout.response_length={sizes.response}",
        f"actor_rollout_ref.rollout.agent.num_workers={workers}",
        f"data.max_prompt_length={sizes.prompt}",
        "data.train_files=none.parquet",
    ]
    return compose_verl(to_settings(compose(words)))


def make_client(config: Any, sizes: Sizes) -> Any:
    """What answers a loop at once with the same ids."""
    from verl.workers.rollout.llm_server import LLMServerClient
    from verl.workers.rollout.replica import TokenOutput

    ids = [300 + i % 100 for i in range(sizes.response)]
    logprobs = [-0.01 * (i % 97) for i in range(sizes.response)]

    class InstantClient(LLMServerClient):  # type: ignore[misc]
        async def generate(self, request_id: Any, **request: Any) -> Any:
            fields = {"global_steps": 0, "min_global_steps": 0, "max_global_steps": 0}
            return TokenOutput(
                token_ids=list(ids), log_probs=list(logprobs), stop_reason="completed", extra_fields=fields
            )

    return InstantClient(config)


def make_batch(first: int, rows: int, sizes: Sizes) -> Any:
    """Prompts as verl's trainers make a batch of them."""
    import torch
    from verl import DataProto

    prompts = np.empty(rows, dtype=object)
    prompts[:] = [load_row(first + i, sizes).messages for i in range(rows)]
    return DataProto.from_single_dict(
        {
            "dummy_tensor": torch.zeros(rows, 1, dtype=torch.uint8),
            "raw_prompt": prompts,
            "index": np.arange(first, first + rows),
        }
    )


async def measure(workers: int, sizes: Sizes, rollouts: int) -> dict[str, Any]:
    """As `bench.ray.measure`; `rollouts` are rounded up to whole batches."""
    import os

    import ray
    from verl.experimental.agent_loop.agent_loop import AgentLoopManager

    os.environ["RAY_USAGE_STATS_ENABLED"] = "0"
    ray.init(
        address="local",
        num_cpus=max(workers, os.cpu_count() or 1),
        include_dashboard=False,
        object_store_memory=4 << 30,  # a batch of 256 x 5120 padded rows is some 50 MB, several times over
        logging_level=logging.ERROR,
    )
    config = make_config(workers, sizes)
    manager = await AgentLoopManager.create(config, make_client(config, sizes))
    try:
        given = await manager.generate_sequences(make_batch(0, IN_FLIGHT, sizes))
        assert int(given.batch["response_mask"].sum()) == IN_FLIGHT * sizes.response
        assert given.batch["rollout_log_probs"].shape == (IN_FLIGHT, sizes.response)
        batches = -(-rollouts // IN_FLIGHT)
        prompts = [make_batch(1000 + i * IN_FLIGHT, IN_FLIGHT, sizes) for i in range(batches)]
        cpu, own, started = cpu_of_family(), time.process_time(), time.perf_counter()
        for batch in prompts:
            await manager.generate_sequences(batch)
        seconds = time.perf_counter() - started
        cpu, own = cpu_of_family() - cpu, time.process_time() - own
    finally:
        ray.shutdown()
    return {"rollouts": batches * IN_FLIGHT, "seconds": seconds, "cpu_s": cpu, "driver_cpu_s": own}


if __name__ == "__main__":
    count, prompt, response, total = map(int, sys.argv[1:5])
    print(orjson.dumps(asyncio.run(measure(count, Sizes(prompt, response), total))).decode())
