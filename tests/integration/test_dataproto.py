"""What a DataProto says of real loops: turns, snapshots, loops of a user's own."""

from pathlib import Path

import pytest

from rollstream.chat.tokenizer import load_tokenizer
from rollstream.demo import MODEL_PATH
from rollstream.generation.run import as_config, generate
from rollstream.testing.stub_server import StubServer
from rollstream.testing.text_rules import answer_by_text
from tests.faults.runs import overrides, write_prompts
from tests.faults.test_context_kill import DELETIONS, EXPECTED, answer, settings

pytest.importorskip("tensordict")

from rollstream.integrations.verl.dataproto import DataProtoFile, read_dataproto

BEST_OF = """
from rollstream.agent.base import AgentLoop
from rollstream.agent.conversation import Conversation

class BestOf(AgentLoop):
    \"\"\"Tries twice and keeps the second; says what its prompt is if it is asked to.\"\"\"

    def __init__(self, *args, says=False, **kwargs):
        super().__init__(*args, **kwargs)
        self.says = says

    async def run(self, sampling, **row):
        messages = row["raw_prompt"]
        ids = await self.render(messages, prompt_key=row["prompt_key"])
        await self.generate(ids, sampling)
        conversation = Conversation(self, messages, ids, logprobs=sampling.logprobs)
        turn = await conversation.generate(sampling)
        extra = {"prompt_messages": len(messages)} if self.says else None
        return conversation.trajectory(turn.completion.finish_reason, extra=extra)
"""


async def exported(words: list[str], run: Path) -> DataProtoFile:
    result = await generate(as_config(words))
    assert result.completed == result.total
    return read_dataproto(run / "trajectories.pkl")


async def test_prompts_of_snapshots_and_turns(tmp_path: Path) -> None:
    """The prompt has as many assistant messages as the prompt's ids begin: they say it independently."""
    tokenizer = load_tokenizer(str(MODEL_PATH))
    prompts = write_prompts(tmp_path / "prompts.jsonl", len(DELETIONS))
    async with StubServer(answer_by_text(tokenizer, answer)) as server:
        words = settings(tmp_path / "run", prompts, server.url)
        words = [word for word in words if not word.startswith("generation.export=")]
        data = await exported([*words, "generation.export=[dataproto]"], tmp_path / "run")
    others = data.non_tensor_batch
    assert len(data) == len(EXPECTED)
    assert others["is_snapshot"].tolist() == [key[3] for key in EXPECTED]
    later = 0
    for row, one in enumerate(data.trajectories()):
        prompt = others["raw_prompt"][row]
        begun = tokenizer.decode(one.prompt_ids, skip_special_tokens=False).count("<|im_start|>assistant")
        assert sum(message["role"] == "assistant" for message in prompt) == begun - 1
        assert prompt == others["messages"][row][: len(prompt)]
        assert prompt[-1]["role"] == ("tool" if others["trajectory"][row] else "user")
        later += others["trajectory"][row] > 0
    assert later == sum(DELETIONS)
    assert len(set(others["uid"])) == len(DELETIONS)


@pytest.mark.parametrize("says", [False, True])
async def test_a_loop_with_calls_that_are_no_messages(
    tmp_path: Path, says: bool, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "best_of.py").write_text(BEST_OF)
    (tmp_path / "loops.yaml").write_text(
        f"- name: best_of\n  _target_: {tmp_path / 'best_of.py'}:BestOf\n  says: {str(says).lower()}\n"
    )
    prompts = write_prompts(tmp_path / "prompts.jsonl", 2)
    async with StubServer(answer_by_text(load_tokenizer(str(MODEL_PATH)), lambda _: "5")) as server:
        words = overrides(
            tmp_path / "run",
            prompts,
            server.url,
            actor_rollout_ref__rollout__agent__default_agent_loop="best_of",
            actor_rollout_ref__rollout__agent__agent_loop_config_path=tmp_path / "loops.yaml",
            generation__show_progress="false",
            generation__export="[dataproto]",
        )
        data = await exported(words, tmp_path / "run")
    found = data.non_tensor_batch["raw_prompt"].tolist()
    if says:
        assert [prompt[0]["content"] for prompt in found] == ["What is 0 + 0?", "What is 1 + 7?"]
        assert [len(prompt) for prompt in found] == [1, 1]
    else:
        assert found == [None, None]
    assert ("have no raw_prompt" in caplog.text) != says
