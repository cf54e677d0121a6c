"""Formats of others: training examples, a Hugging Face dataset, ATIF, the log of inspect_ai."""

from pathlib import Path

from rollstream.store.export.format import ExportCall, ExportFormat


def _sft(call: ExportCall) -> int:
    from rollstream.integrations.exports.examples import SftOptions, export_sft

    options = SftOptions(**call.options)
    return export_sft(call.artifact, call.target, options, call.cancelled, tools=call.manifest.tools)


def _preference(call: ExportCall) -> int:
    from rollstream.integrations.exports.examples import PreferenceOptions, export_preference

    options = PreferenceOptions(**call.options)
    return export_preference(call.artifact, call.target, options, call.cancelled, tools=call.manifest.tools)


def _hf(call: ExportCall) -> int:
    from rollstream.integrations.exports.hf import check_login, export_hf, push_folder

    repo = call.options.get("push")
    if repo is not None:
        check_login()
    rows = export_hf(call.artifact, call.target, call.manifest, call.cancelled)
    if repo is not None:
        push_folder(call.target, repo, public=call.options.get("public", False))
    return rows


def _check_folder(target: Path) -> None:
    from rollstream.integrations.exports.hf import check_replaceable

    check_replaceable(target)


def _atif(call: ExportCall) -> int:
    from rollstream.integrations.exports.interchange import export_atif

    return export_atif(call.artifact, call.target, call.manifest, call.cancelled)


def _inspect(call: ExportCall) -> int:
    from rollstream.integrations.exports.interchange import export_inspect

    return export_inspect(call.artifact, call.target, call.manifest, call.cancelled)


SFT = ExportFormat(
    "examples for supervised fine-tuning, a line each, without duplicates",
    "_sft.jsonl",
    _sft,
    {
        "--best": {
            "type": int,
            "metavar": "N",
            "help": "only the N best rollouts of each prompt (default: all)",
        },
        "--min-reward": {"type": float, "metavar": "X", "help": "only rollouts with a reward of X or more"},
        "--tokens": {
            "action": "store_true",
            "help": "write sampled token ids with a mask instead of messages",
        },
    },
)

PREFERENCE = ExportFormat(
    "pairs of rollouts of one prompt, a line each",
    "_preference.jsonl",
    _preference,
    {
        "--pairs": {
            "choices": ["best", "all"],
            "help": "best: each prompt's best and worst rollout; all: every two whose rewards differ (default: best)",
        },
        "--min-margin": {
            "type": float,
            "metavar": "X",
            "help": "only pairs whose rewards differ by X or more",
        },
    },
)

HF = ExportFormat(
    "a folder that datasets.load_dataset reads, with a card",
    "_hf",
    _hf,
    {
        "--push": {
            "metavar": "REPO",
            "help": "upload it to the Hugging Face hub (log in first)",
        },
        "--public": {"action": "store_true", "help": "make a new REPO public (default: private)"},
    },
    _check_folder,
)

ATIF = ExportFormat("Harbor's interchange format, one trajectory a line", "_atif.jsonl", _atif)

INSPECT = ExportFormat("a log of inspect_ai", ".eval", _inspect)
