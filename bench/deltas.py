"""What a step of GRPO changes in the demo model's weights, and the bytes of a delta: weight_transfer=deltas.

    python -m bench.deltas [--quick] [--json FILE]

Sums by engine hf, 32 prompts a step with 4 completions each, Adam at a constant rate. In float32 with weights rounded
to bfloat16 for the servers, as they would round them; or not. "half frozen": the embedding and the first of two
layers. Then a made model, of which 1 % of elements change: seconds to write a delta and to make a copy.
"""

import contextlib
import io
import statistics
import time
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch
from datasets import Dataset
from transformers import AutoModelForCausalLM, AutoTokenizer, TrainerCallback

from bench.report import parse_options, print_table, write_json
from demo_model.problems import Split, enumerate_pairs
from rollstream.demo import MODEL_PATH
from rollstream.engine.weight_copy import bring_up_to_date
from rollstream.engine.weight_deltas import DeltaChannel
from rollstream.errors import WeightUpdateError
from rollstream.integrations.trl import GRPOEnvConfig, GRPOEnvTrainer, RolloutEnvironment

REWARD = """
def compute_score(data_source, solution_str, ground_truth, extra_info):
    return float(solution_str == ground_truth)
"""


class Counter(TrainerCallback):  # type: ignore[misc]  # transformers is not followed
    """Writes deltas, and counts what changed."""

    def __init__(self, folder: Path, dtype: str) -> None:
        self._folder, self._dtype = folder, getattr(torch, dtype)
        self._channel = DeltaChannel(folder, timeout=0)
        self._before: dict[str, Any] = {}
        self.steps: list[tuple[float, float, float]] = []
        """Shares of tensors and elements that changed, and of a delta in the whole."""

    def on_train_begin(self, *_: Any, model: Any, **more: Any) -> None:
        self.look(model)

    def on_step_end(self, *_: Any, model: Any, **more: Any) -> None:
        self.look(model)

    def look(self, model: Any) -> None:
        now = {name: one.detach().to(self._dtype, copy=True) for name, one in model.state_dict().items()}
        del now["lm_head.weight"]  # the embedding
        with contextlib.suppress(WeightUpdateError):  # nobody copies
            self._channel.put(None, now)
        if self._before:
            changed = [int((one != self._before[name]).sum()) for name, one in now.items()]
            elements, whole = (
                sum(sizes) for sizes in zip(*((one.numel(), one.nbytes) for one in now.values()), strict=True)
            )
            newest = max(self._folder.glob("*.delta.safetensors")).stat().st_size
            self.steps.append((sum(map(bool, changed)) / len(now), sum(changed) / elements, newest / whole))
        self._before = now


def train(dtype: str, rate: float, steps: int, *, frozen: bool) -> dict[str, Any]:
    """A row of the first table."""
    with TemporaryDirectory() as name:
        folder = Path(name)
        (folder / "reward.py").write_text(REWARD)
        counter = Counter(folder / "deltas", dtype)
        model = AutoModelForCausalLM.from_pretrained(MODEL_PATH, dtype=torch.float32)
        if frozen:
            for part in (model.model.embed_tokens, model.model.layers[0]):
                part.requires_grad_(False)
        given: dict[str, Any] = {
            "num_generations": 4,
            "max_completion_length": 16,
            "max_steps": steps,
            "beta": 0.0,
        }
        given |= {
            "learning_rate": rate,
            "lr_scheduler_type": "constant",
            "use_cpu": True,
            "bf16": False,
            "seed": 0,
        }
        given |= {"report_to": [], "save_strategy": "no", "logging_strategy": "no", "disable_tqdm": True}
        words = ["actor_rollout_ref.rollout.name=hf", f"custom_reward_function.path={folder / 'reward.py'}"]
        rows = [
            {"prompt": [{"role": "user", "content": problem.question}], "answer": problem.answer}
            for problem in enumerate_pairs(2, Split.TRAIN)
        ]
        made = GRPOEnvTrainer(
            model,
            RolloutEnvironment([*words, "data.max_prompt_length=128"]),
            GRPOEnvConfig(
                str(folder), per_device_train_batch_size=128, gradient_checkpointing=False, **given
            ),
            train_dataset=Dataset.from_list(rows),
            processing_class=AutoTokenizer.from_pretrained(MODEL_PATH),
            callbacks=[counter],
        )
        with contextlib.redirect_stdout(io.StringIO()):
            made.train()
    means = [100 * statistics.fmean(one) for one in zip(*counter.steps, strict=True)]
    what = f"{dtype}, {rate:g}{', half frozen' if frozen else ''}"
    return {"weights, rate": what, **dict(zip(("% tensors", "% elements", "% bytes"), means, strict=True))}


def apply(megabytes: int) -> dict[str, Any]:
    """Seconds for a delta of a made model."""
    with TemporaryDirectory() as name:
        source, copies = Path(name, "source"), Path(name, "copies")
        copies.mkdir()
        channel = DeltaChannel(source, timeout=0)
        state = {f"w{at:03}": torch.randn(1 << 23).bfloat16() * 0.02 for at in range(megabytes // 16)}
        found: dict[str, Any] = {"MB": megabytes}
        for _ in range(2):
            began = time.perf_counter()
            with contextlib.suppress(WeightUpdateError):
                channel.put(None, state)
            written = time.perf_counter()
            bring_up_to_date(source, copies)
            found |= {"put s": written - began, "copy s": time.perf_counter() - written}
            state = {
                name: torch.where(torch.rand(one.shape) < 0.01, one * 1.01, one)
                for name, one in state.items()
            }
        (delta,) = source.glob("*.delta.safetensors")
        return {**found, "delta MB": delta.stat().st_size / 1e6}


def bench() -> None:
    """Runs the benchmark."""
    options = parse_options(__doc__.split("\n")[0])
    torch.set_num_threads(1)
    kinds = [("bfloat16", 1e-6, False), ("bfloat16", 1e-6, True), ("bfloat16", 1e-5, False)]
    kinds += [("float32", 1e-6, False), ("float32", 1e-6, True)]
    steps = 3 if options.quick else 20
    rows = [train(dtype, rate, steps, frozen=frozen) for dtype, rate, frozen in kinds]
    print_table(f"changed by a step of GRPO, mean of {steps}", rows)
    made = [apply(64 if options.quick else 1024)]
    print_table("a made model, of which 1 % changes", made)
    write_json(options.json, "deltas", [*rows, *made])


if __name__ == "__main__":
    bench()
