"""The model as files: safetensors and tokenizer for transformers, and OpenVINO's form of the same weights."""

import json
import logging
import os
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file
from transformers import Qwen2ForCausalLM, Qwen2Tokenizer

log = logging.getLogger(__name__)

EXPORT_PACKAGES = ("torch==2.13.0", "optimum-intel[openvino]==2.2.0", "openvino==2026.4.1")
"""What the export's own environment holds. optimum-intel wants another transformers than verl does. torch is
pinned and installed first: a newer one brings gigabytes of CUDA."""
_DRAGGED_IN = ("torchvision", "torchaudio")
"""Come along with optimum-intel, built for another torch: importing transformers then fails."""
WEIGHTS = "model.safetensors"
_SHIPPED_IR = ("openvino_model.xml", "openvino_model.bin")


def round_weights(model: Qwen2ForCausalLM) -> None:
    """Round the weights, in place, to what bf16 can hold: what is shipped, and so what is measured."""
    with torch.no_grad():
        for weight in model.parameters():
            weight.copy_(weight.to(torch.bfloat16).to(torch.float32))


def save_model(model: Qwen2ForCausalLM, tokenizer: Qwen2Tokenizer, folder: Path) -> None:
    """Write the files transformers reads into an empty folder.

    Weights are stored in bf16, half the size and exact after ``round_weights``; ``config.json`` says float32,
    which is then what they are loaded and computed in by default.
    """
    model.config.dtype = torch.float32
    model.config.architectures = [type(model).__name__]
    model.config.save_pretrained(folder)
    weights = {name: weight.to(torch.bfloat16).contiguous() for name, weight in model.named_parameters()}
    save_file(weights, folder / WEIGHTS, metadata={"format": "pt"})
    (folder / WEIGHTS).chmod(0o644)  # safetensors writes for its owner only
    _write_json(
        folder / "generation_config.json",
        {"eos_token_id": model.config.eos_token_id, "pad_token_id": model.config.pad_token_id},
    )
    tokenizer.save_pretrained(folder)


def _write_json(file: Path, content: dict[str, object]) -> None:
    file.write_text(json.dumps(content, indent=2) + "\n")


def make_environment(folder: Path) -> Path:
    """Make the environment of the export, unless it is there; return its Python.

    Raises:
        subprocess.CalledProcessError: if an installation fails; its output is on the terminal.
    """
    python = folder / "bin" / "python"
    ready = folder / "ready"
    if ready.exists() and ready.read_text() == "\n".join(EXPORT_PACKAGES):
        return python
    log.info("making the export environment in %s (a minute or two)", folder)
    shutil.rmtree(folder, ignore_errors=True)
    subprocess.run([sys.executable, "-m", "venv", str(folder)], check=True)
    pip = [str(python), "-m", "pip", "--quiet", "--disable-pip-version-check"]
    torch_package, *_ = EXPORT_PACKAGES
    subprocess.run([*pip, "install", torch_package], check=True)
    subprocess.run([*pip, "install", *EXPORT_PACKAGES], check=True)
    subprocess.run([*pip, "uninstall", "--yes", *_DRAGGED_IN], check=True)
    ready.write_text("\n".join(EXPORT_PACKAGES))
    return python


def export_openvino(folder: Path, python: Path) -> None:
    """Add OpenVINO's form of the model to its folder: fp32, stateful, for ContinuousBatchingPipeline.

    Args:
        folder: Holds what ``save_model`` wrote.
        python: Python of an environment with optimum-intel.
    """
    with tempfile.TemporaryDirectory() as scratch:
        source, target = Path(scratch) / "source", Path(scratch) / "target"
        shutil.copytree(folder, source)
        # optimum-intel keeps the type it finds in the file. In fp32 the .bin can later take weights
        # that a trainer has moved by less than bf16 can tell.
        weights = {name: weight.float() for name, weight in load_file(source / WEIGHTS).items()}
        save_file(weights, source / WEIGHTS, metadata={"format": "pt"})
        command = [str(python.absolute()), "-m", "optimum.commands.optimum_cli", "export", "openvino"]
        command += ["--model", str(source), "--task", "text-generation-with-past", "--weight-format", "fp32"]
        command += ["--disable-convert-tokenizer", str(target)]
        environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
        subprocess.run(
            command, check=True, env=environment | {"HF_HUB_OFFLINE": "1", "PYTHONWARNINGS": "ignore"}
        )
        for name in _SHIPPED_IR:
            shutil.copyfile(target / name, folder / name)
    clean_ir(folder / "openvino_model.xml")


def clean_ir(xml: Path) -> None:
    """Take the whole model's ``rt_info`` out of an IR file.

    It names the versions that made it, and asks for an f16 KV cache, which would move log-probs.
    """
    text = xml.read_text()
    before, found, rest = text.rpartition("\t<rt_info>\n")
    _, closed, after = rest.partition("</rt_info>\n")
    if not (found and closed and before.endswith("</edges>\n")):
        raise ValueError(f"{xml}: no rt_info after the edges; has OpenVINO changed its format?")
    xml.write_text(before + after)
