"""Whether OpenVINO's form of the model says the same as transformers does, ids in and ids out."""

from pathlib import Path

import numpy as np
import openvino
import openvino_genai
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from demo_model.chats import CALCULATOR, build_direct_chat
from demo_model.problems import Split, enumerate_pairs

TOLERANCE = 1e-4
"""Six times the rounding seen; without ``EXACT`` log-probs move by hundreds of times the rounding."""
EXACT = {"KV_CACHE_PRECISION": "f32", "INFERENCE_PRECISION_HINT": "f32"}
"""Without both, the CPU plugin rounds to bf16 or compresses the cache."""
_PROBLEMS = 32
_MOST_TOKENS = 64


class NotTheSame(RuntimeError):
    """The two forms of the model differ by more than rounding."""


def compare_forms(folder: Path) -> float:
    """Sample replies with openvino-genai, score them with transformers, and return the largest difference.

    Half of the prompts offer the calculator. Every reply has to end with the end token by itself.

    Raises:
        NotTheSame: if a log-prob differs by more than ``TOLERANCE``, or a reply does not end.
    """
    tokenizer = AutoTokenizer.from_pretrained(folder)
    model = AutoModelForCausalLM.from_pretrained(folder).eval()
    problems = list(enumerate_pairs(2, Split.TEST))[:: 1615 // _PROBLEMS][:_PROBLEMS]
    prompts = [
        tokenizer.apply_chat_template(
            build_direct_chat(problem)[:1], tools=tools, add_generation_prompt=True, return_dict=False
        )
        for problem in problems
        for tools in (None, [CALCULATOR])
    ]
    worst = 0.0
    for prompt, (reply, logprobs) in zip(prompts, _sample_replies(folder, prompts), strict=True):
        if reply[-1] != tokenizer.eos_token_id:
            raise NotTheSame(f"a reply did not end: {tokenizer.decode(reply)!r}")
        with torch.inference_mode():
            logits = model(torch.tensor([prompt + reply])).logits[0, len(prompt) - 1 : -1]
        expected = logits.log_softmax(-1).gather(1, torch.tensor(reply)[:, None])[:, 0]
        worst = max(worst, float((expected - torch.tensor(logprobs)).abs().max()))
    if worst > TOLERANCE:
        raise NotTheSame(f"log-probs differ by up to {worst:.1e}, more than {TOLERANCE:.0e}")
    return worst


def _sample_replies(folder: Path, prompts: list[list[int]]) -> list[tuple[list[int], list[float]]]:
    """Ids and log-probs of one reply to each prompt, sampled at temperature 1."""
    scheduler = openvino_genai.SchedulerConfig()
    scheduler.cache_size = 1  # GB; the model needs a hundredth of it
    pipeline = openvino_genai.ContinuousBatchingPipeline(str(folder), scheduler, "CPU", EXACT)
    handles = []
    for index, prompt in enumerate(prompts):
        sampling = pipeline.get_config()
        sampling.do_sample, sampling.temperature, sampling.top_k, sampling.top_p = True, 1.0, 0, 1.0
        sampling.rng_seed, sampling.logprobs, sampling.max_new_tokens = index, 1, _MOST_TOKENS
        ids = openvino.Tensor(np.array([prompt], dtype=np.int64))
        handles.append(pipeline.add_request(index, ids, sampling))
    while pipeline.has_non_finished_requests():
        pipeline.step()
    replies = [handle.read_all()[0] for handle in handles]
    return [(list(reply.generated_ids), list(reply.generated_log_probs)) for reply in replies]
