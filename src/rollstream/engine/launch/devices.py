"""Finds the accelerators of this machine by the vendors' own tools."""

import os
import re
import shutil
import subprocess
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cache

from rollstream.errors import ConfigError

_TOOL_TIMEOUT_S = 30.0
"""A driver that nobody uses is loaded by the question: seconds for each device."""

_NO_DEVICES = re.compile(r"No devices (were )?found", re.IGNORECASE)
"""nvidia-smi fails and says so where the driver works and there is no GPU."""


class DeviceToolError(ConfigError):
    """A vendor's tool is there and fails: which devices there are is not known."""


@dataclass(frozen=True, slots=True)
class Devices:
    """The devices that this process may use."""

    ids: tuple[str, ...] = ()
    """As the variables name them: numbers, or UUIDs."""
    variables: tuple[str, ...] = ()
    """Environment variables that choose devices for a process; all are set alike."""


def parse_nvidia_smi(text: str) -> list[str]:
    """Devices of `nvidia-smi -L`."""
    return re.findall(r"^GPU (\d+):", text, re.MULTILINE)


def parse_rocm_smi(text: str) -> list[str]:
    """Cards of `rocm-smi --showid --json`, before which warnings may stand."""
    return [str(number) for number in range(len(set(re.findall(r'"card\d+"', text))))]


def parse_npu_smi(text: str) -> list[str]:
    """Chips of `npu-smi info -l`: a card may have two, and each is a device of its own."""
    counts = re.findall(r"^\s*Chip Count\s*:\s*(\d+)\s*$", text, re.MULTILINE)
    return [str(number) for number in range(sum(map(int, counts)))]


_TOOLS: tuple[tuple[str, Callable[[str], list[str]], tuple[str, ...]], ...] = (
    ("nvidia-smi -L", parse_nvidia_smi, ("CUDA_VISIBLE_DEVICES",)),
    # HIP reads either of the two, and engines refuse two that differ.
    ("rocm-smi --showid --json", parse_rocm_smi, ("HIP_VISIBLE_DEVICES", "CUDA_VISIBLE_DEVICES")),
    ("npu-smi info -l", parse_npu_smi, ("ASCEND_RT_VISIBLE_DEVICES",)),
)
"""The vendors' tools, and the variables that choose devices: of two that are set the first counts."""


@cache
def machine_devices() -> Devices:
    """`find_devices`, once for this process: they do not change, and asking takes up to seconds."""
    return find_devices(os.environ)


def find_devices(environ: Mapping[str, str]) -> Devices:
    """The devices of this machine that `environ` leaves visible.

    A variable that chooses devices is taken at its word: the servers refuse a name that is not there.

    Raises:
        DeviceToolError: none were found, and a tool fails: a broken driver is not the same as no device.
    """
    failure: DeviceToolError | None = None
    for command, parse, variables in _TOOLS:
        try:
            ids = parse(_output(command.split()))
        except DeviceToolError as error:
            failure = failure or error
            continue
        if ids:
            if names := tuple(name for name in variables if name in environ):
                return Devices(_chosen(environ[names[0]]), names)
            return Devices(tuple(ids), variables[:1])
    if failure is not None:
        raise failure
    return Devices()


def _output(command: list[str]) -> str:
    """What a tool prints; nothing where there is no such tool. Raises `DeviceToolError`."""
    if shutil.which(command[0]) is None:
        return ""
    try:
        done = subprocess.run(
            command, capture_output=True, text=True, errors="replace", timeout=_TOOL_TIMEOUT_S, check=False
        )
        text = f"{done.stdout}\n{done.stderr}".strip()
        if done.returncode == 0 or _NO_DEVICES.search(text):
            return done.stdout
        problem = f"exit code {done.returncode}: {text[:500]}"
    except (OSError, subprocess.TimeoutExpired) as error:
        problem = str(error)
    raise DeviceToolError(
        f"the devices of this machine are not known: `{' '.join(command)}` fails ({problem}). To run on the "
        "CPU, set trainer.n_gpus_per_node=0"
    )


def _chosen(value: str) -> tuple[str, ...]:
    """The names in a visible-devices variable. As the drivers read it, a -1 ends the list."""
    names: list[str] = []
    for name in map(str.strip, value.split(",")):
        if name in ("", "-1", "NoDevFiles"):
            break
        names.append(name)
    return tuple(names)
