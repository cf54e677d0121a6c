"""`rollstream select`: the prompt rows whose rollouts went a certain way, for the next training.

runs --> figures of each prompt --filter--> prompt keys --> the rows that have them, as their files have them
"""

import argparse
import random
import re
import sys
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from rollstream.errors import ConfigError
from rollstream.evaluate.command import add_reading

if TYPE_CHECKING:
    from rollstream.data.prompts import PromptDataset
    from rollstream.evaluate.prompt_figures import PromptFigures

EPILOG = """\
examples:
  rollstream select outputs/run --prompts train.jsonl --where 'pass_rate between 0.2 and 0.8' --output next.jsonl
  rollstream select outputs/run --prompts train.parquet --where 'std_reward > 0' --output next.jsonl \\
      --control control.jsonl --not-in test.jsonl

columns of --where, over the rollouts of a prompt: pass_rate, mean_reward, std_reward, rollouts, failed, unscored,
truncated (a share), tokens and turns (means), data_source. Syntax of filters: docs/view.md

exit codes: 0 done; 1 no row was chosen; 2 wrong usage. docs/evaluate.md
"""

_WORD: Final = re.compile(r"\w+")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The options of `select`."""
    parser.add_argument("runs", type=Path, nargs="+", metavar="DIR", help="runs, as for `rollstream eval`")
    parser.add_argument(
        "--where", required=True, metavar="FILTER", help="which prompts to take, by the columns below"
    )
    parser.add_argument("--output", type=Path, required=True, metavar="FILE", help="JSON Lines file to write")
    rows = parser.add_mutually_exclusive_group(required=True)
    rows.add_argument(
        "--prompts", action="append", metavar="FILE", help="file of the runs' prompt rows; may be repeated"
    )
    rows.add_argument(
        "--config", type=Path, metavar="FILE", help="configuration of the runs, instead of --prompts"
    )
    parser.add_argument("--prompt-key", metavar="NAME", help="column with the prompt (default: prompt)")
    parser.add_argument(
        "--control",
        type=Path,
        metavar="FILE",
        help="also write as many random rows of the runs, for comparison",
    )
    parser.add_argument("--seed", type=int, default=0, help="seed of --control (default: %(default)s)")
    parser.add_argument(
        "--not-in",
        action="append",
        default=[],
        metavar="FILE",
        help="leave out rows that share --ngram successive words with a prompt of FILE (a test set); may be repeated",
    )
    parser.add_argument(
        "--ngram",
        type=int,
        default=13,
        metavar="N",
        help="successive words for --not-in (default: %(default)s)",
    )
    add_reading(parser)
    parser.add_argument("--force", action="store_true", help="overwrite files that exist")
    parser.add_argument("--json", action="store_true")


def run(options: argparse.Namespace) -> int:
    """Executes a parsed command line. Raises `ConfigError`, `DataError`."""
    import orjson

    targets = [options.output] if options.control is None else [options.output, options.control]
    taken = {Path(name).resolve() for name in (*(options.prompts or ()), *options.not_in)}
    for target in targets:
        if target.resolve() in taken:
            raise ConfigError(f"{target} is read, or written already: take another name")
        taken.add(target.resolve())
        if target.exists() and not options.force:
            raise ConfigError(f"{target} exists: --force overwrites it")
    if options.ngram < 1:
        raise ConfigError("--ngram: numbers from 1")
    figures = _figures(options)
    wanted, rates = _chosen(figures, options.where), figures.pass_rates()
    layer: Any = {"data": {"train_files": options.prompts}} if options.config is None else options.config
    dataset = _rows(options, layer)
    judged = [(index, key) for index, key in enumerate(dataset.prompt_keys()) if key in rates]
    if not judged:
        raise ConfigError(
            f"none of the {len(dataset)} rows has rollouts in {options.runs[0]}: name the rows that the run had, as "
            f"--config {options.runs[0] / 'config.yaml'} does (a prompt key is a hash of all that is in a row, also of "
            "what data.sources says of it)"
        )
    fresh, known = judged, _ngrams_of(options)
    if options.not_in:
        fresh = [
            (index, key) for index, key in judged if known.isdisjoint(_ngrams(dataset, index, options.ngram))
        ]
    chosen = [(index, key) for index, key in fresh if key in wanted]
    report = {
        "rows": len(dataset),
        "with_rollouts": len(judged),
        "left_out": len(judged) - len(fresh),
        "chosen": len(chosen),
        "output": str(options.output),
    }
    if chosen:
        _write(options.output, dataset, chosen, rates)
    if chosen and options.control is not None:
        drawn = random.Random(options.seed).sample(range(len(fresh)), len(chosen))
        _write(options.control, dataset, [fresh[at] for at in sorted(drawn)], rates)
        report["control"] = str(options.control)
    if options.json:
        sys.stdout.write(orjson.dumps(report, option=orjson.OPT_INDENT_2).decode() + "\n")
    else:
        sys.stdout.write(_summary(report, options))
    return 0 if chosen else 1


def _figures(options: argparse.Namespace) -> "PromptFigures":
    from rollstream.evaluate.prompt_figures import PromptFigures
    from rollstream.evaluate.samples import joined, labels_of_run, read_runs

    samples, sources = [], list[str | None]()
    for judged in read_runs(options.runs, scores=options.scores):
        for line in judged.rows.damage:
            sys.stderr.write(f"damaged: {line}\n")
        if len(judged.samples):
            samples.append(judged.samples)
            sources += labels_of_run(judged.rows, "data_source")
    if not samples:
        raise ConfigError(f"{options.runs[0]} holds no rollout yet")
    return PromptFigures(joined(samples), sources, options.solved_at)


def _chosen(figures: "PromptFigures", where: str) -> set[str]:
    """The keys of the prompts that pass a filter."""
    from rollstream.store.filter import Filter, FilterError

    try:
        passing = Filter(where, figures).rows(figures)
    except FilterError as error:
        raise ConfigError(f"--where {where!r}, character {error.position}: {error}") from error
    return {key for key, passes in zip(figures.keys, passing.tolist(), strict=True) if passes}


def _rows(options: argparse.Namespace, layer: Mapping[str, Any] | Path) -> "PromptDataset":
    """The prompt rows that a layer of configuration names. Raises `ConfigError`, `DataError`."""
    from rollstream.config.load import compose, to_settings
    from rollstream.data.prompts import load_prompts
    from rollstream.data.task_cache import resolve_tasks_into_config

    own = {} if options.prompt_key is None else {"data": {"prompt_key": options.prompt_key}}
    every = {"data": {"train_max_samples": -1, "shuffle": False}}
    return load_prompts(to_settings(resolve_tasks_into_config(compose(layers=[layer, own, every]))).data)


def _ngrams_of(options: argparse.Namespace) -> set[tuple[str, ...]]:
    """The runs of words of the prompts in all files of `--not-in`."""
    if not options.not_in:
        return set()
    others = _rows(options, {"data": {"train_files": options.not_in}})
    return {ngram for index in range(len(others)) for ngram in _ngrams(others, index, options.ngram)}


def _ngrams(dataset: "PromptDataset", index: int, size: int) -> Iterator[tuple[str, ...]]:
    """The runs of so many words in a prompt, without case and punctuation; a shorter prompt is one, and one without
    words, as of images, has none.
    """
    words: list[str] = []
    for message in dataset.row(index).messages:
        content = message.get("content") or ""
        parts = [content] if isinstance(content, str) else [part.get("text", "") for part in content]
        if message.get("role") != "system":  # all rows may have the same
            words += [word for part in parts for word in _WORD.findall(part.lower())]
    for at in range(max(1, len(words) - size + 1) if words else 0):
        yield tuple(words[at : at + size])


def _write(
    target: Path, dataset: "PromptDataset", rows: Iterable[tuple[int, str]], rates: Mapping[str, float | None]
) -> None:
    """Writes rows with their pass rates, whole or not at all. Raises `StorageError`."""
    import orjson

    from rollstream.data.values import PASS_RATE
    from rollstream.store.export.files import replacing

    with replacing(target) as temporary, temporary.open("wb") as file:
        for index, key in rows:
            file.write(orjson.dumps({**dataset.given_row(index), PASS_RATE: rates[key]}) + b"\n")


def _summary(report: Mapping[str, Any], options: argparse.Namespace) -> str:
    lines = [
        f"{report['chosen']} of {report['with_rollouts']} rows with rollouts (of {report['rows']}) are "
        f"where {options.where}"
    ]
    if options.not_in:
        lines.append(
            f"left out: {report['left_out']} that share {options.ngram} words with {', '.join(options.not_in)}"
        )
    if report["chosen"]:
        lines.append(f"wrote {report['output']}")
    if "control" in report:
        lines.append(f"wrote {report['control']}: as many at random, of all that are not left out")
    return "\n".join([*lines, ""])
