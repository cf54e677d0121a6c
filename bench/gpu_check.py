"""What was never run for want of a GPU, run on yours; with a report that can be sent in.

    make gpu-check GPU_ARGS='--model Qwen/Qwen2.5-0.5B-Instruct'   an hour at most, and two environments
    python -m bench.gpu_check --device cpu                         a rehearsal: says what it leaves out

Each check is a process of its own with a time limit; one that fails does not end the others. The folder of `--out` has
report.md, report.json, and the log of each check. With two GPUs a server has one and the trainer the other, and weights
go by NCCL; on one GPU they go by gloo, for NCCL takes no two processes of one group there.
"""

import argparse
import asyncio
import json
import os
import random
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from statistics import fmean
from typing import Any

from huggingface_hub import snapshot_download

from rollstream.demo import MODEL_PATH
from rollstream.engine.continuation import ContinuingEngine
from rollstream.engine.hf import HFEngine
from rollstream.engine.hf_forward import score_ids
from rollstream.engine.kind import EngineOptions
from rollstream.engine.launch.devices import find_devices
from rollstream.engine.launch.engine import launched_engine
from rollstream.engine.launch.plan import LaunchRequest
from rollstream.engine.registry import engine_kind
from rollstream.engine.weight_channel import WeightChannel
from rollstream.trajectory import SamplingParams

LOOK = """
import importlib.metadata, json
print(json.dumps({one.metadata["Name"].lower(): one.version for one in importlib.metadata.distributions()}))
"""
PACKAGES = (
    "rollstream",
    "torch",
    "transformers",
    "trl",
    "peft",
    "vllm",
    "sglang",
    "nvidia-nccl",
    "nvidia-cuda-runtime",
)
FAR = 0.2
"""Nats, over the mean of all tokens: bfloat16 and other kernels are off by some 0.02, other weights by far more."""
Figures = dict[str, Any]


def check_engine(kind: str, options: argparse.Namespace) -> Figures:
    """Log-probs, by engine hf or a server that rollstream launches."""
    return asyncio.run(compare(make_engine(kind, options), options, load(options)))


def check_weights(kind: str, options: argparse.Namespace) -> Figures:
    """Updates of its weights over the network, each while it generates."""
    import torch

    model = load(options).to("cuda" if options.transport == "nccl" else "cpu")
    channel, figures = WeightChannel(options.transport), {"transport": options.transport}

    async def update(engine: ContinuingEngine) -> None:
        prompt, how = prompts(options)[0], SamplingParams(1500, ignore_eos=True)
        seconds, spans = [], []
        for version in range(1, 4):
            over = asyncio.create_task(engine.generate(prompt, how, request_id=str(version)))
            with torch.no_grad():
                for tensor in model.parameters():
                    tensor.add_(0.1 * tensor.abs().mean() * torch.randn_like(tensor))
            weights, began = await asyncio.to_thread(channel.put, model), time.monotonic()
            await engine.update_weights(weights, version)
            seconds.append(time.monotonic() - began)
            spans.append([version for _, version in (await over).policy_versions])
        assert spans == [sorted(each) for each in spans], spans
        crossed = sum(len(each) > 1 for each in spans)
        figures.update({"update s": fmean(seconds), "went on under new weights": f"{crossed} of 3"})

    engine = make_engine(kind, options, sends_weights=True)
    return {**asyncio.run(compare(engine, options, model, update=update)), **figures}


def check_adapter(options: argparse.Namespace) -> Figures:
    """A LoRA adapter as a server's weights."""
    from peft import LoraConfig, get_peft_model

    config = LoraConfig(r=8, target_modules="all-linear", init_lora_weights=False, task_type="CAUSAL_LM")
    model, folder = get_peft_model(load(options), config).eval(), str(options.out / "adapter")
    model.save_pretrained(folder)
    engine = make_engine("vllm", options, lora_rank=8)
    return asyncio.run(compare(engine, options, model, update=lambda one: one.update_weights(folder, 1)))


def check_trl(options: argparse.Namespace) -> Figures:
    """Ten steps of GRPO with a vLLM server that is sent the weights. What it learns is no matter."""
    from datasets import Dataset

    from rollstream.integrations.trl import GRPOEnvConfig, GRPOEnvTrainer, RolloutEnvironment

    rollout, request = "actor_rollout_ref.rollout", launch_request("vllm", options)
    reward = options.out / "reward.py"
    reward.write_text("def compute_score(solution_str, **_):\n    return len(solution_str) / 64\n")
    words = [
        f"{rollout}.name=vllm",
        f"actor_rollout_ref.model.path={options.model}",
        f"custom_reward_function.path={reward}",
        f"trainer.n_gpus_per_node={request.devices_per_node}",
        f"{rollout}.launch.python={request.python}",
        *(f"{rollout}.{name}={value}" for name, value in request.arguments.items()),
        *(f"+{rollout}.launch.args.{name}={value}" for name, value in request.args.items()),
        *(f"+{rollout}.launch.env.{name}='{value}'" for name, value in request.env.items()),
    ]
    args = GRPOEnvConfig(
        str(options.out / "trl"),
        max_steps=10,
        per_device_train_batch_size=16,
        num_generations=4,
        max_completion_length=64,
        learning_rate=1e-5,
        use_cpu=options.device == "cpu",
        bf16=options.device == "cuda",
        weight_transfer=options.transport,
        logging_steps=1,
        save_strategy="no",
        report_to=[],
    )
    rows = Dataset.from_list([{"prompt": [{"role": "user", "content": text}]} for text in questions(64)])
    trainer = GRPOEnvTrainer(options.model, RolloutEnvironment(words), args, train_dataset=rows)
    trainer.train()
    logged = [entry for entry in trainer.state.log_history if "reward" in entry]
    assert len(logged) == 10, logged
    names = [name for name in ("step_s", "weights_s", "kl_k1", "kl_k3") if f"rollstream/{name}" in logged[-1]]
    means = {name: fmean(entry[f"rollstream/{name}"] for entry in logged[2:]) for name in names}
    return {"transport": options.transport, "steps": len(logged), **means}


def check_crash(options: argparse.Namespace) -> Figures:
    """What a kill of a training costs, on this machine's CPU and disk."""
    file = options.out / "crash-rows.json"
    words = [sys.executable, "-m", "bench.crash", "--quick", "--doors", "loop", "--json", str(file)]
    subprocess.run(words, check=True)
    return {f"{row['door']}, {row['ahead']} ahead": row for row in json.loads(file.read_text())["rows"]}


CHECKS: dict[str, tuple[Callable[[argparse.Namespace], Figures], int]] = {
    "hf": (partial(check_engine, "hf"), 300),
    "vllm": (partial(check_engine, "vllm"), 420),
    "vllm-weights": (partial(check_weights, "vllm"), 420),
    "vllm-adapter": (check_adapter, 420),
    "trl-vllm": (check_trl, 600),
    "sglang": (partial(check_engine, "sglang"), 420),
    "sglang-weights": (partial(check_weights, "sglang"), 420),
    "crash": (check_crash, 300),
}
"""With their limits in seconds. The name says what they need."""


def load(options: argparse.Namespace) -> Any:
    """The model by transformers, in float32 on the CPU: what every engine is compared with."""
    from transformers import AutoModelForCausalLM

    return AutoModelForCausalLM.from_pretrained(options.model, dtype="float32").eval()


def questions(count: int) -> list[str]:
    """Sums."""
    chance = random.Random(0)
    pairs = [(chance.randint(10, 99), chance.randint(10, 99)) for _ in range(count)]
    return [f"State the final answer to the following arithmetic problem: {a} + {b} =" for a, b in pairs]


def prompts(options: argparse.Namespace) -> list[list[int]]:
    """Ids of sixteen chats."""
    from transformers import AutoTokenizer

    render = AutoTokenizer.from_pretrained(options.model).apply_chat_template
    chats = [[{"role": "user", "content": text}] for text in questions(16)]
    return [render(chat, add_generation_prompt=True, return_dict=False) for chat in chats]


def launch_request(kind: str, options: argparse.Namespace, **arguments: Any) -> LaunchRequest:
    """How a server is started: on a CPU as `make test-vllm` does."""
    python = getattr(options, f"{kind}_python")
    if options.device == "cuda":
        arguments |= {"dtype": "bfloat16", "gpu_memory_utilization": 0.4}
        env = {"CUDA_VISIBLE_DEVICES": options.server_gpu}
        return LaunchRequest(devices_per_node=1, python=python, arguments=arguments, env=env)
    arguments["dtype"], args = "float32", {"enforce-eager": True, "max-num-batched-tokens": 16384}
    env = {"VLLM_CPU_KVCACHE_SPACE": "1", "VLLM_CPU_OMP_THREADS_BIND": "0", "OMP_NUM_THREADS": "1"}
    return LaunchRequest(devices_per_node=0, python=python, arguments=arguments, args=args, env=env)


def make_engine(kind: str, options: argparse.Namespace, **arguments: Any) -> Any:
    """Engine hf, or one server of another kind."""
    if kind == "hf":
        return HFEngine(options.model, engine_kwargs={"device": options.device})
    described = EngineOptions(options.model, max_model_len=2048, log_dir=options.out / "servers")
    request = launch_request(kind, options, **arguments)
    return ContinuingEngine(launched_engine(engine_kind(kind), described, request))


async def compare(engine: Any, options: argparse.Namespace, model: Any, *, update: Any = None) -> Figures:
    """How far log-probs of what an engine sampled are from its own scores, and from transformers'.

    Raises `AssertionError` where they are of another model; with `update`, which gives it the weights of `model`,
    where they are hardly nearer to that than to the model of before.
    """
    await engine.start()
    try:
        if update is not None:
            await update(engine)
        asked, how, began = prompts(options), SamplingParams(64, ignore_eos=True), time.monotonic()
        answers = await asyncio.gather(
            *(engine.generate(ids, how, request_id=str(at)) for at, ids in enumerate(asked))
        )
        figures: Figures = {"tokens/s": round(64 * len(asked) / (time.monotonic() - began))}
        rows = [(ids + answer.token_ids, len(ids)) for ids, answer in zip(asked, answers, strict=True)]
        found = {"its scores": [(await engine.score(*row)).logprobs for row in rows]}
    finally:
        await engine.close()
    found["transformers"] = [score_ids(model, *row).logprobs for row in rows]
    if update is not None:
        before = load(options)
        found["the model before"] = [score_ids(before, *row).logprobs for row in rows]
    sampled = [value for answer in answers for value in answer.logprobs or []]
    for name, scores in found.items():
        others = [value for score in scores for value in score]
        off = [abs(a - b) for a, b in zip(sampled, others, strict=True)]
        figures |= {f"{name}, mean": fmean(off), f"{name}, most": max(off)}
    assert max(figures["its scores, mean"], figures["transformers, mean"]) < FAR, figures
    if update is not None:
        assert figures["transformers, mean"] < figures["the model before, mean"] / 2, figures
    return figures


def look(python: str) -> dict[str, str]:
    """Versions of what an environment has; empty where there is none."""
    try:
        done = subprocess.run([python, "-c", LOOK], capture_output=True, text=True, timeout=120, check=True)
    except (OSError, subprocess.SubprocessError):
        return {}
    return {name: version for name, version in json.loads(done.stdout).items() if name.startswith(PACKAGES)}


def why_not(check: str, device: str, installed: Mapping[str, Mapping[str, str]]) -> str | None:
    """Why a check is not run, if so."""
    if check.startswith("sglang") and device == "cpu":
        return "SGLang needs a GPU"
    for server, found in installed.items():
        if server in check and not any(name.startswith(server) for name in found):
            return f"--{server}-python names no environment that has {server}"
    return None


def run(check: str, options: argparse.Namespace) -> dict[str, Any]:
    """A row of the report: the check in a process of its own, and its figures or the end of its log."""
    log, file, began = options.out / f"{check}.log", options.out / f"{check}.json", time.monotonic()
    file.unlink(missing_ok=True)
    words, limit = (
        [sys.executable, "-m", "bench.gpu_check", *options.words, "--only", check],
        CHECKS[check][1],
    )
    with log.open("wb") as out:
        process = subprocess.Popen(words, stdout=out, stderr=out, start_new_session=True)
    try:
        ended = f"exit code {process.wait(limit)}"
    except subprocess.TimeoutExpired:
        ended = f"more than {limit} s"
    finally:
        if process.poll() is None:
            os.killpg(process.pid, signal.SIGKILL)  # its servers end with it
            process.wait()
    row: dict[str, Any] = {"check": check, "seconds": round(time.monotonic() - began)}
    if process.returncode == 0:
        return {**row, "result": "passed", "figures": json.loads(file.read_text())}
    lines = log.read_text(errors="replace").splitlines()
    return {**row, "result": "failed", "why": f"{ended}: {' '.join(lines[-1:])}"[:500], "log": lines[-60:]}


def markdown(about: Mapping[str, Any], rows: Sequence[Mapping[str, Any]]) -> str:
    """The report as a page."""

    def cell(value: Any) -> str:
        if isinstance(value, Mapping):
            return "; ".join(f"{name} {cell(one)}" for name, one in value.items())
        text = f"{value:.3g}" if isinstance(value, float) else str(value)
        return text.replace("|", "\\|").replace("\n", " ")

    table = ["| check | result | seconds | figures, or why |", "|---|---|---|---|"]
    for row in rows:
        cells = [row.get(name, "") for name in ("check", "result", "seconds")]
        table.append(f"| {' | '.join(map(cell, [*cells, row.get('figures') or row.get('why', '')]))} |")
    told = "Distances of the sampled tokens' log-probs, in nats: from the engine's own scores, from transformers, …"
    lines = ["# rollstream on a GPU", "", *table, "", told, "", "| | |", "|---|---|"]
    return "\n".join([*lines, *(f"| {name} | {cell(value)} |" for name, value in about.items()), ""])


def main(words: list[str] | None = None) -> int:
    """Runs all checks; 1 when one failed."""
    form = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=form)
    parser.add_argument("--model", default="demo", help="a folder, or a name on the hub (default: demo)")
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda", help="default: cuda")
    parser.add_argument("--checks", nargs="+", choices=CHECKS, default=list(CHECKS), help="default: all")
    for server in ("vllm", "sglang"):
        parser.add_argument(f"--{server}-python", default=sys.executable, help="default: this one")
    parser.add_argument("--out", type=Path, default=Path("outputs/gpu-check"), help="default: %(default)s")
    parser.add_argument("--only", choices=CHECKS, help=argparse.SUPPRESS)
    options = parser.parse_args(words)
    options.words = sys.argv[1:] if words is None else words
    options.out = options.out.absolute()
    options.out.mkdir(parents=True, exist_ok=True)
    if not Path(options.model).is_dir():
        options.model = str(MODEL_PATH) if options.model == "demo" else snapshot_download(options.model)
    gpus = find_devices(os.environ).ids if options.device == "cuda" else ()
    if options.device == "cuda" and not gpus:
        parser.error("there is no GPU here: --device cpu rehearses")
    options.transport = "nccl" if len(gpus) > 1 else "gloo"
    if options.only:
        own, options.server_gpu = (*gpus, "")[0], (*gpus[1:2], *gpus, "")[0]
        os.environ["CUDA_VISIBLE_DEVICES"] = own
        figures = CHECKS[options.only][0](options)
        (options.out / f"{options.only}.json").write_text(json.dumps(figures))
        return 0
    installed = {"vllm": look(options.vllm_python), "sglang": look(options.sglang_python)}
    about = {"date": time.strftime("%Y-%m-%d"), "model": options.model, "weights go by": options.transport}
    words = ["nvidia-smi", "--query-gpu=name,driver_version,memory.total", "--format=csv,noheader"]
    devices = subprocess.run(words, capture_output=True, text=True, check=False).stdout if gpus else "none"
    about |= {"devices": devices.strip(), "here": look(sys.executable), **installed}
    rows: list[dict[str, Any]] = []
    for check in options.checks:
        why = why_not(check, options.device, installed)
        rows.append({"check": check, "result": "not run", "why": why} if why else run(check, options))
        print(f"{check}: {rows[-1]['result']}  {rows[-1].get('why') or ''}", flush=True)
        (options.out / "report.md").write_text(markdown(about, rows))
        (options.out / "report.json").write_text(json.dumps({"about": about, "checks": rows}, indent=1))
    print(f"the report: {options.out / 'report.md'}, and report.json beside it")
    return 1 if any(row["result"] == "failed" for row in rows) else 0


if __name__ == "__main__":
    sys.exit(main())
