"""Makes the pictures of docs/: a token strip and a group, of a run whose texts and log-probs are made up.

python -m tests.browser.pictures docs/
"""

import random
import re
import sys
import tempfile
from pathlib import Path
from typing import Any

from playwright.sync_api import sync_playwright
from tokenizers import ByteLevelBPETokenizer

from rollstream.trajectory import Metrics, Rollout, Trajectory
from tests.browser.conftest import serving
from tests.support import view_runs

SYSTEM = "You solve word problems. Think first, use the calculator where it helps, and end with the answer in bold."
QUESTION = (
    "A stationer has 7 boxes of pens. Each box holds 12 packs of 5 pens. On Monday she sells 138 pens, on Tuesday "
    "twice as many. How many pens are left?"
)
THOUGHT = "7 boxes of 12 packs with 5 pens. Tuesday is twice Monday. I let the calculator do the rest."
ANSWERS: list[tuple[str, str, str, str, float, str]] = [
    (
        "At first there are 7 · 12 · 5 = 420 pens. Let me take away what was sold on both days.",
        "420 - 138 - 2 * 138",
        "6",
        "She sold 138 + 276 = 414 pens, so 420 − 414 = 6 are left.\n\n**6**",
        1.0,
        "stop",
    ),
    (
        "At first there are 7 · 12 · 5 = 420 pens. Let me compute what is sold in total.",
        "138 + 2 * 138",
        "414",
        "So 414 pens were sold, and 420 − 414 leaves 6 pens.\n\n**6**",
        1.0,
        "stop",
    ),
    (
        "At first there are 84 pens. That is fewer than she sells on Monday; perhaps packs are meant?",
        "84 * 5 - 138",
        "282",
        "After Monday 282 pens are left. Tuesday she sells twice as many.\n\n**282**",
        0.0,
        "stop",
    ),
    (
        "At first there are 7 · 12 · 5 = 420 pens. But wait, does she sell pens or packs? Let me read that again.",
        "420 / 138",
        "3.0434782608695654",
        "Hmm, 3.04 is not a whole number. Wait, perhaps she sells packs on Tuesday. Then twice as many packs would be",
        0.0,
        "length",
    ),
]


def tokenizer(folder: Path) -> ByteLevelBPETokenizer:
    """Byte-level BPE of this repository's documentation."""
    made = ByteLevelBPETokenizer()
    files = [str(path) for path in Path("docs").glob("*.md")]
    made.train(files, vocab_size=6000, special_tokens=["<|im_start|>", "<|im_end|>", "<think>", "</think>"])
    folder.mkdir()
    made.save(str(folder / "tokenizer.json"))
    return made


def rollout(model: Any, index: int, repeat: int) -> Rollout:
    first, expression, result, last, reward, finish = ANSWERS[repeat]
    call = f'\n<tool_call>{{"name": "calculator", "arguments": {{"expression": "{expression}"}}}}</tool_call>'
    rng = random.Random(index * 10 + repeat)
    prompt = model.encode(
        f"<|im_start|>system\n{SYSTEM}<|im_end|>\n<|im_start|>user\n{QUESTION}<|im_end|>\n<|im_start|>assistant\n"
    ).ids
    spoken = [
        (f"<think>\n{THOUGHT}\n</think>\n\n{first}{call}<|im_end|>", 1),
        (f"\n<|im_start|>tool\n{result}<|im_end|>\n<|im_start|>assistant\n", 0),
        (last + ("<|im_end|>" if finish == "stop" else ""), 1),
    ]
    ids: list[int] = []
    mask: list[int] = []
    logprobs: list[float] = []
    for text, value in spoken:
        tokens = model.encode(text)
        for piece in tokens.tokens:
            # Where a thought could go another way, the model is less sure.
            unsure = bool(re.match(r"(Ċ|Ġ)?[A-Z]\w|Ġ(?:but|wait|perhaps|so)", piece)) or rng.random() < 0.12
            logprobs.append(-rng.expovariate(0.7 if unsure else 18) if value else 0.0)
        ids += tokens.ids
        mask += [value] * len(tokens.ids)
    parts = {"correct": reward, "format": float(finish == "stop")}
    messages = [
        {"role": "system", "content": SYSTEM},
        {"role": "user", "content": QUESTION},
        {
            "role": "assistant",
            "content": f"<think>\n{THOUGHT}\n</think>\n\n{first}",
            "tool_calls": [{"function": {"name": "calculator", "arguments": {"expression": expression}}}],
        },
        {"role": "tool", "name": "calculator", "content": result},
        {"role": "assistant", "content": last},
    ]
    trajectory = Trajectory(
        prompt_ids=prompt,
        response_ids=ids,
        response_mask=mask,
        response_logprobs=logprobs,
        messages=messages,
        finish_reason=finish,
        policy_versions=[(0, 41), (mask.index(0), 42)],
        num_turns=4,
        reward=reward,
        reward_extra=parts,
        metrics=Metrics(0.1, 3.2, 0.01, 0.002, 3.4, 2, 0, 1, 0),
        extra={"trainer_logprobs": [one + rng.gauss(0, 0.03) for one in logprobs]},
    )
    return Rollout(index, repeat, f"{index:032x}", [trajectory], "word_problems", ground_truth="6")


def main(target: Path) -> None:
    with tempfile.TemporaryDirectory() as folder:
        root = Path(folder)
        model = tokenizer(root / "model")
        view_runs.MODEL_PATH = root / "model"
        view_runs.write_run(
            root / "run",
            [rollout(model, index, repeat) for index in range(3) for repeat in range(4)],
            n=4,
            prompts=3,
        )
        with serving(root / "run") as ready, sync_playwright() as playwright:
            browser = playwright.chromium.launch(executable_path="/usr/bin/chromium", args=["--no-sandbox"])
            page = browser.new_page(viewport={"width": 1280, "height": 760})
            page.goto(ready["url"])
            page.locator(".sources tbody a").first.click()
            page.locator(".solve a").nth(1).click()
            page.locator(".rollout").nth(3).wait_for()
            page.screenshot(path=target / "view-group.png")
            page.locator(".rollout header a").nth(0).click()
            page.get_by_role("tab", name="Tokens").click()
            page.locator(".chunk span.s6").first.hover()
            page.screenshot(path=target / "view-tokens.png")
            browser.close()


if __name__ == "__main__":
    main(Path(sys.argv[1]))
