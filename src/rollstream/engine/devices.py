"""Which accelerators this machine has, and how a process is given some. Asks the vendors' own tools."""

import re
import shutil
import subprocess
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import orjson

from rollstream.errors import ConfigError

_TOOL_TIMEOUT_S = 30.0
"""A driver that nobody uses is loaded by the question: seconds for each device."""

_NO_DEVICES = re.compile(r"No devices (were )?found", re.IGNORECASE)
"""What nvidia-smi says, and fails, where the driver works and there is no GPU."""

_SHOWN = 500
"""Characters of what a tool that fails says."""


class DeviceToolError(ConfigError):
    """A vendor's tool is there and fails: which devices there are is not known."""


@dataclass(frozen=True, slots=True)
class Devices:
    """The devices that this process may use."""

    ids: tuple[str, ...]
    """As the variables name them: numbers, or UUIDs."""
    variables: tuple[str, ...]
    """Environment variables that choose devices for a process; all are set alike."""


def run_tool(command: Sequence[str], timeout_s: float = _TOOL_TIMEOUT_S) -> str:
    """What a vendor's tool prints; nothing where there is no such tool. Raises `DeviceToolError`."""
    if shutil.which(command[0]) is None:
        return ""
    try:
        done = subprocess.run(
            command, capture_output=True, text=True, errors="replace", timeout=timeout_s, check=False
        )
        said = f"{done.stdout}\n{done.stderr}".strip()
        if done.returncode == 0 or _NO_DEVICES.search(said):
            return done.stdout
        what = f"fails with exit code {done.returncode}: {said[:_SHOWN] or '(it says nothing)'}"
    except subprocess.TimeoutExpired:
        what = f"has not answered within {timeout_s:g} s"
    except OSError as error:
        what = f"cannot be run: {error}"
    raise DeviceToolError(
        f"which devices this machine has cannot be found out: `{' '.join(command)}` {what}. To run on the "
        "CPU, set trainer.n_gpus_per_node=0"
    )


def parse_nvidia_smi(listed: str) -> list[str]:
    """Devices of `nvidia-smi -L`. A GPU that is split (MIG) is its parts, which have UUIDs only.

    Source: https://docs.nvidia.com/datacenter/tesla/mig-user-guide/ ("Device Enumeration").
    """
    found: list[list[str]] = []
    for line in listed.splitlines():
        if whole := re.match(r"GPU (\d+):", line):
            found.append([whole[1]])
        elif found and (part := re.match(r"\s*MIG .*\(UUID: ([\w/-]+)\)", line)):
            found[-1] = [one for one in found[-1] if one.startswith("MIG-")] + [part[1]]
    return [name for parts in found for name in parts]


def parse_rocm_smi(listed: str) -> list[str]:
    """Cards that `rocm-smi --showid --json` names; none for anything else."""
    # Warnings may stand before the JSON.
    try:
        cards = orjson.loads(listed[listed.index("{") : listed.rindex("}") + 1])
    except (ValueError, orjson.JSONDecodeError):
        return []
    count = sum(bool(re.fullmatch(r"card\d+", name)) for name in cards) if isinstance(cards, dict) else 0
    return [str(number) for number in range(count)]


def parse_npu_smi(listed: str) -> list[str]:
    """Chips that `npu-smi info -l` counts: a card may have two, and each is a device of its own."""
    counts = re.findall(r"^\s*Chip Count\s*:\s*(\d+)\s*$", listed, re.MULTILINE)
    return [str(number) for number in range(sum(map(int, counts)))]


_Parse = Callable[[str], list[str]]

_TOOLS: tuple[tuple[tuple[str, ...], _Parse, tuple[tuple[str, ...], ...]], ...] = (
    (("nvidia-smi", "-L"), parse_nvidia_smi, (("CUDA_VISIBLE_DEVICES",),)),
    (
        ("rocm-smi", "--showid", "--json"),
        parse_rocm_smi,
        # HIP reads either of the first two, and engines refuse two that differ; both count what the last left.
        (("HIP_VISIBLE_DEVICES", "CUDA_VISIBLE_DEVICES"), ("ROCR_VISIBLE_DEVICES",)),
    ),
    (("npu-smi", "info", "-l"), parse_npu_smi, (("ASCEND_RT_VISIBLE_DEVICES",),)),
)
"""The vendors' tools, and the variables that choose devices, the first that are set."""


def find_devices(
    environ: Mapping[str, str], run: Callable[[Sequence[str]], str] = run_tool
) -> Devices | None:
    """The devices of this machine that `environ` leaves visible; None when there are none.

    A variable that chooses devices is taken at its word: what it names that is not there, the servers refuse.

    Args:
        environ: the environment.
        run: asks a tool; for tests.

    Raises:
        DeviceToolError: none were found, and a tool fails: a broken driver is not the same as no device.
    """
    failure: DeviceToolError | None = None
    for command, parse, layers in _TOOLS:
        try:
            ids = parse(run(command))
        except DeviceToolError as error:
            failure = failure or error
            continue
        if ids:
            for layer in layers:
                if names := tuple(name for name in layer if name in environ):
                    chosen = _listed(environ[names[0]])
                    return Devices(tuple(chosen), names) if chosen else None
            return Devices(tuple(ids), layers[0][:1])
    if failure is not None:
        raise failure
    return None


def _listed(value: str) -> list[str]:
    """What a visible-devices variable names. As the drivers read it, a -1 ends the list."""
    names = []
    for name in value.split(","):
        if (name := name.strip()) in ("", "-1", "NoDevFiles"):
            break
        names.append(name)
    return names
