"""Heat maps in notebooks: the pictures are decoded again, and the page has no scripts."""

import base64
import html.parser
import re
import struct
import zlib

import numpy as np
import pytest
import rapt

X = np.array([[1, 0, 1, 0], [0, 1, 0, 1], [1, 1, 0, 0]], np.float32)[None, None]


class Page(html.parser.HTMLParser):
    """The elements of a page."""

    def __init__(self, text):
        super().__init__()
        self.tags, self.texts = [], []
        self.feed(text)

    def handle_starttag(self, tag, attributes):
        self.tags.append((tag, dict(attributes)))

    def handle_data(self, data):
        self.texts.append(data)

    def named(self, tag):
        return [attributes for name, attributes in self.tags if name == tag]

    def pictures(self):
        prefix = "data:image/png;base64,"
        sources = [image["src"] for image in self.named("img")]
        assert all(source.startswith(prefix) for source in sources)
        return [decode(base64.b64decode(source.removeprefix(prefix))) for source in sources]


def decode(data):
    """The colours of a PNG with a palette, [height, width, 3]."""
    assert data[:8] == b"\x89PNG\r\n\x1a\n"
    chunks, at = {}, 8
    while at < len(data):
        (size,), kind = struct.unpack(">I", data[at : at + 4]), data[at + 4 : at + 8]
        chunks[kind] = data[at + 8 : at + 8 + size]
        (checksum,) = struct.unpack(">I", data[at + 8 + size : at + 12 + size])
        assert checksum == zlib.crc32(kind + chunks[kind])
        at += 12 + size
    assert list(chunks) == [b"IHDR", b"PLTE", b"IDAT", b"IEND"]
    width, height, bits, colours, *rest = struct.unpack(">IIBBBBB", chunks[b"IHDR"])
    assert (bits, colours, rest) == (8, 3, [0, 0, 0])
    rows = np.frombuffer(zlib.decompress(chunks[b"IDAT"]), np.uint8).reshape(height, width + 1)
    assert not rows[:, 0].any()
    return np.frombuffer(chunks[b"PLTE"], np.uint8).reshape(-1, 3)[rows[:, 1:]]


def page_of(figure):
    return Page(figure._repr_html_())


def test_dark_is_low_and_bright_is_high():
    (picture,) = page_of(rapt.plot(np.array([[0, 2], [1, 0.5]]))).pictures()
    assert picture[0, 0].tolist() == [0x44, 0x01, 0x54] and picture[0, 1].tolist() == [0xFD, 0xE7, 0x25]
    assert np.abs(picture[1, 0].astype(int) - [0x21, 0x91, 0x8C]).max() <= 2


def test_a_bar_says_which_numbers_colours_mean():
    html = rapt.plot(np.array([[-0.25, 2], [1, 0.5]]))._repr_html_()
    bar = re.search(r"<p>([^<]*)<span [^>]*linear-gradient\(to right,#440154,[^>]*,#fde725\)[^>]*></span>([^<]*)", html)
    assert bar.groups() == ("-0.25", "2")


def test_hidden_keys_of_weights_are_not_like_small_weights():
    """Also where a weight that is not hidden is small."""
    x = np.array([[9, 0], [0, 9], [9, 9]], np.float32)[None, None]
    weights = rapt.attend(x, x, x, causal=True, scores="weights").scores
    assert 0 < weights[0, 0, 1, 0] < 1e-6
    page = page_of(rapt.plot(weights))
    (picture,) = page.pictures()
    np.testing.assert_array_equal((picture == 0xD0).all(-1), np.triu(np.ones((3, 3), bool), 1))
    assert "hidden, or 0" in page.texts


def test_scores_of_0_are_not_hidden():
    page = page_of(rapt.plot(rapt.attend(X, X, X, scores="scores").scores))
    (picture,) = page.pictures()
    assert picture[0, 1].tolist() == [0x44, 0x01, 0x54] and not any("hidden" in text for text in page.texts)


def test_what_is_not_finite_is_red():
    page = page_of(rapt.plot(np.array([[np.nan, 1], [np.inf, -np.inf]])))
    (picture,) = page.pictures()
    red, grey = [0xD6, 0x27, 0x28], [0xD0] * 3
    assert picture[:, 0].tolist() == [red, red] and picture[1, 1].tolist() == grey
    assert "not finite" in page.texts and "hidden" in page.texts


def test_a_number_that_is_none_stays_visible_in_a_reduced_matrix():
    weights = np.zeros((1300, 2))
    weights[4, 0] = np.nan
    (picture,) = page_of(rapt.plot(weights)).pictures()
    assert picture[1, 0].tolist() == [0xD6, 0x27, 0x28]


@pytest.mark.parametrize(("count", "step"), ((6, 1), (100, 3), (1300, 39)))
def test_axes_have_labels(count, step):
    """Every nth, where there is no room for all."""
    words = [f"word{n}" for n in range(count)]
    page = page_of(rapt.plot(np.random.default_rng(1).random((count, count)), query_labels=words, key_labels=words))
    labels = [text for text in page.texts if text.startswith("word")][: 2 * -(-count // step)]
    assert labels == 2 * words[::step]


def test_labels_may_hold_any_character():
    label = "a\x00\x1b\ufffe\ud800<"
    figure = rapt.plot(np.zeros((1, 1)), query_labels=[label], key_labels=[label], title=label)
    assert set("\x00\x1b\ufffe\ud800").isdisjoint(figure._repr_html_()) and "a\ufffd\ufffd\ufffd\ufffd&lt;" in figure._repr_html_()



def test_hidden_pairs_are_grey():
    result = rapt.attend(X, X, X, causal=True, scores="biased")
    page = page_of(result)
    (picture,) = page.pictures()
    grey = (picture == 0xD0).all(-1)
    np.testing.assert_array_equal(grey, np.triu(np.ones((3, 3), bool), 1))
    assert page.texts.count("hidden") == 4  # of them one beside the bar


def test_a_result_shows_its_weights():
    page = page_of(rapt.attend(X, X, X, scores="weights", lse=True))
    assert len(page.pictures()) == 1
    for text in ("y", "scores", "lse", "1 x 1 x 3 x 4", "float32", "0.51", "0.19", "0.31", "0.45"):
        assert text in page.texts, text
    assert any(text.startswith("cpu/") for text in page.texts)
    assert "3 queries down, 3 keys across" in page.named("img")[0]["alt"]


def test_a_result_without_scores_is_a_table():
    page = page_of(rapt.attend(X, X, X))
    assert not page.named("img") and "1 x 1 x 3 x 4" in page.texts


def test_a_grid_of_heads_and_labels():
    weights = np.random.default_rng(1).random((2, 3, 2, 4))
    page = page_of(rapt.plot(weights, batch=1, heads=[2, 0], query_labels=["<b>", "it"], key_labels="the cat sat &".split()))
    assert len(page.pictures()) == 2
    assert [text for text in page.texts if text.startswith("head ")] == [
        "head 2; queries down, keys across", "head 0; queries down, keys across", "head 2", "head 0"
    ]
    assert "<b>" in page.texts and "&" in page.texts and not page.named("b")
    assert f"{weights[1, 2, 0, 0]:.2f}" in page.texts


def test_large_matrices_are_reduced():
    weights = np.zeros((1300, 700))
    weights[1299, 699] = 1
    page = page_of(rapt.plot(weights))
    (picture,) = page.pictures()
    assert picture.shape == (434, 350, 3)
    assert picture[-1, -1].tolist() == [0xFD, 0xE7, 0x25]
    assert "a pixel is the largest of 3 x 2" in page.named("img")[0]["alt"]
    assert not page.named("table")


def test_many_heads_are_shown_in_part():
    q = np.zeros((1, 20, 3, 4), np.float32)
    page = page_of(rapt.attend(q, q, q, scores="weights"))
    assert len(page.pictures()) == 16
    assert any("the first 16 of 20 heads" in text for text in page.texts)


def test_no_scripts_and_nothing_from_elsewhere(tmp_path):
    figure = rapt.plot(rapt.attend(X, X, X, scores="weights").scores, title="<script>alert(1)</script>")
    figure.save(tmp_path / "weights.html")
    text = (tmp_path / "weights.html").read_text()
    page = Page(text)
    assert not page.named("script") and "<script>alert(1)</script>" in "".join(page.texts)
    assert not re.search(r"\bon\w+=|javascript:|https?://", text)


def test_numbers_that_are_equal_or_not_finite():
    for matrix in (np.zeros((2, 2)), np.full((2, 2), -np.inf), np.full((2, 2), np.nan), np.ones((1, 1))):
        (picture,) = page_of(rapt.plot(matrix)).pictures()
        assert picture.shape[:2] == matrix.shape


@pytest.mark.parametrize(
    ("weights", "options", "message"),
    (
        (np.zeros(3), {}, r"weights has shape \[3\]"),
        (np.zeros((0, 3)), {}, r"weights has shape \[0, 3\]"),
        (np.zeros((2, 3)), {"batch": 1}, "batch is 1; it must be from 0 to 0"),
        (np.zeros((2, 3)), {"heads": [1]}, "heads has 1; it must be from 0 to 0"),
        (np.zeros((2, 3)), {"key_labels": ["a"]}, "key_labels has 1 labels; there are 3"),
        (np.zeros((2, 3)), {"key_labels": "abc"}, "key_labels is 'abc'; it must be a sequence of labels"),
    ),
)
def test_errors_name_the_argument(weights, options, message):
    with pytest.raises((ValueError, TypeError), match=message):
        rapt.plot(weights, **options)


def test_a_figure_says_what_it_shows_where_there_is_no_notebook():
    figure = rapt.plot(np.zeros((1, 2, 3, 4), np.float32))
    assert repr(figure) == "<heat maps of 2 heads, 3 queries x 4 keys; a notebook shows it, save() writes a page>"
