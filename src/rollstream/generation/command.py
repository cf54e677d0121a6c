"""What `rollstream generate` does, from a parsed command line to the exit code."""

import argparse
import asyncio
import gc
import logging
import os
import shlex
import shutil
import signal
import sys
import tempfile
import traceback
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, nullcontext, redirect_stdout, suppress
from dataclasses import asdict
from pathlib import Path
from typing import Any, TextIO

import orjson
import yaml  # type: ignore[import-untyped]
from omegaconf import DictConfig, OmegaConf

from rollstream.config.load import compose, to_settings, to_yaml
from rollstream.config.settings import Settings
from rollstream.errors import ConfigError, DataError, RollstreamError, RunDirectoryError
from rollstream.generation.logs import log_to_console
from rollstream.generation.plan import GenerationPlan, make_plan, peek_manifest
from rollstream.generation.progress import ProgressConsole, Waits, format_duration, progress_console
from rollstream.generation.result import GenerationResult
from rollstream.generation.run import check_run_directory, generate
from rollstream.generation.trackers import Reporter
from rollstream.rollout.setup import launch_request
from rollstream.stop_signals import StoppedEarly, StopSignals
from rollstream.store.lock import is_locked, lock_holder
from rollstream.store.manifest import identity_differences
from rollstream.store.run_dir import check_positions

logger = logging.getLogger(__name__)

_PROMPT_SHOWN = 2000
"""Characters of the first prompt that a dry run shows to a person."""

_ERROR_SHOWN = 300
"""Characters of an error in the closing lines."""


def run(
    options: argparse.Namespace, layers: Sequence[Mapping[str, Any] | Path], flags: Mapping[str, Any]
) -> int:
    """Executes a parsed `generate` command line; `layers` are laid under its `--config`, `flags` over it."""
    err = progress_console()
    with _standard_output(kept_clean=options.json) as out:
        try:
            log_to_console(err, "warning")
            config = compose(options.overrides, layers=[*layers, *options.config, flags])
            settings = to_settings(config)
            if options.show_config:
                resolved = OmegaConf.to_container(config, resolve=True)
                out.write(_json(resolved) if options.json else to_yaml(config))
                return 0
            log_to_console(err, settings.generation.log_level)
            if options.dry_run:
                asyncio.run(_dry_run(config, out, as_json=options.json))
                return 0
            return _generate(config, out, err, as_json=options.json)
        except RollstreamError as error:
            err.print(f"error: {error}", style="bold red", markup=False, emoji=False, soft_wrap=True)
            logger.debug("%s", traceback.format_exc())
            return 2 if isinstance(error, ConfigError | DataError | RunDirectoryError) else 1


def _generate(config: DictConfig, out: TextIO, err: ProgressConsole, *, as_json: bool) -> int:
    resume = f"resume with: {shlex.join(command_line())}"

    def leave(text: str, number: int) -> None:
        err.say(f"{text}\n{resume}")
        _leave(128 + number, out)

    async def run_until_stopped() -> GenerationResult:
        stop = StopSignals(
            on_second=lambda number: leave("stopped at once; what was counted as done is on disk", number)
        )
        stop.install()
        try:
            return await generate(config, stop=stop, console=err, on_ready=_freeze_garbage)
        except StoppedEarly:
            assert stop.signal is not None
            leave("stopped before anything was generated", stop.signal)
            raise

    result = asyncio.run(run_until_stopped())
    with suppress(OSError) if result.signal == signal.SIGHUP else nullcontext():  # the terminal is closed
        if as_json:
            out.write(_json({**asdict(result), "exit_code": result.exit_code, "complete": result.complete}))
        else:
            out.write(summarise(result) + "\n")
        out.flush()
        if result.signal is not None:
            err.say(resume)
    if result.signal is not None:
        _leave(result.exit_code, out)
    return result.exit_code


def summarise(result: GenerationResult) -> str:
    """How a run ended, for people."""
    where, scored = shlex.quote(str(result.run_dir)), result.completed - result.unscored
    reward = "" if result.mean_reward is None else f", mean reward {result.mean_reward:.4f}"
    if reward and result.unscored:
        reward += f" over {scored} scored"
    counts = f"{result.completed}/{result.total} rollouts done, {result.failed} failed{reward}"
    failed_now = f" and {result.failed_now} failed" if result.failed_now else ""
    this_call = f"; {result.generated} generated{failed_now} in {format_duration(result.elapsed_s)}"
    if result.signal is not None or result.gave_up is not None:
        state = "stopped"
    elif result.generated == result.failed_now == 0 and result.complete:
        state, this_call = "nothing left to do", ""
    else:
        state = "done" if result.complete else "ended"
    lines = [f"{state}: {counts}{this_call}", f"run directory: {result.run_dir}"]
    if result.artifact is not None:
        lines.append(f"artifact: {result.artifact} ({result.artifact_rows} rows)")
    if result.uploaded is not None:
        lines.append(f"uploaded: {result.uploaded}")
    if result.policy_versions is not None and result.policy_versions[0] != result.policy_versions[1]:
        lines.append("policy versions: {} to {}".format(*result.policy_versions))
    for cause in sorted(result.failure_causes, key=lambda cause: -cause.count):
        lines.append(f"{cause.count} failed: {_shortened(cause.example)}")
    if result.failed:
        lines.append(
            f"all failures: rollstream status --failed {where}; again with generation.retry_failed=true"
        )
    if result.gave_up is not None:
        lines.append(f"it stopped by itself: {_shortened(result.gave_up)}")
    if result.tool_calls:
        lines.append(f"tools: {result.tool_calls} calls, {result.tool_errors} of them failed")
    again = f"rollstream score {where} --reward FILE"
    if without_rule := result.unscored - result.reward_failed:
        names = ", ".join(map(repr, list(result.unscored_sources)[:5]))
        # A function leaves one without an error only where it sees whole groups.
        why = f"no reward for {names}; to score them" if names else "a run's end scores whole groups; or"
        lines.append(f"{without_rule} of {result.completed} rollouts are not scored: {why}: {again}")
    if result.reward_failed:
        lines.append(f"the reward failed on {result.reward_failed} rollouts; once it is mended: {again}")
    if result.equal_rewards is not None:
        lines.append(f"all {scored} rewards are {result.equal_rewards:g}: see rollstream show {where} 0")
    if result.damage:
        lines.append(
            f"{len(result.damage)} damaged places were found and redone, see {result.run_dir}/damaged"
        )
    if result.exit_code == 1 and result.complete:
        lines.append(f"that is more than generation.max_failed_share={result.max_failed_share:g} allows")
    if result.completed:
        program = command_line()[0]
        program = program if Path(program).name == "rollstream" else "rollstream"
        lines.append(f"look at it in a browser: {shlex.quote(program)} view {where} --open")
    return "\n".join(lines)


def _shortened(text: str) -> str:
    """The first line of a text, and of that as much as is read."""
    line = text.partition("\n")[0]
    return line if len(line) <= _ERROR_SHOWN else f"{line[: _ERROR_SHOWN - 1]}…"


async def _dry_run(config: DictConfig, out: TextIO, *, as_json: bool) -> None:
    """Prints what a run would be. Raises what the run itself would raise before its first rollout."""
    manifest = peek_manifest(config)
    with Waits() as waits:
        plan = await make_plan(config, manifest, waits.begin)
    settings, setup, dataset = plan.settings, plan.setup, plan.dataset
    reporter = Reporter({}, settings.generation.metrics_port)  # a port in use would end the run
    await reporter.listen()
    await reporter.end_server()
    launched = launched_commands(settings, plan.run_dir / "logs")
    capabilities = {} if launched else await _engine_capabilities(plan)
    row = dataset.row(int(dataset.order[0]))
    tools = plan.prompt_tools(row)
    report: dict[str, Any] = {
        "run_dir": str(plan.run_dir),
        "holds": "nothing yet" if manifest is None else f"a run created {manifest.created}",
        "would_differ": []
        if manifest is None
        else identity_differences(manifest.identity, plan.manifest.identity),
        "prompt_rows": len(dataset.order),
        "rows_in_files": len(dataset),
        "overlong_left_out": None if plan.overlong is None else plan.overlong.removed,
        "rollouts": plan.total,
        "agent_loops": plan.loop_names,
        "tools": [schema["function"]["name"] for schema in setup.agents.tools.schemas],
        "first_prompt_tokens": setup.prompts and setup.prompts.length(row.messages, row.images, tools=tools),
        "first_prompt": row.messages,
        "first_prompt_text": setup.tokenizer and setup.tokenizer.render_text(row.messages, tools=tools),
        "engine": {"name": settings.actor_rollout_ref.rollout.name, **capabilities},
        "launch": launched,
        "identity": plan.manifest.identity,
    }
    if (
        (stored := row.stored_prompt) is not None
        and setup.prompts is not None
        and setup.tokenizer is not None
    ):
        ids = setup.prompts.stored(stored, row.messages, setup.prompts.tools if tools is None else tools)
        text = setup.tokenizer.decode(ids, skip_special_tokens=False)
        report |= {"first_prompt_tokens": len(ids), "first_prompt_text": text}
    out.write(_json(report) if as_json else _dry_run_text(report))
    out.flush()
    adopted, nothing_done = check_run_directory(plan, manifest)
    if adopted is not None and nothing_done:
        logger.warning("nothing is done in %s yet: it would take the new settings", plan.run_dir)
    elif manifest is not None and not nothing_done and settings.generation.resume == "extend":
        check_positions(plan.run_dir, manifest, plan.visited_keys())
    if is_locked(lock := plan.run_dir / "run.lock"):
        raise RunDirectoryError(f"{plan.run_dir} is being written by another run: {lock_holder(lock)}")
    there = next(path for path in (plan.run_dir, *plan.run_dir.absolute().parents) if path.exists())
    if not there.is_dir():
        raise RunDirectoryError(
            f"{there} is a file; trainer.default_local_dir ({plan.run_dir}) must be a folder"
        )
    if not os.access(there, os.W_OK | os.X_OK):
        raise RunDirectoryError(f"cannot write to {there}")
    plan.say_unscored()
    await setup.prepare_reward(plan.scored_sources)
    plan.check_rows()
    if not as_json:
        out.write("dry run: everything resolves, nothing was generated\n")


def launched_commands(settings: Settings, log_dir: Path) -> list[dict[str, Any]]:
    """What would be launched, replica by replica; empty when nothing is. Starts nothing, joins no cluster.

    On Ray, where the cluster decides how many there are, that is one for all.

    Raises:
        ConfigError: it cannot be.
    """
    request = launch_request(settings)
    if request is None:
        return []
    from rollstream.engine.launch.plan import launch_plan

    rollout, path = settings.actor_rollout_ref.rollout, settings.actor_rollout_ref.model.path
    assert path is not None
    plans = launch_plan(
        rollout.name, model_path=path, max_model_len=rollout.max_model_len, request=request, log_dir=log_dir
    )
    return [
        {
            "where": request.where,
            "devices": list(replica.devices),
            "env": {name: value for name, value in replica.env.items() if name != "PYTHONPATH"},
            "command": replica.command("CHOSEN_AT_START"),
        }
        for replica in plans
    ]


async def _engine_capabilities(plan: GenerationPlan) -> dict[str, Any]:
    """What the engine says of itself; it is started for that, and has to be able to do what is asked for."""
    with tempfile.TemporaryDirectory(prefix="rollstream-dry-run-") as folder:
        engine = plan.create_engine(Path(folder))
        try:
            await engine.start()
            plan.setup.check_engine(engine)
            plan.setup.agents.loops.check(plan.loop_names, plan.setup.agent_resources(engine))
            return asdict(engine.capabilities)
        finally:
            await engine.close()


def _dry_run_text(report: Mapping[str, Any]) -> str:
    """The report for a person, as YAML: without digests and messages, and of a long prompt its two ends."""
    shown = {key: value for key, value in report.items() if key not in ("identity", "first_prompt")}
    prompt = shown.pop("first_prompt_text") or ""
    if len(prompt) > _PROMPT_SHOWN:
        prompt = f"{prompt[: _PROMPT_SHOWN // 2]}\n… (--json shows all) …\n{prompt[-_PROMPT_SHOWN // 2 :]}"
    shown["would_differ"] = [f"{key}: {old!r} -> {new!r}" for key, old, new in shown["would_differ"]]
    shown["launch"] = [{**replica, "command": shlex.join(replica["command"])} for replica in shown["launch"]]
    shown["first_prompt"] = prompt.splitlines() or report["first_prompt"]
    plain = orjson.loads(_json({key: value for key, value in shown.items() if value not in (None, [])}))
    return str(yaml.safe_dump(plain, sort_keys=False, allow_unicode=True, width=2**16))


def command_line() -> list[str]:
    """The command line of this process, as a person types it again.

    A program on PATH by its name, one elsewhere by the path it was called by, and everything else
    (`python -m …`, a script) word for word.
    """
    program = Path(sys.argv[0])
    if not program.is_file() or program.suffix == ".py":
        return list(sys.orig_argv)
    on_path = shutil.which(program.name)
    known = on_path is not None and Path(on_path).samefile(program)
    return [program.name if known else sys.argv[0], *sys.argv[1:]]


@contextmanager
def _standard_output(*, kept_clean: bool) -> Iterator[TextIO]:
    """Standard output; `kept_clean`: what others write there meanwhile goes to standard error.

    Others are a `print` in the user's reward function, and libraries and processes that write to file
    descriptor 1.
    """
    real = sys.stdout
    real.flush()
    try:
        is_file = real.fileno() == 1
    except (OSError, ValueError):
        is_file = False  # a test's or a notebook's
    with ExitStack() as stack:
        if kept_clean:
            stack.enter_context(redirect_stdout(sys.stderr))
        if kept_clean and is_file:
            kept = os.dup(1)
            os.dup2(2, 1)
            stack.callback(os.close, kept)
            stack.callback(os.dup2, kept, 1)
            real = stack.enter_context(open(kept, "w", encoding=real.encoding, closefd=False))
        yield real


def _json(value: Any) -> str:
    return orjson.dumps(value, option=orjson.OPT_INDENT_2, default=str).decode() + "\n"


def _freeze_garbage() -> None:
    """Takes what the start made (a million objects of imported modules) out of the garbage collector's way.

    Walking them again and again costs a tenth of a run's CPU. Only the command line does this: a process
    that embeds rollstream is not ours to tune.
    """
    gc.collect()
    gc.freeze()


def _leave(code: int, out: TextIO) -> None:
    """Ends the process without waiting for threads: everything that counts is on disk."""
    for stream in (out, sys.stdout, sys.stderr):
        with suppress(OSError):
            stream.flush()
    logging.shutdown()
    os._exit(code)
