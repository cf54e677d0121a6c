"""Make the demo model: ``python -m demo_model.make``, from the repository's root."""

import argparse
import json
import logging
import shutil
import time
from pathlib import Path

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, Qwen2Tokenizer

from demo_model.evaluate import Report, evaluate_model
from demo_model.export import export_openvino, make_environment, round_weights, save_model
from demo_model.parity import compare_forms
from demo_model.problems import Split
from demo_model.tokenizer import train_tokenizer
from demo_model.train import Recipe, Run, train_model

log = logging.getLogger("demo_model")

_ROOT = Path(__file__).parents[1]
WANTED = (0.50, 0.75)
"""The band of validation accuracy at temperature 1 a run has to end in: good enough that most groups of
samples hold a right one, bad enough that training has something to improve."""


class NoneFits(RuntimeError):
    """No seed ended in the wanted band."""


def main() -> None:
    """Train, choose, export, check, and put the model in its place."""
    options = _read_options()
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(name)s: %(message)s")
    torch.set_num_threads(options.threads)
    begin = time.monotonic()
    tokenizer = train_tokenizer()
    candidates = []
    for seed in options.seeds:
        run = train_model(seed, tokenizer, Recipe())
        round_weights(run.model)
        report = evaluate_model(run.model, tokenizer, Split.VALIDATION)
        log.info("seed %d: %d steps in %.0f s; %s", seed, run.steps, run.seconds, report.to_json())
        candidates.append((run, report))
    chosen = choose_run(candidates)
    log.info("chosen: seed %d", chosen.seed)
    staged = _write_staged(chosen, tokenizer, options.out, options.build)
    difference = compare_forms(staged)
    # Measured on what was written, not on what was trained.
    report = evaluate_model(
        AutoModelForCausalLM.from_pretrained(staged), AutoTokenizer.from_pretrained(staged), Split.TEST
    )
    _put_in_place(staged, options.out)
    figures = {
        "seed": chosen.seed,
        "steps": chosen.steps,
        "train_seconds": round(chosen.seconds),
        "test": json.loads(report.to_json()),
        "openvino_max_logprob_difference": difference,
        "bytes": {file.name: file.stat().st_size for file in sorted(options.out.iterdir())},
        "seconds": round(time.monotonic() - begin),
    }
    (options.build / "report.json").write_text(json.dumps(figures, indent=2) + "\n")
    log.info("%s", json.dumps(figures, indent=2))


def choose_run(candidates: list[tuple[Run, Report]]) -> Run:
    """Choose the best run with the tool among those that end in the wanted band without it.

    Raises:
        NoneFits: if none ends there.
    """
    low, high = WANTED
    fitting = [(run, report) for run, report in candidates if low <= report.expected <= high]
    if not fitting:
        raise NoneFits(
            f"validation accuracies {[round(report.expected, 3) for _, report in candidates]} "
            f"are all outside {WANTED}: try other --seeds"
        )
    return max(fitting, key=lambda pair: (pair[1].with_tool, pair[1].expected))[0]


def _write_staged(run: Run, tokenizer: Qwen2Tokenizer, out: Path, build: Path) -> Path:
    """Write all files beside their place, on the same file system."""
    staged = out.with_name(out.name + ".new")
    shutil.rmtree(staged, ignore_errors=True)
    staged.mkdir(parents=True)
    save_model(run.model, tokenizer, staged)
    export_openvino(staged, make_environment(build / "export-env"))
    return staged


def _put_in_place(staged: Path, out: Path) -> None:
    """Swap the new folder for the old: at no time is a half-written one there."""
    old = out.with_name(out.name + ".old")
    shutil.rmtree(old, ignore_errors=True)
    if out.exists():
        out.rename(old)
    staged.rename(out)
    shutil.rmtree(old, ignore_errors=True)


def _read_options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m demo_model.make", description=__doc__)
    parser.add_argument(
        "--out", type=Path, default=_ROOT / "src/rollstream/demo/model", help="where the model goes"
    )
    parser.add_argument(
        "--build", type=Path, default=_ROOT / "build/demo_model", help="export environment, report"
    )
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1], help="one training run each")
    parser.add_argument("--threads", type=int, default=2, help="torch's threads")
    return parser.parse_args()


if __name__ == "__main__":
    main()
