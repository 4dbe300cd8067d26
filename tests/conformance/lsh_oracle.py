"""lsh_attention as docs define it, in float64."""

import numpy as np


def lsh_attention(q, v, rotations, chunk_length, k=None, before=1, after=0, scale=None, is_causal=False, lengths=None):
    """Y, and the buckets [B, H, num_hashes, S] or None. q, v [B, H, S, ...], rotations [H or 1, D, num_hashes, C]. With
    k: the simple form, whose chunks see themselves alone. Without: the Reformer's, whose queries are its keys."""
    q, v, r = (np.asarray(x, np.float64) for x in (q, v, rotations))
    simple = k is not None
    k = np.asarray(k, np.float64) if simple else q
    b, h, s, d = q.shape
    scale = d**-0.5 if scale is None else scale
    lengths = np.full(b, s) if lengths is None else np.asarray(lengths)
    padding = np.arange(s) >= lengths[:, None, None, None]
    keys = k if simple else k / np.sqrt((k**2).mean(-1, keepdims=True) + 1e-6)
    hashes = s > chunk_length
    rounds, c = (r.shape[2], chunk_length) if hashes else (1, s)
    offsets = range(-before, after + 1) if hashes and not simple else [0]
    buckets, order = None, np.broadcast_to(np.arange(s), (b, h, s))
    if hashes:
        products = np.einsum("bhsd,hdrc->bhrsc", k, np.broadcast_to(r, (h, *r.shape[1:])))
        products = products if simple else np.concatenate([products, -products], -1)
        buckets = np.where(padding, products.shape[-1], products.argmax(-1))
        order = buckets.argsort(-1, kind="stable").reshape(b, h, rounds * s)
    chunks = order.reshape(b, h, -1, c)
    window = np.concatenate([np.roll(chunks, -o, 2) for o in offsets], -1)
    rows = np.arange(b)[:, None, None, None], np.arange(h)[:, None, None]
    scores = scale * np.einsum("bhnid,bhnjd->bhnij", q[*rows, chunks], keys[*rows, window])
    i, j = chunks[..., None], window[..., None, :]
    scores = np.where((i == j) & (not simple), -1e5, scores)
    scores = np.where((is_causal & (j > i)) | (j >= lengths[:, None, None, None, None]), -np.inf, scores)
    most = np.maximum(scores.max(-1, keepdims=True), -1e9)
    weights = np.exp(scores - most)
    sums = weights.sum(-1, keepdims=True)
    sums = np.maximum(sums, 1e-300)  # 0 where nothing is visible
    parts = np.einsum("bhnij,bhnjd->bhnid", weights / sums, v[*rows, window]).reshape(b, h, rounds, s, -1)
    lse = (most + np.log(sums)).reshape(b, h, rounds, s, 1)
    back = order.reshape(b, h, rounds, s).argsort(-1)[..., None]
    parts, lse = np.take_along_axis(parts, back, 3), np.take_along_axis(lse, back, 3)
    share = np.full_like(lse, 1 / rounds) if simple else np.exp(lse - lse.max(2, keepdims=True))
    y = (parts * share / share.sum(2, keepdims=True)).sum(2)
    return np.where(padding[:, 0, ..., None], 0, y), buckets
