"""The same model under another path is the same; one of another name is not."""

import pytest

from rollstream.engine.servers import check_served_model, model_names
from rollstream.errors import EngineError

HUB = "/root/.cache/huggingface/hub/models--Qwen--Qwen2.5-0.5B/snapshots/060db6499f32"


def test_names() -> None:
    assert model_names("Qwen/Qwen2.5-0.5B") == {"Qwen2.5-0.5B"}
    assert model_names("/models/qwen/") == {"qwen"}
    assert model_names(HUB) == {"060db6499f32", "Qwen2.5-0.5B"}


@pytest.mark.parametrize(
    ("served", "wanted"),
    [
        (["/a/qwen"], "/b/qwen"),
        ([HUB], "Qwen/Qwen2.5-0.5B"),
        (["Qwen/Qwen2.5-0.5B"], HUB),
        (["/ckpt/step7", "/a/qwen"], "/b/qwen"),
        ([None, ""], "/b/qwen"),
        (["/a/qwen"], None),
    ],
)
def test_the_same(served: list[object], wanted: str | None) -> None:
    check_served_model("server", served, wanted, strict=True)


def test_another(caplog: pytest.LogCaptureFixture) -> None:
    with pytest.raises(EngineError, match=r"server serves '/a/llama', but .*'/b/qwen'.*check_model=false"):
        check_served_model("server", ["/a/llama"], "/b/qwen", strict=True)
    check_served_model("server", ["/a/llama"], "/b/qwen", strict=False)
    assert "serves '/a/llama'" in caplog.text
