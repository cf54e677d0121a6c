"""The model's shape: Qwen2, small enough to train and to ship."""

import torch
from transformers import Qwen2Config, Qwen2ForCausalLM

from demo_model.tokenizer import VOCABULARY


def build_model(pad: int, end: int) -> Qwen2ForCausalLM:
    """Build an untrained model of about 435,000 weights in fp32, drawn from torch's global generator.

    Qwen2 because every engine knows it; two layers because copying an expression into a tool call takes
    two (one to look at the previous token, one to find its like).
    """
    config = Qwen2Config(
        vocab_size=VOCABULARY,
        hidden_size=128,
        intermediate_size=352,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=4096,
        tie_word_embeddings=True,
        use_cache=True,
        bos_token_id=None,
        eos_token_id=end,
        pad_token_id=pad,
    )
    model = Qwen2ForCausalLM(config).to(torch.float32)
    model.generation_config.eos_token_id = end
    model.generation_config.pad_token_id = pad
    return model
