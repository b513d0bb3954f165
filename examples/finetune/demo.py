"""A small model with a tokenizer, and text for it: the help topics that come with Python."""

from __future__ import annotations

import pydoc_data.topics
from pathlib import Path

import torch

VOCABULARY, HIDDEN, LAYERS, EXPERTS = 2048, 128, 4, 8
CHAT = (
    "{% for m in messages %}<|{{ m.role }}|>\n{{ m.content }}<|end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>\n{% endif %}"
)


def write_text(folder: Path) -> None:
    """Writes one file per topic."""
    folder.mkdir(parents=True, exist_ok=True)
    for name, text in pydoc_data.topics.topics.items():
        (folder / f"{name}.txt").write_text(text, encoding="utf-8")


def write_model(folder: Path, text: Path, seed: int) -> None:
    """Saves a Qwen3-MoE of random weights, and a tokenizer that is trained on the text."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
    from transformers import PreTrainedTokenizerFast, Qwen3MoeConfig, Qwen3MoeForCausalLM

    learned = Tokenizer(models.BPE())
    learned.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    learned.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCABULARY,
        special_tokens=["<|end|>"],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    learned.train([str(file) for file in sorted(text.glob("*.txt"))], trainer)
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=learned, eos_token="<|end|>", pad_token="<|end|>", chat_template=CHAT
    )
    torch.manual_seed(seed)
    config = Qwen3MoeConfig(
        vocab_size=VOCABULARY,
        hidden_size=HIDDEN,
        intermediate_size=2 * HIDDEN,
        moe_intermediate_size=HIDDEN,
        num_hidden_layers=LAYERS,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=32,
        num_experts=EXPERTS,
        num_experts_per_tok=2,
        norm_topk_prob=True,
        max_position_embeddings=4096,
        bos_token_id=None,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
    )
    Qwen3MoeForCausalLM(config).save_pretrained(folder)
    tokenizer.save_pretrained(folder)
