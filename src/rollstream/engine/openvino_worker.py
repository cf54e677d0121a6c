"""The process that runs the model of `openvino.py`. It is asked, and answers once for each model step.

A request enters the pipeline only when the KV cache has room for it at its longest, in the order of arrival. So
nothing is ever preempted: around a preemption openvino-genai 2026.4.1 returns wrong tokens and log-probs (off by
up to 14 nats) for two sequences of the batch, see docs/engines.md.
"""

import os
import random
import shutil
import signal
import sys
import tempfile
import traceback
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any, Literal

import numpy
import openvino
import openvino_genai
from openvino import opset13
from openvino_genai import py_openvino_genai

from rollstream.childproc import Parent
from rollstream.engine.embedded import StopTexts
from rollstream.engine.openvino import TO_WORKER, Add, Done, End, Load, Loaded, StepResults
from rollstream.sampling import PENALTIES
from rollstream.trajectory import SamplingParams

BLOCK_TOKENS = 32
"""Tokens in one block of the CPU plugin's paged KV cache."""

_NO_END_TOKEN = 2**31
"""An end token that no vocabulary has: the pipeline puts the model's own in place of a missing one."""

# As plain values: comparing pybind enums takes longer than getting the status, and this is done for every request
# in every step.
_RUNNING = py_openvino_genai.GenerationStatus.RUNNING.value
_IGNORED = py_openvino_genai.GenerationStatus.IGNORED.value
_LENGTH = py_openvino_genai.GenerationFinishReason.LENGTH


@dataclass(slots=True)
class _WorkerRequest:
    add: Add
    handle: Any = None
    """The pipeline's, once it is there."""
    blocks: int = 0
    ids: list[int] = field(default_factory=list)
    """Read so far: before the end only where stop strings are watched for."""
    logprobs: list[float] = field(default_factory=list)
    reason: Any = None
    """The pipeline's own, once it has ended."""

    @property
    def is_running(self) -> bool:
        return bool(self.handle.get_status().value == _RUNNING)

    def read(self) -> None:
        """Takes what was sampled since the last time."""
        if self.is_running:  # read_all would wait for the end
            outputs = []
            while self.handle.can_read():
                outputs += self.handle.read().values()
        else:
            outputs = self.handle.read_all() if self.handle.can_read() else []
        for output in outputs:
            self.ids += output.generated_ids
            self.logprobs += output.generated_log_probs
            self.reason = output.finish_reason


class Worker:
    """Steps the pipeline and answers requests as they end. A step that fails ends the process."""

    def __init__(self, load: Load, parent: Parent) -> None:
        self._parent = parent
        self._waiting: dict[int, _WorkerRequest] = {}
        self._running: dict[int, _WorkerRequest] = {}
        self._done: list[Done] = []
        self._load = load
        self._pipeline, self._blocks = _open_pipeline(load)
        self._free_blocks = self._blocks
        self._cancelled_blocks = 0
        """The pipeline frees them only in the next step."""
        parent.send(Loaded(self._blocks * BLOCK_TOKENS))

    @cached_property
    def _stop_texts(self) -> StopTexts:
        return StopTexts(Path(self._load.tokenizer_path) / "tokenizer.json")

    def run(self) -> None:
        """Works until the process ends."""
        while True:
            busy = self._waiting or self._running or self._cancelled_blocks
            for message in self._parent.receive(wait=not busy):
                match message:
                    case Add():
                        self._waiting[message.id] = _WorkerRequest(message)
                    case End():
                        self._end_early(message)
                    case Load():
                        self._update(message)
            self._admit()
            if self._running or self._cancelled_blocks:
                self._step()
            self._flush()

    def _flush(self) -> None:
        if self._done:
            usage = 1 - (self._free_blocks + self._cancelled_blocks) / self._blocks
            self._parent.send(StepResults(self._done, len(self._running), usage))
            self._done = []

    def _update(self, load: Load) -> None:
        """Goes on with other weights. What has tokens ends with them, what has none begins with the new ones.

        Constants are folded into the compiled model, so it takes another pipeline; while it is made there are
        two, and nothing is generated.
        """
        for request in self._running.values():
            request.read()
        try:
            pipeline, self._blocks = _open_pipeline(load)
        except Exception as error:
            traceback.print_exc()
            self._parent.send(Loaded(0, cause_of(error)))
            return
        for request in self._running.values():
            if request.ids:
                self._answer(request, "abort")
        self._waiting = {id: one for id, one in self._running.items() if not one.ids} | self._waiting
        self._running.clear()
        self._load, self._pipeline = load, pipeline
        self._free_blocks, self._cancelled_blocks = self._blocks, 0
        self._flush()
        self._parent.send(Loaded(self._blocks * BLOCK_TOKENS))

    def _end_early(self, order: End) -> None:
        if (request := self._running.get(order.id)) is not None:
            request.read()  # before it is cancelled, which throws away what was not read
            self._leave(request)
        else:
            request = self._waiting.pop(order.id, None)
        if request is not None and order.answer:
            self._answer(request, "abort")

    def _admit(self) -> None:
        while self._waiting and len(self._running) < self._load.scheduler["max_num_seqs"]:
            request = next(iter(self._waiting.values()))
            add = request.add
            if self._would_mix(add):
                return
            request.blocks = -(-(len(add.prompt) + add.sampling.max_tokens) // BLOCK_TOKENS)
            if request.blocks > self._free_blocks:
                return
            del self._waiting[add.id]
            try:
                request.handle = _open_request(self._pipeline, add, self._load.temperature or 1.0)
            except Exception as error:
                self._answer(request, "refused", str(error))
            else:
                self._free_blocks -= request.blocks
                self._running[add.id] = request

    def _would_mix(self, add: Add) -> bool:
        """Whether a request has to wait until the others have left the pipeline.

        openvino-genai 2026.4 gives wrong log-probs to both where it scores a prompt while it generates.
        """
        running = next(iter(self._running.values()), None)  # all are of one kind
        if running is None:
            return add.scores and self._cancelled_blocks > 0
        return running.add.scores != add.scores

    def _step(self) -> None:
        self._pipeline.step()
        self._free_blocks += self._cancelled_blocks
        self._cancelled_blocks = 0
        for request in list(self._running.values()):
            has_ended, stop = not request.is_running, request.add.sampling.stop
            if has_ended and request.handle.get_status().value == _IGNORED:
                raise RuntimeError("the pipeline found no room for a request")
            if has_ended or stop:
                request.read()
            if stop and self._stop_texts.found(request.ids, stop):
                reason: Literal["stop", "length"] = "stop"
            elif has_ended:
                reason = "length" if request.reason == _LENGTH else "stop"
            else:
                continue
            self._answer(request, reason)
            self._leave(request)

    def _answer(
        self, request: _WorkerRequest, reason: Literal["stop", "length", "abort", "refused"], error: str = ""
    ) -> None:
        logprobs = request.logprobs if request.add.sampling.logprobs else None
        self._done.append(Done(request.add.id, request.ids, logprobs, reason, self._load.version, error))

    def _leave(self, request: _WorkerRequest) -> None:
        """Takes a request out of the pipeline, where it may be running."""
        del self._running[request.add.id]
        if request.is_running:
            request.handle.cancel()
            self._cancelled_blocks += request.blocks
        else:
            self._free_blocks += request.blocks


def _open_pipeline(load: Load) -> tuple[Any, int]:
    """A pipeline that has answered once, because much is only checked then, and its KV cache in blocks."""
    scheduler = openvino_genai.SchedulerConfig()
    for key, value in load.scheduler.items():
        setattr(scheduler, key, value)
    with tempfile.TemporaryDirectory(prefix="rollstream-scaled-") as scaled:
        folder = load.model_path
        if load.temperature is not None:
            scale_logits(Path(folder), Path(scaled), load.temperature)
            folder = scaled
        pipeline = openvino_genai.ContinuousBatchingPipeline(folder, scheduler, "CPU", load.properties)
    trial = Add(-1, [0], SamplingParams(2, logprobs=False, ignore_eos=True))
    handle = _open_request(pipeline, trial, 1.0)
    pipeline.step()
    # In percent, while this request holds one block: the pipeline does not say it otherwise.
    blocks = round(100 / pipeline.get_metrics().cache_usage)
    pipeline.step()
    if handle.get_status().value == _RUNNING:
        raise RuntimeError("the pipeline does not finish a request of two tokens")
    return pipeline, blocks


def _open_request(pipeline: Any, add: Add, scale: float) -> Any:
    """Puts a request into a pipeline whose logits are divided by `scale`."""
    how, config = add.sampling, openvino_genai.GenerationConfig()
    config.max_new_tokens = how.max_tokens
    config.logprobs = 1 if how.logprobs else 0
    config.echo = add.scores
    config.do_sample = how.temperature > 0
    if config.do_sample:
        config.temperature = how.temperature / scale
        config.top_p = how.top_p
        # The pipeline's own default is the same seed for every request.
        config.rng_seed = random.getrandbits(31) if how.seed is None else how.seed
        if how.top_k > 0:
            config.top_k = how.top_k
        config.min_p = how.extra.get("min_p", 0.0)
    for penalty in PENALTIES:
        if penalty in how.extra:
            setattr(config, penalty, how.extra[penalty])
    if how.stop_token_ids:
        config.stop_token_ids = set(how.stop_token_ids)
    if how.ignore_eos:
        # The pipeline's own ignore_eos would drop stop_token_ids as well.
        config.set_eos_token_id(_NO_END_TOKEN)
    ids = numpy.array([add.prompt], dtype=numpy.int64)
    return pipeline.add_request(add.id + 1, openvino.Tensor(ids), config)


def scale_logits(model: Path, target: Path, temperature: float) -> None:
    """Writes a model into an empty folder whose logits are those of `model` divided by `temperature`."""
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
    """The cause in one line: OpenVINO's errors begin with where in its source they were raised."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    text = " ".join(line for line in lines if not line.startswith(("Exception from ", "Check '")))
    return text if text and type(error) is RuntimeError else f"{type(error).__name__}: {error}"


def main(number: int) -> None:
    """Runs the worker. The parent decides when it ends, whoever sends signals to all processes of a job."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    parent = Parent(number, TO_WORKER)
    (load,) = parent.receive()
    try:
        worker = Worker(load, parent)
    except Exception as error:
        parent.send(Loaded(0, cause_of(error)))
        _end()
    try:
        worker.run()
    except Exception:
        _end()


def _end() -> None:
    """Ends the process with the error in its log; not through the C++ destructors, which abort after some."""
    traceback.print_exc()
    sys.stderr.flush()
    os._exit(1)
