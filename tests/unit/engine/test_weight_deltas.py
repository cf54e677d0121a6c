"""Weights as files of what changed: any of them give the whole, or nothing."""

import contextlib
import json
import os
import pickle
from collections.abc import Iterator
from pathlib import Path
from tempfile import TemporaryDirectory
from threading import Event, Thread
from typing import Any

import pytest
import torch
import zstandard
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM

from rollstream.demo import MODEL_PATH
from rollstream.engine.weight_copy import bring_up_to_date, newest_version, say_arrived
from rollstream.engine.weight_deltas import DeltaChannel
from rollstream.errors import DamageError, WeightUpdateError

SIZES = {"a": torch.bfloat16, "b": torch.float32, "c": torch.int8, "none": torch.float16, "one": torch.bool}


def state_of(seed: int, rows: int = 40) -> dict[str, torch.Tensor]:
    random = torch.Generator().manual_seed(seed)
    shapes: dict[str, tuple[int, ...]] = {"a": (rows, 50), "b": (50, 3), "c": (7,), "none": (0, 4), "one": ()}
    return {
        name: torch.randint(0, 2, shape, generator=random).to(SIZES[name]) for name, shape in shapes.items()
    }


def write(channel: DeltaChannel, state: dict[str, torch.Tensor]) -> None:
    """Nobody copies: what was written stays, and the trainer is told."""
    with pytest.raises(WeightUpdateError, match="no copy of"):
        channel.put(None, state)


def same(copy: Path, state: dict[str, torch.Tensor]) -> bool:
    found = load_file(copy / "model.safetensors")
    return found.keys() == state.keys() and all(
        found[name].dtype == one.dtype and torch.equal(found[name], one) for name, one in state.items()
    )


CHANGE = st.one_of(
    st.tuples(
        st.just("set"), st.sampled_from(["a", "b", "c"]), st.integers(0, 6), st.floats(0, 100, width=16)
    ),
    st.tuples(st.sampled_from(["all", "grow", "trainer", "look", "late", "nothing"])),
)


@settings(max_examples=40, deadline=None)
@given(st.lists(CHANGE, max_size=25))
def test_any_sequence_of_changes_is_the_full_state_bit_for_bit(changes: list[tuple[Any, ...]]) -> None:
    with TemporaryDirectory() as root:
        source, copies, late = (Path(root, name) for name in ("source", "copies", "late"))
        channel, state = DeltaChannel(source, timeout=0), state_of(0)
        for folder in (copies, late):
            folder.mkdir()
        for at, (kind, *given) in enumerate([("look",), *changes, ("late",)]):
            if kind == "set":
                name, where, value = given
                state[name] = state[name].clone()
                state[name].view(-1)[where] = int(value) if name == "c" else value
            elif kind == "all":
                state = state_of(at, len(state["a"]))
            elif kind == "grow":
                state = state_of(at, len(state["a"]) + 1)
            elif kind == "trainer":
                channel = DeltaChannel(source, timeout=0)
            write(channel, state)
            if kind in ("look", "late"):
                copy = bring_up_to_date(source, late if kind == "late" else copies)
                assert copy is not None and same(copy, state)
        assert len([*copies.iterdir()]) <= 2
        sizes = sum(path.stat().st_size for path in source.glob("*.safetensors"))
        whole = max(path.stat().st_size for path in source.glob("*.whole.safetensors"))
        assert sizes < 6 * whole + 60 * 1000  # headers


@pytest.fixture
def source(tmp_path: Path) -> Path:
    """Two versions, of which `copies` has the first."""
    (tmp_path / "copies").mkdir()
    channel = DeltaChannel(tmp_path / "source", timeout=0)
    for seed in (0, 1):
        write(channel, state_of(seed))
        if not seed:
            bring_up_to_date(tmp_path / "source", tmp_path / "copies")
    (delta,) = (tmp_path / "source").glob("*.delta.safetensors")
    assert newest_version(tmp_path / "source") == delta.name.partition(".")[0]
    return tmp_path / "source"


def damaged(data: bytes) -> Iterator[bytes]:
    yield from (data[:size] for size in range(0, len(data), 37))
    for at in range(0, len(data), 11):
        yield data[:at] + bytes([data[at] ^ 0x10]) + data[at + 1 :]


def test_a_damaged_file_is_no_version(source: Path) -> None:
    copies, (delta,) = source.parent / "copies", source.glob("*.delta.safetensors")
    right, before = delta.read_bytes(), {path.name for path in copies.iterdir()}
    refused = 0
    for data in damaged(right):
        delta.write_bytes(data)
        try:
            copy = bring_up_to_date(source, copies)
            assert copy is not None and same(copy, state_of(1))  # it was a byte that says nothing
            for file in (*copy.iterdir(), copy):
                file.rmdir() if file.is_dir() else file.unlink()
        except DamageError:
            refused += 1
        assert {path.name for path in copies.iterdir()} == before
    assert refused > 30
    delta.write_bytes(right)
    (base,) = copies.glob("*/model.safetensors")
    data = bytearray(base.read_bytes())
    data[-1] ^= 1
    base.write_bytes(data)
    with pytest.raises(DamageError, match=r"is not the trainer's|does not come of"):
        bring_up_to_date(source, copies)


HEADERS = [
    *([], {"a": 1}, {"a": {"data_offsets": 5}}, {"__metadata__": []}, {"__metadata__": {"checksums": "{}"}}),
    *(
        {"__metadata__": {"base": base, "checksums": "{}"}}
        for base in (5, "../../evil", "00000002-" + "a" * 32)
    ),
]
"""Of files of version 2; the last one says that it comes of itself."""


@pytest.mark.parametrize("header", HEADERS)
def test_a_file_that_says_anything_is_no_version(source: Path, header: Any) -> None:
    data = json.dumps(header).encode()
    path = source / f"00000002-{'a' * 32}.delta.safetensors"
    path.write_bytes(len(data).to_bytes(8, "little") + data)
    with pytest.raises(DamageError, match="no file of a trainer's weights"):
        bring_up_to_date(source, source.parent / "copies")


def test_a_change_is_no_larger_than_its_tensor(source: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """R7: what it says of its size is believed by nobody."""
    bomb = torch.frombuffer(bytearray(zstandard.compress(bytes(1 << 24))), dtype=torch.uint8)
    copy = bring_up_to_date(source, source.parent / "copies")
    assert copy is not None
    path = source / f"00000002-{'a' * 32}.delta.safetensors"
    save_file({"a": bomb}, path, {"base": copy.name, "checksums": "{}"})
    monkeypatch.setattr(zstandard, "decompress", None)
    with pytest.raises(DamageError, match=rf"changes {1 << 24} bytes"):
        bring_up_to_date(source, source.parent / "copies")


def test_the_copy_that_was_made_stays_whatever_the_clock_says(source: Path) -> None:
    copies, channel = source.parent / "copies", DeltaChannel(source, timeout=0)
    for seed in (1, 2, 3):
        for one in copies.iterdir():
            os.utime(one, (4e9, 4e9))
        write(channel, state_of(seed))
        copy = bring_up_to_date(source, copies)
        assert copy is not None and same(copy, state_of(seed)) and len([*copies.iterdir()]) == 2


def test_words_of_copies_that_cannot_be_read_end_nobody(
    source: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    copies, said = source.parent / "copies", source / "copies"
    copy = bring_up_to_date(source, copies)
    assert copy is not None
    say_arrived(source, copy)
    (own,) = said.iterdir()
    own.write_bytes(b"\xff")
    (said / "gone").symlink_to("nowhere")
    write(DeltaChannel(source, timeout=0), state_of(1))  # a new trainer, which removes them
    assert not [*said.iterdir()]
    own.write_bytes(b"\xff")
    (said / "gone").symlink_to("nowhere")
    say_arrived(source, copy)
    assert own.read_text() == str(copy)
    own.write_bytes(b"\xff")
    channel = DeltaChannel(source, timeout=0)
    channel._version = copy.name  # it has written before
    write(channel, state_of(1))


def test_a_disk_that_is_full_is_said_as_such(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: object) -> None:
        raise SafetensorError("I/O error: No space left on device (os error 28)")

    monkeypatch.setattr("safetensors.torch.save_file", full)
    with pytest.raises(WeightUpdateError, match="No space left"):
        DeltaChannel(tmp_path).put(None, state_of(0))


def test_a_gap_begins_with_a_whole_version_and_is_named_where_there_is_none(source: Path) -> None:
    (whole,) = source.glob("*.whole.safetensors")
    other = source.parent / "other"
    other.mkdir()
    hidden = whole.rename(source / "hidden")
    with pytest.raises(DamageError, match=f"lacks {whole.name[:8]}-.* neither there nor in"):
        bring_up_to_date(source, other)
    assert not [*other.iterdir()]
    hidden.rename(whole)
    for half_removed in source.glob("*.safetensors"):
        (other / half_removed.name.partition(".")[0]).mkdir(exist_ok=True)
    copy = bring_up_to_date(source, other)
    assert copy is not None and same(copy, state_of(1))


@pytest.mark.parametrize("name", ["fsync", "rename"])
def test_an_end_at_any_step_leaves_the_old_version_or_the_new_one(
    source: Path, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    copies, of = source.parent / "copies", os if name == "fsync" else Path
    plain, left = getattr(of, name), [0]

    def ends(*args: Any) -> Any:
        left[0] -= 1
        if not left[0]:
            raise OSError("the machine is off")
        return plain(*args)

    monkeypatch.setattr(of, name, ends)
    trainer, state, reached = DeltaChannel(source, timeout=0), state_of(1), set()
    for step in range(1, 40):
        state = {**state, "c": state["c"] + 1}
        left[0] = step
        with contextlib.suppress(OSError, WeightUpdateError):
            trainer.put(None, state)
        reached.add(left[0] > 0)
        left[0] = step % 5 + 1
        with contextlib.suppress(OSError):
            bring_up_to_date(source, copies)
        found = [path for path in copies.iterdir() if not path.name.startswith("rollstream-")]
        assert found and all(int(load_file(path / "model.safetensors")["c"][0]) <= step + 1 for path in found)
        if step % 7 == 0:
            trainer = DeltaChannel(source, timeout=0)
        left[0] = 0
        write(trainer, state)
        copy = bring_up_to_date(source, copies)
        assert copy is not None and same(copy, state)
    assert reached == {True, False} and not list(copies.glob("rollstream-*"))


def test_a_trainer_is_told_where_a_copy_is(tmp_path: Path) -> None:
    over, copies = Event(), tmp_path / "copies"
    copies.mkdir()

    def follow() -> None:
        while not over.wait(0.01):
            if copy := bring_up_to_date(tmp_path / "source", copies):
                say_arrived(tmp_path / "source", copy)

    model = AutoModelForCausalLM.from_pretrained(MODEL_PATH, dtype=torch.float32)
    (tmp_path / "source" / "copies").mkdir(parents=True)
    (tmp_path / "source" / "copies" / "gone").write_text("/of/a/machine/of/before")
    channel = DeltaChannel(tmp_path / "source", dtype="bfloat16", timeout=60)
    thread = Thread(target=follow)
    thread.start()
    try:
        for _ in range(2):
            copy = pickle.loads(pickle.dumps(channel.put(model)))  # as actors of Ray get it
            assert Path(copy).parent == copies and len(copy.logprobs or []) == 23
            loaded = load_file(Path(copy, "model.safetensors"))
            assert torch.equal(loaded["model.norm.weight"], model.model.norm.weight.bfloat16())
            assert "lm_head.weight" not in loaded  # it is the embedding
            with torch.no_grad():
                model.model.norm.weight.add_(1)
    finally:
        over.set()
        thread.join()
