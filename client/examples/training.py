"""What the examples share: parameters that Adam trains, a layer of attention, and a loss.

Attention and its gradients are rapt's, in process or at a server: `rapt` and `rapt.Client` have the same functions.
"""

import argparse
import os
import pathlib

os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")  # NumPy's products are small here; its threads would only spin

import numpy as np  # noqa: E402
import rapt  # noqa: E402


class Parameters(dict):
    """Arrays by name. Backward passes add to `gradients`, which update() spends (Adam; Kingma and Ba 2015)."""

    def __init__(self, seed):
        super().__init__()
        self.random = np.random.default_rng(seed)
        self.gradients = {}
        self._moments = {}
        self._step = 0

    def add(self, name, *shape, scale=None):
        """Draws a parameter; by default its products with unit vectors have variance 1."""
        scale = shape[-1] ** -0.5 if scale is None else scale
        self[name] = (self.random.standard_normal(shape) * scale).astype(np.float32)
        self.gradients[name] = np.zeros(shape, np.float32)
        self._moments[name] = np.zeros((2, *shape), np.float32)

    def update(self, rate):
        self._step += 1
        for name, gradient in self.gradients.items():
            mean, square = self._moments[name]
            mean += 0.1 * (gradient - mean)
            square += 0.01 * (gradient**2 - square)
            corrected = mean / (1 - 0.9**self._step), square / (1 - 0.99**self._step)
            self[name] -= rate * corrected[0] / (np.sqrt(corrected[1]) + 1e-8)
            gradient[...] = 0


class SelfAttention:
    """A layer without biases, with the parameters of torch.nn.MultiheadAttention. `options` are those of rapt.attend; a text is
    the name of a parameter."""

    def __init__(self, compute, parameters, heads, width, **options):
        self._compute, self._parameters, self._heads, self.options = compute, parameters, heads, options
        parameters.add("in_proj_weight", 3 * width, width)
        parameters.add("out_proj.weight", width, width)

    def forward(self, x, scores=None):
        """x [B, S, E]. Returns y [B, S, E], and the weights of all heads if scores is "weights"."""
        self._x = x
        batch, length, width = x.shape
        projected = x @ self._parameters["in_proj_weight"].T
        parts = projected.reshape(batch, length, 3, self._heads, width // self._heads)
        self._q, self._k, self._v = (parts[:, :, n] for n in range(3))  # views: rapt reads them where they are
        options = {name: self._parameters.get(value, value) if isinstance(value, str) else value
                   for name, value in self.options.items()}
        self._given = {"layout": "BSHD", **options}
        self._result = self._compute.attend(self._q, self._k, self._v, lse=True, scores=scores, **self._given)
        self._rows = self._result.y.reshape(batch, length, width)
        return self._rows @ self._parameters["out_proj.weight"].T, self._result.scores

    def added_by_heads(self, row):
        """What each head adds to a row of y in the last forward(), [B, H, E]."""
        outer = self._parameters["out_proj.weight"].reshape(self._x.shape[-1], self._heads, -1)
        return np.einsum("bhd,ehd->bhe", self._result.y[:, row], outer)

    def backward(self, dy):
        """Adds to the gradients of the parameters, and returns that of x."""
        x, gradients = self._x, self._parameters.gradients
        gradients["out_proj.weight"] += np.einsum("bse,bsf->ef", dy, self._rows)
        d_rows = (dy @ self._parameters["out_proj.weight"]).reshape(self._result.y.shape)
        trained = [name for name, value in self.options.items() if isinstance(value, str) and value in gradients]
        got = self._compute.attend_backward(
            self._q, self._k, self._v, d_rows, y=self._result.y, lse=self._result.lse,
            gradients=["dq", "dk", "dv", *(f"d_{name}" for name in trained)], **self._given,
        )  # fmt: skip
        for name in trained:
            gradients[self.options[name]] += got[f"d_{name}"]
        projected = np.stack([got["dq"], got["dk"], got["dv"]], 2).reshape(*x.shape[:2], -1)
        gradients["in_proj_weight"] += np.einsum("bsf,bse->fe", projected, x)
        return projected @ self._parameters["in_proj_weight"]


def softmax_loss(logits, targets):
    """The mean loss of targets, and its gradient by the logits [..., classes]."""
    shifted = np.exp(logits - logits.max(-1, keepdims=True))
    p = shifted / shifted.sum(-1, keepdims=True)
    chosen = np.take_along_axis(p, targets[..., None], -1)
    np.put_along_axis(p, targets[..., None], chosen - 1, -1)
    return -np.log(chosen + 1e-12).mean(), (p / targets.size).astype(np.float32)


def sinusoids(length, width):
    """The encoding of Vaswani et al. 2017, [length, width]."""
    angles = np.arange(length)[:, None] * 10000.0 ** (-np.arange(0, width, 2) / width)
    return np.stack([np.sin(angles), np.cos(angles)], -1).reshape(length, width).astype(np.float32)


def run(main, description):
    """Parses the arguments that all examples take, and calls main(compute, output)."""
    parser = argparse.ArgumentParser(description=description, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("output", type=pathlib.Path, help="the folder for weights and pictures")
    parser.add_argument("--server", help="http://HOST:PORT: attention is computed there, not in the process")
    arguments = parser.parse_args()
    arguments.output.mkdir(parents=True, exist_ok=True)
    if arguments.server is None:
        main(rapt, arguments.output)
        return
    with rapt.Client(arguments.server) as client:
        main(client, arguments.output)
