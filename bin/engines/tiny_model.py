"""Write a tiny Llama model with random weights and a tokenizer of its own: 3 MB, one second, no network.

usage: tiny_model.py [--huggingface FOLDER] [--gguf FILE]

The folder is what vLLM and SGLang load, the file what llama.cpp loads. Both hold the same weights and the
same vocabulary, so every engine cuts a text into the same tokens and answers the same greedy noise. The
tokenizer is a byte-level BPE trained on the help topics that CPython ships, so it is the same for the same
Python minor version.

Runs in an engine's environment. Needs numpy and tokenizers; `--gguf` needs gguf.
"""

from __future__ import annotations

import argparse
import json
import os
import struct
from pathlib import Path
from pydoc_data.topics import topics
from typing import Any

import numpy as np
from numpy.typing import NDArray
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

SEED = 0
VOCABULARY = 2048
HIDDEN = 128
HEAD_DIM = 32
HEADS = HIDDEN // HEAD_DIM
KV_HEADS = HEADS // 2
FEED_FORWARD = 2 * HIDDEN
LAYERS = 2
CONTEXT_TOKENS = 4096
ROPE_BASE = 10000.0
NORM_EPS = 1e-5

SPECIAL = ["<|pad|>", "<|bos|>", "<|end|>", "<|system|>", "<|user|>", "<|assistant|>", "<|tool|>"]
CHAT_TEMPLATE = (
    "{% for message in messages %}"
    "{{ '<|' + message['role'] + '|>\n' + message['content'] + '<|end|>\n' }}"
    "{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|assistant|>\n' }}{% endif %}"
)

# Hugging Face's name of a tensor -> GGUF's; the second table is per layer.
GGUF_NAMES = {
    "model.embed_tokens.weight": "token_embd.weight",
    "model.norm.weight": "output_norm.weight",
    "lm_head.weight": "output.weight",
}
GGUF_LAYER_NAMES = {
    "self_attn.q_proj.weight": "attn_q.weight",
    "self_attn.k_proj.weight": "attn_k.weight",
    "self_attn.v_proj.weight": "attn_v.weight",
    "self_attn.o_proj.weight": "attn_output.weight",
    "mlp.gate_proj.weight": "ffn_gate.weight",
    "mlp.up_proj.weight": "ffn_up.weight",
    "mlp.down_proj.weight": "ffn_down.weight",
    "input_layernorm.weight": "attn_norm.weight",
    "post_attention_layernorm.weight": "ffn_norm.weight",
}

Array = NDArray[np.float32]


def train_tokenizer() -> Tokenizer:
    """Train the byte-level BPE."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCABULARY,
        special_tokens=SPECIAL,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator((topics[name] for name in sorted(topics)), trainer)
    return tokenizer


def make_weights(vocabulary: int) -> dict[str, Array]:
    """Draw the tensors, by Hugging Face's names, in a fixed order."""
    rng = np.random.default_rng(SEED)

    def draw(*shape: int) -> Array:
        return (rng.standard_normal(shape) * 0.05).astype(np.float32)

    kv = KV_HEADS * HEAD_DIM
    tensors = {"model.embed_tokens.weight": draw(vocabulary, HIDDEN)}
    for layer in range(LAYERS):
        prefix = f"model.layers.{layer}."
        tensors |= {
            prefix + "self_attn.q_proj.weight": draw(HIDDEN, HIDDEN),
            prefix + "self_attn.k_proj.weight": draw(kv, HIDDEN),
            prefix + "self_attn.v_proj.weight": draw(kv, HIDDEN),
            prefix + "self_attn.o_proj.weight": draw(HIDDEN, HIDDEN),
            prefix + "mlp.gate_proj.weight": draw(FEED_FORWARD, HIDDEN),
            prefix + "mlp.up_proj.weight": draw(FEED_FORWARD, HIDDEN),
            prefix + "mlp.down_proj.weight": draw(HIDDEN, FEED_FORWARD),
            prefix + "input_layernorm.weight": np.ones(HIDDEN, np.float32),
            prefix + "post_attention_layernorm.weight": np.ones(HIDDEN, np.float32),
        }
    tensors["model.norm.weight"] = np.ones(HIDDEN, np.float32)
    tensors["lm_head.weight"] = draw(vocabulary, HIDDEN)
    return tensors


def write_huggingface(folder: Path, tokenizer: Tokenizer, tensors: dict[str, Array]) -> None:
    """Write the folder; `model.safetensors` comes last, so that its presence means a whole folder."""
    folder.mkdir(parents=True, exist_ok=True)
    ids = {name: tokenizer.token_to_id(name) for name in SPECIAL}
    config = {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "vocab_size": tokenizer.get_vocab_size(),
        "hidden_size": HIDDEN,
        "intermediate_size": FEED_FORWARD,
        "num_hidden_layers": LAYERS,
        "num_attention_heads": HEADS,
        "num_key_value_heads": KV_HEADS,
        "head_dim": HEAD_DIM,
        "max_position_embeddings": CONTEXT_TOKENS,
        "rms_norm_eps": NORM_EPS,
        "rope_theta": ROPE_BASE,
        "hidden_act": "silu",
        "tie_word_embeddings": False,
        "torch_dtype": "float32",
        "initializer_range": 0.05,
        "bos_token_id": ids["<|bos|>"],
        "eos_token_id": ids["<|end|>"],
        "pad_token_id": ids["<|pad|>"],
    }
    tokenizer_config = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "bos_token": "<|bos|>",
        "eos_token": "<|end|>",
        "pad_token": "<|pad|>",
        "additional_special_tokens": SPECIAL[3:],
        "clean_up_tokenization_spaces": False,
        "model_max_length": CONTEXT_TOKENS,
        "chat_template": CHAT_TEMPLATE,
    }
    generation_config = {"bos_token_id": ids["<|bos|>"], "eos_token_id": ids["<|end|>"]}
    tokenizer.save(str(folder / "tokenizer.json"))
    for name, content in (
        ("config.json", config),
        ("tokenizer_config.json", tokenizer_config),
        ("generation_config.json", generation_config),
    ):
        (folder / name).write_text(json.dumps(content, indent=1))
    write_safetensors(folder / "model.safetensors", tensors)


def write_safetensors(file: Path, tensors: dict[str, Array]) -> None:
    """Write float32 tensors: the header's length (8 bytes), the header (JSON), the data."""
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    end = 0
    for name, tensor in tensors.items():
        start, end = end, end + tensor.nbytes
        header[name] = {"dtype": "F32", "shape": list(tensor.shape), "data_offsets": [start, end]}
    encoded = json.dumps(header).encode()
    encoded += b" " * (-len(encoded) % 8)
    data = b"".join(tensor.astype("<f4").tobytes() for tensor in tensors.values())
    replace(file, struct.pack("<Q", len(encoded)) + encoded + data)


def write_gguf(file: Path, tokenizer: Tokenizer, tensors: dict[str, Array]) -> None:
    """Write one GGUF file for llama.cpp."""
    import gguf  # only llama.cpp's environment has it

    file.parent.mkdir(parents=True, exist_ok=True)
    unfinished = file.with_suffix(".partial")
    writer = gguf.GGUFWriter(str(unfinished), "llama")
    writer.add_name("tiny-llama")
    writer.add_context_length(CONTEXT_TOKENS)
    writer.add_embedding_length(HIDDEN)
    writer.add_block_count(LAYERS)
    writer.add_feed_forward_length(FEED_FORWARD)
    writer.add_head_count(HEADS)
    writer.add_head_count_kv(KV_HEADS)
    writer.add_key_length(HEAD_DIM)
    writer.add_value_length(HEAD_DIM)
    writer.add_rope_dimension_count(HEAD_DIM)
    writer.add_rope_freq_base(ROPE_BASE)
    writer.add_layer_norm_rms_eps(NORM_EPS)
    writer.add_vocab_size(tokenizer.get_vocab_size())
    writer.add_file_type(gguf.LlamaFileType.ALL_F32)

    merges = json.loads(tokenizer.to_str())["model"]["merges"]
    special = {tokenizer.token_to_id(name) for name in SPECIAL}
    ids = range(tokenizer.get_vocab_size())
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("gpt-2")
    writer.add_token_list([tokenizer.id_to_token(i) for i in ids])
    writer.add_token_types([gguf.TokenType.CONTROL if i in special else gguf.TokenType.NORMAL for i in ids])
    writer.add_token_merges([merge if isinstance(merge, str) else " ".join(merge) for merge in merges])
    writer.add_bos_token_id(tokenizer.token_to_id("<|bos|>"))
    writer.add_eos_token_id(tokenizer.token_to_id("<|end|>"))
    writer.add_pad_token_id(tokenizer.token_to_id("<|pad|>"))
    writer.add_add_bos_token(False)
    writer.add_chat_template(CHAT_TEMPLATE)

    for name, tensor in tensors.items():
        writer.add_tensor(gguf_name(name), np.ascontiguousarray(gguf_layout(name, tensor)))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    os.replace(unfinished, file)


def gguf_name(name: str) -> str:
    """Return GGUF's name of a tensor."""
    if name in GGUF_NAMES:
        return GGUF_NAMES[name]
    _, _, layer, rest = name.split(".", 3)
    return f"blk.{layer}.{GGUF_LAYER_NAMES[rest]}"


def gguf_layout(name: str, tensor: Array) -> Array:
    """Interleave the rotary halves of queries and keys, which Hugging Face keeps apart."""
    for part, heads in (("q_proj", HEADS), ("k_proj", KV_HEADS)):
        if part in name:
            rows, columns = tensor.shape
            halves = tensor.reshape(heads, 2, rows // heads // 2, columns)
            return halves.swapaxes(1, 2).reshape(tensor.shape)
    return tensor


def replace(file: Path, content: bytes) -> None:
    """Write a file so that it is either absent or whole."""
    unfinished = file.with_suffix(".partial")
    unfinished.write_bytes(content)
    os.replace(unfinished, file)


def main() -> None:
    """Write what the command line asks for."""
    parser = argparse.ArgumentParser(description="Write a tiny Llama model with random weights.")
    parser.add_argument("--huggingface", type=Path, metavar="FOLDER")
    parser.add_argument("--gguf", type=Path, metavar="FILE")
    options = parser.parse_args()
    tokenizer = train_tokenizer()
    tensors = make_weights(tokenizer.get_vocab_size())
    if options.huggingface:
        write_huggingface(options.huggingface, tokenizer, tensors)
    if options.gguf:
        write_gguf(options.gguf, tokenizer, tensors)


if __name__ == "__main__":
    main()
