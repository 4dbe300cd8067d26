"""rapt.capture of small models with random weights: rapt's weights are those of transformers' own attention. `./dev test torch`
runs it."""

import json
import subprocess
import sys

import numpy as np
import pytest
import rapt.torch
import torch
import transformers
from rapt.capture import capture
from tokenizers import Tokenizer, decoders, models, pre_tokenizers

TEXT = "the bank of the river"
WORDS = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", "the", "bank", "of", "river", "##s"]
SIZES = {"vocab_size": 64, "hidden_size": 32, "num_hidden_layers": 3, "num_attention_heads": 4, "intermediate_size": 48}
ENCODER_DECODER = {"d_model": 32, "d_kv": 8, "d_ff": 48, "num_layers": 3, "num_heads": 4}
CONFIGURATIONS = {
    "bert": transformers.BertConfig(**SIZES),
    "llama": transformers.LlamaConfig(**SIZES, num_key_value_heads=2),
    "gpt2": transformers.GPT2Config(vocab_size=64, n_embd=32, n_layer=3, n_head=4),
    "t5": transformers.T5Config(vocab_size=64, **ENCODER_DECODER, decoder_start_token_id=0),
}


def save_model(name, folder):
    torch.manual_seed(0)
    transformers.AutoModel.from_config(CONFIGURATIONS[name]).save_pretrained(folder)


def save_words(folder):
    """A tokenizer whose words begin with their blanks, as those of GPT-2 do."""
    words = ["the", "\u0120bank", "\u0120of", "\u0120the", "\u0120river", "\u010a"]
    tokenizer = Tokenizer(models.WordLevel({word: n for n, word in enumerate(words)}, unk_token="the"))
    tokenizer.pre_tokenizer, tokenizer.decoder = pre_tokenizers.ByteLevel(add_prefix_space=False), decoders.ByteLevel()
    transformers.PreTrainedTokenizerFast(tokenizer_object=tokenizer).save_pretrained(folder)


@pytest.fixture
def bert(tmp_path):
    """With no file of the tokenizer but its vocabulary."""
    save_model("bert", tmp_path / "bert")
    (tmp_path / "bert/vocab.txt").write_text("\n".join(WORDS))
    return tmp_path / "bert"


def eager_weights(folder, text):
    tokenizer = transformers.AutoTokenizer.from_pretrained(folder)
    model = transformers.AutoModel.from_pretrained(folder, attn_implementation="eager")
    model = model.get_encoder() if model.config.is_encoder_decoder else model
    with torch.no_grad():
        return torch.stack(model(tokenizer(text, return_tensors="pt")["input_ids"], output_attentions=True).attentions).numpy()


@pytest.mark.parametrize("name", ["llama", "gpt2", "t5"])
def test_every_layer_and_head(tmp_path, monkeypatch, name):
    attend, calls = rapt.torch._transformers._attend, []
    monkeypatch.setattr(rapt.torch._transformers, "_attend", lambda *given, **named: calls.append(1) or attend(*given, **named))
    save_model(name, tmp_path)
    save_words(tmp_path)
    found = capture(tmp_path, TEXT + "\n")
    assert found.tokens == [*TEXT.split(), "↵"] and found.weights.shape == (3, 1, 4, 6, 6)
    np.testing.assert_allclose(found.weights, eager_weights(tmp_path, TEXT + "\n"), atol=1e-5)
    assert len(calls) == 3


def test_the_command_writes_a_file_that_needs_no_pickle(bert, tmp_path):
    command = [sys.executable, "-m", "rapt.capture", bert, "The bank of the rivers", "-o", tmp_path / "bank.npz"]
    done = subprocess.run(command, capture_output=True, text=True)
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout.endswith("bank.npz: bert, 3 layers x 4 heads, 8 tokens: [CLS] the bank of the river ##s [SEP]\n")
    with np.load(tmp_path / "bank.npz", allow_pickle=False) as file:
        assert file["model"] == "bert"
        assert list(file["tokens"]) == ["[CLS]", "the", "bank", "of", "the", "river", "##s", "[SEP]"]
        np.testing.assert_allclose(file["weights"], eager_weights(bert, "The bank of the rivers"), atol=1e-5)


def test_no_folder(tmp_path):
    with pytest.raises(ValueError, match="there is no folder .*none; it must be a model"):
        capture(tmp_path / "none", TEXT)


def test_no_tokenizer(bert):
    (bert / "vocab.txt").unlink()
    with pytest.raises(ValueError, match="bert.*tokenizer|bert has no vocabulary of a BertTokenizer"):
        capture(bert, TEXT)


def test_no_model(bert):
    (bert / "model.safetensors").unlink()
    with pytest.raises(ValueError, match="transformers can't read a model in .*bert"):
        capture(bert, TEXT)


def test_weights_of_another_model(bert):
    """transformers draws random numbers for what is missing."""
    config = json.loads((bert / "config.json").read_text())
    (bert / "config.json").write_text(json.dumps(config | {"num_hidden_layers": 4}))
    with pytest.raises(ValueError, match=r"bert lacks 16 weights of a BertModel, such as encoder.layer.3.attention"):
        capture(bert, TEXT)


@pytest.mark.parametrize("text, count", [("the " * 511, 513), ("the " * 9000, 9002)])
def test_too_many_tokens(bert, text, count):
    with pytest.raises(ValueError, match=f"the text has {count} tokens; it must have from 1 to 512"):
        capture(bert, text)


def test_no_tokens(tmp_path):
    save_model("gpt2", tmp_path)
    save_words(tmp_path)
    with pytest.raises(ValueError, match="the text has 0 tokens; it must have from 1 to 512"):
        capture(tmp_path, "")


SMALL = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 48}
REFUSED = (
    (transformers.MambaConfig(vocab_size=64, hidden_size=32, num_hidden_layers=2), "MambaModel does not return the weights"),
    (
        transformers.LongformerConfig(**SMALL, vocab_size=64, attention_window=[4, 4]),
        r"LongformerModel has weights of shape \[1, 4, 7, 5\]; they must be \[1, heads, 7, 7\]",
    ),
    (transformers.CLIPConfig(text_config=SMALL | {"vocab_size": 64}, vision_config=SMALL), "CLIPModel does not take a text alone"),
    (transformers.FalconConfig(**SMALL, vocab_size=64), "FalconModel has attention of its own"),
)


@pytest.mark.parametrize("config, message", REFUSED, ids=lambda part: getattr(part, "model_type", ""))
def test_models_that_are_refused(bert, tmp_path, config, message):
    transformers.AutoModel.from_config(config).save_pretrained(tmp_path / "model")
    transformers.AutoTokenizer.from_pretrained(bert).save_pretrained(tmp_path / "model")
    with pytest.raises((ValueError, NotImplementedError), match=message):
        capture(tmp_path / "model", TEXT)
