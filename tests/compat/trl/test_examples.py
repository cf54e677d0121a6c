"""`sft` and `preference` exports in TRL's trainers: their columns, and a step of training on them."""

import os
import subprocess
import sys
from itertools import takewhile
from pathlib import Path
from typing import Any

import orjson
import pytest

pytest.importorskip("trl")

from datasets import load_dataset
from trl import DPOConfig, DPOTrainer, SFTConfig, SFTTrainer
from trl.data_utils import apply_chat_template

from demo_model.chats import CALCULATOR
from rollstream.integrations.exports.examples import SftOptions, export_preference, export_sft
from tests.compat.trl.parts import MODEL, TOOLS, load
from tests.faults.runs import rows_of
from tests.support.chats import chat_artifact

LOOKUP = """
@function_tool
def lookup(keys: list[str], kind: Literal["town", "river"] = "town") -> str:
    \"\"\"Looks things up.

    Args:
        keys: What to look for.
        kind: What they are.
    \"\"\"
    return "none"
"""

REWARD = """
def compute_score(data_source, solution_str, ground_truth, extra_info):
    return float(sum(map(ord, solution_str)) % 97)
"""

CHOICES: dict[str, dict[str, Any]] = {
    "all": {},
    "one": {"extra_info": {"tool_selection": ["calculator"]}},
    "turned": {"extra_info": {"tool_selection": ["lookup", "calculator"]}},
    "none": {"agent_name": "single_turn_agent"},
    "own": {"agent_name": "context_agent", "extra_info": {"tool_selection": ["lookup"]}},
}
"""Rows whose prompts show different tools, by name."""

NAMES = {
    "all": ["calculator", "lookup"],
    "one": ["calculator"],
    "turned": ["lookup", "calculator"],
    "none": [],
    "own": ["lookup", "deleteContext", "note", "readNote", "updateNote"],
}


def call(folder: Path, *words: object) -> None:
    """Runs a command of rollstream."""
    command = [sys.executable, "-m", "rollstream.cli", *map(str, words)]
    env = {**os.environ, "ROLLSTREAM_CACHE": str(folder / "cache")}
    done = subprocess.run(command, env=env, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stdout + done.stderr


@pytest.fixture(scope="module")
def tool_run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run of the demo model, with prompts that show different tools."""
    folder = tmp_path_factory.mktemp("tools")
    rows = [
        {
            "prompt": [{"role": "user", "content": f"{at + 11} + {at + 12} ="}],
            "data_source": name,
            "reward_model": {"ground_truth": ""},
            **given,
        }
        for name, given in CHOICES.items()
        for at in range(3)
    ]
    (folder / "rows.jsonl").write_bytes(b"".join(orjson.dumps(row) + b"\n" for row in rows))
    (folder / "functions.py").write_text(f"from typing import Literal\n{TOOLS}\n{LOOKUP}")
    (folder / "reward.py").write_text(REWARD)
    call(
        folder,
        "generate",
        *(f"actor_rollout_ref.model.path={MODEL}", f"data.train_files={folder / 'rows.jsonl'}"),
        *("actor_rollout_ref.rollout.n=4", "actor_rollout_ref.rollout.temperature=1.5"),
        *("actor_rollout_ref.rollout.response_length=128", "data.max_prompt_length=2048"),
        "actor_rollout_ref.rollout.agent.default_agent_loop=tool_agent",
        f"actor_rollout_ref.rollout.multi_turn.function_tool_path={folder / 'functions.py'}",
        "actor_rollout_ref.rollout.multi_turn.max_assistant_turns=3",
        f"custom_reward_function.path={folder / 'reward.py'}",
        *(
            f"trainer.default_local_dir={folder / 'run'}",
            "generation.seed=1",
            "generation.show_progress=false",
        ),
        "generation.export=[sft,preference]",
    )
    return folder / "run"


def step(trainer_class: Any, config_class: Any, rows: Any, folder: Path) -> Any:
    """A trainer after one step on three rows; the step has changed the model."""
    model, tokenizer = load()
    before = model.model.embed_tokens.weight.detach().clone()
    args = config_class(
        output_dir=str(folder / "out"),
        **{"max_steps": 1, "per_device_train_batch_size": 3, "learning_rate": 1e-3, "max_length": 512},
        **{"use_cpu": True, "bf16": False, "report_to": [], "save_strategy": "no", "disable_tqdm": True},
    )
    trainer = trainer_class(model=model, args=args, train_dataset=rows, processing_class=tokenizer)
    assert trainer.train().training_loss > 0
    assert not (model.model.embed_tokens.weight == before).all()
    return trainer


def read(path: Path) -> Any:
    return load_dataset("json", data_files=str(path), split="train", cache_dir=str(path.parent / "cache"))


@pytest.mark.parametrize("tokens", [False, True])
def test_sft_trainer_takes_messages_and_exact_tokens(tmp_path: Path, tokens: bool) -> None:
    made = export_sft(
        chat_artifact(tmp_path / "a"), tmp_path / "x.jsonl", SftOptions(best=1, min_reward=1.0, tokens=tokens)
    )
    rows = read(tmp_path / "x.jsonl")
    assert len(rows) == made == 3
    trainer = step(SFTTrainer, SFTConfig, rows, tmp_path)
    if tokens:  # TRL's labels are the sampled tokens, those ids and no others
        for given, prepared in zip(rows, trainer.train_dataset, strict=True):
            wanted = zip(given["input_ids"], given["assistant_masks"], strict=True)
            assert prepared["labels"] == [token if mask else -100 for token, mask in wanted]


def test_dpo_trainer_takes_pairs(tmp_path: Path) -> None:
    assert export_preference(chat_artifact(tmp_path / "a"), tmp_path / "x.jsonl") == 3
    rows = read(tmp_path / "x.jsonl")
    trainer = step(DPOTrainer, DPOConfig, rows, tmp_path)
    decode = trainer.processing_class.decode
    shown = [(decode(row["prompt_ids"]), decode(row["chosen_ids"])) for row in trainer.train_dataset]
    assert "1 + 2 =" in shown[0][0] and shown[0][1].startswith("3")
    assert "calculator" in shown[2][1] and "42" in shown[2][1]


@pytest.mark.parametrize(
    ("trainer_class", "config_class", "name", "ids"),
    [(SFTTrainer, SFTConfig, "sft", "input_ids"), (DPOTrainer, DPOConfig, "preference", "prompt_ids")],
)
def test_prompts_show_the_tools_that_the_rollouts_saw(
    tool_run: Path, tmp_path: Path, trainer_class: Any, config_class: Any, name: str, ids: str
) -> None:
    stored: dict[tuple[int, int], list[int]] = {}
    for row in rows_of(tool_run):
        key = row["index"], row["repeat"]  # what was deleted from a conversation is in none of its messages
        stored[key] = [] if key in stored else row["prompt_ids"]
    (tmp_path / "x.jsonl").write_bytes((tool_run / f"trajectories_{name}.jsonl").read_bytes())
    rows = read(tmp_path / "x.jsonl")
    for row in rows:
        shown = [] if row["tools"] is None else orjson.loads(row["tools"])
        assert [tool["function"]["name"] for tool in shown] == NAMES[row["data_source"]]
        assert CALCULATOR in shown or row["data_source"] in ("none", "own")
    if name == "sft":
        assert {row["data_source"] for row in rows} == NAMES.keys()
    model, tokenizer = load()
    args = config_class(
        output_dir=str(tmp_path / "out"), max_length=4096, use_cpu=True, bf16=False, report_to=[]
    )
    trainer = trainer_class(model=model, args=args, train_dataset=rows, processing_class=tokenizer)
    for given, made in zip(rows, trainer.train_dataset, strict=True):
        seen = stored[given["index"], given["repeat" if name == "sft" else "repeat_chosen"]]
        if not seen:
            continue
        # The prompt ends in a line break, which is one token with another at the beginning of an answer.
        assert made[ids][: len(seen) - 1] == seen[:-1]
        prompt = list(
            takewhile(lambda one: one["role"] != "assistant", given.get("prompt") or given["messages"])
        )
        tools = None if given["tools"] is None else orjson.loads(given["tools"])
        text = apply_chat_template({"prompt": prompt}, tokenizer, tools=tools)["prompt"]
        assert tokenizer(text, add_special_tokens=False)["input_ids"] == seen
