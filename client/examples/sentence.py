"""Which words does "it" mean? A layer of self-attention learns it from sentences, and shows where each head looks.

    python3 client/examples/sentence.py build/sentence

"the dog did not cross the river because it was too tired": tired is the dog. "... too wide": wide is the river. The model has
one layer of four heads:

    X = embedding[word] + position
    Y = X + attention(X)
    logits = Y[it] . embedding     of each word; the answer is the word that "it" means

Writes the layer (layer/config.json, layer/model.safetensors), the weights of two sentences (weights.npz) and sentence.html: of
each head the words that it looks at most, what it adds to the logits of both answers, the sentence with these words highlighted,
and a heat map.
"""

import html

import training  # before NumPy
import make_layers
import numpy as np
import rapt

HEADS, WIDTH, BATCH, STEPS, RATE = 4, 32, 64, 250, 0.01
ANIMALS, PLACES = ["dog", "cat", "horse", "child"], ["river", "street", "road", "bridge"]
OF_ANIMALS, OF_PLACES = ["tired", "hungry", "scared"], ["wide", "long", "crowded"]
FRAME = "the {animal} did not cross the {place} because it was too {why}"
WORDS = sorted({*FRAME.replace("{", "").replace("}", "").split(), *ANIMALS, *PLACES, *OF_ANIMALS, *OF_PLACES})
NUMBERS = {word: n for n, word in enumerate(WORDS)}
IT = FRAME.split().index("it")


def draw(random, count):
    """Sentences as numbers [count, length], and the word that "it" means."""
    sentences, answers = [], []
    for _ in range(count):
        animal, place = random.choice(ANIMALS), random.choice(PLACES)
        is_animal = random.random() < 0.5
        why = random.choice(OF_ANIMALS if is_animal else OF_PLACES)
        sentences.append(FRAME.format(animal=animal, place=place, why=why).split())
        answers.append(animal if is_animal else place)
    return np.array([[NUMBERS[word] for word in words] for words in sentences]), np.array([NUMBERS[word] for word in answers])


class Model:
    def __init__(self, compute):
        self.parameters = training.Parameters(seed=1)
        self.parameters.add("embedding", len(WORDS), WIDTH)
        self.layer = training.SelfAttention(compute, self.parameters, HEADS, WIDTH)
        self.positions = training.sinusoids(len(FRAME.split()), WIDTH)

    def forward(self, sentences, scores=None):
        """Returns the logits of what "it" means, and the weights if they are wanted."""
        x = self.parameters["embedding"][sentences] + self.positions
        y, weights = self.layer.forward(x, scores)
        self._sentences, self._row = sentences, x[:, IT] + y[:, IT]
        return self._row @ self.parameters["embedding"].T, weights

    def backward(self, d_logits):
        gradients = self.parameters.gradients
        d_row = d_logits @ self.parameters["embedding"]
        gradients["embedding"] += d_logits.T @ self._row
        dy = np.zeros((*self._sentences.shape, WIDTH), np.float32)
        dy[:, IT] = d_row
        dx = self.layer.backward(dy) + dy
        np.add.at(gradients["embedding"], self._sentences, dx)


def seen(words, weights):
    """The words with at least a twentieth of the weight."""
    return ", ".join(f"{words[n]} {weights[n]:.2f}" for n in np.argsort(-weights) if weights[n] >= 0.05)


def highlighted(words, weights):
    """The sentence, each word the brighter the more weight it has."""
    spans = (
        f'<span style="background:rgba(255,191,0,{weight:.2f});padding:2px">{html.escape(word)}</span>'
        for word, weight in zip(words, weights)
    )
    return " ".join(spans)


class Explained:
    """What a model makes of a sentence."""

    def __init__(self, model, why):
        self.words = FRAME.format(animal=ANIMALS[0], place=PLACES[0], why=why).split()
        logits, weights = model.forward(np.array([[NUMBERS[word] for word in self.words]]), scores="weights")
        self.weights = weights[0]  # [H, S, S]
        self.title = f"{' '.join(self.words)}: it is the {WORDS[int(logits[0].argmax())]}"
        added = model.layer.added_by_heads(IT)[0] @ model.parameters["embedding"].T
        self.heads = [
            f"head {head} looks at {seen(self.words, self.weights[head, IT])}: "
            + ", ".join(f"{added[head, NUMBERS[word]]:+.1f} for {word}" for word in (ANIMALS[0], PLACES[0]))
            for head in range(HEADS)
        ]

    def html(self):
        lines = (
            f"<p>{html.escape(text)}<br>{highlighted(self.words, weights)}</p>"
            for text, weights in zip(self.heads, self.weights[:, IT])
        )
        maps = rapt.plot(self.weights, query_labels=self.words, key_labels=self.words)
        return f"<h2>{html.escape(self.title)}</h2>{''.join(lines)}{maps._repr_html_()}"


def page(sentences):
    head = '<meta charset="utf-8"><title>Which word does "it" mean?</title><body style="font-family:sans-serif">'
    return f'<!DOCTYPE html>\n<html lang="en">{head}{"".join(sentence.html() for sentence in sentences)}</html>\n'


def main(compute, output):
    model, random = Model(compute), np.random.default_rng(2)
    for step in range(STEPS + 1):
        sentences, answers = draw(random, BATCH)
        loss, d_logits = training.softmax_loss(model.forward(sentences)[0], answers)
        if step % 50 == 0:
            print(f"step {step:3}: loss {loss:.3f}")
        model.backward(d_logits)
        model.parameters.update(RATE)
    sentences, answers = draw(random, 500)
    right = float((model.forward(sentences)[0].argmax(-1) == answers).mean())
    print(f"right: {right:.1%} of 500 sentences")

    config = {"hidden_size": WIDTH, "num_attention_heads": HEADS, "rapt": {"naming": "torch"}}
    names = ("in_proj_weight", "out_proj.weight")
    make_layers.write_layer(output / "layer", config, {name: model.parameters[name] for name in names})
    sentences = {why: Explained(model, why) for why in ("tired", "wide")}
    for sentence in sentences.values():
        print(sentence.title, *sentence.heads, sep="\n  ")
    np.savez(output / "weights.npz", **{why: sentence.weights for why, sentence in sentences.items()})
    (output / "sentence.html").write_text(page(sentences.values()))


if __name__ == "__main__":
    training.run(main, __doc__)
