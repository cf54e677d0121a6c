"""Devices from what the vendors' tools print."""

from collections.abc import Sequence

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rollstream.engine.devices import (
    Devices,
    DeviceToolError,
    find_devices,
    parse_npu_smi,
    parse_nvidia_smi,
    parse_rocm_smi,
    run_tool,
)

FOUR_GPUS = """\
GPU 0: NVIDIA A100-SXM4-80GB (UUID: GPU-5d5ba0d6-d33d-2b2c-524d-9e3d8d2b8a77)
GPU 1: NVIDIA A100-SXM4-80GB (UUID: GPU-2e2f6c6a-5c3b-4b0e-9f51-1a1b6d3f0c11)
GPU 2: NVIDIA A100-SXM4-80GB (UUID: GPU-93f5f9a0-77a1-6b7c-8a3d-6ad2b6f3b0e5)
GPU 3: NVIDIA A100-SXM4-80GB (UUID: GPU-b1028956-cfa2-0990-bf4a-5da9abb51763)
"""

SPLIT = """\
GPU 0: NVIDIA A100-SXM4-40GB (UUID: GPU-5d5ba0d6-d33d-2b2c-524d-9e3d8d2b8a77)
  MIG 3g.20gb     Device  0: (UUID: MIG-c6d4f1ef-42e4-5de3-91c7-45d71c87eb3f)
  MIG 3g.20gb     Device  1: (UUID: MIG-cba663e8-9bed-5b25-b243-5985ef7c9beb)
GPU 1: NVIDIA A100-SXM4-40GB (UUID: GPU-2e2f6c6a-5c3b-4b0e-9f51-1a1b6d3f0c11)
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
CUDA, HIP, ROCR, NPU = (f"{name}_VISIBLE_DEVICES" for name in ("CUDA", "HIP", "ROCR", "ASCEND_RT"))


def find(tool: str | None, **environ: str) -> Devices | None:
    return find_devices(environ, lambda command: TOOLS[tool] if command[0] == tool else "")


def test_what_the_tools_print_is_read() -> None:
    assert parse_nvidia_smi(FOUR_GPUS) == ["0", "1", "2", "3"]
    assert parse_nvidia_smi(SPLIT) == [
        "MIG-c6d4f1ef-42e4-5de3-91c7-45d71c87eb3f",
        "MIG-cba663e8-9bed-5b25-b243-5985ef7c9beb",
        "1",
    ]
    assert parse_rocm_smi(TWO_CARDS) == ["0", "1"]
    assert parse_npu_smi(TWO_NPUS) == ["0", "1", "2", "3"]


@given(st.text())
def test_what_is_no_list_of_devices_names_none(text: str) -> None:
    assert parse_nvidia_smi("No devices were found\n") == []
    assert not parse_nvidia_smi(text) or "GPU " in text
    assert not parse_rocm_smi(text) or "card" in text
    assert not parse_npu_smi(text) or "Chip Count" in text


@pytest.mark.parametrize(
    ("tool", "environ", "ids", "variables"),
    [
        ("nvidia-smi", {}, "0,1,2,3", [CUDA]),
        ("rocm-smi", {}, "0,1", [HIP]),
        ("npu-smi", {}, "0,1,2,3", [NPU]),
        ("npu-smi", {NPU: "3"}, "3", [NPU]),
        ("nvidia-smi", {CUDA: "2,3"}, "2,3", [CUDA]),
        ("nvidia-smi", {CUDA: " 3 , 0 "}, "3,0", [CUDA]),
        ("nvidia-smi", {CUDA: "1,-1,2"}, "1", [CUDA]),
        ("nvidia-smi", {CUDA: "GPU-2e2f6c6a,GPU-93f5"}, "GPU-2e2f6c6a,GPU-93f5", [CUDA]),
        ("rocm-smi", {HIP: "1"}, "1", [HIP]),
        # HIP reads this one, too; both set, both are kept alike.
        ("rocm-smi", {CUDA: "1"}, "1", [CUDA]),
        ("rocm-smi", {HIP: "1", CUDA: "1"}, "1", [HIP, CUDA]),
        ("rocm-smi", {ROCR: "1"}, "1", [ROCR]),
        # What ROCR leaves is counted from 0.
        ("rocm-smi", {ROCR: "1", HIP: "0"}, "0", [HIP]),
    ],
)
def test_a_visible_devices_variable_is_respected(
    tool: str, environ: dict[str, str], ids: str, variables: list[str]
) -> None:
    assert find(tool, **environ) == Devices(tuple(ids.split(",")), tuple(variables))


@pytest.mark.parametrize("value", ["", "-1", "NoDevFiles"])
def test_a_variable_may_hide_all(value: str) -> None:
    assert find("nvidia-smi", CUDA_VISIBLE_DEVICES=value) is None


def test_no_tool_no_devices() -> None:
    assert find(None) is None
    assert find(None, CUDA_VISIBLE_DEVICES="0") is None
    assert run_tool(["no-such-tool-anywhere"]) == ""
    assert run_tool(["echo", "x"]) == "x\n"
    assert run_tool(["sh", "-c", "echo No devices were found; exit 6"]) == "No devices were found\n"


def test_a_tool_that_fails_is_told_from_no_devices() -> None:
    with pytest.raises(DeviceToolError, match=r"`sh -c .*` fails with exit code 9: out\n+err"):
        run_tool(["sh", "-c", "echo out; echo err >&2; exit 9"])
    with pytest.raises(DeviceToolError, match=r"has not answered within 0\.05 s"):
        run_tool(["sleep", "9"], timeout_s=0.05)

    def run(command: Sequence[str]) -> str:
        if command[0] == "nvidia-smi":
            raise DeviceToolError("a broken driver")
        return TOOLS[command[0]] if command[0] == working else ""

    working = "rocm-smi"
    assert find_devices({}, run) == Devices(("0", "1"), (HIP,))
    working = ""
    with pytest.raises(DeviceToolError, match="a broken driver"):
        find_devices({}, run)
