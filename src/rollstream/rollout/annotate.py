"""The annotation pass: an engine gives log-probs of the tokens that a run has stored; see `stored_pass`.

It waits for its engine, retries and fails as a rollout does: a `RolloutWorker` runs an agent loop that scores.
"""

from collections.abc import Callable, Mapping, Sequence
from contextlib import AsyncExitStack, suppress
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

import pyarrow as pa
import pyarrow.compute as pc

from rollstream.agent.base import AgentLoop, AgentResources
from rollstream.agent.registry import AgentLoops, LoopEntry
from rollstream.chat import token_text
from rollstream.demo import named_model
from rollstream.engine.base import ScoresIds, TopScores
from rollstream.engine.checks import model_digest
from rollstream.engine.detect import detect_server
from rollstream.engine.load import RequestMeter
from rollstream.engine.registry import check_engine_config, create_engine, data_deciding_kwargs, engine_kind
from rollstream.errors import ConfigError, DataError, EngineError
from rollstream.rollout.availability import EngineAvailability
from rollstream.rollout.executor import WorkerBackend
from rollstream.rollout.retry import RetryPolicy
from rollstream.rollout.stored_pass import PassPlan, ScoreReport, pass_trajectory, run_pass
from rollstream.rollout.worker import RolloutWorker
from rollstream.rollout.worker_host import BuiltWorker, LocalBackend
from rollstream.store.manifest import Manifest
from rollstream.store.run import Run
from rollstream.store.scores import SCORED_COLUMNS, pass_folder
from rollstream.store.streams import own_stream, publish_stream
from rollstream.trajectory import SamplingParams, Trajectory

if TYPE_CHECKING:
    from tokenizers import Tokenizer

_COLUMNS = [
    *(*SCORED_COLUMNS, "prompt_key", "data_source", "is_snapshot"),
    *("prompt_ids", "response_ids", "response_mask"),
]
_ENGINE_TIMEOUT_S = 600.0
"""Without an engine, after which the pass ends."""
_DETECT_S = 60.0
"""For servers that start."""
_DECIMALS = 6
"""Of the likeliest ids' log-probs: those of a float32, in a third of the digits."""
_TIMEOUT_S = 3600.0
"""For one rollout: an engine may take one at a time."""
IMAGE = '"type":"image'
"""In the messages of a trajectory that shows images."""


@dataclass(frozen=True, slots=True)
class Teacher:
    """The model that is asked, and the engine that serves it."""

    engine: str
    """A name of `rollstream.engines`."""
    model: str
    """A folder, a hub name, or how its servers call it."""
    server_urls: Sequence[str] = ()
    engine_kwargs: Mapping[str, Any] = field(default_factory=dict)
    tokenizer: str | None = None
    """A folder or hub name; None: it is not known."""


def local_teacher(model: str, engine: str | None = None, engine_kwargs: Mapping[str, Any] = {}) -> Teacher:
    """A model that is loaded here; by default by `openvino` if it is an export for that, else by `hf`."""
    path = str(Path(named_model(model)).expanduser())
    if engine is None:
        engine = "openvino" if (Path(path) / "openvino_model.xml").is_file() else "hf"
    if not engine_kind(engine).is_embedded:
        raise ConfigError(f"engine {engine!r} has servers: give --server URL")
    check_engine_config(engine, model_path=path, engine_kwargs=engine_kwargs)
    return Teacher(engine, path, (), engine_kwargs, path)


async def served_teacher(
    urls: Sequence[str],
    engine: str | None = None,
    engine_kwargs: Mapping[str, Any] = {},
    timeout: float = 60.0,
) -> Teacher:
    """The model of servers that run; they are asked what they are. Raises `ConfigError`, `EngineLostError`."""
    server = await detect_server(urls, timeout=timeout, kind=engine)
    if not engine_kind(server.kind).is_token_exact:
        raise ConfigError(f"{server.url} takes no token ids: a teacher is SGLang, vLLM or `rollstream serve`")
    return Teacher(server.kind, ", ".join(server.models), server.urls, engine_kwargs, server.tokenizer)


def own_teacher(manifest: Manifest) -> Teacher:
    """The model of a run itself, where its engine was embedded. Raises `ConfigError`, also where it has changed."""
    rollout, model = (manifest.setting("actor_rollout_ref", name) for name in ("rollout", "model"))
    engine, path = rollout.get("name"), model.get("path")
    if not isinstance(engine, str) or not isinstance(path, str):
        raise ConfigError("the run does not say which model made it: give --model or --server")
    if not engine_kind(engine).is_embedded:
        raise ConfigError(
            f"the run was made by {engine} servers: give their URL by --server, in place of --same"
        )
    digest = manifest.identity.get("model.digest")
    if digest is not None and digest != model_digest(path):
        raise ConfigError(f"{path} is not the run's model any more: its files have changed since")
    return local_teacher(path, engine, rollout.get("engine_kwargs") or {})


class _ScoringLoop(AgentLoop):
    """Asks the engine for log-probs of stored trajectories."""

    snapshot_scoring = "none"

    async def run(self, sampling: SamplingParams, **row: Any) -> list[Trajectory]:
        return [await self._score(stored) for stored in row["trajectories"]]

    async def _score(self, stored: dict[str, Any]) -> Trajectory:
        prompt, mask = stored["prompt_ids"], stored["response_mask"]
        values, mean, said = [0.0] * len(mask), 0.0, dict[str, Any]()
        if 1 in mask:
            if stored["has_images"]:
                raise DataError("it shows images, which an engine that gives log-probs of ids does not take")
            if not prompt:
                raise DataError("it has no token ids")
            first, end = mask.index(1), len(mask) - mask[::-1].index(1)
            ids = prompt + stored["response_ids"][:end]
            scores, top = await self._ask(ids, len(prompt) + first, stored.get("top_k", 0))
            if len(scores) != end - first:
                raise EngineError(f"the engine gave {len(scores)} log-probs of {end - first} tokens")
            values[first:end] = [
                value if sampled else 0.0 for value, sampled in zip(scores, mask[first:end], strict=True)
            ]
            mean = sum(values) / mask.count(1)
            for name, lists in top.items():
                kept = [one if sampled else [] for one, sampled in zip(lists, mask[first:end], strict=True)]
                said[name] = [[]] * first + kept + [[]] * (len(mask) - end)
        tokens = {"response_ids": [0] * len(mask), "response_mask": mask, "response_logprobs": values}
        return pass_trajectory(stored["is_snapshot"], mean, said, **tokens)

    async def _ask(self, ids: list[int], start: int, top_k: int) -> tuple[list[float], dict[str, list[Any]]]:
        engine = cast(Any, self.resources.engine)
        scores: TopScores = await engine.score(ids, start, top_k)
        if not top_k:
            return scores.logprobs, {}
        values = [[round(value, _DECIMALS) for value in one] for one in scores.top_logprobs]
        return scores.logprobs, {"top_ids": [*scores.top_ids], "top_logprobs": values}


async def open_scorer(
    teacher: Teacher,
    stack: AsyncExitStack,
    logs: Path,
    patience: float = _ENGINE_TIMEOUT_S,
    top_k: int = 0,
) -> BuiltWorker:
    """Starts a teacher's engine, and a worker of rollouts whose `columns` have `trajectories` to be scored.

    Args:
        teacher: who is asked.
        stack: closes it.
        logs: a folder for its engine's.
        patience: seconds without an engine, or with a full one.
        top_k: that it has to know the likeliest of.

    Raises:
        ConfigError: the engine cannot give log-probs of ids, or not of so many.
    """
    engine = create_engine(
        teacher.engine,
        model_path=teacher.model if engine_kind(teacher.engine).is_embedded else teacher.tokenizer,
        server_urls=teacher.server_urls,
        engine_kwargs=teacher.engine_kwargs,
        log_dir=logs,
    )
    stack.push_async_callback(engine.close)
    await engine.start()
    if not engine.capabilities.scores or not isinstance(engine, ScoresIds):
        raise ConfigError(f"this {teacher.engine} gives no log-probs of given ids")
    if top_k > (most := engine.capabilities.score_top_k):
        raise ConfigError(
            f"--top-k {top_k}: this {teacher.engine} gives {most or 'none'} of the likeliest ids of a place: ask "
            "--engine hf, or a server of vLLM or SGLang (--server URL)"
        )
    availability, meter = EngineAvailability(engine, timeout=patience), RequestMeter()
    worker = RolloutWorker(
        AgentResources(engine, None, None, response_length=1),
        sampling=SamplingParams(1, logprobs=False),
        seed=None,
        default_agent_loop="scoring",
        retry=RetryPolicy(3, 1.0, 30.0),
        attempt_timeout=_TIMEOUT_S,
        availability=availability,
        loops=AgentLoops({"scoring": LoopEntry(_ScoringLoop)}),
        refusal_patience=patience,
        counts=meter.counts,
    )
    return BuiltWorker(worker, meter, availability, engine=engine)


async def annotate_run(
    root: Path,
    teacher: Teacher,
    *,
    name: str,
    max_in_flight: int = 128,
    retry_failed: bool = False,
    top_k: int = 0,
    say: Callable[[int, int, int], object] = lambda done, total, failed: None,
) -> ScoreReport:
    """Gets the log-probs of all sampled tokens of a run's finished rollouts that a stream does not have yet.

    Args:
        root: the run directory.
        teacher: who is asked.
        name: of the stream.
        max_in_flight: rollouts at once.
        retry_failed: asks again for those that failed earlier.
        top_k: of each place, of how many of the likeliest ids the log-probs are kept, too.
        say: see `run_pass`.

    Returns:
        what was done; its rewards are mean log-probs of a rollout's sampled tokens.

    Raises:
        ConfigError: the engine cannot give them, the name is taken, or the vocabulary is another one.
        RunDirectoryError, StorageError, EngineLostError: see `run_pass`.
    """
    run = Run.open(root)
    if own_stream(root, name).exists():
        raise ConfigError(f"{root} has a stream {name!r} of its training: choose another name")
    if (root / token_text.FILE).is_file():
        check_vocabulary(token_text.read_decoder(root), teacher)
    embedded = engine_kind(teacher.engine).is_embedded

    async def open_backend(stack: AsyncExitStack) -> WorkerBackend:
        logs = pass_folder(root, name, "streams") / "logs"
        return LocalBackend(await open_scorer(teacher, stack, logs, top_k=top_k))

    plan = PassPlan(
        kind="streams",
        name=name,
        identity={
            "streams.engine": teacher.engine,
            "streams.model": model_digest(teacher.model) if embedded else teacher.model,
            "streams.engine_kwargs": data_deciding_kwargs(teacher.engine, teacher.engine_kwargs),
            **({"streams.top_k": top_k} if top_k else {}),
        },
        config={
            **{"model": teacher.model, "engine": teacher.engine, "mode": "raw", "temperature": 1.0},
            **({"top_k": top_k} if top_k else {}),
        },
        columns=[*_COLUMNS, "messages"],
        read_rows=partial(_tokens, top_k=top_k),
        publish=publish_stream,
        open_backend=open_backend,
        workers=1,
        max_in_flight=max_in_flight,
        timeout=_TIMEOUT_S,
    )
    return await run_pass(run, plan, retry_failed=retry_failed, say=say)


def _tokens(table: pa.Table, top_k: int) -> list[dict[str, Any]]:
    """Rows with their tokens, and without their texts."""
    has_images = pc.match_substring(table["messages"], IMAGE)
    rows: list[dict[str, Any]] = table.select(_COLUMNS).append_column("has_images", has_images).to_pylist()
    return [{**row, "top_k": top_k} for row in rows] if top_k else rows


def check_vocabulary(own: "Tokenizer", teacher: Teacher) -> bool:
    """Whether it could be said that a teacher's ids stand for the same tokens as in `own`.

    Raises:
        ConfigError: they stand for others.
    """
    from huggingface_hub import try_to_load_from_cache

    folder = Path(teacher.tokenizer or "").expanduser()
    if not folder.is_dir():
        with suppress(ValueError):  # it is no name on the hub either
            found = try_to_load_from_cache(teacher.tokenizer or "", token_text.FILE)
            folder = Path(found).parent if isinstance(found, str) else folder
    if teacher.tokenizer is None or not (folder / token_text.FILE).is_file():
        return False
    tokens = {token_id: token for token, token_id in token_text.read_decoder(folder).get_vocab().items()}
    if any(tokens.get(token_id, token) != token for token, token_id in own.get_vocab().items()):
        raise ConfigError(f"{folder} has another vocabulary than the run: its ids stand for other tokens")
    return True
