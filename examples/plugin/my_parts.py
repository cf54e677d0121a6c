"""An engine and an export format of another package: docs/plugins.md."""

from typing import Any

from rollstream.engine.base import Capabilities
from rollstream.engine.checks import check_request
from rollstream.engine.kind import EngineKind
from rollstream.store.export.files import read_rows, replacing
from rollstream.store.export.format import ExportCall, ExportFormat
from rollstream.trajectory import Completion, SamplingParams


class Echo:
    """Answers a prompt with its own tokens, at once: there is never a request in flight to abort."""

    capabilities = Capabilities(
        token_ids=True,
        logprobs="raw",
        seeds=True,
        stop_strings=False,
        stop_token_ids=True,
        images=False,
        update_weights=False,
        max_model_len=None,
    )

    async def start(self) -> None: ...

    async def generate(
        self, prompt_ids: list[int], sampling: SamplingParams, *, request_id: str, images: Any = None
    ) -> Completion:
        check_request(prompt_ids, sampling, self.capabilities, images=images)
        stops = [at + 1 for at, token in enumerate(prompt_ids) if token in sampling.stop_token_ids]
        end = stops[0] if stops else len(prompt_ids)
        ids = prompt_ids[: min(end, sampling.max_tokens)]
        return Completion(
            token_ids=ids,
            logprobs=[0.0] * len(ids) if sampling.logprobs else None,
            finish_reason="stop" if len(ids) == end else "length",
        )

    async def abort(self, request_id: str) -> None: ...

    async def update_weights(self, source: str, version: int) -> None:
        raise NotImplementedError

    async def health(self) -> bool:
        return True

    async def close(self) -> None: ...


ENGINE = EngineKind(name="echo", create=lambda options: Echo(), kwargs={})


def write_tsv(call: ExportCall) -> int:
    """A line a trajectory: its key and, with `--tsv-reward`, its reward."""
    rows = 0
    with replacing(call.target) as temporary, temporary.open("w") as file:
        for row in read_rows(call.artifact, call.cancelled):
            fields = [
                row["index"],
                row["repeat"],
                *([row["reward"]] if call.options.get("tsv_reward") else []),
            ]
            file.write("\t".join(map(str, fields)) + "\n")
            rows += 1
    return rows


TSV = ExportFormat("a table for spreadsheets", ".tsv", write_tsv, {"--tsv-reward": {"action": "store_true"}})
