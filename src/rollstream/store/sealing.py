"""Sealing: the whole frames of one journal file become one batch of the same number."""

from collections.abc import Iterable
from pathlib import Path

from rollstream.store.batch import BATCH_FORMAT, build_table, write_table_durably
from rollstream.store.journal import Frame, ScanReport, scan
from rollstream.store.records import RecordCodec, RolloutRecord


def batch_metadata(run_id: bytes) -> dict[str, str]:
    """Key-value metadata of every Parquet file of a run."""
    return {"rollstream.format": BATCH_FORMAT, "rollstream.run_id": run_id.hex()}


def seal_journal(journal: Path, batch: Path, run_id: bytes) -> ScanReport:
    """Writes the batch durably. Deleting or keeping aside the journal is the caller's.

    A batch is written even when some frames are damaged; the report says so. When there is no whole
    frame, no batch is written.
    """
    report = ScanReport()
    records = decode_frames(scan(journal, run_id, report))
    if records:
        write_table_durably(batch, build_table(records), batch_metadata(run_id))
    return report


def decode_frames(frames: Iterable[Frame]) -> list[RolloutRecord]:
    """Rollout records of frames; of frames with the same key, the first counts."""
    codec = RecordCodec()
    records: dict[tuple[int, int], RolloutRecord] = {}
    for frame in frames:
        if (frame.index, frame.repeat) not in records:
            records[frame.index, frame.repeat] = codec.decode_rollout(frame.body)
    return list(records.values())
