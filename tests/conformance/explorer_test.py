"""The explorer, the page at / of the HTTP address, in a browser: its numbers are NumPy's, its controls act, everybody can use
it, and it loads nothing from elsewhere. Pictures of the page are left in the build folder, in explorer/."""

import contextlib
import json
import math
import os
import pathlib
import re
import subprocess
import sys
import urllib.error
import urllib.request

import numpy as np
import pytest
from axe_playwright_python.sync_playwright import Axe
from playwright.sync_api import expect, sync_playwright
from rapt_server import RaptServer

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
        self.page.wait_for_selector("rapt-heat-map[aria-busy=false]")
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

    def inputs(self):
        """The tensors of the last call of `attention`."""
        request = next(r for r in reversed(self.sent) if r.url.endswith("/attention/infer"))
        body, length = request.post_data_buffer, int(request.headers["inference-header-content-length"])
        tensors, at = {}, length
        for entry in json.loads(body[:length])["inputs"]:
            size = entry["parameters"]["binary_data_size"]
            dtype = {"FP32": "<f4", "FP64": "<f8", "FP16": "<f2", "BOOL": "?"}.get(entry["datatype"])
            if dtype:
                tensors[entry["name"]] = np.frombuffer(body[at : at + size], dtype).reshape(entry["shape"])
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
            assert f"{name}={text}" in explorer.page.url
    address = explorer.page.url
    explorer.page.get_by_role("button", name="Reset the controls").click()
    explorer.settle()
    np.testing.assert_array_equal(explorer.weights(), before)
    explorer.page.goto(address)  # the state is in the address
    explorer.page.reload()
    explorer.settle()
    assert_shows(explorer, **options)


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
    explorer.set("kv", 2)
    tensors = explorer.inputs()
    assert tensors["Q"].shape[1] == 4 and tensors["K"].shape[1] == 2
    for head in range(4):
        explorer.page.get_by_role("button", name=f"head {head}").click()
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
    ranked = explorer.page.locator(".ranking li span:first-child").all_text_contents()
    assert [row[labels.index(word)] for word in ranked] == sorted(row, reverse=True)[:6]
    explorer.page.get_by_role("slider", name="Query").fill("0")
    expect(explorer.page.get_by_role("heading", name="What “The” attends to")).to_be_visible()


def test_full_and_causal_side_by_side(explorer):
    explorer.open()
    tensors = explorer.inputs()
    q, k = tensors["Q"][0, 0], tensors["K"][0, 0]
    maps = explorer.page.locator("rapt-compare rapt-heat-map")
    for n, visible in enumerate([None, K <= Q]):
        labels = maps.nth(n).locator("[role=gridcell]").evaluate_all("cells => cells.map(cell => cell.getAttribute('aria-label'))")
        got = np.array([number_of(label) for label in labels]).reshape(6, 6)
        np.testing.assert_allclose(got, attention(q, k, visible=visible), atol=LABEL_STEP + 1e-6)


def test_the_table_has_the_numbers(explorer):
    explorer.open()
    want = explorer.weights()
    explorer.page.get_by_role("button", name="Table").click()
    rows = explorer.page.locator("#map table tbody tr").evaluate_all(
        "rows => rows.map(row => [...row.querySelectorAll('td')].map(cell => Number(cell.textContent)))"
    )
    np.testing.assert_array_equal(np.array(rows), want)


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


# --- Copies and files -------------------------------------------------------------------------------


def code_of(explorer, language):
    explorer.page.get_by_role("tab", name="Code").click()
    explorer.page.get_by_role("button", name=language, exact=True).click()
    return explorer.page.get_by_role("region", name="Code").text_content()


@pytest.mark.parametrize("state", ["", "#causal=1&left=2&sink=0.5", "#heads=4&kv=2&alibi=1&t=0.5", "#blocks=global&hide=0-0,3-1&norm=entmax&alpha=1.25"])
def test_the_copied_python_gives_the_same_numbers(explorer, state):
    explorer.open(state)
    code = code_of(explorer, "Python") + "\nnp.save('weights.npy', result.scores)\n"
    folder = PICTURES / "python"
    folder.mkdir(parents=True, exist_ok=True)
    subprocess.run([sys.executable, "-B", "-c", code], cwd=folder, check=True, stdout=subprocess.DEVNULL)
    np.testing.assert_allclose(explorer.weights(), np.load(folder / "weights.npy")[0, 0], atol=LABEL_STEP + 1e-6)


def test_the_copied_curl_gives_the_same_numbers(explorer):
    explorer.open("#causal=1&softcap=3")
    answer = json.loads(subprocess.run(["bash", "-c", code_of(explorer, "curl")], check=True, capture_output=True).stdout)
    got = np.array(answer["outputs"][0]["data"]).reshape(6, 6)
    np.testing.assert_allclose(explorer.weights(), got, atol=LABEL_STEP + 1e-6)


def test_copy_python_copies(browser, server):
    with open_page(browser, f"http://{server.http_address}", permissions=["clipboard-read", "clipboard-write"]) as explorer:
        explorer.open()
        explorer.page.get_by_role("button", name="Copy Python").click()
        expect(explorer.page.get_by_role("status")).to_have_text("Copied.")
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
    assert svg.startswith("<svg") and svg.count("<rect") == 37 and ">1.00</text>" in svg


# --- Errors -----------------------------------------------------------------------------------------


def test_an_error_of_the_server_is_shown(explorer):
    explorer.open("#norm=sparsemax&sink=1")
    status = explorer.page.get_by_role("status")
    expect(status).to_contain_text("head_sink")
    expect(status).to_have_class("error")
    explorer.page.wait_for_load_state("networkidle")
    explorer.complaints[:] = [text for text in explorer.complaints if "400" not in text]  # the browser's own line


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


def violations(explorer):
    return [f"{v['id']}: {v['nodes'][0]['html']}" for v in Axe().run(explorer.page).response["violations"]]


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_accessibility(browser, server, scheme):
    with open_page(browser, f"http://{server.http_address}", color_scheme=scheme, reduced_motion="reduce") as explorer:
        explorer.open("#causal=1&heads=4")
        for tab in explorer.page.get_by_role("tab").all():
            tab.click()
            explorer.page.wait_for_load_state("networkidle")
            assert violations(explorer) == []
            explorer.keep_picture(f"{scheme}-{tab.text_content().lower()}")


@pytest.mark.parametrize("width, height", [(390, 844), (820, 1180), (3840, 2160)])
def test_screens(browser, server, width, height):
    with open_page(browser, f"http://{server.http_address}") as explorer:
        explorer.page.set_viewport_size({"width": width, "height": height})
        explorer.open()
        overflow = explorer.page.evaluate("document.documentElement.scrollWidth - document.documentElement.clientWidth")
        assert overflow <= 0
        explorer.keep_picture(f"screen-{width}")


# --- The page as files ------------------------------------------------------------------------------


def fetch(server, path, method="GET", headers={}):
    request = urllib.request.Request(f"http://{server.http_address}{path}", method=method, headers=headers)
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
    print(f"{len(files)} files of {sum(files.values())} bytes")
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
        status, head, empty = fetch(server, path, "HEAD")
        assert (status, empty, head["Content-Length"]) == (200, b"", str(len(body)))
    assert fetch(server, "/explorer/none.js")[0] == 404
    assert fetch(server, "/", "POST")[0] == 405


def test_a_server_without_the_page(browser):
    with RaptServer("--explorer=false") as server:
        for path in ("/", "/explorer/main.js"):
            assert fetch(server, path)[0] == 404
        assert fetch(server, "/v2/health/ready")[0] == 200
