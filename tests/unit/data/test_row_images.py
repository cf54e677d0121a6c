import base64
import hashlib
import io
from pathlib import Path
from typing import Any

import orjson
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from PIL import Image

from rollstream.chat.images import load_image
from rollstream.data.prompts import PromptDataset
from rollstream.data.row import parse_row
from rollstream.data.sources import Concatenated, open_source
from rollstream.data.values import BadRow
from rollstream.trajectory import PromptRow


def png(color: str) -> bytes:
    file = io.BytesIO()
    Image.new("RGB", (2, 2), color).save(file, format="PNG")
    return file.getvalue()


RED, BLUE = png("red"), png("blue")


def text64(data: bytes) -> str:
    return base64.b64encode(data).decode()


def embedded(data: bytes) -> dict[str, Any]:
    return {"type": "image", "sha256": hashlib.sha256(data).hexdigest(), "size": len(data)}


def text(value: str) -> dict[str, str]:
    return {"type": "text", "text": value}


def parse(prompt: Any, images: Any = None, **columns: Any) -> PromptRow:
    row = {"prompt": prompt, **columns} | ({} if images is None else {"images": images})
    return parse_row(row, 0, "prompt")[0]


def ask(content: Any) -> list[dict[str, Any]]:
    return [{"role": "user", "content": content}]


def test_markers_and_a_column() -> None:
    row = parse(
        [{"role": "system", "content": "Be brief."}, *ask("<image>Which of <image>\n is red?")],
        [{"bytes": text64(RED), "path": "red.png"}, "pics/blue.png"],
        id=7,
    )
    assert row.messages == [
        {"role": "system", "content": "Be brief."},
        *ask(
            [
                embedded(RED),
                text("Which of "),
                {"type": "image", "image": "pics/blue.png"},
                text("\n is red?"),
            ]
        ),
    ]
    assert row.images == [RED, "pics/blue.png"]
    assert row.columns == {"id": 7}
    assert len(orjson.dumps(row.messages)) < 400


def test_image_parts_take_from_the_column_in_order() -> None:
    content = [
        {"type": "image"},
        text("or <image>?"),
        {"type": "image", "image": "own.png"},
        {"type": "image"},
    ]
    row = parse(ask(content), ["a.png", "b.png", "c.png"])
    assert row.images == ["a.png", "b.png", "own.png", "c.png"]
    assert [part["type"] for part in row.messages[0]["content"]] == [
        *("image", "text", "image", "text", "image", "image")
    ]


@pytest.mark.parametrize(
    "part",
    [
        {"type": "image", "image": "a.png"},
        {"type": "image", "image": {"path": "a.png", "bytes": None}},
        {"type": "image", "url": "a.png"},
        {"type": "image", "path": "a.png", "text": None},
        {"type": "image_url", "image_url": "a.png"},
        {"type": "image_url", "image_url": {"url": "a.png", "detail": "auto"}},
    ],
)
def test_image_parts_of_any_form(part: dict[str, Any]) -> None:
    row = parse(ask([part, text("?")]))
    assert row.messages == ask([{"type": "image", "image": "a.png"}, text("?")])
    assert row.images == ["a.png"]


def test_text_alone_stays_as_it_is() -> None:
    for images in (None, []):
        row = parse(ask("what does <image> mean in HTML?"), images)
        assert (row.messages, row.images) == (ask("what does <image> mean in HTML?"), [])
    parts = ask([{"type": "text", "text": "hi", "image": None}])
    assert parse(parts).messages == ask("hi")


@pytest.mark.parametrize(
    ("prompt", "images"),
    [
        ("<image> and <image>", ["a.png"]),
        ("what?", ["a.png"]),
        (ask([{"type": "image"}]), None),
        *(
            ("<image>", [image])
            for image in (
                *(3, {"width": 3}, {"path": "a.png", "max_pixels": 9}, {"bytes": "?!"}, {"bytes": ""}),
                "data:image/png;base64,?",
            )
        ),
        (ask([{"type": "image", "max_pixels": 9}]), ["a.png"]),
        (ask([{"type": "image_url", "image_url": {"url": "a.png", "detail": "low"}}]), None),
        (ask([{"type": "video", "video": "a.mp4"}]), None),
    ],
)
def test_a_row_whose_images_cannot_be_used(prompt: Any, images: Any) -> None:
    with pytest.raises(BadRow):
        parse(prompt, images)


def test_the_prompt_key_depends_on_the_images() -> None:
    rows = [
        parse("<image>", images)
        for images in (["a.png"], ["b.png"], [{"bytes": text64(RED)}], [{"bytes": text64(BLUE)}])
    ]
    assert len({row.prompt_key for row in rows}) == 4
    again = parse("<image>", [{"bytes": text64(RED), "path": None}])
    assert again.prompt_key == rows[2].prompt_key


def test_bytes_in_parquet_and_as_base64_in_json_lines_are_the_same_row(tmp_path: Path) -> None:
    table = pa.table({"prompt": ["<image>?"], "images": [[{"bytes": RED, "path": None}]]})
    pq.write_table(table, tmp_path / "a.parquet")
    line = {"prompt": "<image>?", "images": [{"bytes": text64(RED)}]}
    (tmp_path / "a.jsonl").write_bytes(orjson.dumps(line))
    rows = [PromptDataset(open_source(tmp_path / name)).row(0) for name in ("a.parquet", "a.jsonl")]
    assert rows[0] == rows[1]
    assert rows[0].images == [RED]


def test_relative_paths_are_taken_from_the_folder_of_the_file(tmp_path: Path) -> None:
    sources = []
    for name, data in (("one", RED), ("two", BLUE)):
        folder = tmp_path / name
        (folder / "pics").mkdir(parents=True)
        (folder / "pics" / "x.png").write_bytes(data)
        absolute = str(tmp_path / "one" / "pics" / "x.png")
        images = ["pics/x.png", absolute, "http://example.com/x.png", {"bytes": text64(data)}]
        line = {"prompt": "<image><image><image><image>", "images": images}
        (folder / "rows.jsonl").write_bytes(orjson.dumps(line))
        pq.write_table(pa.table({"prompt": ["<image>"], "images": [["pics/x.png"]]}), folder / "rows.parquet")
        sources += [open_source(folder / "rows.jsonl"), open_source(folder / "rows.parquet")]
    dataset = PromptDataset(Concatenated(sources))
    rows = [dataset.row(index) for index in range(4)]
    assert rows[2].images == [
        str(tmp_path / "two" / "pics" / "x.png"),
        str(tmp_path / "one" / "pics" / "x.png"),
        "http://example.com/x.png",
        BLUE,
    ]
    assert [load_image(row.images[0]).getpixel((0, 0))[0] for row in rows] == [255, 255, 0, 0]
    # The folder is no content: moved files keep their prompt keys, and messages what the row says.
    assert rows[1].prompt_key == rows[3].prompt_key
    assert rows[1].messages == rows[3].messages == ask([{"type": "image", "image": "pics/x.png"}])


def test_whether_rows_have_images(tmp_path: Path) -> None:
    path = tmp_path / "rows.jsonl"
    for images, has in (['"a.png"'], True), ([], False):
        path.write_text(f'{{"prompt": "hi"}}\n{{"prompt": "hi <image>", "images": [{", ".join(images)}]}}\n')
        assert PromptDataset(open_source(path)).has_images() == has
