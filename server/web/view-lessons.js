// <rapt-lessons>: small experiments. Weights and diagnoses are the server's; entropies and p (1 - p) are computed here from them.
import './heat-map.js';
import {attend, toAttendRequest} from './call.js';
import {rangeOf} from './colours.js';
import {ask} from './server.js';
import {sourceOfSentence} from './sources.js';
import {headOf, tensor} from './tensor.js';
import {el, show, table} from './text.js';

const weightsOf = async (call, signal) => headOf((await attend(call, 'weights', signal)).scores, 0);
const callOf = (q, k, v, parameters = {}, more = {}) => ({inputs: {Q: q, K: k, V: v, ...more}, parameters, isBottomRight: false});
const warningsOf = async (call, signal) => (await ask('rapt/v1/diagnose', {call: toAttendRequest(call)}, signal)).warnings;

/** @param {{hidden?: ArrayLike<number>, row?: number}} options */
function mapOf(values, rowLabels, columnLabels, name, {hidden, row = 0, isSlope = false} = {}) {
  const map = el('rapt-heat-map');
  queueMicrotask(() => {
    const range = isSlope ? {low: 0, high: 0.25, isAround0: false} : rangeOf([], true);
    map.show({rows: rowLabels.length, columns: columnLabels.length, values, hidden, rowLabels, columnLabels, range}, {name, ...(isSlope && {verb: 'with'})});
    map.mark(row);
  });
  return el('div', {}, el('h3', {}, name), map);
}

const diagnosis = (warnings) => [el('h3', {}, 'What Diagnose says'), el('ul', {className: 'warnings'}, ...warnings.map((text) => el('li', {}, text)))];
const answer = (text) => el('details', {}, el('summary', {}, 'What happened?'), el('p', {}, text));

/** Entropy of a row of weights, and how many keys that is. */
function entropyOf(weights) {
  return -weights.reduce((sum, p) => sum + (p > 0 ? p * Math.log(p) : 0), 0);
}

async function entropy({matrixOf, layer, head}) {
  const {columns, values, rowLabels} = matrixOf(layer, head);
  const rows = rowLabels.map((label, row) => {
    const nats = entropyOf(Array.from(values.slice(row * columns, (row + 1) * columns)));
    return [label, nats.toFixed(3), Math.exp(nats).toFixed(2)];
  });
  return [
    el('p', {}, `How sharply does a word look? The entropy −Σ p ln p of its weights is 0 if it looks at one word, and ${Math.log(columns).toFixed(2)} if it looks at all ${columns} alike. Move the temperature and watch.`),
    el('div', {className: 'scroll', tabIndex: 0, role: 'region', 'aria-label': 'Entropies'}, table('Entropy of the weights above', ['word', 'entropy', 'words looked at'], rows)),
  ];
}

/** Vectors of 64 numbers as training begins with: their products have a standard deviation of 8. */
function unscaled() {
  const words = 'one two three four five six seven eight';
  const size = 64, {q, keyLabels} = sourceOfSentence({s: words, s2: '', heads: 4, kv: 4});
  const spread = tensor('FP32', [1, 1, 8, size], new Float32Array(8 * size));
  for (let at = 0; at < 8 * size; ++at) {
    const token = Math.floor(at / size), n = at % size;
    spread.values[at] = q.values[((n >> 4) * 8 + token) * 16 + (n & 15)];
  }
  return {x: spread, labels: keyLabels};
}

async function scale({signal}) {
  const {x, labels} = unscaled();
  const sides = await Promise.all([{}, {scale: 1}].map((parameters) => weightsOf(callOf(x, x, x, parameters), signal)));
  const slopes = sides.map((weights) => Array.from(weights, (p) => p * (1 - p)));
  return [
    el('p', {}, 'Eight words with 64 numbers each. Products of long vectors are large; 1/√D makes them moderate. p (1 − p) is the slope of the softmax: where it is 0, nothing is learned.'),
    el('div', {className: 'columns'},
      mapOf(sides[0], labels, labels, 'Weights with 1/√D'), mapOf(sides[1], labels, labels, 'Weights without scale'),
      mapOf(slopes[0], labels, labels, 'p (1 − p) with 1/√D', {isSlope: true}), mapOf(slopes[1], labels, labels, 'p (1 − p) without scale', {isSlope: true})),
    el('p', {}, `Largest slope: ${show(Math.max(...slopes[0]), 4)} with the scale, ${show(Math.max(...slopes[1]), 4)} without.`),
    answer('Without the scale the scores differ so much that the softmax takes one word alone: weights of 0 and 1, slopes of 0. In training this looks like a loss that does not move from the first step. The same happens if the scale is applied twice, in the other direction: all weights alike.'),
  ];
}

async function nan({call, hidden, source, row, signal}) {
  const {Q, K, V} = call.inputs;
  const token = Math.floor(K.shape[2] / 2);
  const values = new Float32Array(K.values);
  values[token * K.shape[3]] = NaN;
  const broken = {...call, inputs: {...call.inputs, Q, K: tensor(K.datatype, K.shape, values), V}};
  const [weights, warnings] = await Promise.all([weightsOf(broken, signal), warningsOf(broken, signal)]);
  return [
    el('p', {}, `The key of “${source.keyLabels[token]}” has one NaN, put there on purpose. Which words does it reach? ${call.parameters.is_causal ? 'The causal mask is on' : 'Switch the causal mask on'}: which rows recover, and why these?`),
    mapOf(weights, source.queryLabels, source.keyLabels, 'Weights with one NaN', {hidden: hidden && headOf(hidden, 0), row}), ...diagnosis(warnings),
    answer('A NaN in a key makes its score NaN for every query that sees it; the softmax divides by a sum that is NaN, so the whole row is lost. Rows whose mask hides the key are unharmed. Look at the inputs first: Diagnose counts NaN in each.'),
  ];
}

async function mask({call, source, row, signal}) {
  const {Q, K, V} = call.inputs;
  const queries = Q.shape[2], keys = K.shape[2];
  const seen = Uint8Array.from({length: queries * keys}, (_, at) => at % keys <= Math.floor(at / keys));
  const shape = [1, 1, queries, keys];
  const unseen = seen.map((x) => 1 - x);
  const masks = {A: tensor('BOOL', shape, seen), B: tensor('FP32', shape, Float32Array.from(seen)), C: tensor('BOOL', shape, unseen)};
  const hidden = {A: unseen, C: seen};
  const calls = Object.entries(masks).map(([name, attn_mask]) => [name, callOf(Q, K, V, {}, {attn_mask})]);
  const [maps, warnings] = await Promise.all([
    Promise.all(calls.map(async ([name, c]) => mapOf(await weightsOf(c, signal), source.queryLabels, source.keyLabels, `Mask ${name}`, {hidden: hidden[name], row}))),
    Promise.all(calls.slice(1).map(async ([name, c]) => (await warningsOf(c, signal)).map((text) => `${name}: ${text}`))),
  ]);
  return [
    el('p', {}, 'One of these three is causal. The others are the two most common mistakes with masks. What gives them away?'),
    el('div', {className: 'columns thirds'}, ...maps), ...diagnosis(warnings.flat()),
    answer('A, a BOOL mask, is right: nothing above the diagonal. B has the same numbers as FP32: it adds 1 to the visible scores and hides nothing; a model trained so sees the future, its training loss is too good, and its generation is nonsense. C is BOOL, but its 1 means hidden, so it hides what should be seen: weights only above the diagonal, and the last row sees nothing, so its output is 0.'),
  ];
}

const OF_CALLS = ['A NaN', 'A wrong mask'];  // change the inputs of a call
const LESSONS = {'Entropy': entropy, 'Scale': scale, 'A NaN': nan, 'A wrong mask': mask};

/** Event: `updateview` when another lesson is chosen. */
class Lessons extends HTMLElement {
  #name = 'Entropy';
  #buttons = Object.keys(LESSONS).map((name) => el('button', {type: 'button'}, name));
  #body = el('div', {className: 'stack', 'aria-live': 'polite'});

  connectedCallback() {
    this.className = 'stack';
    this.append(el('div', {className: 'buttons', role: 'group', 'aria-label': 'Lesson'}, ...this.#buttons), this.#body);
    for (const button of this.#buttons) {
      button.addEventListener('click', () => {
        this.#name = button.textContent;
        this.dispatchEvent(new CustomEvent('updateview', {bubbles: true}));
      });
    }
  }

  async update(context) {
    for (const button of this.#buttons) button.setAttribute('aria-pressed', button.textContent === this.#name);
    const isMissing = OF_CALLS.includes(this.#name) && !context.call;
    const body = isMissing ? [el('p', {className: 'quiet'}, 'This lesson changes the inputs of a call: choose toy vectors, numbers, or arrays q, k and v.')]
      : await LESSONS[this.#name](context);
    context.signal.throwIfAborted();
    this.#body.replaceChildren(...body);
  }
}
customElements.define('rapt-lessons', Lessons);
