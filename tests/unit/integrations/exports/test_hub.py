"""Pushing: what is asked of the hub's client, and what its refusals become."""

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import httpx
import pytest
from huggingface_hub.errors import HfHubHTTPError, LocalTokenNotFoundError

from rollstream.cli import main as cli
from rollstream.errors import ConfigError, StorageError
from rollstream.integrations.exports.hf import push_folder
from tests.unit.store.export.artifacts import rollouts, trajectory
from tests.unit.store.fabric import commit_all


class Hub:
    """In the place of `HfApi`: notes what is asked, raises what it is told to."""

    calls: list[tuple[str, dict[str, Any]]]
    failure: Exception | None = None

    def _do(self, name: str, **kwargs: Any) -> Any:
        type(self).calls.append((name, kwargs))
        if self.failure is not None:
            raise self.failure
        return SimpleNamespace(repo_id="me/x")

    def whoami(self) -> Any:
        return self._do("whoami")

    def create_repo(self, repo: str, **kwargs: Any) -> Any:
        return self._do("create_repo", repo=repo, **kwargs)

    def upload_folder(self, **kwargs: Any) -> Any:
        names = sorted(path.name for path in Path(kwargs["folder_path"]).rglob("*.*"))
        return self._do("upload_folder", **kwargs, names=names)


@pytest.fixture
def hub(monkeypatch: pytest.MonkeyPatch) -> type[Hub]:
    Hub.calls, Hub.failure = [], None
    monkeypatch.setattr("huggingface_hub.HfApi", Hub)
    return Hub


def refusal(status: int) -> HfHubHTTPError:
    request = httpx.Request("GET", "https://hub.invalid")
    return HfHubHTTPError(f"status {status}", response=httpx.Response(status, request=request))


async def test_from_the_command_line(
    tmp_path: Path, hub: type[Hub], capsys: pytest.CaptureFixture[str]
) -> None:
    run = tmp_path / "run"
    await commit_all(run, rollouts(trajectory(), trajectory()))
    (run / "checkpoint.json").write_text('{"total": 2}')
    assert cli(["export", str(run), "--format", "hf", "--push", "x"]) == 0
    assert "pushed to https://huggingface.co/datasets/me/x" in capsys.readouterr().err
    assert [name for name, _ in hub.calls] == ["whoami", "create_repo", "upload_folder"]
    _, made = hub.calls[1]
    assert made == {"repo": "x", "repo_type": "dataset", "private": True, "exist_ok": True}
    _, uploaded = hub.calls[2]
    assert uploaded["names"] == ["README.md", "train-00000-of-00001.parquet"]
    assert (uploaded["repo_id"], uploaded["repo_type"]) == ("me/x", "dataset")
    assert uploaded["delete_patterns"] == ["data/train-*.parquet"]

    hub.calls.clear()
    assert cli(["export", str(run), "--format", "jsonl", "--push", "x"]) == 2
    assert "--format hf" in capsys.readouterr().err
    hub.failure = LocalTokenNotFoundError("no token")
    assert cli(["export", str(run), "--format", "hf", "--push", "x", "--output", str(tmp_path / "n")]) == 2
    assert "nobody is logged in" in capsys.readouterr().err
    assert not (tmp_path / "n").exists()  # it is said before anything is written


@pytest.mark.parametrize(
    ("failure", "error"),
    [
        (refusal(403), ConfigError),
        (refusal(500), StorageError),
        (httpx.ReadTimeout("slow"), StorageError),
    ],
)
def test_pushing(tmp_path: Path, hub: type[Hub], failure: Exception, error: type[Exception]) -> None:
    assert push_folder(tmp_path, "a/b", public=True) == "https://huggingface.co/datasets/me/x"
    assert hub.calls[0][1]["private"] is False
    hub.failure = failure
    with pytest.raises(error, match="a/b"):
        push_folder(tmp_path, "a/b")


def test_a_name_that_cannot_be(tmp_path: Path) -> None:
    """By the real client: it looks at names before it connects."""
    with pytest.raises(ConfigError, match="a/b/c"):
        push_folder(tmp_path, "a/b/c")
