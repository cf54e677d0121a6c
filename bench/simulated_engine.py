"""An inference server as the cap on in-flight work sees it, in simulated time.

What it has of a real one (vLLM's scheduler, roughly): a step makes one token of every running request and
takes longer the more there are; the KV cache holds so many tokens; a request is admitted when its prompt
fits; when the cache is full the request that came last loses its memory, goes back to the head of the queue
and is computed anew when it is admitted again.
"""

import heapq
import random
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field

from rollstream.engine.base import EngineLoad
from rollstream.rollout.concurrency import ConcurrencyPolicy, Observation

Lengths = Callable[[random.Random], int]
"""Draws the number of response tokens of a request."""


def lognormal(median: float, sigma: float, longest: int = 16_384) -> Lengths:
    """Response lengths as most models have them."""
    return lambda rng: max(1, min(longest, round(rng.lognormvariate(0.0, sigma) * median)))


def pareto(shortest: float, alpha: float, longest: int = 16_384) -> Lengths:
    """Response lengths with a heavy tail."""
    return lambda rng: max(1, min(longest, round(shortest * rng.paretovariate(alpha))))


@dataclass(slots=True)
class Machine:
    """What one replica can do. The defaults are of an 8 B model on one GPU, in round numbers."""

    slots: int = 256
    """Requests in one step at most."""
    kv_tokens: int = 200_000
    step_s: float = 0.010
    """A step of one request."""
    request_s: float = 0.00005
    """What each further request adds to a step."""
    prefill_s: float = 0.00004
    """Of one prompt token, and of one that has to be computed anew."""
    queue_limit: int | None = None
    """Requests that it takes at most; beyond them it answers 429."""
    reserves: bool = False
    """Admits a request only when its whole answer fits, so nothing is ever preempted (openvino, hf)."""


@dataclass(slots=True)
class _Request:
    number: int
    prompt: int
    length: int
    arrived: float
    turns: int
    done: float = 0.0
    attempt: int = 1
    refused: int = 0

    @property
    def tokens(self) -> float:
        return self.prompt + self.done


@dataclass(slots=True)
class SimulatedEngine:
    """Replicas of a machine, filled evenly, and a clock."""

    machine: Machine = field(default_factory=Machine)
    replicas: int = 1
    now: float = 0.0
    preemptions: int = 0
    recomputed: float = 0.0
    """Tokens that were computed a second time."""
    queue: deque[_Request] = field(default_factory=deque)
    running: list[_Request] = field(default_factory=list)
    _debt: float = 0.0
    """Seconds of prefill that the next step has to do first."""

    @property
    def load(self) -> EngineLoad:
        """As an engine reports it."""
        usage = sum(request.tokens for request in self.running) / self._kv_tokens
        return EngineLoad(len(self.running), len(self.queue), min(1.0, usage), self.preemptions)

    @property
    def _kv_tokens(self) -> int:
        return self.machine.kv_tokens * self.replicas

    def lose_replica(self) -> None:
        """One replica is gone: its requests begin anew on the others."""
        lost = self.running[:: self.replicas]
        self.replicas -= 1
        self.running = [request for request in self.running if request not in lost]
        for request in lost:
            request.done = 0.0
        self.queue.extendleft(reversed(lost))

    def takes(self) -> bool:
        """Whether a request sent now is accepted."""
        limit = self.machine.queue_limit
        return limit is None or len(self.running) + len(self.queue) < limit * self.replicas

    def step(self, dt: float) -> list[_Request]:
        """Lets at least `dt` seconds pass; returns what was finished. Tokens come in whole batches."""
        machine = self.machine
        finished: list[_Request] = []
        end = self.now + dt
        while self.now < end:
            self._admit()
            if not self.running:
                self.now = end
                break
            per_step = machine.step_s + machine.request_s * len(self.running) / self.replicas
            least = min(request.length - request.done for request in self.running)
            steps = max(1.0, min(least, (end - self.now) / per_step))
            self.now += steps * per_step + self._debt
            self._debt = 0.0
            for request in self.running:
                request.done += steps
            ended = [request for request in self.running if request.done >= request.length]
            if ended:
                finished += ended
                self.running = [request for request in self.running if request.done < request.length]
            self._preempt()
        return finished

    def _admit(self) -> None:
        machine = self.machine
        if machine.reserves:
            used = float(sum(request.prompt + request.length for request in self.running))
        else:
            used = sum(request.tokens for request in self.running)
        while self.queue and len(self.running) < machine.slots * self.replicas:
            request = self.queue[0]
            need = request.prompt + (request.length if machine.reserves else request.done)
            if used + need > 0.99 * self._kv_tokens and self.running:
                return
            self.queue.popleft()
            used += need
            self._debt += request.tokens * machine.prefill_s / self.replicas
            if request.done:
                self.recomputed += request.tokens
            self.running.append(request)

    def _preempt(self) -> None:
        used = sum(request.tokens for request in self.running)
        while used > self._kv_tokens and len(self.running) > 1:
            request = self.running.pop()
            used -= request.tokens
            self.preemptions += 1
            self.queue.appendleft(request)


@dataclass(slots=True)
class Outcome:
    """How a simulated run went."""

    seconds: float
    rollouts: int
    tokens: int
    preemptions: int
    rejected: int
    timeouts: int
    failed: int
    """Rollouts given up after their last attempt."""
    caps: list[tuple[float, int]]
    """The cap over time, at every observation."""
    slowest: float
    """Longest time of one request."""

    @property
    def rate(self) -> float:
        """Tokens per second."""
        return self.tokens / self.seconds

    def settled(self, share: float = 0.5) -> list[int]:
        """Caps after the first part of the run."""
        return [cap for at, cap in self.caps if at >= share * self.seconds]

    def rate_between(self, begin: float, end: float, finished: list[tuple[float, int]]) -> float:
        """Tokens per second of a part of the run."""
        return sum(tokens for at, tokens in finished if begin <= at < end) / (end - begin)


def simulate(
    engine: SimulatedEngine,
    cap: ConcurrencyPolicy | int,
    *,
    lengths: Lengths,
    rollouts: int,
    prompt: int = 1000,
    turns: int = 1,
    tool_s: Callable[[random.Random], float] = lambda rng: 0.0,
    says_load: bool = True,
    timeout_s: float = float("inf"),
    attempts: int = 10**9,
    every_s: float = 2.0,
    events: dict[float, Callable[[SimulatedEngine], None]] | None = None,
    seed: int = 0,
    until: float = float("inf"),
    finished_at: list[tuple[float, int]] | None = None,
) -> Outcome:
    """Runs a window of rollouts against an engine.

    Args:
        engine: fresh.
        cap: a state machine, or a fixed number.
        lengths: of every answer.
        rollouts: in the whole run.
        prompt: tokens of the first prompt of a rollout; a later turn has what was said before as well.
        turns: answers of a rollout; between two of them it is in a tool, not in the engine.
        tool_s: how long.
        says_load: whether the engine reports its load.
        timeout_s: of one request; then the rollout begins anew.
        attempts: at a rollout; one that is timed out more often has failed.
        every_s: between two observations.
        events: what happens to the engine at which second.
        seed: of lengths and times.
        until: ends the simulation early.
        finished_at: where to note each answer's end and tokens.
    """
    rng = random.Random(seed)
    limit = cap if isinstance(cap, int) else cap.cap
    owed = iter(range(rollouts))
    in_flight = finished = tokens = timeouts = rejected = done_rollouts = failed = 0
    tools: list[tuple[float, int, _Request]] = []  # rollouts in a tool, or waiting to try again
    caps: list[tuple[float, int]] = []
    upcoming = sorted((events or {}).items())
    next_observation = 0.0
    slowest = 0.0
    numbers = iter(range(10**9))
    dt = every_s / 10

    def send(request: _Request) -> None:
        nonlocal rejected
        if engine.takes():
            request.arrived = engine.now
            engine.queue.append(request)
        else:
            rejected += 1
            request.refused += 1
            wait(request, min(request.refused, 4))

    def again(request: _Request) -> None:
        nonlocal failed, done_rollouts, in_flight
        if request.attempt >= attempts:
            failed += 1
            done_rollouts += 1
            in_flight -= 1
            return
        request.attempt += 1
        request.done = 0.0
        wait(request, request.attempt - 1)

    def wait(request: _Request, times: int) -> None:
        pause = min(30.0, 0.5 * 2.0 ** min(times - 1, 10)) * rng.uniform(0.5, 1.0)
        heapq.heappush(tools, (engine.now + pause, next(numbers), request))

    def refill() -> None:
        nonlocal in_flight
        while in_flight < limit and (number := next(owed, None)) is not None:
            in_flight += 1
            send(_Request(number, prompt, lengths(rng), engine.now, turns))

    while done_rollouts < rollouts and engine.now < until:
        while upcoming and upcoming[0][0] <= engine.now:
            upcoming.pop(0)[1](engine)
        refill()
        while tools and tools[0][0] <= engine.now:
            send(heapq.heappop(tools)[2])
        for request in engine.step(dt):
            finished += 1
            tokens += request.length
            slowest = max(slowest, engine.now - request.arrived)
            if finished_at is not None:
                finished_at.append((engine.now, request.length))
            if request.turns > 1:
                after = _Request(
                    request.number,
                    request.prompt + request.length,
                    lengths(rng),
                    0.0,
                    request.turns - 1,
                )
                heapq.heappush(tools, (engine.now + tool_s(rng), next(numbers), after))
            else:
                done_rollouts += 1
                in_flight -= 1
        if timeout_s < float("inf"):
            late = [r for r in (*engine.running, *engine.queue) if engine.now - r.arrived > timeout_s]
            if late:
                timeouts += len(late)
                names = {id(request) for request in late}
                engine.running = [r for r in engine.running if id(r) not in names]
                engine.queue = deque(r for r in engine.queue if id(r) not in names)
                for request in late:
                    again(request)
        if engine.now >= next_observation:
            next_observation += every_s
            refill()
            if not isinstance(cap, int):
                limit = cap.observe(
                    Observation(
                        at=engine.now,
                        in_flight=in_flight,
                        calls=len(engine.running) + len(engine.queue),
                        finished=finished,
                        overloads=rejected,
                        timeouts=timeouts,
                        load=engine.load if says_load else None,
                    )
                )
            caps.append((engine.now, limit))
    return Outcome(
        engine.now, done_rollouts, tokens, engine.preemptions, rejected, timeouts, failed, caps, slowest
    )
