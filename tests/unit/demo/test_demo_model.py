"""The shipped demo model: its files are all there, small and clean, and it has its skill."""

import json
from pathlib import Path
from typing import Any

import pytest

from rollstream.config.load import compose
from rollstream.demo import MODEL_PATH

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")

TEMPLATE_SOURCE = Path(__file__).parents[3] / "demo_model" / "chat_template.jinja"
MOST_BYTES = 8_000_000
CALCULATOR = {
    "type": "function",
    "function": {
        "name": "calculator",
        "description": "Evaluate an arithmetic expression.",
        "parameters": {
            "type": "object",
            "properties": {
                "expression": {"type": "string", "description": "The expression, such as 12 + 34."}
            },
            "required": ["expression"],
        },
    },
}


@pytest.fixture(scope="module")
def tokenizer() -> Any:
    return transformers.AutoTokenizer.from_pretrained(MODEL_PATH)


@pytest.fixture(scope="module")
def model() -> Any:
    # One thread: a model this small is slower with two where several processes share the cores.
    torch.set_num_threads(1)
    return transformers.AutoModelForCausalLM.from_pretrained(MODEL_PATH).eval()


def _problems(count: int) -> list[Any]:
    from demo_model.problems import Split, enumerate_pairs

    problems = list(enumerate_pairs(2, Split.TEST))
    return problems[:: len(problems) // count][:count]


def _reply(model: Any, tokenizer: Any, chats: list[Any], tools: list[Any] | None, most: int) -> list[str]:
    prompts = [
        tokenizer.apply_chat_template(chat, tools=tools, add_generation_prompt=True, return_dict=False)
        for chat in chats
    ]
    batch = tokenizer.pad({"input_ids": prompts}, padding_side="left", return_tensors="pt")
    ids = model.generate(**batch, do_sample=False, max_new_tokens=most)
    return tokenizer.batch_decode(ids[:, batch["input_ids"].shape[1] :], skip_special_tokens=True)


def test_ships_what_transformers_and_openvino_read() -> None:
    assert {file.name for file in MODEL_PATH.iterdir()} == {
        "chat_template.jinja",
        "config.json",
        "generation_config.json",
        "model.safetensors",
        "openvino_model.bin",
        "openvino_model.xml",
        "tokenizer.json",
        "tokenizer_config.json",
    }
    assert sum(file.stat().st_size for file in MODEL_PATH.iterdir()) <= MOST_BYTES


@pytest.mark.parametrize("trace", [b"/work", b"/tmp", b"/root", b"/home", b"_name_or_path"])
def test_files_hold_no_trace_of_the_machine_that_made_them(trace: bytes) -> None:
    assert [file.name for file in MODEL_PATH.iterdir() if trace in file.read_bytes()] == []


def test_openvino_holds_the_very_weights_of_the_safetensors_file() -> None:
    # Each once: none is folded into another constant, so a trainer's weights can take its place.
    constants = (MODEL_PATH / "openvino_model.bin").read_bytes()
    weights = pytest.importorskip("safetensors.torch").load_file(MODEL_PATH / "model.safetensors")
    assert len(weights) == 26
    for name, weight in weights.items():
        assert constants.count(weight.float().numpy().tobytes()) == 1, name


def test_config_names_one_architecture_and_full_precision() -> None:
    config = json.loads((MODEL_PATH / "config.json").read_text())
    assert config["architectures"] == ["Qwen2ForCausalLM"]
    assert config["dtype"] == "float32"  # or transformers would compute in the bf16 of the file


def test_ships_the_template_of_its_source(tokenizer: Any) -> None:
    assert tokenizer.chat_template == TEMPLATE_SOURCE.read_text()
    assert "chat_template" not in json.loads((MODEL_PATH / "tokenizer_config.json").read_text())


def test_template_renders_a_tool_chat(tokenizer: Any) -> None:
    function = {"name": "calculator", "arguments": {"expression": "37 - 41"}}
    chat = [
        {"role": "user", "content": "37 - 41 ="},
        {"role": "assistant", "content": "", "tool_calls": [{"type": "function", "function": function}]},
        {"role": "tool", "content": "-4"},
    ]
    text = tokenizer.apply_chat_template(chat, tools=[CALCULATOR], tokenize=False, add_generation_prompt=True)
    assert text.startswith("<|im_start|>system\nYou solve arithmetic problems.\n\n# Tools\n\n")
    assert f"<tools>\n{json.dumps(CALCULATOR)}\n</tools>" in text
    assert text.endswith(
        "<|im_start|>user\n37 - 41 =<|im_end|>\n"
        '<|im_start|>assistant\n<tool_call>\n{"name": "calculator", "arguments": {"expression": "37 - 41"}}\n'
        "</tool_call><|im_end|>\n"
        "<|im_start|>user\n<tool_response>\n-4\n</tool_response><|im_end|>\n"
        "<|im_start|>assistant\n"
    )
    assert tokenizer.decode(tokenizer(text)["input_ids"]) == text


def test_template_puts_results_of_one_turn_into_one_message(tokenizer: Any) -> None:
    calls = [
        {"function": {"name": "f", "arguments": '{"x": 1}'}},
        {"function": {"name": "g", "arguments": {}}},
    ]
    chat = [
        {"role": "system", "content": "Be brief."},
        {"role": "assistant", "content": "Two.", "tool_calls": calls},
        {"role": "tool", "content": "a"},
        {"role": "tool", "content": "b"},
        {"role": "user", "content": "And?"},
    ]
    assert tokenizer.apply_chat_template(chat, tokenize=False) == (
        "<|im_start|>system\nBe brief.<|im_end|>\n"
        '<|im_start|>assistant\nTwo.\n<tool_call>\n{"name": "f", "arguments": {"x": 1}}\n</tool_call>\n'
        '<tool_call>\n{"name": "g", "arguments": {}}\n</tool_call><|im_end|>\n'
        "<|im_start|>user\n<tool_response>\na\n</tool_response>\n<tool_response>\nb\n</tool_response><|im_end|>\n"
        "<|im_start|>user\nAnd?<|im_end|>\n"
    )


def test_tool_markers_survive_decoding_without_special_tokens(tokenizer: Any) -> None:
    ids = tokenizer("<tool_call>\n</tool_call><|im_end|>")["input_ids"]
    assert len(ids) == 4
    assert tokenizer.decode(ids, skip_special_tokens=True) == "<tool_call>\n</tool_call>"
    assert tokenizer.eos_token == "<|im_end|>"


@pytest.mark.parametrize(
    "text",
    [
        "<|im_start|>user\nThat is not right.\n\n  a  b 123 x+y's don't\n\n\n",
        '{"a": [-1]}\n',
        "e\u0301 <tool_call>",
    ],
)
def test_every_reader_of_the_tokenizer_gives_the_same_ids(tokenizer: Any, text: str) -> None:
    # transformers 5 puts Qwen2's own split over that of tokenizer.json; other servers read tokenizer.json.
    plain = pytest.importorskip("tokenizers").Tokenizer.from_file(str(MODEL_PATH / "tokenizer.json"))
    assert tokenizer(text)["input_ids"] == plain.encode(text).ids


def test_solves_most_held_out_problems_greedily(model: Any, tokenizer: Any) -> None:
    assert model.dtype == torch.float32
    problems = _problems(50)
    chats = [[{"role": "user", "content": problem.question}] for problem in problems]
    replies = _reply(model, tokenizer, chats, None, most=8)
    assert sum(reply == problem.answer for reply, problem in zip(replies, problems, strict=True)) >= 30


def test_calls_the_calculator_it_is_offered(model: Any, tokenizer: Any) -> None:
    problems = _problems(8)
    chats = [[{"role": "user", "content": problem.question}] for problem in problems]
    replies = _reply(model, tokenizer, chats, [CALCULATOR], most=64)
    start, end = '<tool_call>\n{"name": "calculator", "arguments": {"expression": "', '"}}\n</tool_call>'
    calls = [start + problem.expression + end for problem in problems]
    assert sum(reply == call for reply, call in zip(replies, calls, strict=True)) >= 7


def test_openvino_says_what_transformers_says(model: Any, tokenizer: Any) -> None:
    openvino = pytest.importorskip("openvino")
    chat = [{"role": "user", "content": _problems(1)[0].question}]
    ids = tokenizer.apply_chat_template(
        chat, add_generation_prompt=True, return_dict=False, return_tensors="pt"
    )
    with torch.inference_mode():
        expected = model(ids).logits.log_softmax(-1)
    compiled = openvino.Core().compile_model(
        MODEL_PATH / "openvino_model.xml",
        "CPU",
        {"INFERENCE_PRECISION_HINT": "f32", "KV_CACHE_PRECISION": "f32"},
    )
    inputs = {
        "input_ids": ids.numpy(),
        "attention_mask": torch.ones_like(ids).numpy(),
        "position_ids": torch.arange(ids.shape[1])[None].numpy(),
        "beam_idx": torch.zeros(1, dtype=torch.int32).numpy(),
    }
    (logits,) = compiled.create_infer_request().infer(inputs).values()
    assert torch.allclose(torch.tensor(logits).log_softmax(-1), expected, atol=1e-4, rtol=0)


def test_it_has_a_name_which_a_folder_and_a_hosted_model_keep(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def path(*words: str) -> str:
        composed = compose(["actor_rollout_ref.model.path=demo", *words])
        return str(composed.actor_rollout_ref.model.path)

    monkeypatch.chdir(tmp_path)
    (tmp_path / "demo").mkdir()  # `rollstream init demo`
    assert path() == path("actor_rollout_ref.rollout.name=hf") == str(MODEL_PATH)
    assert path("actor_rollout_ref.rollout.name=openai") == "demo"
    (tmp_path / "demo" / "config.json").touch()
    assert path() == "demo"
