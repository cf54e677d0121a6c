"""The process that runs the model of `openvino.py`, and the messages between them.

A message holds everything there was to say at that moment: one write per model step, not one per request.
"""

import os
import random
import shutil
import signal
import sys
import tempfile
import traceback
from collections import deque
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

import msgspec
import numpy

from rollstream.childproc import Parent, packed
from rollstream.engine.embedded import StopTexts
from rollstream.trajectory import SamplingParams

BLOCK_TOKENS = 32
"""Tokens in one block of the CPU plugin's paged KV cache."""

_NO_END_TOKEN = 2**31
"""An end token that no vocabulary has: the pipeline puts the model's own in place of a missing one."""


class Load(msgspec.Struct, tag=True):
    """To the worker: a model, or other weights of it. Answered with `Loaded`."""

    model_path: str
    properties: dict[str, str | int]
    """OpenVINO properties of the compiled model."""
    scheduler: dict[str, int | bool]
    """Attributes of openvino_genai.SchedulerConfig."""
    tokenizer_path: str
    """Folder of the tokenizer."""
    version: int = 0
    """Of the weights."""
    temperature: float | None = None
    """Logits are divided by it in the model, so that log-probs are of that; None: they stay the raw model's."""


class Add(msgspec.Struct):
    """One request."""

    id: int
    """Never used twice in the life of a worker."""
    prompt: list[int]
    sampling: SamplingParams
    scores: bool = False
    """Only the log-probs of the prompt are asked for: the answer has the prompt's ids, and nothing is sampled."""


class Orders(msgspec.Struct, tag=True):
    """To the worker: new requests, requests to end early, requests to forget."""

    add: list[Add]
    abort: list[int]
    """Answered with what was sampled."""
    cancel: list[int]
    """Not answered."""


class Loaded(msgspec.Struct, tag=True):
    """From the worker: it can generate, has answered once, and results are of these weights from now on."""

    cache_tokens: int
    """Tokens that the KV cache holds."""
    error: str = ""
    """Why not. Then the worker ends, or goes on with what it had, and nothing was interrupted."""


class Done(msgspec.Struct):
    """The end of one request."""

    id: int
    tokens: list[int]
    logprobs: list[float] | None
    reason: Literal["stop", "length", "abort", "refused", "broken"]
    """refused: the pipeline does not take this request; broken: it failed while working on it."""
    error: str = ""
    version: int = 0
    """Of the weights that sampled all of its tokens."""


class Results(msgspec.Struct, tag=True):
    """From the worker: what ended in one step, and how busy the step was."""

    done: list[Done]
    running: int = 0
    """Requests in that step."""
    waiting: int = 0
    """Requests that the KV cache had no room for yet."""
    kv_usage: float = 0.0
    """Share of the KV cache that was reserved for those that ran."""


TO_WORKER = packed(Load | Orders)
FROM_WORKER = packed(Loaded | Results)


@dataclass(slots=True)
class _Running:
    add: Add
    handle: Any
    blocks: int
    ids: list[int] = field(default_factory=list)
    """Read so far: before the end only where stop strings are watched for."""
    logprobs: list[float] = field(default_factory=list)
    reason: Any = None
    """The pipeline's own, once it has ended."""


class Worker:
    """Steps the pipeline and answers requests as they end.

    A request enters the pipeline only when the KV cache has room for it at its longest, in the order of
    arrival. So nothing is ever preempted: around a preemption openvino-genai 2026.4.1 returns wrong tokens
    and log-probs (off by up to 14 nats) for two sequences of the batch, see docs/engines.md.
    """

    def __init__(self, load: Load, parent: Parent) -> None:
        self._load = load
        self._parent = parent
        self._waiting: deque[Add] = deque()
        self._running: dict[int, _Running] = {}
        self._done: list[Done] = []
        self._stop_texts: StopTexts | None = None
        self._busy = (0, 0, 0.0)
        """What `Results` say of the last step."""
        self._make_pipeline(load)

    def _make_pipeline(self, load: Load) -> None:
        """Makes a new pipeline; when that fails, everything stays as it was."""
        import openvino
        import openvino_genai
        from openvino_genai import py_openvino_genai

        self._tensor = openvino.Tensor
        self._config_type = openvino_genai.GenerationConfig
        # As plain values: comparing pybind enums takes longer than getting the status, and this is done for
        # every request in every step.
        self._still_running = py_openvino_genai.GenerationStatus.RUNNING.value
        self._ignored = py_openvino_genai.GenerationStatus.IGNORED.value
        self._length = py_openvino_genai.GenerationFinishReason.LENGTH
        scheduler = openvino_genai.SchedulerConfig()
        for key, value in load.scheduler.items():
            setattr(scheduler, key, value)
        with tempfile.TemporaryDirectory(prefix="rollstream-scaled-") as scaled:
            folder = load.model_path
            if load.temperature is not None:
                folder = scaled
                scale_logits(Path(load.model_path), Path(scaled), load.temperature)
            pipeline = openvino_genai.ContinuousBatchingPipeline(folder, scheduler, "CPU", load.properties)
        self._temperature = load.temperature or 1.0
        blocks = self._warm_up(pipeline)
        self._pipeline = pipeline
        self._max_running = scheduler.max_num_seqs
        self._free_blocks = self.cache_blocks = blocks
        self._cancelled_blocks = 0

    def _warm_up(self, pipeline: Any) -> int:
        """Answers one request, because much is only checked then. Returns the size of the cache in blocks."""
        add = Add(-1, [0], SamplingParams(2, logprobs=False, ignore_eos=True))
        handle = self._open(add, pipeline)
        pipeline.step()
        # In percent, while this request holds one block: the pipeline does not say it otherwise.
        blocks: int = round(100 / pipeline.get_metrics().cache_usage)
        pipeline.step()
        if handle.get_status().value == self._still_running:
            raise RuntimeError("the pipeline does not finish a request of two tokens")
        return blocks

    def run(self) -> None:
        """Works until the process ends."""
        while True:
            busy = self._waiting or self._running or self._cancelled_blocks
            for message in self._parent.receive(wait=not busy):
                if isinstance(message, Orders):
                    self._obey(message)
                else:
                    self._update(message)
            self._admit()
            usage = 1 - self._free_blocks / self.cache_blocks
            self._busy = (len(self._running), len(self._waiting), usage)
            if self._running or self._cancelled_blocks:
                self._step()
            self._flush()

    def _flush(self) -> None:
        if self._done:
            self._parent.send(Results(self._done, *self._busy))
            self._done = []

    def _obey(self, orders: Orders) -> None:
        self._waiting.extend(orders.add)
        for request_id in orders.abort:
            self._end_early(request_id, answer=True)
        for request_id in orders.cancel:
            self._end_early(request_id, answer=False)

    def _update(self, load: Load) -> None:
        """Goes on with other weights. What has tokens ends with them, what has none begins with the new ones.

        Constants are folded into the compiled model, so it takes another pipeline; while it is made there are
        two, and nothing is generated.
        """
        running = list(self._running.values())
        for one in running:
            self._read(one)
        try:
            self._make_pipeline(load)
        except Exception as error:
            traceback.print_exc()
            self._parent.send(Loaded(0, cause_of(error)))
            return
        for one in running:
            if one.ids:
                self._answer(one, "abort")
        self._waiting.extendleft(one.add for one in reversed(running) if not one.ids)
        self._running.clear()
        self._load = load
        self._flush()
        self._parent.send(Loaded(self.cache_blocks * BLOCK_TOKENS))

    def _end_early(self, request_id: int, *, answer: bool) -> None:
        if (running := self._running.get(request_id)) is not None:
            if answer:
                self._read(running)  # before cancel(), which throws away what was not read
                self._answer(running, "abort")
            self._cancel(running)
        else:
            for add in self._waiting:
                if add.id == request_id:
                    self._waiting.remove(add)
                    if answer:
                        logprobs: list[float] | None = [] if add.sampling.logprobs else None
                        self._done.append(Done(add.id, [], logprobs, "abort", version=self._load.version))
                    break

    def _admit(self) -> None:
        while self._waiting and len(self._running) < self._max_running:
            add = self._waiting[0]
            tokens = len(add.prompt) + add.sampling.max_tokens
            blocks = -(-tokens // BLOCK_TOKENS)
            if blocks > self.cache_blocks:
                self._refuse(f"{tokens} tokens do not fit the KV cache of {self.cache_blocks * BLOCK_TOKENS}")
            elif blocks > self._free_blocks:
                return
            else:
                try:
                    handle = self._open(add, self._pipeline)
                except Exception as error:
                    self._refuse(str(error))
                    continue
                self._waiting.popleft()
                self._free_blocks -= blocks
                self._running[add.id] = _Running(add, handle, blocks)

    def _refuse(self, error: str) -> None:
        self._done.append(Done(self._waiting.popleft().id, [], None, "refused", error))

    def _open(self, add: Add, pipeline: Any) -> Any:
        how, config = add.sampling, self._config_type()
        config.max_new_tokens = how.max_tokens
        config.logprobs = 1 if how.logprobs else 0
        config.echo = add.scores
        config.do_sample = how.temperature > 0
        if config.do_sample:
            config.temperature = how.temperature / self._temperature
            config.top_p = how.top_p
            # The pipeline's own default is the same seed for every request.
            config.rng_seed = random.getrandbits(31) if how.seed is None else how.seed
            if how.top_k > 0:
                config.top_k = how.top_k
        if how.stop_token_ids:
            config.stop_token_ids = set(how.stop_token_ids)
        if how.ignore_eos:
            # The pipeline's own ignore_eos would drop stop_token_ids as well.
            config.set_eos_token_id(_NO_END_TOKEN)
        ids = numpy.array([add.prompt], dtype=numpy.int64)
        return pipeline.add_request(add.id + 1, self._tensor(ids), config)

    def _step(self) -> None:
        try:
            self._pipeline.step()
        except Exception as error:
            self._start_over(error)
            return
        self._free_blocks += self._cancelled_blocks
        self._cancelled_blocks = 0
        still_running = self._still_running
        for running in list(self._running.values()):
            status = running.handle.get_status().value
            if running.add.sampling.stop:
                self._read(running)
                if self._stopped_by_text(running):
                    self._answer(running, "stop")
                    if status == still_running:
                        self._cancel(running)
                    else:
                        self._release(running)
                    continue
            if status == still_running:
                continue
            if status == self._ignored:
                self._answer(running, "broken", "the pipeline found no room for the request")
            else:
                self._read(running)
                self._answer(running, "length" if running.reason == self._length else "stop")
            self._release(running)

    def _start_over(self, error: Exception) -> None:
        """After a failed step the pipeline cannot be used; what was in it may be tried again."""
        traceback.print_exc()
        for running in self._running.values():
            self._answer(running, "broken", f"{type(error).__name__}: {error}")
        self._running.clear()
        self._flush()
        self._make_pipeline(self._load)

    def _stopped_by_text(self, running: _Running) -> bool:
        if self._stop_texts is None:
            self._stop_texts = StopTexts(Path(self._load.tokenizer_path) / "tokenizer.json")
        return self._stop_texts.found(running.ids, running.add.sampling.stop)

    def _read(self, running: _Running) -> None:
        """Takes what was sampled since the last time."""
        handle = running.handle
        if handle.get_status().value != self._still_running:
            outputs = handle.read_all() if handle.can_read() else []
        else:
            outputs = []  # read_all would wait for the end
            while handle.can_read():
                outputs += handle.read().values()
        for output in outputs:
            running.ids += output.generated_ids
            running.logprobs += output.generated_log_probs
            running.reason = output.finish_reason

    def _answer(self, running: _Running, reason: Any, error: str = "") -> None:
        logprobs = running.logprobs if running.add.sampling.logprobs else None
        self._done.append(Done(running.add.id, running.ids, logprobs, reason, error, self._load.version))

    def _release(self, running: _Running) -> None:
        """After a request has ended by itself."""
        del self._running[running.add.id]
        self._free_blocks += running.blocks

    def _cancel(self, running: _Running) -> None:
        """Ends a request early. The pipeline frees its blocks only in the next step."""
        running.handle.cancel()
        del self._running[running.add.id]
        self._cancelled_blocks += running.blocks


def scale_logits(model: Path, target: Path, temperature: float) -> None:
    """Writes a model into an empty folder whose logits are those of `model` divided by `temperature`."""
    import openvino
    from openvino import opset13

    graph = openvino.Core().read_model(str(model / "openvino_model.xml"))
    result = graph.get_results()[0].input(0)
    logits = result.get_source_output()
    names = logits.get_names()
    scaled = opset13.multiply(logits, opset13.constant(numpy.float32(1 / temperature))).output(0)
    result.replace_source_output(scaled)
    scaled.set_names(names)
    openvino.save_model(graph, str(target / "openvino_model.xml"), compress_to_fp16=False)
    for name in ("config.json", "generation_config.json"):
        if (model / name).is_file():
            shutil.copyfile(model / name, target / name)


def cause_of(error: Exception) -> str:
    """What went wrong, in one line: OpenVINO's errors begin with where in its source they were raised."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    said = [line for line in lines if not line.startswith(("Exception from ", "Check '"))]
    text = " ".join(said or lines)
    return text if text and type(error) is RuntimeError else f"{type(error).__name__}: {text}"


def main(number: int) -> None:
    """Runs the worker. The parent decides when it ends, whoever sends signals to all processes of a job."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    parent = Parent(number, TO_WORKER)
    load, *others = parent.receive()
    assert isinstance(load, Load) and not others
    try:
        worker = Worker(load, parent)
    except Exception as error:
        traceback.print_exc()
        parent.send(Loaded(0, cause_of(error)))
        # Not through the C++ destructors, which abort after some failures.
        sys.stderr.flush()
        os._exit(1)
    parent.send(Loaded(worker.cache_blocks * BLOCK_TOKENS))
    worker.run()
