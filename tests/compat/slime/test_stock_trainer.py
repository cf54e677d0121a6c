"""slime's stock trainer and a stock generator against `rollstream buffer serve`, over two cycles."""

import threading
from pathlib import Path
from typing import Any

import orjson

from tests.support.buffer import serve_buffer

from .trainer import StockTrainer

SAMPLES, BATCH, PROMPTS = 8, 4, 8

GENERATOR = """
import time
import uuid

import requests

TASK_TYPE = "stock"


def run_rollout(data):
    skipped = list(data["skip_instance_ids"])
    with open(data["input_file"]) as file:
        prompts = [line.strip() for line in file]
    epochs = [one for _ in range(int(data["num_epoch"])) for one in enumerate(prompts)]
    for number, prompt in epochs:
        if number in skipped:
            skipped.remove(number)
            continue
        for repeat in range(int(data["num_repeat_per_sample"])):
            item = {
                "uid": str(uuid.uuid4()),
                "instance_id": number,
                "messages": [{"role": "user", "content": prompt}, {"role": "assistant", "content": "7"}],
                "reward": (number + repeat) % 2,
                "extra_info": {"timestamp": str(time.time()), "finish_reason": "stop"},
            }
            url = data["remote_buffer_url"].rstrip("/") + "/buffer/write"
            requests.post(url, json=item).raise_for_status()
"""


def test_two_cycles(tmp_path: Path) -> None:
    generators = tmp_path / "generators"
    generators.mkdir()
    (generators / "stock_generator.py").write_text(GENERATOR)
    prompts = tmp_path / "prompts.txt"
    prompts.write_text("".join(f"What is {n}?\n" for n in range(PROMPTS)))
    options = ("--generators", str(generators), "--max-groups-per-read", str(BATCH))
    pause = threading.Event()
    with serve_buffer(tmp_path / "buffer", *options, cwd=tmp_path) as server:
        trainer = StockTrainer(server.url, "stock", BATCH, SAMPLES, str(prompts))
        answers = [trainer.start() for _ in range(3)]  # a client that retries finds the same rollout
        assert answers[0]["message"] == "Rollout started"
        assert len({orjson.dumps(answer) for answer in answers}) == 1
        seen: list[int | str] = []
        for cycle in range(2):
            groups = trainer.fetch(cycle, pause=lambda: pause.wait(0.1))
            assert len(groups) == BATCH
            for group in groups.values():
                assert sorted(item["raw_reward"] for item in group) == [0] * 4 + [1] * 4
                assert abs(sum(item["reward"] for item in group)) < 1e-6
                assert len({item["uid"] for item in group}) == SAMPLES
            seen += groups
        assert sorted(seen, key=str) == list(range(PROMPTS)), "no id twice, none left out"
        assert trainer.thrown_away == 0
        assert sorted(one for ids in trainer.finished.values() for one in ids) == list(range(PROMPTS))


def test_several_epochs_and_another_rollout(tmp_path: Path) -> None:
    generators = tmp_path / "generators"
    generators.mkdir()
    (generators / "stock_generator.py").write_text(GENERATOR)
    files = []
    for name, count in (("first", 4), ("second", 6)):
        path = tmp_path / f"{name}.txt"
        path.write_text("".join(f"{name} {n}?\n" for n in range(count)))
        files.append(str(path))
    options = ("--generators", str(generators), "--max-groups-per-read", str(BATCH))
    pause = threading.Event()
    with serve_buffer(tmp_path / "buffer", *options, cwd=tmp_path) as server:
        trainer = StockTrainer(server.url, "stock", BATCH, SAMPLES, files[0], num_epoch=3)
        trainer.start()
        for cycle in range(2):  # the third epoch stays behind
            groups = trainer.fetch(cycle, pause=lambda: pause.wait(0.02))
            assert sorted(groups, key=str) == list(range(4)), "each once, in every cycle"
            assert _prompts(groups) == {f"first {n}?" for n in range(4)}
        assert trainer.thrown_away == 0
        other = StockTrainer(server.url, "stock", 3, 4, files[1])  # other prompts, other sizes
        other.start()
        groups = other.fetch(0, pause=lambda: pause.wait(0.02))
        assert all(prompt.startswith("second") for prompt in _prompts(groups)) and len(groups) == 3


def _prompts(groups: dict[int | str, list[dict[str, Any]]]) -> set[str]:
    return {item["messages"][0]["content"] for group in groups.values() for item in group}
