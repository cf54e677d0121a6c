"""Images from a row, and from a tool, through processor and server into a stored trajectory."""

import base64
import json
from pathlib import Path

import pytest

from rollstream.errors import ConfigError
from rollstream.generation.runner import as_config, generate
from rollstream.store.find import find_trajectory
from rollstream.testing.scripted import ScriptedRequest
from rollstream.testing.stub_server import StubModel, StubServer
from rollstream.testing.text_rules import answer_by_text
from tests.unit.chat.vision import CALL, IMAGE_PAD, load_model, png, write_model

TOOLS = '''
from rollstream.agent.tools.base import ToolResponse
from rollstream.agent.tools.functions import function_tool
from tests.unit.chat.vision import png

@function_tool
def look() -> ToolResponse:
    """Looks at something."""
    return ToolResponse(text="this", image=[png(56, 84)])
'''


def overrides(folder: Path, server: StubServer, *more: str) -> list[str]:
    return [
        "actor_rollout_ref.rollout.name=sglang",
        f"actor_rollout_ref.rollout.server_urls=[{server.url}]",
        f"actor_rollout_ref.model.path={folder / 'model'}",
        "actor_rollout_ref.rollout.response_length=256",
        f"data.train_files={folder / 'rows.jsonl'}",
        f"trainer.default_local_dir={folder / 'run'}",
        "generation.show_progress=false",
        *more,
    ]


def write_rows(folder: Path) -> None:
    url = "data:image/png;base64," + base64.b64encode(png(56, 56)).decode()
    (folder / "one.png").write_bytes(png(112, 56, "blue"))
    rows = [
        {"prompt": "look at this <image>", "images": [url]},
        {"prompt": [{"role": "user", "content": "<image> and <image>"}], "images": ["one.png", url]},
        {"prompt": "look at that"},
    ]
    (folder / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))


async def test_images_of_rows_reach_the_server_and_keep_their_placeholders(tmp_path: Path) -> None:
    model = write_model(tmp_path / "model")
    write_rows(tmp_path)
    tokenizer, _ = load_model(model)
    async with StubServer(
        answer_by_text(tokenizer, lambda prompt: "and that"),
        model=StubModel(vocab_size=tokenizer.vocab_size, images=True, image_token_id=IMAGE_PAD),
    ) as server:
        result = await generate(as_config(overrides(tmp_path, server)))
        assert (result.completed, result.failed) == (3, 0)
        assert server.stats.images == 3
    rows = [find_trajectory(tmp_path / "run", index).row for index in range(3)]
    assert [row["prompt_ids"].count(IMAGE_PAD) for row in rows] == [4, 8 + 4, 0]
    assert "one.png" in json.dumps(rows[1]["messages"])
    assert "base64" not in json.dumps([row["messages"] for row in rows] + [row["extra"] for row in rows])


async def test_an_image_that_a_tool_returns_goes_on_to_the_server(tmp_path: Path) -> None:
    model = write_model(tmp_path / "model")
    tokenizer, _ = load_model(model)
    (tmp_path / "tools.py").write_text(TOOLS)
    (tmp_path / "rows.jsonl").write_text(json.dumps({"prompt": "look at this"}) + "\n")

    def rule(prompt: str, request: ScriptedRequest) -> str:
        return "and that" if request.images else CALL

    async with StubServer(
        answer_by_text(tokenizer, rule),
        model=StubModel(vocab_size=tokenizer.vocab_size, images=True, image_token_id=IMAGE_PAD),
    ) as server:
        result = await generate(
            as_config(
                overrides(
                    tmp_path,
                    server,
                    "actor_rollout_ref.rollout.agent.default_agent_loop=tool_agent",
                    f"actor_rollout_ref.rollout.multi_turn.function_tool_path={tmp_path / 'tools.py'}",
                    "actor_rollout_ref.rollout.multi_turn.show_tools=false",  # this template shows none
                )
            )
        )
        assert (result.completed, result.failed) == (1, 0)
        assert server.stats.images == 1
    row = find_trajectory(tmp_path / "run", 0).row
    assert row["response_ids"].count(IMAGE_PAD) == 2 * 3
    assert row["num_turns"] == 4
    assert "base64" not in json.dumps(row["messages"])


async def test_a_model_or_a_server_without_eyes_is_an_error_at_start(tmp_path: Path) -> None:
    write_rows(tmp_path)
    model = write_model(tmp_path / "model")
    async with StubServer() as server:
        with pytest.raises(ConfigError, match="engine 'sglang' takes none"):
            await generate(as_config(overrides(tmp_path, server)))
        (model / "preprocessor_config.json").unlink()
        with pytest.raises(ConfigError, match="no image processor"):
            await generate(as_config(overrides(tmp_path, server)))


async def test_no_dataproto_of_images_is_an_error_at_start(tmp_path: Path) -> None:
    pytest.importorskip("tensordict")
    tokenizer, _ = load_model(write_model(tmp_path / "model"))
    write_rows(tmp_path)
    async with StubServer(
        answer_by_text(tokenizer, lambda prompt: "and that"), model=StubModel(images=True)
    ) as server:
        with pytest.raises(ConfigError, match=r"generation\.export=dataproto: the prompt rows have images"):
            await generate(as_config(overrides(tmp_path, server, "generation.export=[dataproto]")))
    assert not (tmp_path / "run").exists()
