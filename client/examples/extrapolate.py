"""Trained on short sequences, asked about long ones: sinusoidal positions against a bias by distance.

    python3 client/examples/extrapolate.py build/extrapolate

A causal layer with one head has to tell the symbol that was DISTANCE positions before each one. It knows where symbols are

    sinusoidal    by position vectors that are added to the embeddings (Vaswani et al. 2017)
    relative      by relative_bias, a trained number for each distance that is added to the scores; from CLIP on they share one
    window        the trained layer of the line above, with keys beyond that distance hidden

Both layers are trained at length 32. Writes accuracy.npy, the share of right answers at lengths 32 to 512, and weights.npz, the
last rows of weights at length 96.
"""

import training  # before NumPy
import numpy as np

SYMBOLS, WIDTH, BATCH, STEPS, RATE = 8, 32, 32, 250, 0.01
DISTANCE, CLIP = 5, 16
TRAINED, LENGTHS, SHOWN, ROWS = 32, (32, 48, 64, 96, 128, 256, 512), 96, 24
KINDS = ("sinusoidal", "relative")


class Model:
    def __init__(self, compute, kind):
        self.parameters = training.Parameters(seed=1)
        self.parameters.add("embedding", SYMBOLS, WIDTH, scale=1)
        self.parameters.add("output", SYMBOLS, WIDTH)
        options = {"causal": True}
        if kind == "relative":
            self.parameters.add("bias", 1, 2 * CLIP + 1, scale=0.1)
            options["relative_bias"] = "bias"  # the parameter of this name
        self._is_sinusoidal = kind == "sinusoidal"
        self.layer = training.SelfAttention(compute, self.parameters, 1, WIDTH, **options)

    def forward(self, symbols, scores=None):
        x = self.parameters["embedding"][symbols]
        if self._is_sinusoidal:
            x = x + training.sinusoids(symbols.shape[1], WIDTH)
        self._symbols = symbols
        self._y, weights = self.layer.forward(x, scores)
        return self._y[:, DISTANCE:] @ self.parameters["output"].T, weights

    def backward(self, d_logits):
        gradients = self.parameters.gradients
        gradients["output"] += np.einsum("bsc,bse->ce", d_logits, self._y[:, DISTANCE:])
        dy = np.zeros_like(self._y)
        dy[:, DISTANCE:] = d_logits @ self.parameters["output"]
        np.add.at(gradients["embedding"], self._symbols, self.layer.backward(dy))


def train(compute, kind):
    model, random = Model(compute, kind), np.random.default_rng(2)
    for step in range(STEPS + 1):
        symbols = random.integers(SYMBOLS, size=(BATCH, TRAINED))
        loss, d_logits = training.softmax_loss(model.forward(symbols)[0], symbols[:, :-DISTANCE])
        if step % 50 == 0:
            print(f"{kind:10} step {step:3}: loss {loss:.3f}")
        model.backward(d_logits)
        model.parameters.update(RATE)
    return model


def shares_of(model):
    """The share of right answers at each length."""
    random, shares = np.random.default_rng(3), []
    for length in LENGTHS:
        symbols = random.integers(SYMBOLS, size=(8, length))
        shares.append(float((model.forward(symbols)[0].argmax(-1) == symbols[:, :-DISTANCE]).mean()))
    return shares


def main(compute, output):
    models = {kind: train(compute, kind) for kind in KINDS}
    shares = {kind: shares_of(model) for kind, model in models.items()}
    symbols = np.random.default_rng(4).integers(SYMBOLS, size=(1, SHOWN))
    rows = {kind: model.forward(symbols, scores="weights")[1][0, 0, -ROWS:] for kind, model in models.items()}
    models["relative"].layer.options["window"] = (CLIP, 0)
    shares["window"] = shares_of(models["relative"])

    print(f"{'length':10} {' '.join(f'{length:6}' for length in LENGTHS)}")
    for kind, of_kind in shares.items():
        print(f"{kind:10} {' '.join(f'{share:6.1%}' for share in of_kind)}")
    np.save(output / "accuracy.npy", np.array(list(shares.values()), np.float32).T)
    np.savez(output / "weights.npz", **rows)


if __name__ == "__main__":
    training.run(main, __doc__)
