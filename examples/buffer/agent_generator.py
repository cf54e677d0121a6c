"""A generator around an agent framework of one's own: copy it, and put your agent in place of `solve`.

`solve` stands for any code that talks to a model: here the openai client and two turns, a thread for each
rollout. The buffer needs nothing of it but its messages and a reward:

    rollstream buffer serve --dir outputs/buffer --generators examples/buffer
    curl http://127.0.0.1:8889/v1/jobs -d '{"task_type": "agent", "input_file": "prompts.jsonl", …}'

- A uid is made of the job, the instance and `epoch * repeats + repeat`: a generator that is started again asks
  which uids the buffer knows, and makes the others.
- `skip_instance_ids` has an instance once for each epoch of it that was done before this job.
- One epoch comes after the other, since the buffer makes groups of items in the order of their arrival.
- A rollout that fails is written, too, with reward -1 and its cause: its group need not wait for it, and the
  default rule hands it to no trainer.
"""

import json
import time
from collections import Counter
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from openai import OpenAI

from rollstream.buffer.client import BufferClient

TASK_TYPE = "agent"


def run_rollout(data: dict[str, Any]) -> None:
    """Makes all that the payload asks for; returns when it is stored."""
    with Path(data["input_file"]).open() as file:
        rows = [json.loads(line) for line in file]
    client = OpenAI(base_url=f"{data['remote_engine_url']}/v1", api_key="none")
    request = {"model": client.models.list().data[0].id, **data.get("sampling_params", {})}
    workers = int(data.get("num_process", 16))
    with BufferClient(data["remote_buffer_url"]) as buffer, ThreadPoolExecutor(workers) as pool:

        def make(row: dict[str, Any], uid: str, instance_id: int | str) -> None:
            item = {"uid": uid, "instance_id": instance_id, "job": data["rollstream"]["job"]}
            buffer.write(item | rollout(client, row, request))

        for epoch in planned(data, rows):
            known = buffer.known([uid for _, uid, _ in epoch])
            missing = [one for one, is_known in zip(epoch, known, strict=True) if not is_known]
            for done in [pool.submit(make, *one) for one in missing]:
                done.result()


def planned(
    data: dict[str, Any], rows: list[dict[str, Any]]
) -> Iterator[list[tuple[dict[str, Any], str, int | str]]]:
    """The rollouts of each epoch: row, uid, instance."""
    repeats, own = int(data["num_repeat_per_sample"]), data["rollstream"]
    skips = Counter(own["skip_instance_ids"])
    for epoch in range(int(data.get("num_epoch", 1))):
        rollouts = []
        for number, row in enumerate(rows):
            instance_id = row.get("instance_id", number)
            if epoch >= skips[instance_id]:
                for repeat in range(repeats):
                    uid = f"{own['job']}:{instance_id!r}:{epoch * repeats + repeat}"
                    rollouts.append((row, uid, instance_id))
        yield rollouts


def rollout(client: OpenAI, row: dict[str, Any], request: dict[str, Any]) -> dict[str, Any]:
    """Messages, reward and further facts of one rollout, whatever the agent does."""
    messages = [{"role": "user", "content": row["prompt"]}]
    info: dict[str, Any] = {"timestamp": str(time.time()), "finish_reason": "stop"}
    try:
        reward = solve(client, messages, row, request)
    except Exception as error:
        reward, info = -1.0, {**info, "failure": {"error": f"{type(error).__name__}: {error}"}}
    return {"messages": messages, "reward": reward, "extra_info": info}


def solve(
    client: OpenAI, messages: list[dict[str, Any]], row: dict[str, Any], request: dict[str, Any]
) -> float:
    """The agent: adds its turns to the messages, and scores them. A wrong answer has a second try, for half."""
    for reward in (1.0, 0.5):
        answer = client.chat.completions.create(messages=messages, **request)  # type: ignore[arg-type]
        text = answer.choices[0].message.content or ""
        messages.append({"role": "assistant", "content": text})
        if text.strip().endswith(str(row["label"])):
            return reward
        if reward == 1.0:
            messages.append({"role": "user", "content": "That is wrong. Try again."})
    return 0.0
