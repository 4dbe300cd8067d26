"""Reverses sequences with an LSTM encoder, an LSTM decoder and attention between them, by three scores.

    python3 client/examples/reverse.py build/reverse

For decoder states s and encoder states h, a score is

    dot        s . h
    luong      s . W h                     (Luong et al. 2015, general)
    additive   v . tanh(W s + U h)         (Bahdanau et al. 2015)

and the output at a step is softmax(V [s; sum of weights h]). The LSTMs are NumPy here; attention and its gradients are rapt's.
Writes alignment.npz, the weights of SHOWN by each score: a diagonal from the last digit to the first.
"""

import training  # before NumPy
import numpy as np

DIGITS, LENGTH, WIDTH, BATCH, STEPS, RATE = 10, 8, 32, 64, 300, 0.01
START = DIGITS  # the decoder's first input
SCORES = ("dot", "luong", "additive")
SHOWN = np.array([[3, 1, 4, 1, 5, 9, 2, 6]])


class Lstm:
    """Keeps what its backward pass needs."""

    def __init__(self, parameters, name):
        self._parameters, self._name = parameters, name
        parameters.add(name, 4 * WIDTH, 2 * WIDTH + 1)  # of [x; h; 1]: gates in, forget, out, and the candidate

    def forward(self, inputs, h, c):
        """inputs [B, S, WIDTH], from state h, c. Returns all h [B, S, WIDTH], and the last state."""
        self._steps, states = [], []
        ones = np.ones((len(h), 1), np.float32)
        for x in inputs.swapaxes(0, 1):
            row = np.concatenate([x, h, ones], 1)
            gates = row @ self._parameters[self._name].T
            i, f, o = (1 / (1 + np.exp(-gates[:, n * WIDTH : (n + 1) * WIDTH])) for n in range(3))
            g = np.tanh(gates[:, 3 * WIDTH :])
            before, c = c, f * c + i * g
            h = o * np.tanh(c)
            self._steps.append((row, i, f, o, g, before, c))
            states.append(h)
        return np.stack(states, 1), h, c

    def backward(self, d_states, dh, dc):
        """From gradients by all h, and by the last state. Returns those by the inputs and the first state."""
        d_inputs = []
        for (row, i, f, o, g, before, c), d_state in zip(reversed(self._steps), reversed(d_states.swapaxes(0, 1))):
            dh = dh + d_state
            tanh = np.tanh(c)
            dc = dc + dh * o * (1 - tanh**2)
            d_gates = np.concatenate(
                [dc * g * i * (1 - i), dc * before * f * (1 - f), dh * tanh * o * (1 - o), dc * i * (1 - g**2)], 1
            )
            self._parameters.gradients[self._name] += d_gates.T @ row
            d_row = d_gates @ self._parameters[self._name]
            d_inputs.append(d_row[:, :WIDTH])
            dh, dc = d_row[:, WIDTH : 2 * WIDTH], dc * f
        return np.stack(d_inputs[::-1], 1), dh, dc


class CrossAttention:
    """One head from decoder states to encoder states, by one of the scores."""

    def __init__(self, compute, parameters, score):
        self._compute, self._parameters = compute, parameters
        self._maps = {"dot": (), "luong": ("luong.k",), "additive": ("additive.q", "additive.k")}[score]
        for name in self._maps:
            parameters.add(name, WIDTH, WIDTH)
        self._options = {"scale": 1.0}
        if score == "additive":
            parameters.add("additive.v", 1, WIDTH)
            self._options |= {"score_function": "additive", "additive_weight": parameters["additive.v"]}

    def _mapped(self, side, x):
        name = next((name for name in self._maps if name.endswith(side)), None)
        return x if name is None else x @ self._parameters[name].T

    def _back(self, side, x, gradient):
        name = next((name for name in self._maps if name.endswith(side)), None)
        if name is None:
            return gradient
        self._parameters.gradients[name] += np.einsum("bse,bsf->ef", gradient, x)
        return gradient @ self._parameters[name]

    def forward(self, s, h, scores=None):
        """s [B, T, WIDTH] and h [B, S, WIDTH]. Returns the sums [B, T, WIDTH], and the weights if they are wanted."""
        self._s, self._h = s, h
        self._q, self._k, self._v = (x[:, None] for x in (self._mapped(".q", s), self._mapped(".k", h), h))
        self._result = self._compute.attend(self._q, self._k, self._v, lse=True, scores=scores, **self._options)
        return self._result.y[:, 0], self._result.scores

    def backward(self, dy):
        """Returns the gradients by s and h."""
        names = ["dq", "dk", "dv"] + ["d_additive_weight"] * ("additive_weight" in self._options)
        got = self._compute.attend_backward(
            self._q, self._k, self._v, np.ascontiguousarray(dy[:, None]), gradients=names, y=self._result.y,
            lse=self._result.lse, **self._options,
        )  # fmt: skip
        if "d_additive_weight" in got:
            self._parameters.gradients["additive.v"] += got["d_additive_weight"]
        dk = self._back(".k", self._h, got["dk"][:, 0])
        return self._back(".q", self._s, got["dq"][:, 0]), dk + got["dv"][:, 0]


class Model:
    def __init__(self, compute, score):
        self.parameters = training.Parameters(seed=1)
        self.parameters.add("embedding", DIGITS + 1, WIDTH, scale=1)
        self.encoder, self.decoder = (Lstm(self.parameters, name) for name in ("encoder", "decoder"))
        self.attention = CrossAttention(compute, self.parameters, score)
        self.parameters.add("output", DIGITS, 2 * WIDTH)

    def forward(self, digits, scores=None):
        """Logits of the reversed digits, each from those before it, and the weights if they are wanted."""
        zeros = np.zeros((len(digits), WIDTH), np.float32)
        self._inputs = digits, np.concatenate([np.full((len(digits), 1), START), digits[:, :0:-1]], 1)
        h, *state = self.encoder.forward(self.parameters["embedding"][self._inputs[0]], zeros, zeros)
        s, *_ = self.decoder.forward(self.parameters["embedding"][self._inputs[1]], *state)
        y, weights = self.attention.forward(s, h, scores)
        self._rows = np.concatenate([s, y], -1)
        return self._rows @ self.parameters["output"].T, weights

    def backward(self, d_logits):
        gradients = self.parameters.gradients
        gradients["output"] += np.einsum("btc,bte->ce", d_logits, self._rows)
        d_rows = d_logits @ self.parameters["output"]
        ds, dh = self.attention.backward(d_rows[..., WIDTH:])
        zeros = np.zeros((len(d_logits), WIDTH), np.float32)
        d_decoded, *d_state = self.decoder.backward(d_rows[..., :WIDTH] + ds, zeros, zeros)
        d_encoded, *_ = self.encoder.backward(dh, *d_state)
        for inputs, gradient in zip(self._inputs, (d_encoded, d_decoded)):
            np.add.at(gradients["embedding"], inputs, gradient)


def train(compute, score):
    """Returns the share of digits that are right, and the weights [T, S] of SHOWN."""
    model, random = Model(compute, score), np.random.default_rng(2)
    for step in range(STEPS + 1):
        digits = random.integers(DIGITS, size=(BATCH, LENGTH))
        loss, d_logits = training.softmax_loss(model.forward(digits)[0], digits[:, ::-1])
        if step % 100 == 0:
            print(f"{score:8} step {step:3}: loss {loss:.3f}")
        model.backward(d_logits)
        model.parameters.update(RATE)
    digits = random.integers(DIGITS, size=(500, LENGTH))
    right = float((model.forward(digits)[0].argmax(-1) == digits[:, ::-1]).mean())
    return right, model.forward(SHOWN, scores="weights")[1][0, 0]


def main(compute, output):
    results = {score: train(compute, score) for score in SCORES}
    for score, (right, weights) in results.items():
        print(f"{score:8} {right:.1%} of digits are right; steps look at inputs {weights.argmax(-1).tolist()}")
    np.savez(output / "alignment.npz", **{score: weights for score, (_, weights) in results.items()})


if __name__ == "__main__":
    training.run(main, __doc__)
