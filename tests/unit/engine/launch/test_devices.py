"""Devices, from what the vendors' tools print."""

import os
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rollstream.engine.launch.devices import (
    Devices,
    DeviceToolError,
    find_devices,
    parse_npu_smi,
    parse_nvidia_smi,
    parse_rocm_smi,
)

FOUR_GPUS = """\
GPU 0: NVIDIA A100-SXM4-80GB (UUID: GPU-5d5ba0d6-d33d-2b2c-524d-9e3d8d2b8a77)
GPU 1: NVIDIA A100-SXM4-80GB (UUID: GPU-2e2f6c6a-5c3b-4b0e-9f51-1a1b6d3f0c11)
GPU 2: NVIDIA A100-SXM4-80GB (UUID: GPU-93f5f9a0-77a1-6b7c-8a3d-6ad2b6f3b0e5)
GPU 3: NVIDIA A100-SXM4-80GB (UUID: GPU-b1028956-cfa2-0990-bf4a-5da9abb51763)
"""

TWO_CARDS = """\
WARNING: AMD GPU device(s) is/are in a low-power state. Check power control/runtime_status

{"card0": {"Device Name": "AMD Instinct MI300X", "Device ID": "0x74a1", "GUID": "28851"}, \
"card1": {"Device Name": "AMD Instinct MI300X", "Device ID": "0x74a1", "GUID": "51499"}, "system": {}}
"""

TWO_NPUS = """\
        Total Count                    : 2

        NPU ID                         : 0
        Chip Count                     : 2

        NPU ID                         : 1
        Chip Count                     : 2
"""

TOOLS = {"nvidia-smi": FOUR_GPUS, "rocm-smi": TWO_CARDS, "npu-smi": TWO_NPUS}
CUDA, HIP, NPU = (f"{name}_VISIBLE_DEVICES" for name in ("CUDA", "HIP", "ASCEND_RT"))


@pytest.fixture
def tools(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder that stands first in PATH."""
    monkeypatch.setenv("PATH", f"{tmp_path}{os.pathsep}{os.environ['PATH']}")
    return tmp_path


def install(folder: Path, name: str, text: str, code: int = 0) -> None:
    tool = folder / name
    tool.write_text(f"#!/bin/sh\ncat << 'END'\n{text}END\nexit {code}\n")
    tool.chmod(0o755)


def test_what_the_tools_print_is_read() -> None:
    assert parse_nvidia_smi(FOUR_GPUS) == ["0", "1", "2", "3"]
    assert parse_rocm_smi(TWO_CARDS) == ["0", "1"]
    assert parse_npu_smi(TWO_NPUS) == ["0", "1", "2", "3"]


@given(st.text())
def test_what_is_no_list_of_devices_names_none(text: str) -> None:
    assert not parse_nvidia_smi(text) or "GPU " in text
    assert not parse_rocm_smi(text) or "card" in text
    assert not parse_npu_smi(text) or "Chip Count" in text


@pytest.mark.parametrize(
    ("tool", "environ", "ids", "variables"),
    [
        ("nvidia-smi", {}, "0,1,2,3", [CUDA]),
        ("rocm-smi", {}, "0,1", [HIP]),
        ("npu-smi", {NPU: "3"}, "3", [NPU]),
        ("nvidia-smi", {CUDA: " 3 , 0 "}, "3,0", [CUDA]),
        ("nvidia-smi", {CUDA: "1,-1,2"}, "1", [CUDA]),
        ("nvidia-smi", {CUDA: "GPU-2e2f6c6a,GPU-93f5"}, "GPU-2e2f6c6a,GPU-93f5", [CUDA]),
        ("nvidia-smi", {CUDA: ""}, "", [CUDA]),
        # HIP reads this one, too; both set, both are kept alike.
        ("rocm-smi", {CUDA: "1"}, "1", [CUDA]),
        ("rocm-smi", {HIP: "1", CUDA: "1"}, "1", [HIP, CUDA]),
    ],
)
def test_a_visible_devices_variable_is_respected(
    tools: Path, tool: str, environ: dict[str, str], ids: str, variables: list[str]
) -> None:
    for name in TOOLS:
        install(tools, name, TOOLS[name] if name == tool else "")
    assert find_devices(environ) == Devices(tuple(filter(None, ids.split(","))), tuple(variables))


def test_a_tool_that_fails_is_told_from_no_devices(tools: Path) -> None:
    for name in TOOLS:
        install(tools, name, "")
    assert find_devices({CUDA: "0"}) == Devices()
    install(tools, "nvidia-smi", "No devices were found\n", code=6)
    assert find_devices({}) == Devices()
    install(tools, "nvidia-smi", "Failed to initialize NVML\n", code=18)
    with pytest.raises(DeviceToolError, match="Failed to initialize NVML"):
        find_devices({})
    install(tools, "rocm-smi", TWO_CARDS)
    assert find_devices({}) == Devices(("0", "1"), (HIP,))
