"""Generations that go on over interruptions: every token is that of its context under its version."""

import asyncio
import hashlib
import itertools
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rollstream.engine.base import Capabilities, TopScores
from rollstream.engine.continuation import ContinuingEngine, OnUpdate, PartialCompletion
from rollstream.engine.replica import WeightsLostError
from rollstream.engine.weight_probe import PROBE_FILE, PROBE_IDS, write_probe
from rollstream.errors import EngineError, EngineUnavailableError, TransientEngineError
from rollstream.testing.scripted import ScriptedEngine
from rollstream.trajectory import Completion, SamplingParams

pytestmark = pytest.mark.virtual_time

LONG = SamplingParams(40)
ENDLESS = SamplingParams(10**9, ignore_eos=True)


def next_token(context: list[int], version: int) -> tuple[int, float]:
    """A model: a token and its log-prob, of all that was before and of the weights."""
    digest = hashlib.blake2b(repr((context, version)).encode(), digest_size=4).digest()
    return digest[0] + 1, -float(digest[1])


@dataclass(eq=False)
class _Inside:
    ids: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    ended: bool = False


class Stepper:
    """An engine that samples a token per turn of the event loop, for as many requests as it has slots.

    It insists on what the wrapper promises: no request inside while weights change.
    """

    def __init__(self, slots: int = 64) -> None:
        self.version = 0
        self.inside: dict[str, _Inside] = {}
        self.slots = asyncio.Semaphore(slots)
        self.calls = 0
        self.seeds: list[int | None] = []
        self.prompts: list[list[int]] = []
        self.aborts = 0
        self.deaf = False
        """Ignores aborts."""
        self.token_s = 0.0
        self.stuck: set[str] = set()
        """Requests that it ends without a token."""
        self.away = False
        self.closed = False
        self.loading: Callable[[], Any] | None = None
        self.capabilities = Capabilities(True, "raw", True, True, True, False, True, None)

    async def start(self) -> None: ...

    async def generate(
        self,
        prompt_ids: list[int],
        sampling: SamplingParams,
        *,
        request_id: str,
        images: list[object] | None = None,
    ) -> Completion:
        assert request_id not in self.inside
        self.calls += 1
        self.seeds.append(sampling.seed)
        self.prompts.append(list(prompt_ids))
        one = self.inside[request_id] = _Inside()
        try:
            async with self.slots:
                while not (one.ended or request_id in self.stuck):
                    if self.closed or self.away:
                        raise EngineUnavailableError("away")
                    token, logprob = next_token(prompt_ids + one.ids, self.version)
                    one.ids.append(token)
                    one.logprobs.append(logprob)
                    if len(one.ids) == sampling.max_tokens or (token % 50 == 0 and not sampling.ignore_eos):
                        how = "length" if len(one.ids) == sampling.max_tokens else "stop"
                        return Completion(one.ids, one.logprobs, how, [(0, self.version)])  # type: ignore[arg-type]
                    await asyncio.sleep(self.token_s)
                await asyncio.sleep(0)
                return Completion(one.ids, one.logprobs, "abort", [(0, self.version)])
        finally:
            del self.inside[request_id]

    async def abort(self, request_id: str) -> None:
        self.aborts += 1
        if request_id in self.inside and not self.deaf:
            self.inside[request_id].ended = True

    def abort_all(self) -> None:
        for one in self.inside.values():
            one.ended = True

    async def update_weights(self, source: str, version: int) -> None:
        assert not self.inside
        if self.loading is not None:
            await self.loading()
        assert not self.inside
        if source == "nothing":
            raise EngineError("there is no folder nothing")
        self.version = version

    async def health(self) -> bool:
        return not self.closed

    async def close(self) -> None:
        self.closed = True


def check(prompt: list[int], completion: Completion) -> None:
    """Every token and log-prob is that of its context under its version; versions only go up."""
    assert completion.logprobs is not None
    assert len(completion.logprobs) == len(completion.token_ids)
    runs = completion.policy_versions
    assert runs[0][0] == 0
    assert all(one[0] < two[0] and one[1] < two[1] for one, two in itertools.pairwise(runs))
    context = list(prompt)
    for i, (token, logprob) in enumerate(zip(completion.token_ids, completion.logprobs, strict=True)):
        version = next(version for start, version in reversed(runs) if start <= i)
        assert (token, logprob) == next_token(context, version)
        context.append(token)


def lasting(count: int, tokens: int) -> list[list[int]]:
    """Prompts whose answers, under version 0, have more tokens than that."""
    found: list[list[int]] = []
    number = 0
    while len(found) < count:
        context = [number]
        while len(context) <= tokens and (token := next_token(context, 0)[0]) % 50:
            context.append(token)
        if len(context) > tokens:
            found.append([number])
        number += 1
    return found


async def turns(count: int) -> None:
    for _ in range(count):
        await asyncio.sleep(0)


OPS = st.one_of(
    st.tuples(st.just("wait"), st.integers(1, 12)),
    st.tuples(st.just("update"), st.booleans()),
    st.tuples(st.just("fail"), st.booleans()),
    st.tuples(st.just("abort"), st.integers(0, 5)),
    st.tuples(st.just("abort all"), st.just(0)),
    st.tuples(st.just("cancel"), st.integers(0, 5)),
)


@settings(deadline=None)
@given(
    st.lists(OPS, max_size=12),
    st.sampled_from(("continue", "restart", "abort")),
    st.integers(1, 6),
)
def test_whatever_interrupts_tokens_are_exact(
    ops: list[tuple[str, int]], on_update: OnUpdate, slots: int
) -> None:
    asyncio.run(_interrupt(ops, on_update, slots))


async def _interrupt(ops: list[tuple[str, int]], on_update: OnUpdate, slots: int) -> None:
    inner = Stepper(slots)
    engine = ContinuingEngine(inner, on_update=on_update)
    asked = [asyncio.create_task(engine.generate([i], LONG, request_id=str(i))) for i in range(6)]
    version, aborted, updates = 0, set(), []
    for op, value in ops:
        match op:
            case "wait":
                await turns(value)
            case "update":
                version += 1
                updates.append(asyncio.create_task(engine.update_weights("/x", version)))
                if value:
                    await asyncio.wait(updates)
            case "fail":
                with pytest.raises(EngineError):
                    await engine.update_weights("nothing", 99)
            case "abort":
                aborted.add(value)
                await engine.abort(str(value))
            case "abort all":
                inner.abort_all()
            case "cancel":
                asked[value].cancel()
    answers = await asyncio.wait_for(asyncio.gather(*asked, return_exceptions=True), 20)
    await asyncio.gather(*updates)
    assert inner.version == version
    assert not inner.inside
    for i, answer in enumerate(answers):
        if isinstance(answer, asyncio.CancelledError):
            continue
        assert isinstance(answer, Completion), answer
        check([i], answer)
        if answer.finish_reason == "length":
            assert len(answer.token_ids) == 40
        if answer.finish_reason == "abort" and on_update != "abort":
            assert i in aborted
        if on_update != "continue":
            assert len(answer.policy_versions) == 1


async def test_what_each_policy_does_with_the_tokens() -> None:
    for on_update in ("continue", "restart", "abort"):
        inner = Stepper()
        engine = ContinuingEngine(inner, on_update=on_update)  # type: ignore[arg-type]
        prompts = lasting(8, 10)
        asked = [asyncio.create_task(engine.generate(p, LONG, request_id=str(p[0]))) for p in prompts]
        await turns(5)
        sampled = [list(one.ids) for one in inner.inside.values()]
        assert len(sampled) == 8
        await engine.update_weights("/new", 7)
        for prompt, before, answer in zip(prompts, sampled, await asyncio.gather(*asked), strict=True):
            check(prompt, answer)
            kept = answer.token_ids[: len(before)] == before
            if on_update == "continue":
                (_, old), (start, new) = answer.policy_versions
                assert kept and (old, new) == (0, 7) and start >= len(before)
            elif on_update == "restart":
                assert answer.policy_versions == [(0, 7)]
            else:
                assert kept and (answer.finish_reason, answer.policy_versions) == ("abort", [(0, 0)])
        assert inner.version == 7


async def test_stop_strings_begin_anew() -> None:
    inner = Stepper()
    engine = ContinuingEngine(inner)
    (prompt,) = lasting(1, 10)
    asked = asyncio.create_task(engine.generate(prompt, replace(LONG, stop=("end",)), request_id="a"))
    await turns(5)
    await engine.update_weights("/new", 1)
    answer = await asked
    check(prompt, answer)
    assert answer.policy_versions == [(0, 1)]


@pytest.mark.parametrize("ours", [False, True])
async def test_a_seed_repeats_whoever_pauses_the_server(ours: bool) -> None:
    """The same seed and weights give the same tokens; with other weights they are others anyway."""
    inner = Stepper()
    engine = ContinuingEngine(inner)
    (prompt,) = lasting(1, 10)
    asked = asyncio.create_task(engine.generate(prompt, replace(LONG, seed=3), request_id="a"))
    await turns(5)
    if ours:
        await engine.update_weights("/new", 1)
    else:
        inner.abort_all()
    answer = await asked
    check(prompt, answer)
    if ours:
        assert [version for _, version in answer.policy_versions] == [0, 1]
        assert len(set(inner.seeds)) == 2
    else:
        assert inner.prompts == [prompt, prompt]
        assert inner.seeds == [3, 3]


async def test_weights_changed_beside_us_in_one_version_are_other_weights() -> None:
    """A trainer's optimizer steps within a batch: a request with a seed keeps what it has."""

    class Shared(Stepper):
        weight_changes = 0

    inner = Shared()
    engine = ContinuingEngine(inner)
    (prompt,) = lasting(1, 10)
    asked = asyncio.create_task(engine.generate(prompt, replace(LONG, seed=3), request_id="a"))
    await turns(5)
    (one,) = inner.inside.values()
    before = list(one.ids)
    inner.weight_changes += 1
    inner.abort_all()
    answer = await asked
    check(prompt, answer)
    assert before and inner.prompts == [prompt, prompt + before]


async def test_new_requests_wait_while_weights_are_loaded() -> None:
    inner, loaded = Stepper(), asyncio.Event()
    inner.loading = loaded.wait
    engine = ContinuingEngine(inner)
    (prompt,) = lasting(1, 10)
    early = asyncio.create_task(engine.generate(prompt, LONG, request_id="early"))
    await turns(4)
    update = asyncio.create_task(engine.update_weights("/new", 1))
    second = asyncio.create_task(engine.update_weights("/newer", 2))
    await turns(4)
    late = [asyncio.create_task(engine.generate([i], LONG, request_id=str(i))) for i in range(3)]
    await turns(9)
    assert not inner.inside and not any(task.done() for task in late)
    # At the door an abort and a cancellation are heard.
    await engine.abort("0")
    late[1].cancel()
    await engine.abort("early")
    none, cut = await late[0], await early
    assert (none.token_ids, none.finish_reason, none.policy_versions) == ([], "abort", [(0, 0)])
    assert cut.finish_reason == "abort" and cut.token_ids
    check(prompt, cut)
    loaded.set()
    await update
    await second
    assert {version for _, version in (await late[2]).policy_versions} <= {1, 2}
    assert late[1].cancelled() and inner.version == 2


async def test_an_engine_that_does_not_let_go() -> None:
    inner = Stepper()
    inner.deaf, inner.token_s = True, 1.0
    engine = ContinuingEngine(inner)
    asked = asyncio.create_task(engine.generate([1], ENDLESS, request_id="a"))
    await turns(2)
    with pytest.raises(EngineError, match="1 requests did not end within 60 s"):
        await engine.update_weights("/new", 1)
    assert inner.version == 0 and inner.aborts > 1
    inner.deaf = False
    await engine.abort("a")
    assert (await asked).finish_reason == "abort"


@pytest.mark.parametrize("others_go_on", [False, True])
async def test_an_engine_that_ends_everything_is_not_asked_in_a_hot_loop(others_go_on: bool) -> None:
    inner = Stepper()
    inner.stuck = {"a"}
    engine = ContinuingEngine(inner)
    asked = asyncio.create_task(engine.generate([1], LONG, request_id="a"))
    await asyncio.sleep(10)
    assert 10 < inner.calls < 20  # a pause of a second between two calls
    if others_go_on:
        await engine.generate([2], LONG, request_id="b")
    expected = TransientEngineError if others_go_on else EngineUnavailableError
    with pytest.raises(expected, match="64 times without a token") as caught:
        await asked
    assert type(caught.value) is expected


async def test_a_pause_ends_with_an_abort_or_the_engine() -> None:
    inner = Stepper()
    inner.stuck = {"0", "1"}
    engine = ContinuingEngine(inner)
    asked = [asyncio.create_task(engine.generate([i], LONG, request_id=str(i))) for i in range(2)]
    await asyncio.sleep(5)  # the pauses are of a second by now
    await engine.abort("0")
    assert (await asked[0]).finish_reason == "abort"
    await engine.close()
    with pytest.raises(EngineUnavailableError, match="closed"):
        await asked[1]
    with pytest.raises(EngineUnavailableError, match="closed"):
        await engine.update_weights("/new", 1)
    with pytest.raises(EngineUnavailableError, match="closed"):
        await engine.generate([1], LONG, request_id="a")


async def test_closing_during_an_update_ends_it() -> None:
    inner = Stepper()
    inner.deaf = True
    engine = ContinuingEngine(inner)
    asked = asyncio.create_task(engine.generate([1], ENDLESS, request_id="a"))
    await turns(2)
    update = asyncio.create_task(engine.update_weights("/new", 1))
    late = asyncio.create_task(engine.generate([2], LONG, request_id="late"))
    await turns(2)
    await engine.close()
    results = await asyncio.wait_for(asyncio.gather(asked, update, late, return_exceptions=True), 10)
    assert [type(result) for result in results] == [EngineUnavailableError] * 3


class Scoring(ScriptedEngine):
    """Whose log-probs are those of its newest weights, or do not change."""

    logprob, keeps_old = -1.0, False

    def __init__(self) -> None:
        super().__init__()
        self.capabilities = replace(self.capabilities, scores=True)

    async def update_weights(self, source: str, version: int) -> None:
        if not self.keeps_old:
            self.logprob = -1.0 - version

    async def score(self, ids: list[int], start: int = 1, top_k: int = 0) -> TopScores:
        return TopScores([self.logprob] * (len(ids) - start))


async def test_weights_are_compared_with_what_their_trainer_says(tmp_path: Path) -> None:
    inner = Scoring()
    engine = ContinuingEngine(inner)
    await engine.start()
    write_probe(tmp_path, [-3.0] * (len(PROBE_IDS) - 1))
    await engine.update_weights(str(tmp_path), 2)
    await engine.update_weights(str(tmp_path), 2)  # a step that changed nothing
    inner.keeps_old = True
    write_probe(tmp_path, [-3.1] * (len(PROBE_IDS) - 1))
    with pytest.raises(WeightsLostError, match="did not change"):
        await engine.update_weights(str(tmp_path), 3)
    write_probe(tmp_path, [-4.0] * (len(PROBE_IDS) - 1))
    with pytest.raises(WeightsLostError, match="nats off"):
        await engine.update_weights(str(tmp_path), 3)
    (tmp_path / PROBE_FILE).unlink()
    await engine.update_weights(str(tmp_path), 3)  # nobody says what they are


PROMPT = [7, 8, 9]


@st.composite
def pieces(draw: st.DrawFn) -> list[tuple[int, list[tuple[int, int]]]]:
    """Lengths of pieces, and the versions in each: runs that begin at 0 and go up."""
    made = []
    for _ in range(draw(st.integers(1, 6))):
        length = draw(st.integers(0, 8))
        starts = sorted({0, *draw(st.lists(st.integers(1, max(1, length)), max_size=3))})
        made.append((length, [(start, draw(st.integers(0, 3))) for start in starts]))
    return made


def version_at(runs: list[tuple[int, int]], index: int) -> int:
    return next(version for start, version in reversed(runs) if start <= index)


@given(pieces(), st.booleans(), st.one_of(st.none(), st.integers(0, 2**31 - 1)))
def test_pieces_add_up(
    made: list[tuple[int, list[tuple[int, int]]]], logprobs: bool, seed: int | None
) -> None:
    total = sum(length for length, _ in made)
    sampling = SamplingParams(total + 5, logprobs=logprobs, seed=seed, temperature=0.7)
    partial = PartialCompletion(PROMPT, sampling)
    ids: list[int] = []
    versions: list[int] = []
    seeds = set()
    for length, runs in made:
        assert partial.prompt_ids == PROMPT + ids
        how = partial.sampling
        assert how == replace(sampling, max_tokens=total + 5 - len(ids), seed=how.seed)
        assert how.seed is None if seed is None else 0 <= (how.seed or 0) < 2**31
        seeds.add((len(ids), how.seed))
        assert not partial.is_full
        new = [len(ids) + i for i in range(length)]
        partial.add(Completion(new, [-float(i) for i in new] if logprobs else None, "abort", runs))
        ids += new
        versions += [version_at(runs, i) for i in range(length)]
        assert len(partial) == len(ids)
    whole = partial.result("abort")
    assert whole.token_ids == ids == list(range(total))
    assert whole.logprobs == ([-float(i) for i in ids] if logprobs else None)
    runs = whole.policy_versions
    assert [version_at(runs, i) for i in range(total)] == versions
    # Run-length encoded: from 0, going up, no two the same, none without a token.
    assert runs[0][0] == 0
    assert all(one[0] < two[0] and one[1] != two[1] for one, two in itertools.pairwise(runs))
    assert runs[-1][0] < max(1, total)
    if seed is not None:  # the same place always has the same seed, and each place another one
        assert len({how for _, how in seeds}) == len({at for at, _ in seeds})
    partial.clear()
    assert (len(partial), partial.prompt_ids, partial.sampling) == (0, PROMPT, sampling)


def test_the_last_piece_says_how_it_ended() -> None:
    sampling = SamplingParams(10)
    partial = PartialCompletion(PROMPT, sampling)
    only = Completion([1], [-1.0], "stop", [(0, 3)], cached_prompt_tokens=2)
    assert partial.finish(only) is only
    partial.add(Completion([], [], "abort"))
    partial.add(Completion([1, 2], [-1.0, -2.0], "abort", [(0, 3)], cached_prompt_tokens=2))
    whole = partial.finish(Completion([3], [-3.0], "stop", [(0, 4)], cached_prompt_tokens=5))
    assert (whole.token_ids, whole.finish_reason, whole.policy_versions) == (
        [1, 2, 3],
        "stop",
        [(0, 3), (2, 4)],
    )
    assert whole.cached_prompt_tokens == 2  # the later pieces' cover the request's own tokens


@pytest.mark.parametrize(
    ("options", "goes_on"),
    [
        ({}, True),
        ({"extra": {"min_p": 0.1}}, True),
        # A string that begins in one piece and ends in the next; what counts the tokens of a request.
        ({"stop": ("end",)}, False),
        ({"extra": {"presence_penalty": 0.5}}, False),
    ],
)
def test_what_cannot_go_on_says_so(options: dict[str, Any], goes_on: bool) -> None:
    partial = PartialCompletion(PROMPT, SamplingParams(2, **options))
    assert partial.can_go_on
    for length in (1, 2):
        with pytest.raises(ValueError, match="1 sampled ids came with 2 log-probs"):
            partial.add(Completion([1], [-1.0, -2.0], "abort"))
        partial.add(Completion([1], [-1.0], "abort"))
        assert (len(partial), partial.can_go_on, partial.is_full) == (length, goes_on, length == 2)
    partial.clear()
    assert partial.can_go_on
