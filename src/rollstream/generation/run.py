"""A generation run from start to artifact.

make_plan -> open the run directory -> start_execution -> executor -> StoreWriter -> merge, export, upload
"""

import asyncio
import logging
import os
import threading
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import AsyncExitStack, suppress
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any

import msgspec
from omegaconf import DictConfig
from rich.console import Console

from rollstream.aio import finish_despite_cancellation
from rollstream.config.load import compose
from rollstream.data.sources import ObjectRows
from rollstream.errors import ConfigError, RewardError, RunDirectoryError, StorageError
from rollstream.generation.identity import adopted_manifest
from rollstream.generation.logs import log_to_file
from rollstream.generation.plan import GenerationPlan, InMemory, make_plan, peek_manifest
from rollstream.generation.progress import RunProgress, Waits, progress_console, show_progress
from rollstream.generation.result import GenerationResult
from rollstream.generation.trackers import Reporter, TrackedRun, load_trackers, tracked_run
from rollstream.generation.upload import upload_trajectories
from rollstream.reward.base import FunctionReward
from rollstream.rollout.executor import Executor, FailureStreak, WindowCounters
from rollstream.rollout.replay import score_run
from rollstream.rollout.setup import in_flight_limit, reward_settings
from rollstream.rollout.stored_pass import ScoreReport
from rollstream.stop_signals import StoppedEarly, StopSignals
from rollstream.store.export.format import file_name
from rollstream.store.export.run import write_export
from rollstream.store.journal import write_file_durably
from rollstream.store.manifest import Manifest, check_reward, read_manifest, write_manifest
from rollstream.store.paths import RunPaths
from rollstream.store.records import EncodedRollout, RecordCodec
from rollstream.store.run import Run
from rollstream.store.run_dir import RunDirectory, extend_run, lock_run, open_run
from rollstream.store.summary import FailureCause, write_checkpoint
from rollstream.store.turns import TurnPlaces, remove_turns
from rollstream.store.writer import StoreWriter
from rollstream.trajectory import Failure, Rollout
from rollstream.user_calls import in_daemon_thread

logger = logging.getLogger(__name__)

_FAILURES_SAID = 5
"""Failures that are logged one by one; all are in `failed/`."""


Config = Mapping[str, Any] | Sequence[str] | DictConfig
"""Overrides of `generation.yaml` as a nested mapping (also OmegaConf's), or as `key=value` words."""

OnRollout = Callable[[Rollout], object]

OnExecutor = Callable[[Executor], object]

Result = Rollout | EncodedRollout | Failure


def run_generation(
    config: Config = (),
    *,
    prompts: Iterable[Mapping[str, Any] | str] | None = None,
    reward: Callable[..., Any] | None = None,
    on_rollout: OnRollout | None = None,
) -> GenerationResult:
    """Runs a generation from Python, from start to artifact.

    Args:
        config: overrides of `generation.yaml`.
        prompts: rows instead of `data.train_files`: a list of mappings or texts, a Hugging Face dataset, a
            DataFrame, an Arrow table, an object with a length and positions. They are fingerprinted: the same rows
            continue a run.
        reward: instead of `custom_reward_function.path`, verl's `compute_score`: called with `data_source`,
            `solution_str`, `ground_truth` and `extra_info`, it returns a number or a dict with `score`.
        on_rollout: called with each rollout that this call completes, once it is durable, in the run's thread: it
            should return at once. An exception of it ends the run; what was durable stays so.

    Raises:
        RollstreamError: see `rollstream.errors`; what was durable stays so.
    """
    with suppress(RuntimeError):
        asyncio.get_running_loop()
        raise ConfigError(
            "an event loop is running here (as in a notebook): use `rollstream.generate(...)`, or await "
            "`rollstream.generation.run.generate(as_config(...))`"
        )
    tree = as_config(config)
    return asyncio.run(generate(tree, given=in_memory(tree, prompts, reward), on_rollout=on_rollout))


def in_memory(
    config: DictConfig,
    prompts: Iterable[Mapping[str, Any] | str] | None,
    reward: Callable[..., Any] | None,
) -> InMemory:
    """Prompts and a reward as a run takes them. Raises `ConfigError`, `DataError`."""
    if isinstance(prompts, str):
        raise ConfigError(f"prompts: a list of rows or texts, not the text {prompts!r}")
    rows = None if prompts is None else ObjectRows(prompts, "prompts", str(config.data.prompt_key))
    return InMemory(rows, reward)


def as_config(config: Config) -> DictConfig:
    """The configuration tree for any form of configuration. Raises `ConfigError`."""
    if isinstance(config, str):
        raise ConfigError(f"a mapping, or a list of key=value words, not the text {config!r}")
    if isinstance(config, Mapping | DictConfig):
        return compose(layers=[config])
    return compose(config)


async def generate(
    config: DictConfig,
    *,
    stop: StopSignals | None = None,
    console: Console | None = None,
    on_ready: Callable[[], object] = lambda: None,
    given: InMemory | None = None,
    on_rollout: OnRollout | None = None,
    on_executor: OnExecutor = lambda executor: None,
) -> GenerationResult:
    """Runs a generation in the running event loop.

    Args:
        config: the configuration tree, see `rollstream.config.load.compose`.
        stop: fires when a person wants the run to end.
        console: where progress is shown; standard error by default.
        on_ready: called once everything is set up, right before the first rollout.
        given: prompts and reward that are in no file, see `in_memory`.
        on_rollout: see `run_generation`.
        on_executor: called with what begins the rollouts, right before the first one.

    Raises:
        RollstreamError: see `rollstream.errors`.
    """
    started = time.monotonic()
    stop = stop or StopSignals()
    with Waits() as waits:
        plan = await stop.unless_stopped(
            make_plan(config, peek_manifest(config), waits.begin, given or InMemory())
        )
        settings = plan.settings
        async with AsyncExitStack() as stack:
            reporter = Reporter(load_trackers(settings.trainer.logger), settings.generation.metrics_port)
            await reporter.listen()
            stack.push_async_callback(reporter.end_server)
            report = await stop.unless_stopped(_rescore(plan, waits))
            waits.begin("opening the run directory")
            # Closed also where this is cancelled meanwhile.
            directory = await finish_despite_cancellation(in_daemon_thread(_open, plan, stack, report))
            waits.begin(None)
            stack.enter_context(log_to_file(directory.paths.logs, settings.generation.log_level))
            run = _OpenRun(plan, directory, reporter, waits, stop, on_rollout)
            # Before the lock is given back: trackers write into the run directory, too.
            stack.push_async_callback(run.end_reports)

            def ready(executor: Executor) -> None:
                on_ready()
                on_executor(executor)

            await run.execute(console or progress_console(), ready)
            return await run.finish(time.monotonic() - started)


async def _rescore(plan: GenerationPlan, waits: Waits) -> ScoreReport | None:
    """Scores what is finished by the reward asked for, if that is another one and `generation.rescore` is set."""
    root, settings = plan.run_dir, reward_settings(plan.settings)
    manifest = read_manifest(root)
    if manifest is None or not plan.settings.generation.rescore or manifest.reward == plan.manifest.reward:
        return None
    if plan.setup.group_reward is not None:
        return None  # groups are scored when they are whole
    _, nothing_done = await in_daemon_thread(check_run_directory, plan, manifest)
    if nothing_done:
        return None
    waits.begin("scoring what is finished by the new reward")
    reward = plan.setup.reward
    in_memory = reward if settings.path is None and isinstance(reward, FunctionReward) else None
    report = await score_run(root, settings, in_memory=in_memory)
    if report.failed == report.rollouts:
        raise RewardError(
            f"the reward failed on all {report.failed} finished rollouts: {next(iter(report.causes))}"
        )
    logger.info("%d rollouts were scored anew: %s", report.rollouts, report.path)
    return report


def _open(plan: GenerationPlan, stack: AsyncExitStack, report: ScoreReport | None) -> RunDirectory:
    """Opens the run, with the settings asked for where they change nothing that is done; `stack` closes it."""
    root, mode = plan.run_dir, plan.settings.generation.resume
    lock = lock_run(root)
    try:
        _adopt(root, plan, report)
        if mode == "extend":
            extend_run(root, plan.manifest, plan.visited_keys, plan.config_yaml)
    except BaseException:
        lock.release()
        raise
    run = open_run(
        lock,
        root,
        plan.manifest,
        config_yaml=plan.config_yaml,
        tokenizer=plan.setup.stored_tokenizer(),
    )
    stack.callback(run.close)
    return run


def _adopt(root: Path, plan: GenerationPlan, report: ScoreReport | None) -> None:
    """`report`: of the pass by which finished rollouts have the rewards asked for; None without one."""
    manifest = read_manifest(root)
    adopted, nothing_done = check_run_directory(plan, manifest)
    if manifest is None or adopted is None:
        return
    paths = RunPaths(root)
    if nothing_done:
        remove_turns(paths, TurnPlaces())  # which the new settings would not have made
    if nothing_done and paths.failures.is_dir():
        aside = paths.logs / f"failed-{time.strftime('%Y%m%d-%H%M%S')}-{os.getpid()}"
        paths.failures.rename(aside)
        paths.failures.mkdir()
        logger.warning(
            "nothing is done in %s yet: it takes the new settings; failures are in %s", root, aside
        )
    elif not nothing_done and manifest.reward != adopted.reward:
        done, scored = Run(root, manifest).state().keys.done, report.rollouts if report else 0
        if plan.setup.group_reward is None and (report is None or scored < done):
            raise RunDirectoryError(f"{root}: of {done} finished rollouts only {scored} could be scored anew")
        if report is not None:
            adopted = msgspec.structs.replace(adopted, scores=report.name)
    write_file_durably(root / "config.yaml", plan.config_yaml.encode())
    write_manifest(root, adopted)


def check_run_directory(plan: GenerationPlan, manifest: Manifest | None) -> tuple[Manifest | None, bool]:
    """Compares a plan with what its run directory holds. Touches nothing.

    Returns:
        the manifest that the directory is to take (see `adopted_manifest`; None where it stays as it is), and whether
        nothing is done there.

    Raises:
        RunDirectoryError: the run directory cannot be used by this run.
    """
    root, generation, wanted = plan.run_dir, plan.settings.generation, plan.manifest
    if manifest is None or not RunPaths(root).has_data():
        return None, True
    if generation.resume == "never":
        raise RunDirectoryError(
            f"{root} already holds a run (created {manifest.created}) and generation.resume=never. "
            "Choose an empty trainer.default_local_dir, or generation.resume=auto to continue it."
        )
    if manifest.identity == wanted.identity and manifest.reward == wanted.reward:
        return None, False
    state = Run(root, manifest).state()
    nothing_done = not (state.keys.done or state.damage or RunPaths(root).damaged.is_dir())
    adopted = adopted_manifest(
        root,
        manifest,
        wanted,
        extend=generation.resume == "extend",
        nothing_done=nothing_done,
    )
    if manifest.reward != wanted.reward:
        if not nothing_done and not generation.rescore:
            check_reward(root, manifest, wanted)
        adopted = msgspec.structs.replace(adopted or manifest, reward=wanted.reward, config=wanted.config)
    return adopted, nothing_done


@dataclass(eq=False)
class _OpenRun:
    """One open run while it executes; the sink of its executor."""

    plan: GenerationPlan
    directory: RunDirectory
    reporter: Reporter
    waits: Waits
    stop: StopSignals
    on_rollout: OnRollout | None

    def __post_init__(self) -> None:
        self._settings = settings = self.plan.settings.generation
        self._metrics = self.reporter.metrics
        self._codec = RecordCodec()
        self._failing = FailureStreak(settings.stop_after_failures, len(self.plan.dataset.order))
        self._writer = StoreWriter(
            self.directory,
            save_batch_size=settings.save_batch_size,
            pull_timeout=settings.pull_timeout,
            on_sealed=self._write_checkpoint,
        )
        self._executor: Executor | None = None
        self._window = WindowCounters()
        """What went through so far."""
        self._gave_up: str | None = None
        """Why the run was stopped before its end, other than by a signal."""
        self._succeeded = False

    async def execute(self, console: Console, on_ready: OnExecutor) -> None:
        """Generates what is owed and seals it."""
        plan, state, order = self.plan, self.directory.state, self.plan.dataset.order
        for line in (*state.damage, *state.restored):
            logger.warning("damaged, or restored: %s", line)
        if state.torn:
            logger.info("cut an unfinished frame of %d bytes, as a crash leaves it", state.torn)
        done, failed = state.keys.count(order)
        owed = plan.total - done - (0 if self._settings.retry_failed else failed)
        logger.info(
            "%d prompt rows, %d rollouts: %d done, %d failed, %d owed; engine %s; configuration: %s",
            len(order),
            plan.total,
            done,
            failed,
            owed,
            plan.settings.actor_rollout_ref.rollout.name,
            self.directory.paths.root / "config.yaml",
        )
        for name in plan.loop_names if self._settings.keep_turns else ():
            if not plan.setup.agents.loops.entry(name).loop.says_resumable():
                logger.warning("generation.keep_turns: agent loop %s keeps no turns", name)
        self._write_checkpoint()
        self._writer.start()
        generated, shown = False, AsyncExitStack()  # the progress line stays until everything is sealed
        try:
            if owed:
                await self._generate(console, on_ready, shown)
            generated = True
        finally:
            # After an error or a cancellation nothing waits for a seal: what is durable is in the journal.
            await self._writer.close(seal=generated)
            await shown.aclose()
            self._write_checkpoint()
            self.reporter.sealed(
                unsealed_rows=self._writer.pending_rows, saved_batches=self._writer.saved_batches
            )

    async def finish(self, elapsed: float) -> GenerationResult:
        """Merges, exports and uploads. `elapsed`: seconds so far."""
        plan, run, state, stop = self.plan, self.directory, self.directory.state, self.stop
        artifact_rows, not_exported, uploaded = 0, None, None
        complete = stop.signal is None and self._gave_up is None and bool(state.rows)
        if complete and plan.setup.group_reward is not None:
            try:
                await stop.unless_stopped(self._score_groups())
                state = run.state
            except StoppedEarly:
                complete = False
                logger.info("stopped while groups were scored; the same command goes on")
        if complete and self._settings.final_merge:
            try:
                self.waits.begin("merging")
                keep = self._settings.keep_batches
                artifact_rows = await self._interruptible(
                    lambda cancelled: run.merge(keep_batches=keep, cancelled=cancelled)
                )
                if not keep:
                    self._write_checkpoint()
                self.waits.begin("exporting")
                not_exported = await self._export()
            except StoppedEarly:
                logger.info("stopped while merging; the same command merges again")
        if self._settings.upload_artifact and complete and stop.signal is None:
            self._succeeded = not_exported is None
            await self.end_reports()  # W&B takes an artifact by a run that is opened for it
            self.waits.begin("uploading the trajectories (Ctrl-C leaves them here)")
            uploaded = await upload_trajectories(
                self._tracked(), self._settings.upload_artifact, merged=self._settings.final_merge, stop=stop
            )
        self.waits.begin(None)
        if not_exported is not None:  # only now: what hinders an export is no reason not to upload
            raise not_exported
        done, failed = state.keys.count(plan.dataset.order)
        logger.info("ended: %d of %d done, %d failed", done, plan.total, failed)
        self._succeeded = True
        return GenerationResult(
            run_dir=run.paths.root,
            total=plan.total,
            completed=done,
            failed=failed,
            unscored=max(done - state.rewards.scored, 0),
            reward_failed=state.rewards.unscored,
            generated=self._window.completed,
            failed_now=self._window.failed,
            mean_reward=state.rewards.mean,
            equal_rewards=state.rewards.lowest if state.rewards.are_equal else None,
            artifact=run.paths.artifact if artifact_rows else None,
            artifact_rows=artifact_rows,
            elapsed_s=elapsed,
            damage=state.damage,
            signal=stop.signal,
            max_failed_share=self._settings.max_failed_share,
            tool_calls=self._metrics.tool_calls,
            tool_errors=self._metrics.tool_errors,
            policy_versions=self._metrics.versions,
            unscored_sources=plan.unscored_sources,
            uploaded=uploaded,
            failure_causes=[FailureCause(*one) for one in self._metrics.causes.values()],
            gave_up=self._gave_up,
        )

    async def _score_groups(self) -> None:
        """Has a reward that sees groups score what is stored, durably: a pass, as of `rollstream score`."""
        self.waits.begin("scoring groups")
        settings, reward = self.plan.settings.custom_reward_function, self.plan.setup.group_reward
        in_memory = None
        if settings.path is None and isinstance(reward, FunctionReward):
            in_memory = reward.reopened()  # the generation has closed it
        try:
            report = await score_run(self.directory.paths.root, settings, in_memory=in_memory)
        finally:
            if in_memory is not None:
                in_memory.close()
        await in_daemon_thread(self.directory.take_scores, report.name)
        self._write_checkpoint()
        for cause, count in report.causes.items():
            logger.warning("%d rollouts could not be scored: %s", count, cause)

    async def end_reports(self) -> None:
        """Lets trackers write what is left."""
        self.waits.begin("waiting for trackers to take the last reports (Ctrl-C shortens that)")
        await self.reporter.close(succeeded=self._succeeded, stop=self.stop.requested)
        self.waits.begin(None)

    def submit(self, result: Result) -> "asyncio.Future[None]":
        """See `Sink`. Stops the run when its first `stop_after_failures` rollouts have all failed with one cause."""
        durable = self._writer.submit(result)
        if durable.done():
            return durable  # it cannot be stored
        if not isinstance(result, Failure):
            self._failing.completed()
        elif self._failing.failed(result) and self._gave_up is None and self._executor is not None:
            self._gave_up = (
                f"the first {self._failing.count} rollouts all failed with one cause, {result.error} "
                "(generation.stop_after_failures)"
            )
            self._executor.drop()
        return durable

    async def _generate(self, console: Console, on_ready: OnExecutor, shown: AsyncExitStack) -> None:
        # Not for a run with nothing left to do.
        from rollstream.generation.execution import Start, start_execution

        plan, settings, directory, writer = self.plan, self._settings, self.directory, self._writer
        keys, order = directory.state.keys, plan.dataset.order
        turns = writer if settings.keep_turns else None
        async with AsyncExitStack() as stack:
            self.waits.begin("starting the engine, and the workers")
            execution = await start_execution(
                Start(plan, self, directory.paths.logs, self.stop, stack, self._count, turns)
            )
            self.waits.begin(None)
            if plan.setup.sampling.logprobs:
                directory.note_logprobs(execution.logprobs)
            executor = self._executor = execution.executor
            self._window = executor.counters
            # Counted once and then on: rows outside `order` are not of this run's total.
            (done_before, failed_before), all_failed_before = keys.count(order), keys.failed
            limit = in_flight_limit(plan.settings)

            def observe() -> RunProgress:
                counts = executor.stats.counts
                return RunProgress(
                    total=plan.total,
                    done=done_before + self._window.completed,
                    failed=failed_before + keys.failed - all_failed_before,
                    in_flight=executor.in_flight,
                    cap=executor.cap if executor.cap < limit else None,
                    unsealed_rows=writer.pending_rows,
                    saved_batches=writer.saved_batches,
                    tokens=self._metrics.tokens,
                    mean_reward=directory.state.rewards.mean,
                    waiting=not executor.stats.is_available,
                    retries=counts.retries,
                    reward_failed=counts.reward_errors,
                    limit=limit,
                    replicas=execution.replicas(),
                )

            self.reporter.begin(self._tracked(), directory.manifest.created)
            on_ready(executor)
            work = asyncio.ensure_future(executor.run(keys.owed(order, retry_failed=settings.retry_failed)))
            companions = {
                asyncio.ensure_future(self._stop_when_asked(executor)),
                asyncio.ensure_future(self.reporter.run(observe, executor.stats.engine)),
            }
            watched = {writer.failed, *companions}
            if settings.show_progress and "console" in plan.settings.trainer.logger:
                progress = asyncio.ensure_future(show_progress(observe, console))
                shown.push_async_callback(_cancelled, progress)
                watched.add(progress)
            try:
                await _until_done(work, watched)
            finally:
                executor.drop()
                await _cancelled(*companions)
                await asyncio.gather(work, return_exceptions=True)
            if self._gave_up is not None:
                logger.error("stopping: %s", self._gave_up)
            if executor.counters.dropped:
                logger.info("dropped %d rollouts in flight; they are owed again", executor.counters.dropped)

    async def _export(self) -> ConfigError | StorageError | None:
        """Writes the artifact in further formats; one that cannot be written is in no other's way.

        Returns the first error; further ones are logged. Raises `DamageError`, `StoppedEarly`.
        """
        first: ConfigError | StorageError | None = None
        paths, pad_id = self.directory.paths, self.plan.setup.pad_id

        def write(name: str, cancelled: Callable[[], bool]) -> int:
            options: dict[str, Any] = {}
            if name == "dataproto":
                options = {"pad_token_id": pad_id or 0, "unscored": self._settings.export_unscored}
            return write_export(
                paths.artifact,
                name,
                paths.root / file_name(name),
                self.directory.manifest,
                root=paths.root,
                options=options,
                images=self.plan.export_images,
                cancelled=cancelled,
            )

        for name in dict.fromkeys(self._settings.export):
            try:
                await self._interruptible(partial(write, name))
            except (ConfigError, StorageError) as error:
                if isinstance(error, ConfigError):
                    error = ConfigError(
                        f"generation.export={name} of {paths.artifact} failed: {error} (see also "
                        "generation.export_unscored)"
                    )
                if first is not None:
                    logger.error("%s", error)
                first = first or error
        return first

    def _tracked(self) -> TrackedRun:
        run = self.directory
        return tracked_run(run.paths.root, run.manifest, asdict(self.plan.settings))

    async def _interruptible(self, work: Callable[[Callable[[], bool]], int]) -> int:
        """Runs `work` in a thread; told to stop, it has ended when this raises, so the lock may go."""
        cancelled = threading.Event()
        task = asyncio.ensure_future(in_daemon_thread(work, cancelled.is_set))
        try:
            return await self.stop.unless_stopped(asyncio.shield(task))
        except (StoppedEarly, asyncio.CancelledError):
            cancelled.set()
            await finish_despite_cancellation(asyncio.gather(task, return_exceptions=True))
            raise

    def _count(self, result: Result) -> None:
        if not isinstance(result, Failure):
            self._metrics.add(result)
            if self.on_rollout is not None:
                self.on_rollout(result if isinstance(result, Rollout) else self._codec.decode(result.body))
            return
        self._metrics.add_failure(result)
        level = logging.WARNING if self._window.failed <= _FAILURES_SAID else logging.DEBUG
        logger.log(
            level,
            "rollout (%d, %d) failed after %d attempts: %s",
            result.index,
            result.repeat,
            result.attempts,
            result.error,
        )

    async def _stop_when_asked(self, executor: Executor) -> None:
        await self.stop.requested.wait()
        executor.stop()
        logger.warning(
            "stopping: nothing new is started; %d in flight get %g s to finish (again: stop at once)",
            executor.in_flight,
            self._settings.grace_period,
        )
        await asyncio.sleep(self._settings.grace_period)
        executor.drop()

    def _write_checkpoint(self) -> None:
        run = self.directory
        try:
            write_checkpoint(run.paths, run.manifest, run.state, total=self.plan.total)
        except (OSError, RunDirectoryError) as error:
            logger.warning("cannot write checkpoint.json: %s", error)


async def _cancelled(*futures: "asyncio.Future[None]") -> None:
    for future in futures:
        future.cancel()
    await asyncio.gather(*futures, return_exceptions=True)


async def _until_done(work: "asyncio.Future[None]", companions: "set[asyncio.Future[None]]") -> None:
    """Awaits `work`; a companion that fails meanwhile ends the wait with its error (R10)."""
    waiting = {work, *companions}
    while not work.done():
        done, waiting = await asyncio.wait(waiting, return_when=asyncio.FIRST_COMPLETED)
        for future in done - {work}:
            future.result()
    # When the writer broke, every rollout in flight says so too: the first cause counts.
    for future in companions:
        if future.done() and not future.cancelled():
            future.result()
    work.result()
