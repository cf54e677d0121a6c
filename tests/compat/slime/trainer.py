"""A trainer that speaks slime's wire and nothing else, written to the contract of its stock client:

start_rollout is posted until it succeeds; get_rollout_data is polled with `{}` until `success`; items must
have five keys; they are grouped by `instance_id`, and more groups than needed are thrown away, the oldest
first; what `finished_groups` names is remembered and goes into the next start's `skip_instance_ids`.
"""

import time
from dataclasses import dataclass, field
from typing import Any

import requests

REQUIRED = {"uid", "instance_id", "messages", "reward", "extra_info"}


@dataclass
class StockTrainer:
    """One trainer."""

    url: str
    task_type: str
    rollout_batch_size: int
    n_samples_per_prompt: int
    input_file: str
    num_epoch: int = 1
    finished: dict[str, list[int | str]] = field(default_factory=dict)
    thrown_away: int = 0

    def start(self) -> dict[str, Any]:
        payload: dict[str, Any] = {
            "num_process": "4",
            "num_epoch": str(self.num_epoch),
            "remote_engine_url": "http://127.0.0.1:9",
            "remote_buffer_url": self.url,
            "task_type": self.task_type,
            "input_file": self.input_file,
            "num_repeat_per_sample": str(self.n_samples_per_prompt),
            "max_tokens": "128",
            "sampling_params": {"max_tokens": 128, "temperature": 1.0, "top_p": 1.0},
            "tokenizer_path": "none",
            "skip_instance_ids": [one for ids in self.finished.values() for one in ids],
        }
        response = requests.post(f"{self.url}/start_rollout", json=payload, timeout=120)
        response.raise_for_status()
        answer: dict[str, Any] = response.json()
        return answer

    def fetch(
        self, cycle: int, *, patience_s: float = 120.0, pause: Any = None
    ) -> dict[int | str, list[dict[str, Any]]]:
        """One rollout's groups: the newest `rollout_batch_size`."""
        items: list[dict[str, Any]] = []
        metas: list[dict[str, Any]] = []
        needed = self.rollout_batch_size * self.n_samples_per_prompt
        deadline = time.monotonic() + patience_s
        while len(items) < needed and time.monotonic() < deadline:
            response = requests.post(f"{self.url}/get_rollout_data", json={}, timeout=120)
            response.raise_for_status()
            answer = response.json()
            assert set(answer) == {"success", "message", "data"}
            assert set(answer["data"]) == {"data", "meta_info"}
            if not answer["success"]:
                pause()
                continue
            for item in answer["data"]["data"]:
                assert item.keys() >= REQUIRED
            items += answer["data"]["data"]
            metas.append(answer["data"]["meta_info"])
        assert len(items) >= needed, "the buffer gave too little"
        groups: dict[int | str, list[dict[str, Any]]] = {}
        for item in items:
            groups.setdefault(item["instance_id"], []).append(item)
        for instance_id, group in groups.items():
            uids = len({item["uid"] for item in group})
            told = f"instance {instance_id}: {len(group)} items, {uids} uids, in {len(metas)} polls: {metas}"
            assert len(group) == self.n_samples_per_prompt, told
        newest = sorted(groups, key=lambda one: max(timestamp_of(item) for item in groups[one]), reverse=True)
        self.thrown_away += len(newest) - self.rollout_batch_size
        assert "finished_groups" in metas[0]
        self.finished[str(cycle)] = [one for meta in metas for one in meta["finished_groups"]]
        return {one: groups[one] for one in newest[: self.rollout_batch_size]}


def timestamp_of(item: dict[str, Any]) -> float:
    return float(item.get("timestamp") or item["extra_info"].get("timestamp") or 0)
