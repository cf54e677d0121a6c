"""Which accelerators this machine has, and how a process is given some. Asks the vendors' own tools."""

import re
import shutil
import subprocess
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

import orjson

from rollstream.errors import ConfigError

Kind = Literal["cuda", "rocm", "npu"]
"""NVIDIA, AMD, Ascend."""

_TOOL_TIMEOUT_S = 30.0
"""A driver that nobody uses is loaded by the question: seconds for each device."""

_NO_DEVICES = re.compile(r"No devices (were )?found", re.IGNORECASE)
"""What nvidia-smi says, and fails, where the driver works and there is no GPU."""

_SHOWN = 500
"""Characters of what a tool that fails says."""

Run = Callable[[Sequence[str]], str | None]
"""Runs a command; its standard output, or None when there is no such command. Raises
`DeviceToolError` when it fails."""


class DeviceToolError(ConfigError):
    """A vendor's tool is there and fails: which devices there are is not known."""


@dataclass(frozen=True, slots=True)
class Devices:
    """The devices that this process may use."""

    kind: Kind
    ids: tuple[str, ...]
    """As the variables name them: numbers, or UUIDs."""
    variables: tuple[str, ...]
    """Environment variables that choose devices for a process; all are set alike."""


def find_devices(environ: Mapping[str, str], run: Run | None = None) -> Devices | None:
    """The devices of this machine that `environ` leaves visible; None when there are none.

    Args:
        environ: the environment; `CUDA_VISIBLE_DEVICES`, `HIP_VISIBLE_DEVICES`, `ROCR_VISIBLE_DEVICES` and
            `ASCEND_RT_VISIBLE_DEVICES` are respected.
        run: asks a tool; for tests.

    Raises:
        ConfigError: a variable names devices that are not there.
        DeviceToolError: none were found, and a tool fails: a broken driver is not the same as no device.
    """
    failures: list[DeviceToolError] = []

    def ask(*command: str) -> str:
        try:
            return (run or run_tool)(command) or ""
        except DeviceToolError as error:
            failures.append(error)
            return ""

    if gpus := parse_nvidia_smi(ask("nvidia-smi", "-L")):
        return _visible("cuda", gpus, environ, ("CUDA_VISIBLE_DEVICES",))
    if cards := parse_rocm_smi(ask("rocm-smi", "--showid", "--json")):
        return _visible_rocm([str(number) for number in range(cards)], environ)
    if chips := parse_npu_smi(ask("npu-smi", "info", "-l")):
        numbers = [Gpu(str(number), "") for number in range(chips)]
        return _visible("npu", numbers, environ, ("ASCEND_RT_VISIBLE_DEVICES",))
    if failures:
        raise failures[0]
    return None


def run_tool(command: Sequence[str]) -> str | None:
    """Runs a vendor's tool, see `Run`."""
    if shutil.which(command[0]) is None:
        return None
    try:
        done = subprocess.run(
            command, capture_output=True, text=True, errors="replace", timeout=_TOOL_TIMEOUT_S, check=False
        )
    except subprocess.TimeoutExpired:
        raise _tool_error(command, f"has not answered within {_TOOL_TIMEOUT_S:g} s") from None
    except OSError as error:
        raise _tool_error(command, f"cannot be run: {error}") from error
    said = f"{done.stdout}\n{done.stderr}".strip()
    if done.returncode == 0 or _NO_DEVICES.search(said):
        return done.stdout
    raise _tool_error(
        command, f"fails with exit code {done.returncode}: {said[:_SHOWN] or '(it says nothing)'}"
    )


def _tool_error(command: Sequence[str], what: str) -> DeviceToolError:
    return DeviceToolError(
        f"which devices this machine has cannot be found out: `{' '.join(command)}` {what}. To run on the "
        "CPU, set trainer.n_gpus_per_node=0"
    )


@dataclass(frozen=True, slots=True)
class Gpu:
    """One device, by the two names it has."""

    name: str
    """What stands in a visible-devices variable by default."""
    uuid: str


def parse_nvidia_smi(listed: str) -> list[Gpu]:
    """Devices of `nvidia-smi -L`. A GPU that is split (MIG) is its parts, which have UUIDs only.

    Source: https://docs.nvidia.com/datacenter/tesla/mig-user-guide/ ("Device Enumeration").
    """
    found: list[list[Gpu]] = []
    for line in listed.splitlines():
        uuid = re.search(r"\(UUID: ([\w/-]+)\)", line)
        if whole := re.match(r"GPU (\d+):", line):
            found.append([Gpu(whole[1], uuid[1] if uuid else "")])
        elif found and uuid and line.lstrip().startswith("MIG "):
            parts = [part for part in found[-1] if part.name.startswith("MIG-")]
            found[-1] = [*parts, Gpu(uuid[1], uuid[1])]
    return [gpu for parts in found for gpu in parts]


def parse_rocm_smi(listed: str) -> int:
    """How many cards `rocm-smi --showid --json` names; 0 for anything else."""
    # Warnings may stand before the JSON.
    try:
        cards = orjson.loads(listed[listed.index("{") : listed.rindex("}") + 1])
    except (ValueError, orjson.JSONDecodeError):
        return 0
    return sum(bool(re.fullmatch(r"card\d+", name)) for name in cards) if isinstance(cards, dict) else 0


def parse_npu_smi(listed: str) -> int:
    """How many chips `npu-smi info -l` counts: a card may have two, and each is a device of its own."""
    return sum(int(count) for count in re.findall(r"^\s*Chip Count\s*:\s*(\d+)\s*$", listed, re.MULTILINE))


def _visible(
    kind: Kind, found: Sequence[Gpu], environ: Mapping[str, str], variables: tuple[str, ...]
) -> Devices | None:
    variable = variables[0]
    if variable not in environ:
        return Devices(kind, tuple(gpu.name for gpu in found), variables)
    ids = []
    for name in _listed(environ[variable]):
        known = any(
            # A UUID may be cut short where that is unambiguous.
            name == gpu.name or (len(name) > 4 and gpu.uuid.startswith(name))
            for gpu in found
        )
        if not known:
            raise ConfigError(
                f"{variable}={environ[variable]}: there is no device {name!r} on this machine, which has "
                f"{', '.join(gpu.name for gpu in found)}"
            )
        ids.append(name)
    return Devices(kind, tuple(ids), variables) if ids else None


def _visible_rocm(found: list[str], environ: Mapping[str, str]) -> Devices | None:
    """`ROCR_VISIBLE_DEVICES` chooses first; the other variables count what it left."""
    outer = "ROCR_VISIBLE_DEVICES"
    inner = [name for name in ("HIP_VISIBLE_DEVICES", "CUDA_VISIBLE_DEVICES") if name in environ]
    cards = [Gpu(name, "") for name in found]
    if outer in environ:
        # UUIDs are taken as they are: no tool lists them in a form that could be compared.
        left = _listed(environ[outer])
        if not inner:
            return Devices("rocm", tuple(left), (outer,)) if left else None
        cards = [Gpu(str(number), "") for number in range(len(left))]
    # HIP reads either variable, and engines refuse two that differ.
    return _visible("rocm", cards, environ, tuple(inner) or ("HIP_VISIBLE_DEVICES",))


def _listed(value: str) -> list[str]:
    """What a visible-devices variable names. As the drivers read it, a -1 ends the list."""
    names = []
    for name in value.split(","):
        if (name := name.strip()) in ("", "-1", "NoDevFiles"):
            break
        names.append(name)
    return names
