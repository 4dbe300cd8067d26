"""Writes a model repository with a small layer of each naming, whose weights are random:

    python3 client/examples/make_layers.py models
    rapt-server --model_repository=models

Needs NumPy. write_layer() and save_tensors() write other layers, without the package safetensors.
"""

import json
import math
import pathlib
import struct
import sys

import numpy as np

TYPES = {"float64": "F64", "float32": "F32", "float16": "F16", "bfloat16": "BF16"}


def save_tensors(path, tensors):
    """Writes arrays by name in the format of safetensors. Replaces a file at once, so that a server never maps a part."""
    index, data = {}, b""
    for name, array in tensors.items():
        content = np.ascontiguousarray(array).tobytes()
        index[name] = {
            "dtype": TYPES[array.dtype.name],
            "shape": list(array.shape),
            "data_offsets": [len(data), len(data) + len(content)],
        }
        data += content
    header = json.dumps(index).encode()
    part = path.with_suffix(".part")
    part.write_bytes(struct.pack("<Q", len(header)) + header + data)
    part.rename(path)


def write_layer(folder, config, tensors):
    """Writes config.json and model.safetensors."""
    folder.mkdir(parents=True, exist_ok=True)
    save_tensors(folder / "model.safetensors", tensors)
    (folder / "config.json").write_text(json.dumps(config, indent=2) + "\n")


def layers(embed=32, heads=4, seed=2026):
    """Returns name -> (config, tensors)."""
    rng = np.random.default_rng(seed)

    def matrix(rows, columns):
        return (rng.standard_normal((rows, columns)) / math.sqrt(columns)).astype(np.float32)

    def vector(size):
        return (0.1 * rng.standard_normal(size)).astype(np.float32)

    def linear(name, rows, columns, bias=True):
        return {f"{name}.weight": matrix(rows, columns)} | ({f"{name}.bias": vector(rows)} if bias else {})

    head = embed // heads
    llama = {"q_proj": embed, "k_proj": embed // 2, "v_proj": embed // 2, "o_proj": embed}
    return {
        "torch_block": (
            {"num_attention_heads": heads},
            {"in_proj_weight": matrix(3 * embed, embed), "in_proj_bias": vector(3 * embed)}
            | linear("out_proj", embed, embed),
        ),
        "llama_block": (
            {
                "hidden_size": embed,
                "num_attention_heads": heads,
                "num_key_value_heads": heads // 2,
                "rope_theta": 10000.0,
                "rms_norm_eps": 1e-6,
                "rapt": {"prefix": "model.layers.0.self_attn.", "is_causal": True},
            },
            {
                f"model.layers.0.self_attn.{name}": tensor
                for projection, rows in llama.items()
                for name, tensor in linear(projection, rows, embed, bias=False).items()
            }
            | {f"model.layers.0.self_attn.{name}_norm.weight": 1 + vector(head) for name in "qk"},
        ),
        "bert_block": (
            {
                "hidden_size": embed,
                "num_attention_heads": heads,
                "pad_token_id": 0,
                "rapt": {"prefix": "encoder.layer.0.attention."},
            },
            {
                f"encoder.layer.0.attention.{name}": tensor
                for projection in ("self.query", "self.key", "self.value", "output.dense")
                for name, tensor in linear(projection, embed, embed).items()
            },
        ),
        "gpt2_block": (
            {"n_embd": embed, "n_head": heads, "rapt": {"prefix": "h.0.attn."}},
            {
                "h.0.attn.c_attn.weight": matrix(embed, 3 * embed),
                "h.0.attn.c_attn.bias": vector(3 * embed),
                "h.0.attn.c_proj.weight": matrix(embed, embed),
                "h.0.attn.c_proj.bias": vector(embed),
            },
        ),
        "t5_block": (
            {"d_model": embed, "num_heads": heads, "d_kv": head, "relative_attention_max_distance": 20},
            {f"{name}.weight": matrix(embed, embed) / 2 for name in "qkvo"}
            | {"relative_attention_bias.weight": matrix(8, heads)},
        ),
        "plain_block": ({}, {"W_q": matrix(24, embed), "W_k": matrix(24, embed), "W_v": matrix(28, embed)}),
        "bahdanau": ({}, {"W1": matrix(20, embed), "W2": matrix(20, 16), "v": matrix(1, 20)}),
        "luong_general": ({}, {"W": matrix(16, embed)}),
        "luong_concat": ({"hidden_size": 16}, {"W": matrix(20, 16 + embed), "v": vector(20)}),
        "luong_dot": ({"hidden_size": embed, "rapt": {"naming": "plain"}}, {}),
        "positions": (
            {"num_attention_heads": heads, "rapt": {"positional_base": 10000, "is_causal": True}},
            {"in_proj_weight": matrix(3 * embed, embed)} | linear("out_proj", embed, embed, bias=False),
        ),
    }


def main():
    if len(sys.argv) != 2:
        sys.exit("usage: make_layers.py FOLDER")
    for name, (config, tensors) in layers().items():
        write_layer(pathlib.Path(sys.argv[1]) / name, config, tensors)


if __name__ == "__main__":
    main()
