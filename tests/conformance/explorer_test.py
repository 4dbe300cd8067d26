"""The explorer, the page at / of the HTTP address, in a browser: its numbers are NumPy's, its controls act, everybody can use
it, and it loads nothing from elsewhere. Pictures of the page are left in the build folder, in explorer/."""

import contextlib
import hashlib
import http.client
import http.server
import json
import math
import os
import pathlib
import re
import subprocess
import sys
import threading
import urllib.error
import urllib.request
import xml.etree.ElementTree

import numpy as np
import pytest
from axe_playwright_python.sync_playwright import Axe
from playwright.sync_api import expect, sync_playwright
from rapt_server import RaptServer

sys.path.append(str(pathlib.Path(__file__).resolve().parents[2] / "client/examples"))

import make_layers  # noqa: E402

BROWSER = "/usr/bin/chromium-headless-shell"
PICTURES = pathlib.Path(os.environ["RAPT_SERVER"]).parents[1] / "explorer"
LABEL_STEP = 5e-4  # labels have three decimals
MOST_BYTES = 300_000
CELLS = "#map rapt-heat-map [role=gridcell]"

# The vectors of `rapt demo`.
DEMO_Q = [[1, 5, 0, 0, 0, -3], [3, 2, 6, 0, 0, -1], [0, 0, 2, 3, 6, -1], [0, 5, 3, 1, 0, 3], [1, 5, 0, 0, 0, 3], [2, 2, 2, 6, 3, 1]]
DEMO_K = [[1, 0, 0, 0, 0, -1], [0, 1, 0, 0, 1, -0.6], [0, 0, 1, 0, 0, -0.2], [0, 0, 0, 1, 0, 0.2], [1, 0, 0, 0, 0, 0.6], [0, 1, 0, 0, 0, 1]]


@pytest.fixture(scope="module")
def server():
    with RaptServer("--kv_cache_bytes=67108864") as running:
        yield running


@pytest.fixture(scope="module")
def browser():
    with sync_playwright() as playwright:
        running = playwright.chromium.launch(executable_path=BROWSER, args=["--no-sandbox"])
        yield running
        running.close()


class Explorer:
    """A page, with what the browser complained about and what it sent."""

    def __init__(self, page, url):
        self.page, self.url = page, url
        self.complaints, self.sent, self.loaded = [], [], {}
        page.on("console", lambda message: self.complaints.append(message.text) if message.type in ("error", "warning") else None)
        page.on("pageerror", lambda error: self.complaints.append(str(error)))
        page.on("request", lambda request: self.sent.append(request))
        page.on("response", self._on_response)

    def _on_response(self, response):
        if response.request.method == "GET":
            self.loaded[response.url] = int(response.headers.get("content-length", 0))

    def open(self, state=""):
        self.page.goto(f"{self.url}/{state}")
        return self.settle()

    def settle(self):
        self.page.wait_for_selector("#map rapt-heat-map[aria-busy=false]", state="attached")
        return self

    def set(self, name, value):
        """Sets a control."""
        field = self.page.locator(f"[name={name}]")
        if isinstance(value, bool):
            field.set_checked(value)
        elif field.evaluate("field => field.localName") == "select":
            field.select_option(value)
        else:
            field.fill(str(value))
        return self.settle()

    def type(self, sentence):
        box = self.page.get_by_role("textbox", name="Sentence")
        box.fill(sentence)
        box.press("Enter")
        return self.settle()

    def inputs(self, model="attention"):
        """The tensors of the last call of a model."""
        request = next(r for r in reversed(self.sent) if r.url.endswith(f"/{model}/infer"))
        body, length = request.post_data_buffer, int(request.headers["inference-header-content-length"])
        tensors, at = {}, length
        for entry in json.loads(body[:length])["inputs"]:
            size = entry["parameters"]["binary_data_size"]
            dtype = {"FP32": "<f4", "FP64": "<f8", "FP16": "<f2", "BOOL": "?"}.get(entry["datatype"])
            if dtype:
                tensors[entry["name"]] = np.frombuffer(body[at : at + size], dtype).reshape(entry["shape"])
            if entry["datatype"] == "BF16":
                bits = np.frombuffer(body[at : at + size], "<u2").astype(np.uint32) << 16
                tensors[entry["name"]] = bits.view(np.float32).reshape(entry["shape"])
            at += size
        return tensors

    def weights(self, map="#map rapt-heat-map"):
        """The numbers at the ends of the cells' labels."""
        rows = self.page.locator(f"{map} [role=row]").evaluate_all(
            "rows => rows.map(row => [...row.children].map(cell => cell.getAttribute('aria-label')))"
        )
        return np.array([[number_of(label) for label in row] for row in rows])

    def keep_picture(self, name):
        PICTURES.mkdir(parents=True, exist_ok=True)
        self.page.screenshot(path=PICTURES / f"{name}.png", full_page=True)


def number_of(label):
    return float(re.search(r"(\S+)$", label)[1].replace("−", "-").replace("∞", "inf"))


@pytest.fixture
def explorer(browser, server):
    with open_page(browser, f"http://{server.http_address}") as page:
        yield page


@contextlib.contextmanager
def open_page(browser, url, **options):
    context = browser.new_context(viewport={"width": 1440, "height": 1000}, accept_downloads=True, **options)
    page = Explorer(context.new_page(), url)
    page.page.set_default_timeout(20_000)
    yield page
    origins = {request.url for request in page.sent if not request.url.startswith((url + "/", "blob:" + url))}
    context.close()
    assert page.complaints == []
    assert origins == set()


def attention(q, k, v=None, *, visible=None, scale=None, softcap=0, sink=None, bias=0, alpha=None):
    """Weights of one head by the definition, in float64."""
    q, k = q.astype(float), k.astype(float)
    scores = q @ k.T * (1 / math.sqrt(q.shape[1]) if scale is None else scale)
    if softcap:
        scores = softcap * np.tanh(scores / softcap)
    scores = scores + bias
    if visible is not None:
        scores = np.where(visible, scores, -np.inf)
    if alpha == 2:
        return np.array([sparsemax(row) for row in scores])
    if alpha == 1.5:
        return np.array([entmax15(row) for row in scores])
    columns = scores if sink is None else np.hstack([scores, np.full((len(scores), 1), sink)])
    weights = np.exp(columns - columns.max(axis=1, keepdims=True))
    return (weights / weights.sum(axis=1, keepdims=True))[:, : len(k)]


def sparsemax(scores):
    ordered = np.sort(scores)[::-1]
    sums = np.cumsum(ordered) - 1
    support = np.nonzero(ordered * np.arange(1, len(scores) + 1) > sums)[0][-1]
    return np.maximum(scores - sums[support] / (support + 1), 0)


def entmax15(scores):
    low, high = scores.max() / 2 - 1, scores.max() / 2
    for _ in range(100):
        tau = (low + high) / 2
        low, high = (tau, high) if (np.maximum(scores / 2 - tau, 0) ** 2).sum() > 1 else (low, tau)
    return np.maximum(scores / 2 - tau, 0) ** 2


def assert_shows(explorer, **options):
    """The heat map has NumPy's weights of what the page sent."""
    tensors = explorer.inputs()
    want = attention(tensors["Q"][0, 0], tensors["K"][0, 0], **options)
    np.testing.assert_allclose(explorer.weights(), want, atol=LABEL_STEP + 1e-6)


def expect_in_address(explorer, text):
    expect(explorer.page).to_have_url(re.compile(re.escape(text)))


Q, K = np.arange(6)[:, None], np.arange(6)[None, :]

# --- Numbers and controls ---------------------------------------------------------------------------


def test_the_demo_has_the_numbers_of_numpy(explorer):
    explorer.open()
    sent = explorer.inputs()
    np.testing.assert_array_equal(sent["Q"][0, 0], np.float32(DEMO_Q))
    np.testing.assert_array_equal(sent["K"][0, 0], np.float32(DEMO_K))
    assert_shows(explorer)
    expect(explorer.page.get_by_role("status")).to_contain_text("Computed by the server")


@pytest.mark.parametrize(
    "controls, options",
    [
        ({"causal": True}, {"visible": K <= Q}),
        ({"left": 1}, {"visible": K >= Q - 1}),
        ({"right": 2}, {"visible": K <= Q + 2}),
        ({"causal": True, "left": 2}, {"visible": (K <= Q) & (K >= Q - 2)}),
        ({"causal": True, "align": "bottom_right"}, {"visible": K <= Q}),
        ({"blocks": "diagonal"}, {"visible": Q // 2 == K // 2}),
        ({"blocks": "local", "block": 1}, {"visible": abs(Q - K) <= 1}),
        ({"blocks": "strided", "block": 1}, {"visible": (Q - K) % 2 == 0}),
        ({"blocks": "global"}, {"visible": (Q // 2 == K // 2) | (Q < 2) | (K < 2)}),
        ({"scale": 0.1}, {"scale": 0.1}),
        ({"t": 2}, {"scale": 0.5 / math.sqrt(6)}),
        ({"softcap": 1}, {"softcap": 1}),
        ({"sink": 1.5}, {"sink": 1.5}),
        ({"alibi": True}, {"bias": -abs(Q - K) * 2.0**-8}),
        ({"norm": "sparsemax"}, {"alpha": 2}),
        ({"norm": "entmax15"}, {"alpha": 1.5}),
        ({"norm": "entmax", "alpha": 2}, {"alpha": 2}),
        ({"type": "FP64"}, {}),
        ({"type": "FP16", "scale": 0.01}, {"scale": 0.01}),
    ],
    ids=lambda value: str(value) if isinstance(value, dict) and "visible" not in value else "",
)
def test_a_control_changes_what_the_definition_says(explorer, controls, options):
    explorer.open()
    before = explorer.weights()
    for name, value in controls.items():
        explorer.set(name, value)
    assert_shows(explorer, **options)
    if controls != {"type": "FP64"}:
        assert not np.array_equal(explorer.weights(), before)
    for name, value in controls.items():
        text = "1" if value is True else str(value)
        if (name, value) not in [("block", 2)]:
            expect_in_address(explorer, f"{name}={text}")
    address = explorer.page.url
    explorer.page.get_by_role("button", name="Reset the controls").click()
    explorer.settle()
    expect(explorer.page).to_have_url(explorer.url + "/")
    np.testing.assert_array_equal(explorer.weights(), before)
    explorer.page.goto(address)  # the state is in the address
    explorer.page.reload()
    explorer.settle()
    assert_shows(explorer, **options)


@pytest.mark.parametrize(
    "name, value, message",
    [
        ("softcap", "-3", "Softcap must be at least 0; ignored."),
        ("left", "-1", "Keys before must be at least 0; ignored."),
        ("right", "1.5", "Keys after must be a whole number; ignored."),
        ("heads", "65", "Query heads must be at most 64; ignored."),
    ],
)
def test_a_number_that_can_not_be_is_marked_and_ignored(explorer, name, value, message):
    field, status = explorer.page.locator(f"[name={name}]"), explorer.page.get_by_role("status")
    explorer.open().set(name, value)
    expect(status).to_contain_text(message)
    expect(field).to_have_attribute("aria-invalid", "true")
    assert_shows(explorer)
    explorer.set(name, "1")
    expect(status).not_to_contain_text("ignored")
    expect(field).not_to_have_attribute("aria-invalid", "true")


def test_scores_that_overflow_are_not_masked(explorer):
    explorer.open("#scale=1e300&causal=1&view=steps&row=2")
    masked = ["masked" in label for label in explorer.page.locator(CELLS).evaluate_all("cells => cells.map(cell => cell.getAttribute('aria-label'))")]
    np.testing.assert_array_equal(np.reshape(masked, (6, 6)), K > Q)
    maps = explorer.page.locator("rapt-steps rapt-heat-map")
    for n, count in enumerate([0, 0, 3, 3, 0]):
        expect(maps.nth(n).locator("[aria-label*=masked]")).to_have_count(count)
    assert maps.first.locator("[aria-label$='−∞']").count() > 0  # an overflow


def test_bf16(explorer):
    explorer.open().set("type", "BF16")
    sent = explorer.inputs()
    for name, want in (("Q", DEMO_Q), ("K", DEMO_K)):
        np.testing.assert_allclose(sent[name][0, 0], want, rtol=2**-8)
    want = attention(sent["Q"][0, 0], sent["K"][0, 0])
    np.testing.assert_allclose(explorer.weights(), want, atol=LABEL_STEP + 2**-9)


def test_values_on_hover(explorer):
    explorer.open()
    for n in (7, 22):
        cell = explorer.page.locator(CELLS).nth(n)
        cell.hover()
        expect(explorer.page.locator("#map .readout")).to_have_text(cell.get_attribute("aria-label"))
    tops = [explorer.page.locator(part).bounding_box()["y"] for part in ("#map .readout", "#map .plot")]
    assert tops == sorted(tops)  # on a small screen the plot's end is out of sight


def test_a_long_word_leaves_the_number_of_the_readout(explorer):
    explorer.page.set_viewport_size({"width": 820, "height": 1000})
    explorer.open("#s=" + "pneumono" * 12 + "+cat")
    explorer.page.locator(CELLS).first.hover()
    readout = explorer.page.locator("#map .readout")
    expect(readout).to_have_text(explorer.page.locator(CELLS).first.get_attribute("aria-label"))
    end = readout.evaluate("""readout => {
      const range = document.createRange();
      range.selectNodeContents(readout.lastChild);
      return readout.getBoundingClientRect().right - range.getBoundingClientRect().right;
    }""")
    assert end >= -0.5


def test_a_readout_fits_after_the_window_became_smaller(explorer):
    page = explorer.open("#s=" + "pneumono" * 2 + "+cats").page
    page.set_viewport_size({"width": 820, "height": 1000})
    page.wait_for_function("() => document.querySelector('#map .readout').matches('.tight')")


def test_legends_say_what_colours_mean(explorer):
    explorer.open("#view=gradient&causal=1&row=2")
    assert explorer.page.locator("#map .legend span").all_text_contents() == ["0", "1", "masked"]
    maps = explorer.page.locator("rapt-gradient rapt-heat-map")
    for n in range(3):
        maps.nth(n).locator("[role=gridcell]").first.wait_for()
        labels = maps.nth(n).locator("[role=gridcell]").evaluate_all("cells => cells.map(cell => cell.getAttribute('aria-label'))")
        low, high = maps.nth(n).locator(".legend span").all_text_contents()
        most = max(abs(number_of(label)) for label in labels)
        assert low.startswith("lowers −") and high.endswith(" raises")
        assert float(low.split("−")[1]) == float(high.split()[0]) == pytest.approx(most, rel=0.005, abs=1.1 * LABEL_STEP)
    explorer.page.get_by_role("tab", name="Positions").click()
    expect(explorer.page.locator("rapt-positions .legend span").first).to_have_text("−1")
    explorer.page.get_by_role("button", name="Table").click()
    expect(explorer.page.locator("#map .legend")).to_be_hidden()


def test_large_numbers_have_an_exponent(explorer):
    explorer.open("#source=numbers&n=1e7+2%0A-3e8+4&view=steps")
    scores = explorer.page.locator("rapt-steps rapt-heat-map").first
    expect(scores.locator(".legend span")).to_have_text(["−2.12e+15", "2.12e+15"])
    expect(scores.locator("[role=gridcell]").last).to_have_attribute("aria-label", "q0 → k1: −2.12e+15")


def test_masked_cells_say_so(explorer):
    explorer.open("#causal=1")
    cell = explorer.page.get_by_role("gridcell", name="the₁ attends to cat: masked").first
    expect(cell).to_have_attribute("aria-label", "the₁ attends to cat: masked, 0.000")


def test_a_painted_mask_hides_cells(explorer):
    explorer.open()
    explorer.set("paint", True)
    cell = explorer.page.locator(CELLS).nth(1)
    cell.focus()
    cell.press(" ")
    explorer.settle()
    visible = np.ones((6, 6), bool)
    visible[0, 1] = False
    assert_shows(explorer, visible=visible)
    explorer.page.locator(CELLS).nth(8).click()
    explorer.settle()
    visible[1, 2] = False
    assert_shows(explorer, visible=visible)
    explorer.page.get_by_role("button", name="Clear the painted mask").click()
    explorer.settle()
    assert_shows(explorer)


def test_heads_and_groups(explorer):
    explorer.open()
    explorer.set("heads", 4)
    assert explorer.inputs()["K"].shape[1] == 4
    expect(explorer.page.get_by_role("status")).to_contain_text("Key heads changed to 4 with the query heads.")
    explorer.set("kv", 2)
    tensors = explorer.inputs()
    assert tensors["Q"].shape[1] == 4 and tensors["K"].shape[1] == 2
    pictures = explorer.page.locator("rapt-heads canvas")
    pictures.first.evaluate("canvas => { canvas.id = 'kept'; }")  # choosing a head draws no picture again
    for head in range(4):
        explorer.page.get_by_role("button", name=f"head {head}").click()
        expect(pictures.first).to_have_id("kept")
        want = attention(tensors["Q"][0, head], tensors["K"][0, head // 2])
        np.testing.assert_allclose(explorer.weights(), want, atol=LABEL_STEP + 1e-6)
    expect(explorer.page.locator("#note")).to_contain_text("Not a language model")
    explorer.keep_picture("heads")


def test_words_and_most_attended(explorer):
    explorer.open().type("The cat chased the mouse because it was hungry")
    weights = explorer.weights()
    explorer.page.get_by_role("radio", name="mouse").click()
    expect(explorer.page.get_by_role("heading", name="What “mouse” attends to")).to_be_visible()
    labels = explorer.page.locator(".column-labels").first.locator("span").all_text_contents()
    row = weights[labels.index("mouse")]
    ranked = explorer.page.locator(".ranking bdi").all_text_contents()
    assert [row[labels.index(word)] for word in ranked] == sorted(row, reverse=True)[:6]
    current = explorer.page.locator(CELLS + "[tabindex='0']")  # the one that Tab reaches
    expect(current).to_have_count(1)
    expect(current).to_have_attribute("aria-label", re.compile("^mouse attends to"))
    readout = explorer.page.locator("#map .readout")
    expect(readout).to_have_text(f"“mouse” attends most to “{ranked[0]}” ({row.max():.3f})")
    current.hover()
    expect(readout).to_have_text(current.get_attribute("aria-label"))
    explorer.page.get_by_role("slider", name="Query").fill("0")
    expect(explorer.page.get_by_role("heading", name="What “The” attends to")).to_be_visible()


def test_words_are_what_a_reader_sees(explorer):
    words = ["👩‍👩‍👧", "🏳️‍🌈", "नमस्ते", "!", "don't", "مرحبا"]
    explorer.open().type(" ".join([words[0] + words[1], *words[2:], "\u200d"]).replace(" !", "!"))
    assert explorer.page.locator("#map .column-labels span").all_text_contents() == words
    explorer.page.get_by_role("radio", name=words[-1]).click()
    expect(explorer.page.locator("rapt-words h2 bdi")).to_have_text(words[-1])
    expect(explorer.page.locator("#note")).to_contain_text("Q = K, so most words fit themselves best")


def test_a_sentence_looks_at_another(explorer):
    explorer.open("#s=a+dog+saw&s2=the+dog+saw+a+cat&causal=1")
    assert_shows(explorer, visible=np.arange(5)[None] <= np.arange(3)[:, None])
    words = explorer.page.get_by_role("radiogroup", name="The word that looks").get_by_role("radio")
    assert words.all_text_contents() == ["a", "dog", "saw"]
    explorer.set("causal", False).page.get_by_role("radio", name="dog").click()
    others = explorer.page.locator("rapt-words p.text span")
    assert others.all_text_contents() == ["the", "dog", "saw", "a", "cat"]
    shares = others.evaluate_all("words => words.map(word => Number(word.style.getPropertyValue('--weight')))")
    row = explorer.weights()[1]
    np.testing.assert_allclose(shares, row / row.max(), atol=0.01)
    second = explorer.page.get_by_role("button", name="+ second sentence (cross-attention)")
    expect(second).to_have_attribute("aria-expanded", "true")
    causal = explorer.page.locator("#causal-text")
    expect(causal).to_have_text("each word sees the other sentence up to its own place")
    second.click()
    explorer.settle()
    assert explorer.weights().shape == (3, 3)
    expect(causal).to_have_text("no word sees the words after it")
    expect(explorer.page.get_by_role("textbox", name="Sentence that is looked at")).to_be_hidden()


def test_another_sentence_that_begins_alike(explorer):
    explorer.open("#s=the+cat&s2=the+cat+sat+down")
    assert explorer.page.locator("rapt-words p.text span").all_text_contents() == ["the", "cat", "sat", "down"]


def test_examples(explorer):
    explorer.open("#s2=a+dog").page.get_by_role("button", name="a rose is a rose is a rose").click()
    explorer.settle()
    assert explorer.weights().shape == (8, 8)
    expect(explorer.page.get_by_role("textbox", name="Sentence").first).to_have_value("a rose is a rose is a rose")
    explorer.page.locator("[value=numbers]").check(force=True)
    explorer.page.get_by_role("button", name="three tokens of two numbers").click()
    explorer.settle()
    x = np.array([[1, 0], [0, 1], [1, 1]])
    np.testing.assert_allclose(explorer.weights(), attention(x, x), atol=LABEL_STEP + 1e-6)


def test_before_anything_is_given_no_card_is_empty(explorer):
    explorer.open("#source=numbers")
    for part in ("#map", "#words", "#settings"):
        expect(explorer.page.locator(part)).to_be_hidden()
    expect(explorer.page.get_by_role("tabpanel")).to_contain_text("once there is some")
    explorer.page.get_by_role("tab", name="Positions").click()
    expect(explorer.page.locator("rapt-positions [role=gridcell]").first).to_be_visible()
    explorer.page.get_by_role("button", name="three tokens of two numbers").click()
    for part in ("#map", "#words", "#settings"):
        expect(explorer.page.locator(part)).to_be_visible()


def test_back_undoes_the_last_step(explorer):
    page = explorer.open().page
    for name in ("Steps", "Steps", "Lines"):  # the same view twice is one step
        page.get_by_role("tab", name=name).click()
    explorer.type("a dog saw a bird").set("t", 2)
    expect_in_address(explorer, "t=2")
    page.go_back()
    expect(page.get_by_role("textbox", name="Sentence").first).to_have_value("the cat sat on the mat")
    expect(page.get_by_role("tab", name="Lines")).to_have_attribute("aria-selected", "true")
    page.go_back()
    expect(page.locator("rapt-steps")).to_be_visible()
    page.go_back()
    expect(page.locator("rapt-compare")).to_be_visible()
    explorer.settle()
    assert_shows(explorer)
    page.go_forward()
    expect(page.locator("rapt-steps")).to_be_visible()


def test_back_fills_the_field_that_has_the_focus(explorer):
    explorer.open().type("a dog saw a bird")
    box = explorer.page.get_by_role("textbox", name="Sentence").first
    expect(box).to_be_focused()
    explorer.page.go_back()
    expect(box).to_have_value("the cat sat on the mat")


def test_full_and_causal_side_by_side(explorer):
    explorer.open()
    tensors = explorer.inputs()
    q, k = tensors["Q"][0, 0], tensors["K"][0, 0]
    maps = explorer.page.locator("rapt-compare rapt-heat-map")
    for n, visible in enumerate([None, K <= Q]):
        labels = maps.nth(n).locator("[role=gridcell]").evaluate_all("cells => cells.map(cell => cell.getAttribute('aria-label'))")
        got = np.array([number_of(label) for label in labels]).reshape(6, 6)
        np.testing.assert_allclose(got, attention(q, k, visible=visible), atol=LABEL_STEP + 1e-6)
    beside, change = explorer.page.locator("#change"), explorer.page.locator("rapt-compare > p")
    explorer.page.get_by_role("radio", name="on", exact=True).click()
    before, after = attention(q, k)[3], attention(q, k, visible=K <= Q)[3]
    most, labels = after.argmax(), explorer.page.locator("#map .column-labels span").all_text_contents()
    sentence = (
        f"The causal mask hides 2 of 6 words from “on”, which together have {before[4:].sum():.3f} without it. This moves to the "
        f"words that are left: “{labels[most]}” has {after[most]:.3f} instead of {before[most]:.3f}."
    )
    expect(change).to_have_text(sentence)
    expect(beside).to_be_hidden()
    explorer.set("causal", True)  # the same is said while the mask is on, beside its control
    expect(change).to_have_text(sentence)
    expect(beside).to_have_text(sentence)
    explorer.page.get_by_role("radio", name="mat").click()
    expect(beside).to_have_text("The causal mask hides no word from “mat”: it changes nothing here.")
    expect(change).to_have_text("The causal mask hides no word from “mat”: it changes nothing here.")
    explorer.set("causal", False)
    expect(beside).to_be_hidden()


def test_what_the_mask_changes_is_told_of_the_chosen_head(explorer):
    explorer.open("#s=a+dog+saw&heads=2&kv=2&causal=1&view=lines")
    tensors = explorer.inputs()
    for head in (1, 0):
        explorer.page.get_by_role("button", name=f"head {head}").click()
        before, after = (attention(tensors["Q"][0, head], tensors["K"][0, head], visible=mask)[0] for mask in (None, np.tri(3, dtype=bool)))
        expect(explorer.page.locator("#change")).to_contain_text(
            f"hides 2 of 3 words from “a”, which together have {before[1:].sum():.3f} without it"
        )
        expect(explorer.page.locator("#change")).to_contain_text(f"“a” has {after[0]:.3f} instead of {before[0]:.3f}.")


@pytest.mark.parametrize(
    "state, row, sentence",
    [
        ("norm=sparsemax", 2, r"hides 3 of 6 words from “sat”, which together have 0\.000 without it: it changes nothing here\.$"),
        ("sink=3", 0, r"This moves to the words that are left and to the sink: “the₁” has 0\.203 instead of 0\.111\.$"),
        ("type=BF16", 0, r"This moves to the words that are left: “the₁” has 1\.000 instead of"),
    ],
    ids=["nowhere", "to the sink", "rounded"],
)
def test_where_the_weight_of_masked_words_goes(explorer, state, row, sentence):
    explorer.open(f"#causal=1&{state}&row={row}")
    expect(explorer.page.locator("#change")).to_have_text(re.compile(sentence))


def test_the_table_has_the_numbers(explorer):
    explorer.open()
    want = explorer.weights()
    explorer.page.get_by_role("button", name="Table").click()
    rows = explorer.page.locator("#map table tbody tr").evaluate_all(
        "rows => rows.map(row => [...row.querySelectorAll('td')].map(cell => Number(cell.textContent)))"
    )
    np.testing.assert_array_equal(np.array(rows), want)
    explorer.set("causal", True)
    expect(explorer.page.locator("#map table").get_by_role("img", name="masked")).to_have_count(15)


def test_five_steps_of_a_query(explorer):
    explorer.open("#view=steps&causal=1&softcap=2&row=2")
    tensors = explorer.inputs()
    q, k, v = (tensors[name][0, 0].astype(float) for name in "QKV")
    scores = q[2] @ k.T / math.sqrt(6)
    capped = 2 * np.tanh(scores / 2)
    biased = np.where(np.arange(6) <= 2, capped, -np.inf)
    weights = np.exp(biased) / np.exp(biased).sum()
    expect(explorer.page.locator("rapt-steps rapt-heat-map").last.locator("[role=gridcell]")).to_have_count(6)
    maps = explorer.page.locator("rapt-steps rapt-heat-map")
    for n, want in enumerate([scores, capped, biased, weights, weights @ v]):
        labels = maps.nth(n).locator("[role=gridcell]").evaluate_all("cells => cells.map(cell => cell.getAttribute('aria-label'))")
        np.testing.assert_allclose([number_of(label) for label in labels], want, atol=LABEL_STEP + 1e-5)


def colour_of(map, cell):
    """The colour of the corner of a cell of the first row."""
    return map.locator("canvas").evaluate(
        """(canvas, cell) => {
          const size = canvas.width / getComputedStyle(canvas.parentElement.querySelector('.cells')).gridTemplateColumns.split(' ').length;
          const copy = new OffscreenCanvas(1, 1).getContext('2d', {willReadFrequently: true});
          copy.drawImage(canvas, -cell * size - 4, -4);
          return [...copy.getImageData(0, 0, 1, 1).data.slice(0, 3)];
        }""",
        cell,
    )


def test_scores_of_all_steps_have_the_same_colours(explorer):
    explorer.open("#view=steps&causal=1&row=1")
    maps = explorer.page.locator("rapt-steps rapt-heat-map")
    expect(maps.nth(2).locator("[aria-label*=masked]")).to_have_count(4)
    for cell in range(2):
        assert colour_of(maps.nth(0), cell) == colour_of(maps.nth(2), cell)


def test_masked_cells_follow_the_colour_scheme(explorer):
    explorer.open("#causal=1&heads=2&view=compare")
    maps = [explorer.page.locator("#map rapt-heat-map"), explorer.page.locator("rapt-compare rapt-heat-map").last]
    expect(maps[1].locator("[aria-label*=masked]")).to_have_count(15)
    head = explorer.page.locator("#map rapt-heads canvas").first
    corner = """canvas => {
      const copy = new OffscreenCanvas(1, 1).getContext('2d', {willReadFrequently: true});
      copy.drawImage(canvas, 5 - canvas.width, -4);
      return [...copy.getImageData(0, 0, 1, 1).data.slice(0, 3)];
    }"""
    for scheme, is_light in (("light", True), ("dark", False), ("light", True)):
        explorer.page.emulate_media(color_scheme=scheme)
        for _ in range(100):
            colours = [*(colour_of(map, 3) for map in maps), head.evaluate(corner)]
            if [min(colour) > 110 for colour in colours] == [is_light] * 3:
                break
            explorer.page.wait_for_timeout(50)
        assert [min(colour) > 110 for colour in colours] == [is_light] * 3


def test_canvases_are_drawn_again_for_another_resolution(explorer):
    explorer.open("#s=a+dog&heads=2")
    canvases = [explorer.page.locator(f"#map {part} canvas").first for part in ("rapt-heat-map", "rapt-heads")]
    sharpness = "canvas => canvas.width / parseFloat(canvas.style.width)"
    devtools = explorer.page.context.new_cdp_session(explorer.page)
    for width, ratio in ((2072, 1.25), (1480, 1.75), (2590, 1)):  # as by the browser's zoom
        devtools.send("Emulation.setDeviceMetricsOverride", {"width": width, "height": 1000, "deviceScaleFactor": ratio, "mobile": False})
        for canvas in canvases:
            explorer.page.wait_for_function(f"canvas => Math.abs(({sharpness})(canvas) - {ratio}) < 0.01", arg=canvas.element_handle())


# --- Copies and files -------------------------------------------------------------------------------


def code_of(explorer, language):
    explorer.page.get_by_role("tab", name="Code", exact=True).click()
    explorer.page.get_by_role("button", name=language, exact=True).click()
    return explorer.page.get_by_role("region", name="Code").text_content()


@pytest.mark.parametrize("state", ["", "#s=a+dog+saw&softcap=2", "#causal=1&left=2&sink=0.5", "#heads=4&kv=2&alibi=1&t=0.5", "#blocks=global&hide=0-0,3-1&norm=entmax&alpha=1.25"])
def test_the_copied_python_gives_the_same_numbers(explorer, state):
    explorer.open(state)
    code = code_of(explorer, "Python") + "\nnp.save('weights.npy', result.scores)\n"
    folder = PICTURES / "python"
    folder.mkdir(parents=True, exist_ok=True)
    subprocess.run([sys.executable, "-B", "-c", code], cwd=folder, check=True, stdout=subprocess.DEVNULL)
    np.testing.assert_allclose(explorer.weights(), np.load(folder / "weights.npy")[0, 0], atol=LABEL_STEP + 1e-6)


def test_the_copied_python_is_short(explorer):
    explorer.open("#s=a+dog&softcap=2")
    lines = code_of(explorer, "Python").splitlines()
    assert "# Settings: softcap=2" in lines and "k = v = q" in lines
    assert [line.split("  # ")[1] for line in lines if "  # " in line] == ["a", "dog", "[batch, head, query, key]"]


def test_code_is_not_cut(explorer):
    explorer.open("#s=a+dog+saw+a+bird+and+the+bird+saw+a+dog&heads=4")
    code_of(explorer, "Python")
    assert explorer.page.get_by_role("region", name="Code").evaluate("code => code.scrollHeight - code.clientHeight") <= 0


def test_the_copied_curl_gives_the_same_numbers(explorer):
    explorer.open("#causal=1&softcap=3")
    answer = json.loads(subprocess.run(["bash", "-c", code_of(explorer, "curl")], check=True, capture_output=True).stdout)
    got = np.array(answer["outputs"][0]["data"]).reshape(6, 6)
    np.testing.assert_allclose(explorer.weights(), got, atol=LABEL_STEP + 1e-6)


@pytest.mark.parametrize(
    "state",
    ["#causal=1&left=2&sink=1&blocks=global&hide=1-0&scale=0.5&softcap=3&alibi=1&align=bottom_right", "#norm=entmax&alpha=1.5",
     "#type=FP64", "#type=FP16&sink=0.1", "#type=BF16"],
)
def test_the_copied_cpp_compiles(explorer, tmp_path, state):
    explorer.open(state)
    code = code_of(explorer, "C++")
    for name, sent in explorer.inputs().items():
        numbers = re.search(rf" {dict(attn_mask='mask').get(name, name.lower() if len(name) == 1 else name)}\[\] = {{(.*)}};", code)[1]
        numbers = numbers.replace("true", "1").replace("false", "0").split(", ")
        if numbers[0].startswith("0x"):  # the bits of numbers of 16
            bits = np.array([int(x, 16) for x in numbers])
            got = bits.astype("<u2").view(np.float16) if "kFloat16" in code else (bits << 16).astype("<u4").view(np.float32)
        else:
            got = np.array([float(x) for x in numbers])
        np.testing.assert_array_equal(got.astype(sent.dtype).astype(np.float32), sent.ravel().astype(np.float32))
    (tmp_path / "attend.cc").write_text(code)
    root = pathlib.Path(__file__).resolve().parents[2]
    headers = [f"-I{root}/{library}/include" for library in ("call", "client/cpp")]
    subprocess.run(["g++", "-std=c++20", "-Wall", "-Werror", "-fsyntax-only", *headers, "attend.cc"], cwd=tmp_path, check=True)


def test_a_call_too_long_for_cpp_is_a_command(explorer, server, tmp_path):
    rng = np.random.default_rng(29)
    for name in "qkv":
        np.save(tmp_path / name, rng.standard_normal((2, 40, 32)).astype(np.float32))
    explorer.open("#source=files&causal=1&left=5&scale=0.3&softcap=2&alibi=1&sink=-1&blocks=global&block=4&align=bottom_right")
    explorer.page.set_input_files("#files", [tmp_path / f"{name}.npy" for name in "qkv"])
    expect(explorer.page.locator("#note")).to_contain_text("q [1,2,40,32]")
    explorer.settle()
    code = code_of(explorer, "C++")
    files = []
    explorer.page.on("download", lambda file: files.append(file))
    explorer.page.get_by_role("button", name="Inputs as .npy").click()
    for _ in range(100):
        if len(files) == 5:
            break
        explorer.page.wait_for_timeout(50)
    assert {file.suggested_filename for file in files} == {f"{name}.npy" for name in ("q", "k", "v", "block_mask", "head_sink")}
    for file in files:
        file.save_as(tmp_path / file.suggested_filename)
    command = re.search(r"rapt (attend .*)", code)[1].split()
    subprocess.run([os.environ["RAPT"], *command, f"--address={server.grpc_address}"], cwd=tmp_path, check=True, stdout=subprocess.DEVNULL)
    np.testing.assert_allclose(explorer.weights(), np.load(tmp_path / "weights.npy")[0, 0], atol=LABEL_STEP + 1e-6)
    explorer.page.locator("[name=type]").select_option("BF16")
    expect(explorer.page.get_by_role("region", name="Code")).to_contain_text("NumPy have no BF16")


def test_copy_python_copies(browser, server):
    with open_page(browser, f"http://{server.http_address}", permissions=["clipboard-read", "clipboard-write"]) as explorer:
        explorer.page.clock.install()
        explorer.open()
        explorer.page.get_by_role("button", name="Copy Python").click()
        status = explorer.page.get_by_role("status")
        expect(status).to_contain_text("Copied.")
        button = explorer.page.locator("[data-copy=python]")
        expect(button).to_have_text("Copied")
        explorer.page.clock.run_for(2000)
        expect(button).to_have_text("Copy Python")
        expect(status).to_contain_text("Computed by the server")
        copied = explorer.page.evaluate("navigator.clipboard.readText()")
        assert copied == code_of(explorer, "Python")


def download(explorer, button):
    with explorer.page.expect_download() as waiting:
        explorer.page.get_by_role("button", name=button, exact=True).click()
    return pathlib.Path(waiting.value.path())


def test_saved_files(explorer):
    explorer.open("#causal=1")
    weights = np.load(download(explorer, ".npy"))
    assert weights.dtype == np.float32 and weights.shape == (1, 1, 6, 6)
    np.testing.assert_allclose(explorer.weights(), weights[0, 0], atol=LABEL_STEP + 1e-6)
    png = download(explorer, "PNG").read_bytes()
    assert png.startswith(b"\x89PNG") and len(png) > 2000
    svg = download(explorer, "SVG").read_text()
    assert svg.startswith("<svg") and svg.count("<rect") == 37 and ">1.000</text>" in svg


def test_a_saved_picture_is_xml_whatever_the_words_are(explorer):
    """XML has neither control characters nor U+FFFE."""
    explorer.open("#s=a%01b+%EF%BF%BE+%3C%26")
    picture = xml.etree.ElementTree.parse(download(explorer, "SVG"))
    words = [text.text for text in picture.iter("{http://www.w3.org/2000/svg}text")][:5]
    assert words == ["a", "b", "\ufffd", "<", "&"]


def test_numbers_have_three_decimals_where_they_are_long(explorer, tmp_path):
    """They are smaller there. In cells as on top of the map."""
    weights = np.array([[-1234.5678, 0.5], [0.25, 1]])
    np.save(tmp_path / "weights.npy", weights)
    explorer.open("#source=files").page.set_input_files("#files", tmp_path / "weights.npy")
    expect(explorer.page.locator("#note")).to_contain_text("the server computed nothing")
    cells = [text for text in xml.etree.ElementTree.parse(download(explorer, "SVG")).iter("{http://www.w3.org/2000/svg}text")][4:]
    assert [cell.text for cell in cells] == ["−1234.568", "0.500", "0.250", "1.000"]
    assert {float(cell.get("font-size")) < 40 * 0.28 for cell in cells} == {True}
    np.testing.assert_allclose(explorer.weights(), weights, atol=LABEL_STEP)


@pytest.mark.parametrize("end", ("\n", "\r\n"))
def test_words_of_files(explorer, tmp_path, end):
    save_arrays(tmp_path)
    queries, keys = "the cat <b> the \u732b".split(), "a b c d e f g".split()
    (tmp_path / "words.txt").write_text(end.join([*queries, ""]), newline="")
    (tmp_path / "keys.txt").write_text(end.join(keys), newline="")
    arrays = [tmp_path / f"{name}.npy" for name in "qkv"]
    explorer.open("#source=files").page.set_input_files("#files", [*arrays, tmp_path / "words.txt"])
    first = explorer.page.locator(CELLS).first
    expect(first).to_have_attribute("aria-label", re.compile("^the₁ attends to k0: "))
    explorer.page.set_input_files("#files", [tmp_path / "words.txt", tmp_path / "keys.txt"])  # the arrays stay
    expect(first).to_have_attribute("aria-label", re.compile("^the₁ attends to a: "))
    assert explorer.page.locator(CELLS).nth(3 * 7).get_attribute("aria-label").startswith("the₂ attends to a: ")
    explorer.page.set_input_files("#files", [*arrays, tmp_path / "keys.txt"])
    expect(first).to_have_attribute("aria-label", re.compile("^q0 attends to a: "))


def test_words_of_files_that_do_not_fit(explorer, tmp_path):
    save_arrays(tmp_path)
    (tmp_path / "words.txt").write_text("one\ntwo\n")
    explorer.open("#source=files").page.set_input_files("#files", tmp_path / "words.txt")
    expect(explorer.page.get_by_role("status")).to_have_text("The files have words and no arrays; drop arrays, too.")
    explorer.page.set_input_files("#files", [tmp_path / name for name in ("q.npy", "words.txt")])
    expect(explorer.page.get_by_role("status")).to_have_text("words.txt has 2 lines; there are 5 queries.")


def save_arrays(folder):
    rng = np.random.default_rng(27)
    arrays = {name: rng.standard_normal((2, size, 8)).astype(np.float32) for name, size in (("q", 5), ("k", 7), ("v", 7))}
    for name, array in arrays.items():
        np.save(folder / name, array)
    np.savez(folder / "plain.npz", **arrays)
    np.savez_compressed(folder / "packed.npz", **arrays)
    entries, data = {}, b""
    for name, array in arrays.items():
        entries[f"layer.0.{name}"] = {"dtype": "F32", "shape": array.shape, "data_offsets": [len(data), len(data) + array.nbytes]}
        data += array.tobytes()
    head = json.dumps(entries).encode()
    (folder / "all.safetensors").write_bytes(len(head).to_bytes(8, "little") + head + data)
    return arrays


@pytest.mark.parametrize("names", [["q.npy", "k.npy", "v.npy"], ["plain.npz"], ["packed.npz"], ["all.safetensors"]])
def test_arrays_of_files(explorer, tmp_path, names):
    arrays = save_arrays(tmp_path)
    explorer.open("#source=files").page.set_input_files("#files", [tmp_path / name for name in names])
    expect(explorer.page.locator("#note")).to_contain_text("q [1,2,5,8]")
    explorer.settle()
    np.testing.assert_allclose(explorer.weights(), attention(arrays["q"][0], arrays["k"][0]), atol=LABEL_STEP + 1e-6)
    explorer.page.get_by_role("button", name="head 1").click()
    np.testing.assert_allclose(explorer.weights(), attention(arrays["q"][1], arrays["k"][1]), atol=LABEL_STEP + 1e-6)
    explorer.set("align", "bottom_right").set("causal", True)
    visible = np.arange(7)[None] <= np.arange(5)[:, None] + 2
    np.testing.assert_allclose(explorer.weights(), attention(arrays["q"][1], arrays["k"][1], visible=visible), atol=LABEL_STEP + 1e-6)


@pytest.mark.parametrize("dtype", [np.float16, np.float32, np.float64])
def test_weights_of_layers_and_heads(explorer, tmp_path, dtype):
    weights = np.random.default_rng(28).dirichlet(np.ones(6), size=(3, 1, 2, 4)).astype(dtype)
    np.save(tmp_path / "weights.npy", weights)
    explorer.open("#source=files").page.set_input_files("#files", tmp_path / "weights.npy")
    expect(explorer.page.locator("#note")).to_contain_text("the server computed nothing")
    for layer, head in [(0, 0), (2, 1), (1, 0)]:
        explorer.page.get_by_role("button", name=f"layer {layer}, head {head}").click()
        np.testing.assert_allclose(explorer.weights(), weights[layer, 0, head], atol=LABEL_STEP + 1e-6)
    for name in ("Causal", "Paint", "ALiBi"):
        expect(explorer.page.get_by_role("checkbox", name=name)).to_be_disabled()
    explorer.keep_picture("layers")


@contextlib.contextmanager
def open_layers(browser, folder, extra={}):
    for name, (config, tensors) in (make_layers.layers() | extra).items():
        make_layers.write_layer(folder / name, config, tensors)
    with RaptServer(f"--model_repository={folder}") as server, open_page(browser, f"http://{server.http_address}") as explorer:
        yield server, explorer


def weights_of_layer(server, name, inputs, **parameters):
    """The layer's answer to what the page sent, in JSON."""
    sent = [{"name": n, "datatype": "FP32", "shape": x.shape, "data": x.ravel().tolist()} for n, x in inputs.items()]
    message = json.dumps({"inputs": sent, "outputs": [{"name": "weights"}], "parameters": parameters}).encode()
    (weights,) = json.loads(fetch(server, f"/v2/models/{name}/infer", "POST", data=message)[2])["outputs"]
    return np.array(weights["data"]).reshape(weights["shape"])[0]


def test_a_layer_of_the_server(browser, tmp_path):
    with open_layers(browser, tmp_path) as (server, explorer):
        # One whose description fails hides no other.
        explorer.page.route("**/v2/models/t5_block", lambda route: route.fulfill(status=404, json={"error": "unloaded meanwhile"}))
        explorer.open().type("one two three")
        choice = explorer.page.get_by_role("combobox", name="Layer")
        expect(choice.locator("option", has_text="gpt2_block")).to_be_attached()
        expect(choice.locator("option", has_text="t5_block")).to_have_count(0)
        forget_status(explorer, 404)
        causal, status = explorer.page.get_by_role("checkbox", name="Causal"), explorer.page.get_by_role("status")
        choice.select_option("gpt2_block")
        expect(causal).to_be_checked()  # as it is configured
        explorer.settle()
        expect(status).to_contain_text("gpt2_block is causal")
        for is_causal in (True, False):
            causal.set_checked(is_causal)
            explorer.settle()
            want = weights_of_layer(server, "gpt2_block", explorer.inputs("gpt2_block"), is_causal=is_causal)
            assert (want[0, 0, 1:] == 0).all() == is_causal
            for head in range(len(want)):
                explorer.page.get_by_role("button", name=f"head {head}").click()
                np.testing.assert_allclose(explorer.weights(), want[head], atol=LABEL_STEP + 1e-6)
        expect_in_address(explorer, "model=gpt2_block")
        choice.select_option("bert_block")
        expect(causal).not_to_be_checked()
        explorer.settle()
        assert (explorer.weights() > 0).all()
        explorer.set("causal", True)
        weights = explorer.weights()
        assert (weights[np.triu_indices(3, 1)] == 0).all() and (weights[np.tril_indices(3)] > 0).all()
        expect(explorer.page.locator(CELLS + "[aria-label*=masked]")).to_have_count(3)
        expect(explorer.page.get_by_label("Softcap")).to_be_hidden()  # a layer has none
        explorer.keep_picture("layer")


def test_the_layer_is_that_of_the_last_choice(browser, tmp_path):
    with open_layers(browser, tmp_path) as (_, explorer):
        page = explorer.open("#s=one+two+three").page
        choice, note = page.locator("[name=model]"), page.locator("#note")
        expect(choice.locator("option", has_text="gpt2_block")).to_be_attached()
        held = Held(page, "**/v2/models/gpt2_block")
        choice.focus()
        choice.select_option("gpt2_block")
        held.wait_for(1)
        choice.select_option("bert_block")
        expect(note).to_contain_text("The layer bert_block")
        held.let_go()
        page.wait_for_timeout(200)  # in which the answer for gpt2_block must change nothing
        expect(choice).to_have_value("bert_block")
        expect(note).to_contain_text("The layer bert_block")
        expect(page.get_by_role("checkbox", name="Causal")).not_to_be_checked()
        # A layer that is described after another source was chosen, or after Back, changes nothing.
        for leave in (lambda: page.locator("[value=numbers]").check(force=True), page.go_back):
            held = Held(page, "**/v2/models/llama_block")
            page.locator("[value=sentence]").check(force=True)
            choice.select_option("llama_block")
            held.wait_for(1)
            leave()
            held.let_go()
            page.wait_for_timeout(200)
            expect(choice).not_to_have_value("llama_block")
            assert "llama_block" not in page.url
            page.unroute("**/v2/models/llama_block")


def test_a_layer_that_is_gone_when_it_is_chosen(browser, tmp_path):
    with open_layers(browser, tmp_path) as (_, explorer):
        explorer.open("#s=one+two+three")
        choice = explorer.page.get_by_role("combobox", name="Layer")
        expect(choice.locator("option", has_text="gpt2_block")).to_be_attached()
        explorer.page.route("**/v2/models/gpt2_block", lambda route: route.fulfill(status=404, json={"error": "unloaded meanwhile"}))
        choice.select_option("gpt2_block")
        expect(explorer.page.get_by_role("status")).to_have_text("unloaded meanwhile")
        expect(choice).to_have_value("")  # as the map has it
        assert explorer.weights().shape == (3, 3)
        forget_status(explorer, 404)


def test_cells_of_a_layer_are_not_painted(browser, tmp_path):
    with open_layers(browser, tmp_path) as (_, explorer):
        explorer.open("#paint=1&model=bert_block&s=one+two+three")
        before = len(explorer.sent)
        explorer.page.locator(CELLS).nth(5).click()
        explorer.page.wait_for_timeout(500)  # after which the address is written
        assert "hide" not in explorer.page.url
        assert [r.url for r in explorer.sent[before:] if r.url.endswith("/infer")] == []


@pytest.mark.parametrize("model", ["attention", ".", ".."])
def test_a_model_that_is_no_layer(explorer, model):
    explorer.open(f"#model={model}")
    expect(explorer.page.get_by_role("status")).to_contain_text("must be the name of a layer of this server")
    expect(explorer.page.get_by_role("status")).to_contain_text(f"“{model}”")


def test_full_and_causal_of_a_layer(browser, tmp_path):
    with open_layers(browser, tmp_path) as (server, explorer):
        explorer.open("#model=bert_block&head=2&s=one+two+three")
        sent = explorer.inputs("bert_block")
        maps = explorer.page.locator("rapt-compare rapt-heat-map")
        for n, is_causal in enumerate([False, True]):
            want = weights_of_layer(server, "bert_block", sent, is_causal=is_causal)[2]
            np.testing.assert_allclose(labels_of(maps.nth(n)), want, atol=LABEL_STEP + 1e-6)


def test_views_that_a_layer_does_not_have(browser, tmp_path):
    with open_layers(browser, tmp_path) as (_, explorer):
        page = explorer.open("#model=bert_block&s=one+two+three").page
        view = page.get_by_role("tabpanel")
        for name, text in [("Steps", "not the steps"), ("Gradient", "not how its output depends"), ("Decode", "not the keys and values")]:
            page.get_by_role("tab", name=name).click()
            expect(view).to_contain_text(text)
        page.get_by_role("tab", name="Lessons").click()
        expect(view.get_by_role("table").get_by_role("row")).to_have_count(4)
        page.get_by_role("button", name="Scale", exact=True).click()
        expect(view).to_contain_text("Largest slope")
        page.get_by_role("button", name="A NaN").click()
        expect(view).to_contain_text("choose toy vectors")
        page.get_by_role("tab", name="Steps").click()
        page.get_by_role("button", name="Back to toy vectors").click()
        expect(page.locator("rapt-steps")).to_be_visible()
        explorer.settle()
        assert_shows(explorer)


def test_the_average_of_the_heads_of_a_layer(browser, tmp_path):
    with open_layers(browser, tmp_path) as (server, explorer):
        explorer.open("#model=torch_block&s=one+two+three")
        want = weights_of_layer(server, "torch_block", explorer.inputs("torch_block"))
        explorer.page.get_by_role("checkbox", name="Average of the heads").check()
        explorer.settle()
        np.testing.assert_allclose(explorer.weights(), want.mean(axis=0), atol=LABEL_STEP + 1e-6)
        expect(explorer.page.locator("#map rapt-heads")).to_be_hidden()
        expect_in_address(explorer, "average=1")
        for model in ("", "bahdanau"):  # which has one head
            explorer.page.get_by_role("button", name="Reset the controls").click()
            explorer.set("model", model)
            expect(explorer.page.get_by_role("checkbox", name="Average of the heads")).to_be_hidden()


# Queries, keys and values of three sizes, as in the cross-attention of two models.
SIZES = {
    "cross": (
        {"num_attention_heads": 4},
        {f"{name}_proj_weight": np.random.default_rng(size).standard_normal((32, size)).astype(np.float32) / 6 for name, size in (("q", 32), ("k", 24), ("v", 20))}
        | {"out_proj.weight": np.eye(32, dtype=np.float32)},
    )
}


@pytest.mark.parametrize("layer, sizes", [("torch_block", (32, 32, None)), ("bahdanau", (16, 32, None)), ("cross", (32, 24, 20))])
def test_a_sentence_looks_at_another_by_a_layer(browser, tmp_path, layer, sizes):
    with open_layers(browser, tmp_path, SIZES) as (server, explorer):
        explorer.open(f"#model={layer}&s=le+chat+dort")
        explorer.page.get_by_role("button", name="+ second sentence (cross-attention)").click()
        box = explorer.page.get_by_role("textbox", name="Sentence that is looked at")
        expect(box).to_be_focused()
        box.fill("the cat is asleep")
        box.press("Enter")
        explorer.settle()
        sent = explorer.inputs(layer)
        assert tuple(sent[name].shape[-1] if name in sent else None for name in ("query", "key", "value")) == sizes
        assert explorer.page.locator("#map .row-labels span").all_text_contents() == ["le", "chat", "dort"]
        assert explorer.page.locator("#map .column-labels span").all_text_contents() == ["the", "cat", "is", "asleep"]
        np.testing.assert_allclose(explorer.weights(), weights_of_layer(server, layer, sent, is_causal=False)[0], atol=LABEL_STEP + 1e-6)


@pytest.mark.parametrize("state", ["#model=bert_block&causal=1", "#model=bahdanau&s2=a+b+c", "#model=torch_block&average=1"])
def test_the_copied_code_of_a_layer_gives_the_same_numbers(browser, tmp_path, state):
    with open_layers(browser, tmp_path / "models") as (_, explorer):
        explorer.open(state)
        code = code_of(explorer, "Python") + "\nnp.save('weights.npy', result['weights'])\n"
        subprocess.run([sys.executable, "-B", "-c", code], cwd=tmp_path, check=True, stdout=subprocess.DEVNULL)
        weights = np.load(tmp_path / "weights.npy")[0]
        want = explorer.weights()
        np.testing.assert_allclose(want, weights if weights.ndim == 2 else weights[0], atol=LABEL_STEP + 1e-6)
        answer = json.loads(subprocess.run(["bash", "-c", code_of(explorer, "curl")], check=True, capture_output=True).stdout)
        got = np.array(answer["outputs"][0]["data"]).reshape(-1, *want.shape)[0]
        np.testing.assert_allclose(want, got, atol=LABEL_STEP + 1e-6)


def halved(layer):
    """A layer in BF16."""
    ml_dtypes = pytest.importorskip("ml_dtypes")
    config, tensors = layer
    return config, {name: tensor.astype(ml_dtypes.bfloat16) for name, tensor in tensors.items()}


def test_the_copied_code_of_a_layer_in_bf16(browser, tmp_path):
    extra = {"halved": halved(make_layers.layers()["bert_block"])}
    with open_layers(browser, tmp_path / "models", extra) as (_, explorer):
        explorer.open("#model=halved&s=one+two+three")
        code = code_of(explorer, "Python") + "\nnp.save('weights.npy', result['weights'].astype(np.float32))\n"
        subprocess.run([sys.executable, "-B", "-c", code], cwd=tmp_path, check=True, stdout=subprocess.DEVNULL)
        np.testing.assert_allclose(explorer.weights(), np.load(tmp_path / "weights.npy")[0, 0], atol=LABEL_STEP + 1e-6)


def test_the_copied_python_of_a_long_layer_call_reads_files(browser, tmp_path):
    with open_layers(browser, tmp_path / "models") as (_, explorer):
        explorer.open("#model=bert_block&s=" + "+".join(f"w{n}" for n in range(130)))
        code = code_of(explorer, "Python")
        assert 'query = np.load("query.npy")' in code and len(code) < 1000
        with explorer.page.expect_download() as waiting:
            explorer.page.get_by_role("button", name="Inputs as .npy").click()
        assert waiting.value.suggested_filename == "query.npy"
        waiting.value.save_as(tmp_path / "query.npy")
        subprocess.run([sys.executable, "-B", "-c", code + "\nnp.save('weights.npy', result['weights'])\n"], cwd=tmp_path, check=True, stdout=subprocess.DEVNULL)
        saved = np.load(download(explorer, ".npy"))
        np.testing.assert_array_equal(saved, np.load(tmp_path / "weights.npy"))


def test_layers_times_heads(browser, tmp_path):
    with open_layers(browser, tmp_path) as (server, explorer):
        explorer.open("#view=layers&s=one+two+three")
        rows = explorer.page.locator("rapt-layers rapt-heads")
        expect(rows).to_have_count(len(make_layers.layers()))
        assert rows.locator("h3").all_text_contents() == sorted(make_layers.layers())
        row = explorer.page.get_by_role("group", name="llama_block")
        expect(row.get_by_role("button")).to_have_count(4)
        explorer.page.get_by_role("tab", name="Layers").focus()
        row.get_by_role("button", name="head 3").click()
        expect(explorer.page.locator("#note")).to_contain_text("The layer llama_block")
        explorer.settle()
        want = weights_of_layer(server, "llama_block", explorer.inputs("llama_block"))[3]
        np.testing.assert_allclose(explorer.weights(), want, atol=LABEL_STEP + 1e-6)
        expect(explorer.page.get_by_role("group", name="llama_block").get_by_role("button", pressed=True)).to_have_text("head 3")
        assert violations(explorer) == []
        explorer.keep_picture("layers-of-the-server")


def test_layers_times_heads_are_asked_once(browser, tmp_path):
    with open_layers(browser, tmp_path) as (_, explorer):
        page = explorer.open("#view=layers&s=one+two+three").page
        expect(page.locator("rapt-layers rapt-heads")).to_have_count(len(make_layers.layers()))
        before = len(explorer.sent)
        page.get_by_role("radio", name="one").press("ArrowRight")
        expect(page.get_by_role("heading", name="What “two” attends to")).to_be_visible()
        page.wait_for_load_state("networkidle")
        assert [request.url for request in explorer.sent[before:]] == []
        page.set_viewport_size({"width": 1440, "height": 600})
        head = page.get_by_role("group", name="llama_block").get_by_role("button", name="head 2")
        head.focus()
        page.keyboard.press("Enter")
        expect(head).to_have_attribute("aria-pressed", "true")
        expect(head).to_be_focused()
        page.wait_for_function("() => Math.abs(document.querySelector('#map').getBoundingClientRect().top) < 2")  # it is seen
        explorer.type("four words are more")
        expect(page.locator("#note")).to_contain_text("llama_block")
        assert explorer.inputs("t5_block")["query"].shape[1] == 4


def test_a_picture_of_a_layer_is_chosen_from_numbers(browser, tmp_path):
    with open_layers(browser, tmp_path) as (server, explorer):
        explorer.open("#source=numbers&n=1+0%0A0+1%0A1+1&view=layers&s=one+two+three+four")
        view = explorer.page.get_by_role("tabpanel")
        expect(view).to_contain_text("with the sentence “one two three four”")
        view.get_by_role("group", name="bert_block").get_by_role("button", name="head 1").click()
        expect(explorer.page.locator("#note")).to_contain_text("The layer bert_block")
        explorer.settle()
        want = weights_of_layer(server, "bert_block", explorer.inputs("bert_block"))[1]
        np.testing.assert_allclose(explorer.weights(), want, atol=LABEL_STEP + 1e-6)
        expect(explorer.page.get_by_role("radio", name="Sentence")).to_be_checked()
        expect(view).to_contain_text("with the words above")


def test_layers_that_fail_say_so(browser, tmp_path):
    with open_layers(browser, tmp_path) as (_, explorer):
        page = explorer.page
        page.route("**/v2/models/bert_block/infer", lambda route: route.fulfill(status=503, json={"error": "no memory today"}))
        explorer.open("#view=layers&s=one+two+three")
        view = page.get_by_role("tabpanel")
        expect(view.locator("rapt-heads")).to_have_count(len(make_layers.layers()) - 1)
        assert view.locator("h3").all_text_contents() == sorted(make_layers.layers())
        expect(view.locator(".error")).to_have_text("no memory today")
        assert violations(explorer, "#view") == []
        explorer.type("!")
        expect(view.locator(".error")).to_have_text("no memory today")
        explorer.type("")
        expect(page.get_by_role("status")).to_have_text("Type a sentence first.")
        expect(view.locator("rapt-heads")).to_have_count(0)
        forget_status(explorer, 503)


def test_a_layer_that_is_gone(explorer):
    explorer.open("#model=gone")
    expect(explorer.page.get_by_role("combobox", name="Layer").locator("option:checked")).to_have_text("gone, not on this server")
    expect(explorer.page.get_by_role("status")).to_contain_text("unknown model 'gone'")
    explorer.set("model", "")
    assert_shows(explorer)
    explorer.page.get_by_role("tab", name="Layers").click()
    expect(explorer.page.get_by_role("tabpanel")).to_contain_text("This server has no layers: start it with --model_repository.")
    forget_status(explorer, 404)


def test_a_layer_with_a_key_of_its_own(browser, tmp_path):
    config, tensors = make_layers.layers()["torch_block"]
    extra = {name: np.ones((1, 1, 32), np.float32) for name in ("bias_k", "bias_v")}
    make_layers.write_layer(tmp_path / "own_key", config, tensors | extra)
    with RaptServer(f"--model_repository={tmp_path}") as server, open_page(browser, f"http://{server.http_address}") as explorer:
        explorer.open("#model=own_key&view=lines").type("one two three")
        assert explorer.weights().shape == (3, 4)
        assert explorer.page.locator("#map .column-labels span").all_text_contents() == ["one", "two", "three", "bias_k"]
        words = explorer.page.locator("rapt-words [role=radio]")
        assert words.all_text_contents() == ["one", "two", "three"]
        shares = words.evaluate_all("words => words.map(word => Number(word.style.getPropertyValue('--weight')))")
        row = explorer.weights()[0, :3]
        np.testing.assert_allclose(shares, row / row.max(), atol=0.01)


def test_a_wrong_file_is_explained(explorer, tmp_path):
    np.save(tmp_path / "names.npy", np.array([b"a", b"b"]))
    (tmp_path / "notes.md").write_text("text")
    explorer.open("#source=files")
    np.save(tmp_path / "empty.npy", np.zeros((0, 3), np.float32))
    for name, message in [("empty.npy", "empty has shape [0,3]; an axis of 0"), ("names.npy", "names.npy has the type |S1; it must be one of"), ("notes.md", "notes.md is none of .npy")]:
        explorer.page.set_input_files("#files", tmp_path / name)
        expect(explorer.page.get_by_role("status")).to_contain_text(message)


# --- The attention of a model, as rapt.capture keeps it ---------------------------------------------


TOKENS = ["[CLS]", "the", "bank", "##s", "\U0001f600", "[SEP]"]
CAPTURED = np.random.default_rng(47).dirichlet(np.ones(6), size=(3, 1, 4, 6)).astype(np.float32)


def save_capture(path, save=np.savez, **changes):
    save(path, **({"model": np.array("tiny-bert"), "tokens": np.array(TOKENS), "weights": CAPTURED} | changes))
    return path


def labels_at(explorer, axis):
    return explorer.page.locator(f"#map .{axis}-labels span").all_text_contents()


@pytest.mark.parametrize("save", [np.savez, np.savez_compressed])
def test_a_captured_model(explorer, tmp_path, save):
    explorer.open("#source=files").page.set_input_files("#files", save_capture(tmp_path / "bank.npz", save))
    page = explorer.page
    expect(page.locator("#note")).to_contain_text("tiny-bert, 3 layers × 4 heads: weights [3,1,4,6,6]")
    assert labels_at(explorer, "row") == labels_at(explorer, "column") == TOKENS
    expect(page.locator("#map rapt-heads").get_by_role("button")).to_have_count(12)
    page.get_by_role("button", name="layer 2, head 3").click()
    expect(page.get_by_role("heading", name="Attention weights: layer 2, head 3")).to_be_visible()
    np.testing.assert_allclose(explorer.weights(), CAPTURED[2, 0, 3], atol=LABEL_STEP + 1e-6)
    for key in ("ArrowUp", "ArrowLeft", "Enter"):
        page.keyboard.press(key)
    expect(page.get_by_role("heading", name="Attention weights: layer 1, head 2")).to_be_visible()
    np.testing.assert_allclose(explorer.weights(), CAPTURED[1, 0, 2], atol=LABEL_STEP + 1e-6)
    assert not [request.url for request in explorer.sent if request.method == "POST" and not request.url.endswith("/index")]
    assert violations(explorer) == []
    explorer.keep_picture("captured")


def told(explorer):
    return explorer.page.locator("#told").text_content()


def ranking(words, weights, count=3):
    return ", ".join(f"“{words[n]}” {weights[n]:.3f}" for n in np.argsort(-weights)[:count])


def test_a_word_shows_where_it_looks_and_who_looks_at_it(explorer, tmp_path):
    explorer.open("#source=files").page.set_input_files("#files", save_capture(tmp_path / "bank.npz"))
    page, weights = explorer.page, CAPTURED[0, 0, 0]
    expect(page.get_by_role("tab", name="Lines")).to_have_attribute("aria-selected", "true")
    looks, looked_at = (page.get_by_role("listbox", name=name) for name in ("Words that look", "Words that are looked at"))
    of_first = f"“[CLS]” attends to {ranking(TOKENS, weights[0])}"
    expect(page.locator("#told")).to_have_text(of_first)
    looks.get_by_role("option", name="bank").hover()
    assert told(explorer) == f"“bank” attends to {ranking(TOKENS, weights[2])}"
    expect(looks.get_by_role("option", selected=True)).to_have_text("bank")
    looked_at.get_by_role("option", name="##s").hover()
    assert told(explorer) == f"“##s” is attended to by {ranking(TOKENS, weights[:, 3])}"
    expect(looked_at.get_by_role("option", selected=True)).to_have_text("##s")
    expect(looks.get_by_role("option", selected=True)).to_have_count(0)
    shades = looks.locator("rect").evaluate_all("words => words.map(word => Number(word.getAttribute('fill-opacity')))")
    np.testing.assert_allclose(shades, 0.5 * weights[:, 3] / weights[:, 3].max(), rtol=1e-5)
    page.get_by_role("heading", name="rapt explorer").hover()
    expect(page.locator("#told")).to_have_text(of_first)
    looked_at.get_by_role("option").first.focus()
    for _ in range(2):
        page.keyboard.press("ArrowDown")
    assert told(explorer) == f"“bank” is attended to by {ranking(TOKENS, weights[:, 2])}"
    expect(looked_at.get_by_role("option", name="bank")).to_be_focused()
    assert violations(explorer) == []


def test_many_words_have_lines_where_one_points(explorer, tmp_path):
    words = [f"w{n}" for n in range(90)]
    weights = np.random.default_rng(1).dirichlet(np.full(90, 0.05), size=(2, 1, 1, 90)).astype(np.float32)
    explorer.open("#source=files").page.set_input_files("#files", save_capture(tmp_path / "long.npz", tokens=np.array(words), weights=weights))
    page = explorer.page
    page.get_by_role("listbox", name="Words that are looked at").get_by_role("option", name="w40", exact=True).hover()
    assert told(explorer) == f"“w40” is attended to by {ranking(words, weights[0, 0, 0, :, 40])}"
    expect(page.locator("rapt-lines path")).to_have_count(int((weights[0, 0, 0, :, 40] > 0.005).sum()))


def test_a_dropped_capture(explorer, tmp_path):
    content = list(save_capture(tmp_path / "bank.npz").read_bytes())
    explorer.open().page.evaluate(
        """bytes => {
          const dataTransfer = new DataTransfer();
          dataTransfer.items.add(new File([new Uint8Array(bytes)], 'bank.npz'));
          document.querySelector('main').dispatchEvent(new DragEvent('drop', {dataTransfer, bubbles: true, cancelable: true}));
        }""",
        content,
    )
    expect(explorer.page.locator("#note")).to_contain_text("tiny-bert, 3 layers × 4 heads")
    expect_in_address(explorer, "view=lines")


def with_bytes(content, at, new):
    return content[:at] + new + content[at + len(new) :]


def broken_captures(folder):
    """Files, and what is said of them."""
    stored, deflated = (save_capture(folder / "x.npz", save).read_bytes() for save in (np.savez, np.savez_compressed))
    entry, last = deflated.index(b"PK\x01\x02"), deflated.rindex(b"PK\x01\x02")
    data = deflated.rindex(b"PK\x03\x04") + 30 + len("weights.npy") + 20
    shape = stored.index(b"(3, 1, 4, 6, 6)")
    yield "text.npz", b"model", "text.npz is not a .npz file."
    yield "empty.npz", b"", "empty.npz is not a .npz file."
    yield "cut.npz", stored[:-30], "cut.npz is not a .npz file."
    yield "begins-late.npz", bytes(9) + stored, "is damaged: its directory is not where its end says."
    yield "directory.npz", with_bytes(stored, len(stored) - 6, b"\xff\xff\xff\x7f"), "directory.npz ends early."
    yield "method.npz", with_bytes(deflated, entry + 10, b"\x0c"), "model.npy is compressed by method 12; it must be 0 (stored) or 8 (deflated)."
    yield "far.npz", with_bytes(deflated, last + 20, b"\xff\xff\xff\x7f"), "weights.npy ends early."
    yield "huge.npz", with_bytes(deflated, last + 24, b"\xff\xff\xff\xff"), "weights.npy says that it has 4294967295 bytes, which its data can't have."
    yield "longer.npz", with_bytes(deflated, last + 24, b"\x80\x00\x00\x00"), "weights.npy is longer than it says."
    yield "shorter.npz", with_bytes(deflated, last + 24, b"\xff\x10\x00\x00"), "weights.npy ends early."
    directory, end = stored[stored.index(b"PK\x01\x02") : -22], stored[-22:]
    yield "overlap.npz", stored[:-22] + directory + with_bytes(end, 10, b"\x06"), "overlap.npz is damaged: its members overlap."
    yield "deflated.npz", with_bytes(deflated, data, b"\xff" * 40), "weights.npy is damaged."
    yield "numbers.npz", with_bytes(stored, shape, b"(3, 1, 4, 6, 9)"), "weights.npy ends early: 432 of 648 numbers."
    yield "axes.npz", with_bytes(stored, shape, b"(3, 1, 4, 6,-6)"), "weights.npy does not say its shape."
    yield "short.safetensors", bytes(7), "short.safetensors ends early."
    yield "head.safetensors", b"\xff" * 8 + b"{}", "head.safetensors ends early."
    for offsets in (-4, 0), (0, 8), (4, 0):
        head = json.dumps({f"x{offsets[0]}": {"dtype": "F32", "shape": [1], "data_offsets": offsets}}).encode()
        yield f"{offsets[0]}.safetensors", len(head).to_bytes(8, "little") + head + bytes(4), f"x{offsets[0]} ends early."
    yield "tokens.npz", save_capture(folder / "x.npz", tokens=np.array(TOKENS[:-1])).read_bytes(), "tokens has 5 lines; there are 6 queries."
    yield "pickled.npz", save_capture(folder / "x.npz", tokens=np.array(TOKENS, object)).read_bytes(), "tokens.npy has the type |O; it must be one of"
    yield "none.npz", save_capture(folder / "x.npz", weights=CAPTURED[:0]).read_bytes(), "weights has shape [0,1,4,6,6]; an axis of 0 has nothing to show."


def test_a_broken_capture_is_explained(explorer, tmp_path):
    explorer.open("#source=files")
    for name, content, message in broken_captures(tmp_path):
        (tmp_path / name).write_bytes(content)
        explorer.page.set_input_files("#files", tmp_path / name)
        expect(explorer.page.get_by_role("status")).to_contain_text(message)


@pytest.mark.parametrize("width, scheme", [(390, "dark"), (1440, "light")])
def test_a_captured_model_on_a_screen(browser, server, tmp_path, width, scheme):
    with open_page(browser, f"http://{server.http_address}", color_scheme=scheme) as explorer:
        explorer.page.set_viewport_size({"width": width, "height": 844})
        weights = np.random.default_rng(2).dirichlet(np.ones(6), size=(4, 1, 16, 6)).astype(np.float32)
        explorer.open("#source=files").page.set_input_files("#files", save_capture(tmp_path / "bank.npz", weights=weights))
        expect(explorer.page.locator("rapt-lines svg")).to_be_visible()
        assert explorer.page.evaluate(OVERLAPS) == []
        assert explorer.page.evaluate("document.documentElement.scrollWidth - document.documentElement.clientWidth") <= 0
        assert violations(explorer) == []
        explorer.page.get_by_role("button", name="layer 3, head 15").click()
        np.testing.assert_allclose(explorer.weights(), weights[3, 0, 15], atol=LABEL_STEP + 1e-6)
        explorer.keep_picture(f"captured-{width}")


def test_a_long_header_of_numpy(explorer, tmp_path):
    header = b"{'descr': '<f4', 'fortran_order': False, 'shape': (2, 2), }" + b" " * 500_000 + b"\n"
    weights = np.float32([[1, 0], [0.25, 0.75]])
    (tmp_path / "weights.npy").write_bytes(b"\x93NUMPY\x02\x00" + len(header).to_bytes(4, "little") + header + weights.tobytes())
    explorer.open("#source=files").page.set_input_files("#files", tmp_path / "weights.npy")
    expect(explorer.page.locator("#note")).to_contain_text("weights [2,2]")
    explorer.settle()
    np.testing.assert_array_equal(explorer.weights(), weights)


def test_weights_that_are_no_weights(explorer, tmp_path):
    np.save(tmp_path / "scores.npy", np.float32([[2, 0.5], [-1, 1]]))
    explorer.open("#source=files").page.set_input_files("#files", tmp_path / "scores.npy")
    expect(explorer.page.locator("#note")).to_contain_text("2 of its numbers are not from 0 to 1")


def test_a_call_that_is_too_long_for_json(explorer, tmp_path):
    for name, tokens in (("q", 1024), ("k", 1025)):
        np.save(tmp_path / name, np.zeros((2, tokens, 2), np.float32))
    explorer.open("#source=files&align=bottom_right").page.set_input_files("#files", [tmp_path / "q.npy", tmp_path / "k.npy"])
    expect(explorer.page.get_by_role("status")).to_contain_text("--max_json_bytes. Show fewer tokens or heads.")
    forget_status(explorer, 413)


def test_pasted_numbers(explorer):
    explorer.open("#source=numbers").page.get_by_role("button", name="Show").last.click()
    expect(explorer.page.get_by_role("status")).to_have_text("Type or paste a matrix first.")
    matrices = [np.array([[1.0, 0], [0, 1], [2, -1]]), np.array([[1.0, 1], [0.5, 0]]), np.array([[1.0], [2]])]
    box = explorer.page.get_by_role("textbox", name="Numbers")
    show = explorer.page.get_by_role("button", name="Show").last
    for count, form in [(1, "{}"), (3, "[{}]")]:
        box.fill("\n\n".join("\n".join(form.format(", ".join(map(str, row))) for row in m) for m in matrices[:count]))
        show.click()
        explorer.settle()
        want = attention(matrices[0], matrices[0 if count == 1 else 1])
        np.testing.assert_allclose(explorer.weights(), want, atol=LABEL_STEP + 1e-6)
    expect_in_address(explorer, "n=%5B1.0")
    box.fill("1 2\n3")
    show.click()
    expect(explorer.page.get_by_role("status")).to_have_text("Line 2 of a matrix has 1 numbers; the first line has 2.")


# --- Views ------------------------------------------------------------------------------------------


def labels_of(map):
    """The numbers of a heat map that is complete."""
    expect(map.locator("[role=gridcell]").first).to_be_attached()
    rows = map.locator("[role=row]").evaluate_all("rows => rows.map(row => [...row.children].map(cell => cell.getAttribute('aria-label')))")
    return np.array([[number_of(label) for label in row] for row in rows])


def test_gradients(explorer):
    explorer.open("#view=gradient&row=2&causal=1")
    q, k, v = (explorer.inputs()[name][0, 0].astype(float) for name in "QKV")
    weights = attention(q, k, visible=K <= Q)[2]
    slopes = weights * (v.sum(1) - weights @ v.sum(1)) / math.sqrt(6)
    row = np.arange(6)[:, None] == 2
    maps = explorer.page.locator("rapt-gradient rapt-heat-map")
    for n, want in enumerate([row * (slopes @ k), np.outer(slopes, q[2]), np.outer(weights, np.ones(6))]):
        np.testing.assert_allclose(labels_of(maps.nth(n)), want, atol=LABEL_STEP + 1e-5)
        expect(maps.nth(n).locator("[tabindex='0'][role=gridcell]")).to_have_attribute("aria-label", re.compile("^sat number"))


@pytest.mark.parametrize("dtype", ["FP32", "FP64", "BF16"])
def test_the_noise_of_a_gradient_is_not_drawn_in_full_colour(explorer, dtype):
    """The first word sees itself alone under a causal mask: its output depends on no score, but for rounding."""
    explorer.open(f"#s=my+sister+lent+her+bike&heads=4&view=gradient&causal=1&type={dtype}")
    legends = explorer.page.locator("rapt-gradient .legend")
    ends = ["lowers −0.0000010.000001 raises"] * 2 + ["lowers −11 raises"]
    expect(legends).to_have_text(ends)


def test_gradients_of_the_last_queries(explorer, tmp_path):
    arrays = save_arrays(tmp_path)
    explorer.open("#source=files&view=gradient&causal=1&align=bottom_right&row=1&head=1")
    explorer.page.set_input_files("#files", [tmp_path / f"{name}.npy" for name in "qkv"])
    explorer.settle().page.get_by_role("button", name="head 1").click()
    explorer.page.get_by_role("radio", name="q1").click()
    maps = explorer.page.locator("rapt-gradient rapt-heat-map")
    expect(maps.first.locator("[role=grid]")).to_have_attribute("aria-label", "dQ for q1")
    q, k, v = (arrays[name][1].astype(float) for name in "qkv")
    weights = attention(q, k, visible=np.arange(7)[None] <= np.arange(5)[:, None] + 2)[1]
    slopes = weights * (v.sum(1) - weights @ v.sum(1)) / math.sqrt(8)
    row = np.arange(5)[:, None] == 1
    for n, want in enumerate([row * (slopes @ k), np.outer(slopes, q[1]), np.outer(weights, np.ones(8))]):
        np.testing.assert_allclose(labels_of(maps.nth(n)), want, atol=LABEL_STEP + 1e-5)


def test_positions(explorer):
    explorer.open("#view=positions")
    for name, value in (("Positions", "7"), ("Numbers", "4"), ("Base", "100")):
        explorer.page.get_by_role("spinbutton", name=name).fill(value)
    explorer.page.keyboard.press("Tab")
    map = explorer.page.locator("rapt-positions rapt-heat-map")
    expect(map.locator("[role=gridcell]")).to_have_count(28)
    angles = np.arange(7)[:, None] * 100.0 ** -np.array([0, 0.5])
    want = np.stack([np.sin(angles), np.cos(angles)], axis=2).reshape(7, 4)
    np.testing.assert_allclose(labels_of(map), want, atol=LABEL_STEP + 1e-6)
    ticks = explorer.page.locator("rapt-positions svg text[text-anchor=end]").all_text_contents()
    assert ticks[0] == "−1" and ticks[-1] == "1"  # the least cosine is larger than -1
    swatches = explorer.page.locator("rapt-positions .symbols i").evaluate_all("all => all.map(one => getComputedStyle(one).borderTopStyle)")
    lines = explorer.page.locator("rapt-positions polyline").evaluate_all("all => all.map(one => one.hasAttribute('stroke-dasharray'))")
    assert [style == "dashed" for style in swatches] == lines


def choose_encoding(explorer, name, positions, numbers):
    page = explorer.open("#view=positions").page
    for field, value in (("Positions", positions), ("Numbers", numbers)):
        page.get_by_role("spinbutton", name=field).fill(str(value))
    page.get_by_role("combobox", name="Encoding").select_option(name)
    return page.locator("rapt-positions rapt-heat-map")


def test_rotary_positions(explorer):
    map = choose_encoding(explorer, "rotary", 7, 4)
    expect(map.locator("[role=gridcell]")).to_have_count(28)
    expect(explorer.page.locator("rapt-positions > p")).to_contain_text("every pair was (1, 0)")
    angles = np.arange(7)[:, None] * 10000.0 ** -np.array([0, 0.5])
    np.testing.assert_allclose(labels_of(map), np.stack([np.cos(angles), np.sin(angles)], axis=2).reshape(7, 4), atol=LABEL_STEP + 1e-6)


def test_alibi_positions(explorer):
    map = choose_encoding(explorer, "ALiBi", 9, 4)
    expect(map.locator("[role=gridcell]")).to_have_count(81)
    distances = abs(np.arange(9)[:, None] - np.arange(9))
    np.testing.assert_allclose(labels_of(map), -distances * 2.0**-8, atol=LABEL_STEP + 1e-6)


def test_costs(explorer, server):
    explorer.open("#view=cost")
    message = {"batch": 1, "queryHeads": 1, "headSize": 64, "lengths": [128, 65536]}
    want = json.loads(fetch(server, "/rapt/v1/estimate-memory", "POST", data=json.dumps(message).encode())[2])["estimates"]
    rows = explorer.page.locator("rapt-cost table").first.locator("tbody tr")
    assert [int(e["length"]) for e in want] == [128, 65536]
    assert rows.first.locator("td").first.text_content() == f"{int(want[0]['standardBytes']) / 1024:.1f} KiB"
    assert rows.last.locator("td").first.text_content() == f"{int(want[1]['standardBytes']) / 2**30:.1f} GiB"
    explorer.page.get_by_role("button", name="Measure time").click()
    times = explorer.page.locator("rapt-cost table").nth(1).locator("tbody tr")
    expect(times).to_have_count(2, timeout=20_000)
    colours = [
        symbols.locator("span").evaluate_all("spans => spans.map(span => [span.textContent, span.firstChild.style.borderColor])")
        for symbols in explorer.page.locator("rapt-cost .symbols").all()
    ]
    common = {name for name, _ in colours[0]} & {name for name, _ in colours[1]}
    assert len(common) == 3 and all(dict(colours[0])[name] == dict(colours[1])[name] != "" for name in common)
    assert all(re.fullmatch(r"\d+ µs|\d+\.\d ms", text) for text in times.first.locator("td").all_text_contents())


def test_decode_against_a_cache(explorer, server):
    explorer.open("#view=decode&heads=2&head=1")
    step = explorer.page.get_by_role("button", name="Append the next word")
    cached, whole = (explorer.page.locator("rapt-decode rapt-heat-map").nth(n) for n in range(2))
    words = explorer.page.locator("rapt-decode .chips span").all_text_contents()
    for count in range(1, 7):
        step.click()
        expect(cached.locator("[role=row]")).to_have_count(count)
        np.testing.assert_allclose(labels_of(cached), labels_of(whole), atol=2 * LABEL_STEP)
        expect(cached.locator("[role=gridcell][tabindex='0']")).to_have_attribute("aria-label", re.compile("^" + words[count - 1]))
    expect(step).to_be_disabled()
    expect(explorer.page.locator("rapt-decode dd").first).to_have_text("6")
    tensors = explorer.inputs()
    weights = attention(tensors["Q"][0, 1], tensors["K"][0, 0], visible=K <= Q)
    np.testing.assert_allclose(labels_of(cached), weights @ tensors["V"][0, 0], atol=LABEL_STEP + 1e-5)
    with explorer.page.expect_response("**/rapt/v1/caches/close"):
        explorer.page.get_by_role("tab", name="Lines").click()
    assert json.loads(fetch(server, "/rapt/v1/caches")[2]).get("caches", []) == []


def test_decode_shows_no_words_of_the_sentence_before(explorer):
    explorer.open("#view=decode&s=a+dog")
    words = explorer.page.locator("rapt-decode .chips")
    expect(words).to_have_text("adog")
    asked = [request for request in explorer.sent if request.url.endswith("/rapt/v1/server")]
    held = Held(explorer.page, "**/rapt/v1/server")  # which is known
    explorer.type("the cat sat")
    expect(words).to_have_text("thecatsat")
    assert held.routes == [] and asked
    with explorer.page.expect_response("**/caches/close"):
        explorer.page.get_by_role("tab", name="Lines").click()


def test_decode_without_caches(browser):
    with RaptServer() as server, open_page(browser, f"http://{server.http_address}") as explorer:
        explorer.open("#view=decode")
        expect(explorer.page.get_by_text("This server keeps no caches: start it with --kv_cache_bytes=67108864.")).to_be_visible()
        expect(explorer.page.get_by_role("button", name="Append the next word")).to_be_hidden()
        explorer.set("causal", True)
        explorer.page.wait_for_load_state("networkidle")
        assert not any("/caches" in request.url for request in explorer.sent)


def test_figures_of_the_server(explorer):
    explorer.open("#view=server")
    row = explorer.page.locator("rapt-server tbody tr").first
    expect(row.locator("th")).to_have_text("attention")
    before = int(row.locator("td").first.text_content())
    explorer.set("causal", True)
    expect(row.locator("td").first).not_to_have_text(str(before))


def test_what_is_known_of_the_server_is_shown_at_once(explorer):
    explorer.open()
    expect(explorer.page.locator("#server")).to_contain_text("rapt")
    explorer.page.route("**/v2/models/stats", lambda route: None)
    explorer.page.get_by_role("tab", name="Server").click()
    figures = explorer.page.locator("rapt-server .figures div")
    expect(figures.filter(has_text="memory for caches").locator("dd")).to_have_text("64.0 MiB")
    expect(figures.filter(has_text="calls").first.locator("dd")).to_have_text("…")


def test_the_server_is_polled_by_the_timer_alone(explorer):
    clock, page = explorer.page.clock, explorer.page
    clock.install(time=0)
    explorer.open("#view=server")
    page.wait_for_load_state("networkidle")
    clock.pause_at(3600)
    page.wait_for_load_state("networkidle")

    def count():
        return sum(request.url.endswith("/v2/models/stats") for request in explorer.sent)

    before = count()
    for word in ("cat", "sat", "mat"):
        page.get_by_role("radio", name=word).click()
    page.wait_for_load_state("networkidle")
    assert count() == before
    page.route("**/v2/models/stats", lambda route: route.fulfill(status=500, json={"error": "no figures today"}))
    clock.run_for(1000)
    expect(page.locator("rapt-server [role=alert]")).to_have_text("no figures today")
    page.unroute("**/v2/models/stats")
    clock.run_for(1000)
    expect(page.locator("rapt-server [role=alert]")).to_have_text("")
    forget_status(explorer, 500)


def test_lessons(explorer):
    explorer.open("#view=lessons")
    weights = explorer.weights()
    cells = explorer.page.locator("rapt-lessons tbody tr td:nth-child(2)")
    expect(cells).to_have_count(6)
    got = [float(text) for text in cells.all_text_contents()]
    np.testing.assert_allclose(got, -(weights * np.log(weights)).sum(axis=1), atol=0.01)
    for lesson, text in [
        ("A NaN", "k has 1 NaN among 36 values"),
        ("A wrong mask", "B: mask has type FP32 and contains only 0 and 1"),
        ("Scale", "Largest slope:"),
    ]:
        explorer.page.get_by_role("button", name=lesson).click()
        expect(explorer.page.locator("rapt-lessons")).to_contain_text(text)
        explorer.keep_picture(f"lesson-{lesson.lower()}")
    captions = explorer.page.locator("rapt-lessons .readout").all_text_contents()
    assert [bool(text) for text in captions] == [True, True, False, False]  # slopes are not attention
    x = explorer.inputs()["Q"][0, 0]
    want = [(p * (1 - p)).max() for p in (attention(x, x), attention(x, x, scale=1))]
    expect(explorer.page.locator("rapt-lessons")).to_contain_text(f"Largest slope: {want[0]:.4f} with the scale, {want[1]:.4f} without.")


def test_lessons_show_the_mask_and_the_row(explorer):
    page = explorer.open("#view=lessons&causal=1&row=2").page
    maps = page.locator("rapt-lessons rapt-heat-map")
    for lesson, counts in [("A NaN", [15]), ("A wrong mask", [15, 0, 21])]:
        page.get_by_role("button", name=lesson).click()
        expect(maps).to_have_count(len(counts))
        for n, count in enumerate(counts):
            expect(maps.nth(n).locator("[aria-label*=masked]")).to_have_count(count)
            expect(maps.nth(n).locator("[tabindex='0'][role=gridcell]")).to_have_attribute("aria-label", re.compile("^sat attends to"))
        expect(page.locator("rapt-lessons")).not_to_contain_text("Switch the causal mask on")
    assert page.locator("rapt-lessons .columns h3").all_text_contents() == ["Mask A", "Mask B", "Mask C"]


def test_the_queries_play(explorer):
    clock = explorer.page.clock
    clock.install(time=0)
    explorer.open()
    clock.pause_at(3600)
    explorer.page.get_by_role("button", name="Play").click()
    for word in ("cat", "sat", "on", "the₂", "mat", "the₁"):
        clock.run_for(900)
        expect(explorer.page.get_by_role("heading", name=f"What “{word}” attends to")).to_be_visible()
    explorer.page.get_by_role("button", name="Pause").click()
    clock.run_for(9000)
    expect(explorer.page.get_by_role("heading", name="What “the₁” attends to")).to_be_visible()


def test_reduced_motion(browser, server):
    with open_page(browser, f"http://{server.http_address}", reduced_motion="reduce") as explorer:
        explorer.open()
        expect(explorer.page.get_by_role("slider", name="Query")).to_be_visible()
        expect(explorer.page.get_by_role("button", name="Play")).to_have_count(0)


def test_a_thousand_words(explorer):
    explorer.open().type(" ".join(f"w{n}" for n in range(1024)))
    tensors = explorer.inputs()
    want = attention(tensors["Q"][0, 0], tensors["K"][0, 0])
    grid = explorer.page.locator("#map [role=grid]")
    assert grid.get_attribute("aria-rowcount") == grid.get_attribute("aria-colcount") == "1024"
    cell = grid.locator("[role=gridcell]")
    cell.focus()
    explorer.page.keyboard.press("Control+End")
    explorer.page.keyboard.press("Shift+ArrowLeft")
    label = cell.get_attribute("aria-label")
    assert label.startswith("w1023 attends to w1013: ")
    assert abs(number_of(label) - want[1023, 1013]) <= LABEL_STEP + 1e-6
    explorer.keep_picture("thousand-words")


def forget_status(explorer, status):
    """Forgets the browser's own lines about answers that a test wants."""
    explorer.page.wait_for_load_state("networkidle")
    explorer.complaints[:] = [text for text in explorer.complaints if str(status) not in text]


# --- Answers that come late -------------------------------------------------------------------------


class Held:
    """Requests of a page that wait until they are let go."""

    def __init__(self, page, pattern):
        self.page, self.pattern, self.routes, self.holds = page, pattern, [], True
        page.route(pattern, lambda route: self.routes.append(route) if self.holds else route.continue_())

    def wait_for(self, count):
        for _ in range(200):
            if len(self.routes) >= count:
                return
            self.page.wait_for_timeout(50)
        raise AssertionError(f"{len(self.routes)} of {count} requests to {self.pattern}")

    def release(self, count):
        """Lets the first ones go; later requests still wait."""
        for route in self.routes[:count]:
            route.continue_()

    def let_go(self, order=slice(None)):
        self.holds = False
        for route in self.routes[order]:
            route.continue_()
        self.page.wait_for_load_state("networkidle")


@pytest.mark.parametrize("width, height", [(1440, 900), (1280, 800)])
def test_a_chosen_view_is_in_sight(browser, server, width, height):
    with open_page(browser, f"http://{server.http_address}") as explorer:
        explorer.page.set_viewport_size({"width": width, "height": height})
        explorer.open()
        button = explorer.page.get_by_role("button", name="Go to the views")
        expect(button).to_be_in_viewport(ratio=1)
        button.click()
        expect(explorer.page.get_by_role("tab", name="Compare")).to_be_focused()
        explorer.page.get_by_role("tab", name="Gradient").click()
        expect(explorer.page.locator("rapt-gradient canvas").first).to_be_in_viewport(ratio=1)


def test_a_view_shows_the_last_choice(explorer):
    explorer.open("#view=gradient")
    grid = explorer.page.locator("rapt-gradient [role=grid]").first
    expect(grid).to_have_attribute("aria-label", "dQ for the₁")
    held = Held(explorer.page, "**/attention_backward/infer")
    for count, word in enumerate(["cat", "mat"], 1):
        explorer.page.get_by_role("radio", name=word).click()
        held.wait_for(count)
    # The heading and the maps are of one answer.
    expect(explorer.page.get_by_role("heading", name="What the output of “the₁” depends on")).to_be_visible()
    held.let_go(slice(None, None, -1))
    expect(grid).to_have_attribute("aria-label", "dQ for mat")
    explorer.page.wait_for_timeout(200)  # in which the answer for “cat” must change nothing
    expect(grid).to_have_attribute("aria-label", "dQ for mat")
    expect(explorer.page.get_by_role("heading", name="What the output of “mat” depends on")).to_be_visible()


def test_what_the_mask_changes_is_not_that_of_the_sentence_before(explorer):
    page, beside = explorer.open("#causal=1&view=lines").page, explorer.page.locator("#change")
    expect(beside).to_contain_text("from “the₁”")
    page.route("**/attention/infer", lambda route: route.continue_() if b"is_causal" in route.request.post_data_buffer
               else route.fulfill(status=429, json={"error": "too many calls"}))  # fmt: skip
    explorer.type("a dog saw")
    expect(page.get_by_role("status")).to_have_text("too many calls")
    expect(beside).to_be_empty()
    expect(page.locator("#heard")).to_have_text("“a” attends most to “a” (1.000)")
    page.unroute("**/attention/infer")
    explorer.type("the cat")
    expect(beside).to_contain_text("from “the”")
    held = Held(page, "**/attention/infer")
    page.get_by_role("textbox", name="Sentence").fill("a dog saw")
    page.keyboard.press("Enter")
    held.wait_for(2)  # the weights and the mask
    held.release(2)
    held.wait_for(3)  # without the mask
    expect(page.locator("#words h2")).to_have_text("What “a” attends to")
    expect(beside).to_be_hidden()
    held.let_go(slice(2, None))
    expect(beside).to_contain_text("from “a”")
    expect(beside).to_be_visible()
    forget_status(explorer, 429)


def test_positions_are_those_of_the_last_choice(explorer):
    explorer.open("#view=positions")
    tokens = explorer.page.get_by_role("spinbutton", name="Positions")
    held = Held(explorer.page, "**/positional_encoding/infer")
    for count, value in enumerate(["7", "5"], 1):
        tokens.fill(value)
        tokens.press("Tab")
        held.wait_for(count)
    held.let_go(slice(None, None, -1))
    grid = explorer.page.locator("rapt-positions [role=grid]")
    expect(grid).to_have_attribute("aria-rowcount", "5")
    explorer.page.wait_for_timeout(200)
    expect(grid).to_have_attribute("aria-rowcount", "5")


def test_a_lesson_shows_the_last_choice(explorer):
    explorer.open("#view=lessons")
    held = Held(explorer.page, "**/rapt/v1/diagnose")
    explorer.page.get_by_role("button", name="A NaN").click()
    held.wait_for(1)
    explorer.page.get_by_role("button", name="Entropy").click()
    expect(explorer.page.locator("rapt-lessons table")).to_be_visible()
    held.let_go()
    explorer.page.wait_for_timeout(200)
    expect(explorer.page.locator("rapt-lessons table")).to_be_visible()
    explorer.page.route("**/rapt/v1/diagnose", lambda route: route.fulfill(status=400, json={"error": "no diagnosis today"}))
    explorer.page.get_by_role("button", name="A NaN").click()
    expect(explorer.page.get_by_role("status")).to_have_text("no diagnosis today")
    forget_status(explorer, 400)


def test_caches_that_come_too_late_are_closed(explorer, server):
    held = Held(explorer.page, "**/rapt/v1/caches")
    explorer.page.goto(f"{explorer.url}/#view=decode")
    held.wait_for(1)
    explorer.page.locator("[name=causal]").check()  # another call, with a cache of its own
    held.wait_for(2)
    explorer.page.get_by_role("button", name="Start again").click()
    held.wait_for(3)
    explorer.page.get_by_role("tab", name="Lines").click()
    held.let_go(slice(None, None, -1))
    caches = None
    for _ in range(100):
        caches = json.loads(fetch(server, "/rapt/v1/caches")[2]).get("caches", [])
        if not caches and sum(r.url.endswith("/caches/close") for r in explorer.sent) == 3:
            break
        explorer.page.wait_for_timeout(50)
    assert caches == [] and sum(r.url.endswith("/caches/close") for r in explorer.sent) == 3


# --- Errors -----------------------------------------------------------------------------------------


def test_a_server_that_does_not_answer(explorer):
    explorer.open()
    status = explorer.page.get_by_role("status")
    explorer.page.context.set_offline(True)
    explorer.set("causal", True)
    expect(status).to_have_text("The server does not answer.")
    explorer.page.context.set_offline(False)
    explorer.set("causal", False)
    assert_shows(explorer)
    explorer.complaints.clear()  # the browser's own lines


def test_an_error_of_the_server_is_shown(explorer):
    explorer.open("#norm=sparsemax&sink=1")
    status = explorer.page.get_by_role("status")
    expect(status).to_contain_text("head_sink")
    expect(status).to_have_class("error")
    forget_status(explorer, 400)


def test_after_an_error_nothing_of_the_call_before_is_shown(explorer):
    explorer.open("#sink=1")
    parts = [explorer.page.locator(part) for part in ("#map rapt-heat-map", "#words", "rapt-compare")]
    buttons = [explorer.page.get_by_role("button", name=name, exact=True) for name in (".npy", "PNG", "SVG")]
    copying = explorer.page.get_by_role("button", name="Copy Python")
    for name, value, is_wrong in [("norm", "sparsemax", True), ("norm", "softmax", False), ("source", "files", True), ("source", "sentence", False)]:
        if name == "source":
            explorer.page.locator(f"[value={value}]").check(force=True)
            explorer.settle()
        else:
            explorer.set(name, value)
        for part in (*parts, copying):
            expect(part).to_be_hidden() if is_wrong else expect(part).to_be_visible()
        for button in buttons:
            if value == "files":
                expect(button).to_be_hidden()
            else:
                expect(button).to_be_disabled() if is_wrong else expect(button).to_be_enabled()
    assert_shows(explorer, sink=1)
    forget_status(explorer, 400)


@pytest.mark.parametrize(
    "state",
    ["heads=1000000000", "heads=1.5", "heads=-1", "kv=0", "row=-1", "row=1.5", "head=-3", "layer=", "t=0", "t=1e99", "block=0&blocks=local",
     "left=0x1", "left=-1", "right=1.5", "softcap=-3", "scale=0x2", "sink=1e999", "heads=0x2", "t=+2", "sink= 1", "view=constructor", "blocks=toString", "norm=hardmax", "type=INT8", "source=nowhere", "align=middle", "constructor=1", "__proto__=1"],
)
def test_an_address_that_can_not_be(explorer, state):
    explorer.open("#" + state)
    if "local" in state:
        return assert_shows(explorer, visible=abs(Q // 2 - K // 2) <= 1)
    assert_shows(explorer)
    expect(explorer.page.locator("rapt-compare")).to_be_visible()


def test_a_browser_that_refuses_addresses(explorer):
    explorer.page.add_init_script(
        "window.writes = 0; history.replaceState = () => { ++window.writes; throw new DOMException('too many', 'SecurityError'); };"
    )
    explorer.open()
    explorer.page.locator("[name=t]").evaluate(
        "field => { for (let n = 1; n <= 200; ++n) { field.value = n % 2 ? 0.5 : 2; field.dispatchEvent(new Event('input', {bubbles: true})); } }"
    )
    explorer.settle()
    assert_shows(explorer, scale=0.5 / math.sqrt(6))
    explorer.page.wait_for_timeout(500)
    assert 0 < explorer.page.evaluate("window.writes") < 20


# --- Everybody --------------------------------------------------------------------------------------


def test_keyboard_alone(explorer):
    """Type a sentence, walk the grid, choose a head's word, switch the mask on, open another view."""
    page = explorer.open().page
    focused = "document.activeElement"

    def tab_to(condition):
        for _ in range(60):
            page.keyboard.press("Tab")
            if page.evaluate(f"(e => Boolean({condition}))({focused})"):
                return
        raise AssertionError(f"Tab does not reach {condition}")

    tab_to("e.id === 'sentence'")
    page.keyboard.press("Control+A")
    page.keyboard.type("a dog saw a bird")
    page.keyboard.press("Enter")
    explorer.settle()
    assert explorer.weights().shape == (5, 5)
    tab_to("e.getAttribute('role') === 'gridcell'")
    for key, label in [("ArrowRight", "a₁ attends to dog"), ("ArrowDown", "dog attends to dog"), ("End", "dog attends to bird"), ("Control+Home", "a₁ attends to a₁")]:
        page.keyboard.press(key)
        assert page.evaluate(f"{focused}.getAttribute('aria-label')").startswith(label)
    tab_to("e.getAttribute('role') === 'radio' && e.closest('rapt-words')")
    page.keyboard.press("ArrowRight")
    expect(page.get_by_role("heading", name="What “dog” attends to")).to_be_visible()
    page.evaluate("document.querySelector('#sentence').focus()")
    tab_to("e.name === 'causal'")
    page.keyboard.press("Space")
    explorer.settle()
    assert explorer.weights()[0].tolist() == [1, 0, 0, 0, 0]
    tab_to("e.getAttribute('role') === 'tab'")
    page.keyboard.press("ArrowRight")
    expect(page.get_by_role("tab", name="Steps")).to_have_attribute("aria-selected", "true")


def test_what_a_screen_reader_says(explorer):
    explorer.open().type("a dog saw")
    page, heard = explorer.page, explorer.page.locator("#heard")
    most = re.compile("^“a” attends most to “a” \\(0\\.\\d{3}\\)")
    expect(heard).to_have_attribute("aria-live", "polite")
    expect(heard).to_have_text(most)
    explorer.set("causal", True)
    expect(heard).to_have_text(re.compile("“a” \\(1\\.000\\) The causal mask hides 2 of 3 words from “a”"))
    before = heard.text_content()
    word = page.get_by_role("radio", name="dog")
    page.get_by_role("radio", name="a", exact=True).press("ArrowRight")
    expect(word).to_be_focused()
    expect(word).to_have_accessible_description(re.compile("^“dog” attends most to “dog”"))
    expect(page.get_by_role("slider", name="Query")).to_have_attribute("aria-valuetext", re.compile("^“dog” attends most to “dog”"))
    assert heard.text_content() == before  # what has the focus is said without it
    assert set(page.locator(CELLS).all_text_contents()) == {""}  # Orca says the text of a cell instead of its label
    expect(page.get_by_label("Keys before")).to_have_attribute("aria-valuetext", "all")
    explorer.set("left", 1)
    assert page.get_by_label("Keys before").get_attribute("aria-valuetext") is None
    causal = page.get_by_role("checkbox", name="Causal", exact=True)
    expect(causal).to_have_accessible_description("no word sees the words after it")


def test_the_skip_link_keeps_the_state(explorer):
    page = explorer.open("#s=my+grumpy+dog+barks&causal=1&row=2&view=steps").page
    address = page.url
    page.keyboard.press("Tab")
    expect(page.get_by_role("link", name="Skip to the heat map")).to_be_focused()
    page.keyboard.press("Enter")
    expect(page.locator(CELLS + ":focus")).to_have_attribute("aria-label", re.compile("^dog attends to"))
    assert page.url == address


def test_nineteen_words_on_a_phone_have_labels(browser, server):
    with open_page(browser, f"http://{server.http_address}") as explorer:
        explorer.page.set_viewport_size({"width": 390, "height": 844})
        explorer.open().type("Donaudampfschifffahrtsgesellschaft " + " ".join(f"w{n}" for n in range(18)))
        labels = explorer.page.locator("#map .row-labels span")
        expect(labels).to_have_count(19)
        assert labels.last.evaluate("label => parseFloat(getComputedStyle(label).fontSize)") >= 8
        explorer.keep_picture("nineteen-words-390")


def test_where_labels_do_not_fit_some_and_the_chosen_one_are_shown(explorer):
    page = explorer.open("#row=31").type(" ".join(f"w{n}" for n in range(100))).page
    labels = page.locator("#map .row-labels span")
    page.get_by_role("radio", name="w31", exact=True).click()
    expect(labels.get_by_text("w31", exact=True)).to_be_visible()
    assert 10 < labels.count() < 100 and 10 < page.locator("#map .column-labels span").count() < 100
    tops = labels.evaluate_all("labels => labels.map(label => label.getBoundingClientRect().top)")
    assert min(b - a for a, b in zip(tops, tops[1:])) >= 8
    page.get_by_role("radio", name="w32", exact=True).click()
    expect(labels.get_by_text("w32", exact=True)).to_be_visible()
    explorer.keep_picture("hundred-words")


def violations(explorer, part=None):
    return [f"{v['id']}: {v['nodes'][0]['html']}" for v in Axe().run(explorer.page, context=part).response["violations"]]


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_accessibility(browser, server, scheme):
    with open_page(browser, f"http://{server.http_address}", color_scheme=scheme, reduced_motion="reduce") as explorer:
        explorer.open("#causal=1&heads=4")
        assert violations(explorer) == []
        for tab in explorer.page.get_by_role("tab").all():
            tab.click()
            explorer.page.wait_for_load_state("networkidle")
            assert violations(explorer, "#view") == []
            explorer.keep_picture(f"{scheme}-{tab.text_content().lower()}")


@pytest.mark.parametrize("width, height", [(390, 844), (820, 1180), (3840, 2160)])
def test_screens(browser, server, width, height):
    with open_page(browser, f"http://{server.http_address}") as explorer:
        explorer.page.set_viewport_size({"width": width, "height": height})
        explorer.open()
        overflow = explorer.page.evaluate("document.documentElement.scrollWidth - document.documentElement.clientWidth")
        assert overflow <= 0
        explorer.keep_picture(f"screen-{width}")
        explorer.type("a " + "Donaudampfschifffahrt" * 12)
        explorer.page.get_by_role("radio").last.click()
        expect(explorer.page.locator("rapt-compare [role=gridcell]")).to_have_count(8)
        widest = "parts => Math.max(...parts.map(part => part.scrollWidth - part.clientWidth))"
        assert explorer.page.locator("html, .card, #view, rapt-compare .columns > div").evaluate_all(widest) <= 0
        explorer.keep_picture(f"long-word-{width}")


# Pairs of texts whose boxes overlap by more than what line boxes share.
OVERLAPS = """() => {
  const boxes = [], walker = document.createTreeWalker(document.body, NodeFilter.SHOW_TEXT);
  while (walker.nextNode()) {
    const {currentNode: text} = walker, {parentElement: parent} = text;
    if (!text.data.trim() || parent.closest('option, title, .skip, .heard') || !parent.checkVisibility({visibilityProperty: true})) continue;
    const range = document.createRange();
    range.selectNodeContents(text);
    for (const {left, right, top, bottom} of range.getClientRects()) boxes.push({text: text.data.trim(), left, right, top, bottom});
  }
  const pairs = [];
  boxes.forEach((a, n) => boxes.slice(n + 1).forEach((b) => {
    const across = Math.min(a.right, b.right) - Math.max(a.left, b.left), down = Math.min(a.bottom, b.bottom) - Math.max(a.top, b.top);
    if (across > 1 && down > 4) pairs.push(`${a.text} | ${b.text}`);
  }));
  return pairs;
}"""


@pytest.mark.parametrize("width", [390, 820, 1440, 3840])
def test_no_text_lies_on_another(browser, server, width):
    with open_page(browser, f"http://{server.http_address}") as explorer:
        explorer.page.set_viewport_size({"width": width, "height": 900})
        explorer.open("#s=the+quick+brown+fox+jumps+over+the+lazy+dog&causal=1&heads=4")
        explorer.page.evaluate("document.querySelector('#settings').open = true")
        for tab in explorer.page.get_by_role("tab").all():
            tab.click()
            explorer.page.locator(f"rapt-{tab.text_content().lower()}").wait_for()
            explorer.page.wait_for_load_state("networkidle")
            assert explorer.page.evaluate(OVERLAPS) == [], tab.text_content()
            assert explorer.page.evaluate("document.documentElement.scrollWidth - document.documentElement.clientWidth") <= 0
            explorer.keep_picture(f"view-{tab.text_content().lower()}-{width}")


CUT = """charts => charts.flatMap(chart => {
  const box = chart.getBoundingClientRect();
  return [...chart.querySelectorAll('text')].filter(text => {
    const {left, right, top, bottom} = text.getBoundingClientRect();
    return left < box.left - 1 || right > box.right + 1 || top < box.top - 1 || bottom > box.bottom + 1;
  }).map(text => text.textContent);
})"""


@pytest.mark.parametrize("width", [390, 1440, 3840])
def test_labels_of_charts_are_not_cut(browser, server, width):
    with open_page(browser, f"http://{server.http_address}") as explorer:
        explorer.page.set_viewport_size({"width": width, "height": 900})
        explorer.open("#view=cost")
        charts = explorer.page.locator("#view .chart")
        expect(charts.get_by_text("16.0 GiB")).to_be_visible()
        assert charts.evaluate_all(CUT) == []
        explorer.page.get_by_role("tab", name="Positions").click()
        explorer.page.get_by_role("spinbutton", name="Positions").fill("1001")
        explorer.page.keyboard.press("Enter")
        expect(charts.get_by_text("1000")).to_be_visible()
        assert charts.evaluate_all(CUT) == []


def test_on_a_phone_the_mask_is_beside_the_map(browser, server):
    with open_page(browser, f"http://{server.http_address}") as explorer:
        explorer.page.set_viewport_size({"width": 390, "height": 844})
        explorer.open()
        tops = [explorer.page.locator(part).bounding_box()["y"] for part in ("[name=causal]", "#map .plot", "#words", "#settings", ".views")]
        assert tops == sorted(tops)
        expect(explorer.page.get_by_label("Softcap")).to_be_hidden()
        explorer.page.get_by_text("Controls", exact=True).click()
        expect(explorer.page.get_by_label("Softcap")).to_be_visible()
        explorer.page.set_viewport_size({"width": 1440, "height": 844})
        expect(explorer.page.get_by_label("Softcap")).to_be_visible()


def test_forced_colours(browser, server):
    with open_page(browser, f"http://{server.http_address}", forced_colors="active", color_scheme="dark") as explorer:
        explorer.open("#causal=1&heads=4")
        assert violations(explorer) == []
        assert colour_of(explorer.page.locator("#map rapt-heat-map"), 0) == [253, 231, 37]  # viridis stays
        explorer.keep_picture("forced-colours")


# --- The page as files ------------------------------------------------------------------------------


def fetch(server, path, method="GET", headers={}, data=None):
    request = urllib.request.Request(f"http://{server.http_address}{path}", data, headers, method=method)
    try:
        with urllib.request.urlopen(request) as answer:
            return answer.status, answer.headers, answer.read()
    except urllib.error.HTTPError as error:
        return error.code, error.headers, error.read()


def test_page_weight(explorer):
    explorer.open()
    for tab in explorer.page.get_by_role("tab").all():
        tab.click()
        explorer.page.wait_for_load_state("networkidle")
    files = {url: size for url, size in explorer.loaded.items() if "/explorer/" in url or url.endswith("/")}
    paint = explorer.page.evaluate("performance.getEntriesByName('first-contentful-paint')[0].startTime")
    print(f"{len(files)} files of {sum(files.values())} bytes; first paint after {paint:.0f} ms")
    assert len(files) > 10 and 0 < sum(files.values()) <= MOST_BYTES


def test_headers_of_the_files(server):
    status, headers, body = fetch(server, "/")
    assert status == 200 and headers["Content-Type"] == "text/html; charset=utf-8"
    for name in ["/", *re.findall(r'(?:src|href)="(explorer/[^"]+)"', body.decode())]:
        path = "/" + name.lstrip("/")
        status, headers, body = fetch(server, path)
        assert status == 200
        assert headers["Content-Security-Policy"].startswith("default-src 'none'; script-src 'self';")
        assert headers["X-Content-Type-Options"] == "nosniff"
        assert headers["Cache-Control"] == "no-cache"
        status, again, empty = fetch(server, path, headers={"If-None-Match": headers["ETag"]})
        assert (status, empty, again["ETag"]) == (304, b"", headers["ETag"])
        for form, want in [("W/{}", 304), ('"another", W/{}', 304), ("*", 304), ('"another"', 200)]:
            assert fetch(server, path, headers={"If-None-Match": form.format(headers["ETag"])})[0] == want
        status, head, empty = fetch(server, path, "HEAD")
        assert (status, empty, head["Content-Length"]) == (200, b"", str(len(body)))
    assert fetch(server, "/explorer/none.js")[0] == 404
    assert fetch(server, "/", "POST")[0] == 405


class Prefix(http.server.BaseHTTPRequestHandler):
    """A proxy that serves a rapt-server below /some/prefix/."""

    protocol_version = "HTTP/1.1"
    target = ""

    def do_GET(self):
        body = self.rfile.read(int(self.headers.get("Content-Length", 0)))
        connection = http.client.HTTPConnection(self.target)
        connection.request(self.command, self.path.removeprefix("/some/prefix"), body, dict(self.headers))
        answer = connection.getresponse()
        content = answer.read()
        self.send_response(answer.status)
        for name, value in answer.getheaders():
            self.send_header(name, value)
        self.end_headers()
        self.wfile.write(content)

    do_POST = do_GET

    def log_message(self, *_):
        pass


def test_behind_a_path_prefix(browser, server):
    handler = type("Handler", (Prefix,), {"target": server.http_address})
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), handler) as proxy:
        threading.Thread(target=proxy.serve_forever, daemon=True).start()
        with open_page(browser, f"http://127.0.0.1:{proxy.server_port}/some/prefix") as explorer:
            explorer.open("#causal=1")
            assert_shows(explorer, visible=K <= Q)
            assert "/some/prefix\") as client" in code_of(explorer, "Python")
        proxy.shutdown()


def test_the_page_asks_for_a_token(browser, tmp_path):
    key, certificate, tokens = tmp_path / "key", tmp_path / "certificate", tmp_path / "tokens"
    subprocess.run(
        ["openssl", "req", "-x509", "-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:P-256", "-nodes", "-subj", "/CN=localhost"]
        + ["-keyout", key, "-out", certificate],
        check=True,
        capture_output=True,
    )
    tokens.write_text(f"alice {hashlib.sha256(b'a-token-that-is-known').hexdigest()}\n")
    flags = [f"--tls_key={key}", f"--tls_cert={certificate}", f"--token_file={tokens}"]
    with RaptServer(*flags) as server, open_page(browser, f"https://{server.http_address}", ignore_https_errors=True) as explorer:
        explorer.page.goto(explorer.url + "/")
        dialog = explorer.page.get_by_role("dialog")
        expect(dialog).to_be_visible()
        explorer.page.keyboard.press("Escape")
        explorer.settle()
        explorer.page.wait_for_load_state("networkidle")
        expect(dialog).to_have_count(0)  # no call of the start asks again
        expect(explorer.page.get_by_role("status")).to_have_class("error")
        explorer.page.get_by_role("button", name="Show").first.click()
        for token in ("a-wrong-one", "a-token-that-is-known"):
            box = explorer.page.get_by_label("Token", exact=True)
            box.fill(token)
            explorer.page.get_by_role("button", name="Use it").click()
        explorer.settle()
        assert_shows(explorer)
        expect(explorer.page.get_by_role("dialog")).to_have_count(0)
        for language in ("Python", "curl"):
            assert "RAPT_TOKEN" in code_of(explorer, language)
        assert explorer.page.evaluate("[localStorage.length, sessionStorage.length, document.cookie]") == [0, 0, ""]
        explorer.complaints[:] = [text for text in explorer.complaints if "401" not in text]  # the browser's own lines


def test_a_server_without_the_page():
    with RaptServer("--explorer=false") as server:
        for path in ("/", "/explorer/main.js"):
            assert fetch(server, path)[0] == 404
        assert fetch(server, "/v2/health/ready")[0] == 200
