"""The formats that need no other program: the artifact itself, JSON Lines, a zip, verl's DataProto."""

import shutil
from pathlib import Path

from rollstream.errors import ConfigError
from rollstream.store.export.format import ExportCall, ExportFormat


def _parquet(call: ExportCall) -> int:
    from rollstream.store.batch import file_rows
    from rollstream.store.export.files import replacing

    if call.target.resolve() != call.artifact.resolve():
        with replacing(call.target) as temporary:
            shutil.copyfile(call.artifact, temporary)
    return file_rows(call.target)


def _jsonl(call: ExportCall) -> int:
    from rollstream.store.export.files import export_lines

    return export_lines(call.artifact, call.target, cancelled=call.cancelled)


def _zip(call: ExportCall) -> int:
    from rollstream.store.batch import file_rows
    from rollstream.store.export.files import export_zip

    summary = call.root / "checkpoint.json"
    export_zip(call.artifact, call.target, summary=summary, cancelled=call.cancelled)
    return file_rows(call.artifact)


def _dataproto(call: ExportCall) -> int:
    from rollstream.store.export.dataproto import DataProtoOptions, export_dataproto

    options, manifest = dict(call.options), call.manifest
    if "pad_token_id" not in options:
        if manifest.pad_token_id is None and manifest.identity.get("model.tokenizer", "") is not None:
            raise ConfigError(f"{call.root / 'run.json'} has no pad_token_id: say it by --pad-token-id")
        options["pad_token_id"] = manifest.pad_token_id or 0
    return export_dataproto(
        call.artifact,
        call.target,
        call.cancelled,
        options=DataProtoOptions(**options),
        images=call.images,
        sampling=manifest.sampling_changes,
    )


PARQUET = ExportFormat("the run's trajectories.parquet", ".parquet", _parquet)

JSONL = ExportFormat("one trajectory a line", ".jsonl", _jsonl)

ZIP = ExportFormat(
    "trajectories.parquet and checkpoint.json in a zip",
    ".zip",
    _zip,
    {
        "--upload": {
            "nargs": "?",
            "const": True,
            "metavar": "NAME",
            "help": "upload it to W&B as an artifact of type trajectories (default: trajectories-EXPERIMENT, of a "
            "shard with -I-of-K)",
        }
    },
)

DATAPROTO = ExportFormat(
    "a pickle that verl.DataProto.load_from_disk reads",
    ".pkl",
    _dataproto,
    {
        "--unscored": {
            "choices": ["error", "keep", "drop"],
            "help": "if some rows have no reward: stop, keep all without rm_scores, or drop those (default: error)",
        },
        "--max-rows-per-file": {
            "type": int,
            "metavar": "N",
            "help": "write several files of N rows: FILE-00000-of-00004.pkl and so on",
        },
        "--prompt-width": {
            "type": int,
            "metavar": "N",
            "help": "pad prompts to N tokens (default: the longest)",
        },
        "--response-width": {
            "type": int,
            "metavar": "N",
            "help": "pad responses to N tokens (default: the longest)",
        },
        "--pad-token-id": {"type": int, "metavar": "ID", "help": "default: that of the run's tokenizer"},
        "--config": {
            "type": Path,
            "metavar": "FILE",
            "help": "configuration with model and prompt rows; needed to read images",
        },
    },
)
