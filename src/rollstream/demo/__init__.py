"""The demo model: a language model of 435,000 weights that does small sums, alone or with a calculator.

It lets every example and test run a real engine on real weights without a download. How it was made, and
how good it is, stands in ``demo_model/README.md`` of the repository.
"""

from pathlib import Path

MODEL_PATH: Path = Path(__file__).parent / "model"
"""The model's folder, for transformers (safetensors, tokenizer, chat template) and openvino-genai (IR)."""


def named_model(path: str) -> str:
    """The folder or name of a model; `demo` is this one, unless a model of that name lies here."""
    return str(MODEL_PATH) if path == "demo" and not Path("demo", "config.json").exists() else path
