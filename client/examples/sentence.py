"""Which words does "it" mean? A layer of self-attention learns it from sentences, and shows where each head looks.

    python3 client/examples/sentence.py build/sentence

"the dog did not cross the river because it was too tired": tired is the dog. "... too wide": wide is the river. The model has
one layer of four heads:

    X = embedding[word] + position
    Y = X + attention(X)
    logits = Y[it] . embedding     of each word; the answer is the word that "it" means

Writes the layer (layer/config.json, layer/model.safetensors), the weights of a sentence (weights.npy) and sentence.html: heat
maps of the heads, the words that each head looks at most, and the sentence with these words highlighted.
"""

import html

import training  # before NumPy
import make_layers
import numpy as np
import rapt

HEADS, WIDTH, BATCH, STEPS, RATE = 4, 32, 64, 250, 0.01
ANIMALS, PLACES = ["animal", "dog", "cat", "child"], ["street", "river", "road", "bridge"]
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


def highlighted(words, weights):
    """The sentence, each word the darker the more weight it has."""
    spans = (
        f'<span style="background:rgba(53,95,141,{weight:.2f});padding:2px">{html.escape(word)}</span>'
        for word, weight in zip(words, weights)
    )
    return f"<p>{' '.join(spans)}</p>"


def page(words, weights, answer):
    """weights [H, S, S] of a sentence, as HTML."""
    parts = [f"<p>it: <strong>{html.escape(answer)}</strong></p>"]
    for head, of_it in enumerate(weights[:, IT]):
        most = ", ".join(f"{words[n]} {of_it[n]:.2f}" for n in np.argsort(-of_it)[:3])
        parts.append(f"<h2>head {head}: it looks at {html.escape(most)}</h2>{highlighted(words, of_it)}")
    maps = rapt.plot(weights, query_labels=words, key_labels=words, title="weights of all heads")
    return f'<!DOCTYPE html><html lang="en"><meta charset="utf-8"><title>it</title>{"".join(parts)}{maps._repr_html_()}</html>\n'


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
    for why in ("tired", "wide"):
        words = FRAME.format(animal="animal", place="street", why=why).split()
        logits, weights = model.forward(np.array([[NUMBERS[word] for word in words]]), scores="weights")
        answer = WORDS[int(logits[0].argmax())]
        print(f"{' '.join(words)}: it is the {answer}")
        for head, of_it in enumerate(weights[0, :, IT]):
            print(f"  head {head} looks at {', '.join(f'{words[n]} {of_it[n]:.2f}' for n in np.argsort(-of_it)[:3])}")
        if why == "tired":
            np.save(output / "weights.npy", weights[0])
            (output / "sentence.html").write_text(page(words, weights[0], answer))


if __name__ == "__main__":
    training.run(main, __doc__)
