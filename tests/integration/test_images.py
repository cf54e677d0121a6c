"""Images from a row, and from a tool, through processor and server into a stored trajectory."""

import asyncio
import base64
import json
import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

from rollstream.errors import ConfigError
from rollstream.generation.export_images import run_images
from rollstream.generation.run import as_config, generate
from rollstream.integrations.verl.dataproto import read_dataproto
from rollstream.store.export.run import export_run
from rollstream.store.run import Run
from rollstream.testing.scripted import ScriptedRequest
from rollstream.testing.stub_server import StubModel, StubServer
from rollstream.testing.text_rules import answer_by_text
from tests.support.until import PATIENCE_S
from tests.unit.chat.vision import CALL, IMAGE_PAD, load_model, picture, png, write_model

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
    rows = [Run.open(tmp_path / "run").find(index).row for index in range(3)]
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
    row = Run.open(tmp_path / "run").find(0).row
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


async def test_a_dataproto_has_the_pixels_and_the_models_own_positions(tmp_path: Path) -> None:
    pytest.importorskip("tensordict")
    tokenizer, processor = load_model(write_model(tmp_path / "model"))
    write_rows(tmp_path)
    run, rows, n = tmp_path / "run", 3, "actor_rollout_ref.rollout.n=2"
    async with StubServer(
        answer_by_text(tokenizer, lambda prompt: "and that"),
        model=StubModel(vocab_size=tokenizer.vocab_size, images=True, image_token_id=IMAGE_PAD),
    ) as server:
        words = overrides(tmp_path, server, "generation.export=[dataproto]", n)
        assert (await generate(as_config(words))).completed == 2 * rows
    data = read_dataproto(run / "trajectories.pkl")
    inputs = data.non_tensor_batch["multi_modal_inputs"]
    assert [sorted(one) for one in inputs[1::2]] == [
        *[["image_grid_thw", "images_seqlens", "pixel_values"]] * 2,
        [],
    ]
    assert inputs[0] is inputs[1]  # the rollouts of a prompt share their pixels
    assert inputs[2]["image_grid_thw"].tolist() == [[1, 4, 8], [1, 4, 4]]
    assert inputs[2]["images_seqlens"].tolist() == [32, 16]
    red = processor.pixels([picture(56, 56)])[0]["pixel_values"]
    assert (inputs[0]["pixel_values"] == red).all()
    assert (inputs[2]["pixel_values"][-len(red) :] == red).all()
    # Time, height and width of an image of 2 x 2 tokens behind three others; the text goes on behind it.
    positions, seen = data.batch["position_ids"], data.batch["attention_mask"].bool()
    assert positions.shape[1] == 4
    at = data.batch["input_ids"][0][seen[0]].tolist().index(IMAGE_PAD)
    own = positions[0][:, seen[0]][:, at : at + 5].tolist()
    after = [[0, 0, 0, 0, 2], [0, 0, 1, 1, 2], [0, 1, 0, 1, 2]]
    assert own == [list(range(at, at + 5)), *([at + step for step in line] for line in after)]
    again = export_run(
        run, "dataproto", tmp_path / "again.pkl", images=lambda: run_images(run / "config.yaml")
    )
    assert (read_dataproto(again.target).batch["position_ids"] == positions).all()

    def refused(match: str) -> None:
        with pytest.raises(ConfigError, match=match):
            export_run(run, "dataproto", tmp_path / "no.pkl", images=lambda: run_images(run / "config.yaml"))

    (tmp_path / "one.png").write_bytes(png(56, 56, "blue"))
    refused("row 1, repeat 0: its images are 8 tokens now, and the model was shown 12")
    (tmp_path / "one.png").unlink()
    refused("row 1, repeat 0: image .*one.png: no such file")
    (tmp_path / "rows.jsonl").write_text('{"prompt": "look"}\n' * 3)
    refused(r"row 0, repeat 0: .*rows.jsonl.* is another row than the run had")
    (tmp_path / "rows.jsonl").unlink()
    refused("row 0, repeat 0: image 1 is not stored, and the prompt rows cannot be read")


async def test_the_command_of_the_page(tmp_path: Path) -> None:
    """docs/images.md: its command on its row, with another model and another server."""
    page = (Path(__file__).parents[2] / "docs" / "images.md").read_text("utf-8")
    (command,) = re.findall(r"^```sh\n(.*?)^```", page, re.DOTALL | re.MULTILINE)
    row = re.findall(r"^```json\n(.*?)^```", page, re.DOTALL | re.MULTILINE)[0]
    (tmp_path / "prompts.jsonl").write_text(row)
    (tmp_path / "pictures").mkdir()
    (tmp_path / "pictures" / "cats.png").write_bytes(png(56, 56))
    model = write_model(tmp_path / "model")
    tokenizer, _ = load_model(model)
    async with StubServer(
        answer_by_text(tokenizer, lambda prompt: "three"),
        model=StubModel(vocab_size=tokenizer.vocab_size, images=True, image_token_id=IMAGE_PAD),
    ) as server:
        command = command.replace("models/Qwen2.5-VL-3B-Instruct", str(model)).replace(
            "http://127.0.0.1:30000", server.url
        )
        words = [sys.executable, "-m", "rollstream.cli", *shlex.split(command.replace("\\\n", " "))[1:]]
        done = await asyncio.to_thread(
            subprocess.run,
            words,
            cwd=tmp_path,
            capture_output=True,
            text=True,
            timeout=PATIENCE_S,
            check=False,
        )
    assert done.returncode == 0, done.stderr
    assert Run.open(tmp_path / "outputs" / "images").find(0).row["prompt_ids"].count(IMAGE_PAD) == 4
