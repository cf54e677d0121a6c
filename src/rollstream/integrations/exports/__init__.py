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
    "examples for supervised fine-tuning, a line each, none twice",
    "_sft.jsonl",
    _sft,
    {
        "--best": {"type": int, "metavar": "N", "help": "the N best of each prompt (default: all)"},
        "--min-reward": {"type": float, "metavar": "X", "help": "only those with at least this reward"},
        "--tokens": {
            "action": "store_true",
            "help": "the sampled token ids with a mask, instead of chat messages",
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
            "help": "the best with the worst of each prompt, or all whose rewards differ (default: best)",
        },
        "--min-margin": {"type": float, "metavar": "X", "help": "rewards differ by at least this"},
    },
)

HF = ExportFormat(
    "a folder that datasets.load_dataset reads, with a card",
    "_hf",
    _hf,
    {
        "--push": {
            "metavar": "REPO",
            "help": "upload it to the Hugging Face hub, where you are logged in",
        },
        "--public": {"action": "store_true", "help": "a new REPO is public (default: private)"},
    },
    _check_folder,
)

ATIF = ExportFormat("Harbor's interchange format, a trajectory a line", "_atif.jsonl", _atif)

INSPECT = ExportFormat("a log of inspect_ai", ".eval", _inspect)
