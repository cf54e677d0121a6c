"""What `bench.peer` runs in datatrove's environment: URL PROMPTS FOLDER IN_FLIGHT CHECKPOINTS."""

import sys
from typing import Any

from datatrove.executor import LocalPipelineExecutor
from datatrove.pipeline.inference.run_inference import InferenceConfig, InferenceRunner
from datatrove.pipeline.readers import JsonlReader
from datatrove.pipeline.writers import JsonlWriter


async def rollout(document: Any, generate: Any) -> Any:
    """One request for one document."""
    return await generate({"messages": [{"role": "user", "content": document.text}], "max_tokens": 64})


def main() -> None:
    """Generates an answer to each prompt, as datatrove's documentation shows it."""
    url, prompts, folder, in_flight, checkpoints = sys.argv[1:]
    config = InferenceConfig(
        server_type="endpoint",
        model_name_or_path="model",
        endpoint_url=url,
        max_concurrent_generations=int(in_flight),
        metric_interval=120,
    )
    runner = InferenceRunner(
        rollout_fn=rollout,
        config=config,
        output_writer=JsonlWriter(
            f"{folder}/out", output_filename="${rank}_chunk_${chunk_index}.jsonl", compression=None
        ),
        checkpoints_local_dir=f"{folder}/checkpoints" if checkpoints == "1" else None,
        records_per_chunk=1000,
    )
    reader = JsonlReader(prompts, text_key="prompt")
    LocalPipelineExecutor(pipeline=[reader, runner], logging_dir=f"{folder}/logs", tasks=1).run()


if __name__ == "__main__":
    main()
