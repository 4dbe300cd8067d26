"""Keeps the attention weights of a Hugging Face model for a text, of every layer and head, as rapt computes them:

    python -m rapt.capture MODEL_FOLDER "The bank of the river was steep" -o bank.npz

The explorer and `rapt plot` open the file. docs/python.md says what is in it. Needs PyTorch and transformers.
"""

from __future__ import annotations

import argparse
import pathlib
import sys
from typing import Any, NamedTuple

import numpy as np

_MOST_TOKENS = 512  # 1 GiB of 32 layers with 32 heads
_SIGNS = str.maketrans(" \n\t", "␣↵⇥")

Weights = np.ndarray[Any, np.dtype[np.float32]]


class Capture(NamedTuple):
    model: str  # the folder's name
    tokens: list[str]  # as text, without the blanks around it
    weights: Weights  # [layers, 1, heads, tokens, tokens]

    def save(self, path: str | pathlib.Path) -> None:
        """Writes an .npz file, which needs no pickle."""
        with open(path, "wb") as file:  # to a path NumPy may add .npz
            np.savez(file, model=np.array(self.model), tokens=np.array(self.tokens), weights=self.weights)


def capture(folder: str | pathlib.Path, text: str) -> Capture:
    """The weights of the model in `folder` for a text, which its tokenizer divides. Of an encoder with a decoder, the
    encoder's. Downloads nothing and runs no code of the folder."""
    path = pathlib.Path(folder).resolve()
    if not path.is_dir():
        raise ValueError(f"there is no folder {folder}; it must be a model as save_pretrained() of transformers writes it")
    tokenizer, model = _load_tokenizer(path), _load_model(path)
    ids = tokenizer(text)["input_ids"]
    most = min(_MOST_TOKENS, tokenizer.model_max_length, getattr(model.config, "max_position_embeddings", _MOST_TOKENS))
    if not 1 <= len(ids) <= most:
        raise ValueError(f"the text has {len(ids)} tokens; it must have from 1 to {most}")
    tokens = [_text_of(tokenizer, token) for token in ids]
    return Capture(path.name, tokens, _weights(model, ids))


def _load_tokenizer(path: pathlib.Path) -> Any:
    from transformers import AutoTokenizer

    try:
        tokenizer = AutoTokenizer.from_pretrained(path, local_files_only=True, trust_remote_code=False)
    except Exception as error:  # of many kinds
        raise ValueError(f"transformers can't read a tokenizer in {path}: {error}") from error
    if set(tokenizer.get_vocab()) <= set(tokenizer.all_special_tokens):  # transformers 5 makes one without its files
        raise ValueError(f"{path} has no vocabulary of a {type(tokenizer).__name__}, such as tokenizer.json or vocab.txt")
    return tokenizer


def _load_model(path: pathlib.Path) -> Any:
    from transformers import AutoModel

    from . import torch as rapt_torch

    rapt_torch.register_transformers()
    options = {"local_files_only": True, "trust_remote_code": False, "attn_implementation": "rapt"}
    try:
        model, info = AutoModel.from_pretrained(path, output_loading_info=True, **options)
    except (OSError, ValueError) as error:
        raise ValueError(f"transformers can't read a model in {path}: {error}") from error
    missing = sorted(name for name in info["missing_keys"] if "pooler" not in name)  # comes after the attention
    if missing:
        raise ValueError(f"{path} lacks {len(missing)} weights of a {type(model).__name__}, such as {missing[0]}")
    return (model.get_encoder() if model.config.is_encoder_decoder else model).eval()


def _text_of(tokenizer: Any, token: int) -> str:
    text: str = tokenizer.decode([token])
    return text.strip() or text.translate(_SIGNS) or str(tokenizer.convert_ids_to_tokens(token))


def _weights(model: Any, ids: list[int]) -> Weights:
    import torch

    name = type(model).__name__
    try:
        with torch.no_grad():
            outputs = model(torch.tensor([ids]), output_attentions=True)
    except NotImplementedError:  # of rapt, which says why
        raise
    except Exception as error:  # such as of a model that needs pictures
        raise ValueError(f"{name} does not take a text alone: {error}") from error
    layers = getattr(outputs, "attentions", None)
    if not layers or any(layer is None for layer in layers):
        raise ValueError(f"{name} does not return the weights of its attention")
    for layer in layers:
        if layer.shape != (1, layers[0].shape[1], len(ids), len(ids)):
            raise ValueError(f"{name} has weights of shape {list(layer.shape)}; they must be [1, heads, {len(ids)}, {len(ids)}]")
    return np.stack([layer.float().numpy() for layer in layers])


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m rapt.capture", description="Keeps a model's attention weights for a text.")
    parser.add_argument("folder", help="a model with its tokenizer, as save_pretrained() of transformers writes them")
    parser.add_argument("text")
    parser.add_argument("-o", "--output", required=True, metavar="FILE.npz")
    arguments = parser.parse_args()
    try:
        import transformers

        logging: Any = transformers.logging
        logging.set_verbosity_error()
        logging.disable_progress_bar()
        captured = capture(arguments.folder, arguments.text)
        captured.save(arguments.output)
    except (ImportError, NotImplementedError, OSError, ValueError) as error:
        sys.exit(f"rapt.capture: {error}")
    layers, _, heads, count, _ = captured.weights.shape
    print(f"{arguments.output}: {captured.model}, {layers} layers x {heads} heads, {count} tokens: {' '.join(captured.tokens)}")


if __name__ == "__main__":
    main()
