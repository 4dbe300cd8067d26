// Where queries, keys and values come from: a sentence, numbers, or arrays of files.
import {sizeOf, tensor} from './tensor.js';

/**
 * @typedef {Object} Source
 * @property {string} note what the vectors are
 * @property {string[]} queryLabels
 * @property {string[]} keyLabels the same array if the words look at each other
 * @property {import('./tensor.js').Tensor} [q] [1, heads, queries, D]
 * @property {import('./tensor.js').Tensor} [k]
 * @property {import('./tensor.js').Tensor} [v]
 * @property {string} [layer] the model that computes, from `words`
 * @property {string[]} [words]
 * @property {string[]} [keyWords] of another sentence, which `words` look at
 * @property {import('./tensor.js').Tensor} [weights] [layers, heads, queries, keys]: shown as they are
 */

// --- A sentence ----------------------------------------------------------------------------------

export const DEMO = 'the cat sat on the mat';

// The vectors of `rapt demo`: article, noun, verb, preposition, animal, position.
const IS = [
  [1, 0, 0, 0, 0, -1], [0, 1, 0, 0, 1, -0.6], [0, 0, 1, 0, 0, -0.2],
  [0, 0, 0, 1, 0, 0.2], [1, 0, 0, 0, 0, 0.6], [0, 1, 0, 0, 0, 1],
];
const LOOKS_FOR = [
  [1, 5, 0, 0, 0, -3], [3, 2, 6, 0, 0, -1], [0, 0, 2, 3, 6, -1],
  [0, 5, 3, 1, 0, 3], [1, 5, 0, 0, 0, 3], [2, 2, 2, 6, 3, 1],
];

/** What a note adds if words are numbered. */
const repeats = (labels) => (labels.some((label) => /[₀-₉]$/.test(label)) ? ' Words that occur twice are numbered.' : '');

/** Numbers words that occur several times: the₁, the₂. */
function labelsOf(words) {
  const total = new Map(), seen = new Map();
  for (const word of words) total.set(word, (total.get(word) ?? 0) + 1);
  return words.map((word) => {
    if (total.get(word) === 1) return word;
    seen.set(word, (seen.get(word) ?? 0) + 1);
    return word + String(seen.get(word)).replace(/\d/g, (digit) => '₀₁₂₃₄₅₆₇₈₉'[digit]);
  });
}

/** Numbers of a standard normal distribution from a text, the same on every machine (FNV-1a, mulberry32). */
function* normals(seed) {
  let state = 2166136261;
  for (const c of seed) state = Math.imul(state ^ c.codePointAt(0), 16777619);
  const uniform = () => {
    state = (state + 0x6d2b79f5) | 0;
    let t = Math.imul(state ^ (state >>> 15), 1 | state);
    t = (t + Math.imul(t ^ (t >>> 7), 61 | t)) ^ t;
    return ((t ^ (t >>> 14)) >>> 0) / 4294967296;
  };
  for (;;) yield Math.sqrt(-2 * Math.log(1 - uniform())) * Math.cos(2 * Math.PI * uniform());
}

function draw(seed, count) {
  const numbers = normals(seed);
  return Array.from({length: count}, () => numbers.next().value);
}

const TOY_SIZE = 16;

function positionVector(position, size) {
  return Array.from({length: size}, (_, n) => {
    const angle = position * 10000 ** (-(n - (n % 2)) / size);
    return n % 2 ? Math.cos(angle) : Math.sin(angle);
  });
}

const add = (a, aScale, b, bScale) => a.map((x, n) => Math.round((aScale * x + bScale * b[n]) * 1e3) / 1e3);

/** A row for each word: its own numbers and its position. */
export const toyVectors = (words, size) =>
  words.map((word, at) => add(draw(word.toLowerCase(), size), 1, positionVector(at, size), 1));

// How strongly a head looks at words and at positions, and at which distance: itself, the previous word, any, the next.
const TOY_HEADS = [
  {word: 0.7, place: 1, shift: 0}, {word: 0.3, place: 3, shift: -1}, {word: 1.1, place: 0, shift: 0}, {word: 0.3, place: 3, shift: 1},
];

function toyRows(words, heads, shifts) {
  return Array.from({length: heads}, (_, head) => {
    const {word, place, shift} = TOY_HEADS[head % TOY_HEADS.length];
    return words.map((text, at) => {
      const distance = shifts ? shift * (1 + Math.floor(head / TOY_HEADS.length)) : 0;
      return add(draw(text.toLowerCase(), TOY_SIZE), word, positionVector(at + distance, TOY_SIZE), place);
    });
  });
}

const tensorOf = (rows) => {
  const shape = [1, rows.length, rows[0].length, rows[0][0].length];
  return tensor('FP32', shape, Float32Array.from(rows.flat(2)));
};

const graphemes = new Intl.Segmenter(undefined, {granularity: 'grapheme'});

/** Letters and digits that follow each other are a word, and so is every other character that a reader sees, such as an emoji. */
function wordsOf(sentence) {
  const words = [];
  let isInWord = false;
  for (const {segment} of graphemes.segment(sentence)) {
    const isLetter = /[\p{L}\p{N}'’-]/u.test(segment);
    if (isLetter && isInWord) words[words.length - 1] += segment;
    else if (/[^\s\p{Cc}\p{Cf}\p{M}]/u.test(segment)) words.push(segment);
    isInWord = isLetter;
  }
  if (words.length === 0) throw new RangeError('Type a sentence first.');
  if (words.length > 1024) throw new RangeError(`Use at most 1024 words; this sentence has ${words.length}.`);
  return words;
}

/** The words of a sentence, and of the one that they look at: another, or the same. */
function wordsAndLabels({s, s2}) {
  const words = wordsOf(s), keyWords = s2.trim() ? wordsOf(s2) : null;
  const queryLabels = labelsOf(words);
  return {words, keyWords, queryLabels, keyLabels: keyWords ? labelsOf(keyWords) : queryLabels};
}

/** The words for a layer of the server. @returns {Source} */
export function sourceOfLayer(sentences) {
  return {
    ...wordsAndLabels(sentences), layer: sentences.model,
    note: `The layer ${sentences.model} of this server, with its weights; the words are toy vectors, as the layer has no dictionary.`,
  };
}

/** @returns {Source} */
export function sourceOfSentence({heads, kv, ...sentences}) {
  const {words, keyWords, queryLabels, keyLabels} = wordsAndLabels(sentences);
  const common = {queryLabels, keyLabels}, numbered = repeats([...queryLabels, ...keyLabels]);
  if (words.join(' ').toLowerCase() === DEMO && heads === 1 && !keyWords) {
    return {
      ...common,
      note: `Hand-made vectors: six numbers for what each word is, and six for what it looks for. Not a language model.${numbered}`,
      q: tensorOf([LOOKS_FOR]), k: tensorOf([IS]), v: tensorOf([IS]),
    };
  }
  const fits = keyWords ? 'Words fit those with the same letters, and those at the same place.' : 'Q = K, so most words fit themselves best.';
  return {
    ...common,
    note: `Toy vectors. Not a language model: each word has random numbers, and its position, so the pattern shows the arithmetic and not the meaning. `
      + `${heads > 1 ? 'In head 0, ' : ''}${fits}${numbered}`,
    q: tensorOf(toyRows(words, heads, true)),
    k: tensorOf(toyRows(keyWords ?? words, kv, false)),
    v: tensorOf(toyRows(keyWords ?? words, kv, false)),
  };
}

// --- Numbers -------------------------------------------------------------------------------------

function parseMatrix(text) {
  const rows = text.trim().split('\n').map((line) => line.replace(/[[\],;]/g, ' ').trim().split(/\s+/).map(Number));
  const bad = rows.findIndex((row) => row.some(Number.isNaN));
  if (bad >= 0) throw new RangeError(`Line ${bad + 1} of a matrix has something that is not a number.`);
  const width = rows[0].length;
  const odd = rows.findIndex((row) => row.length !== width);
  if (odd >= 0) throw new RangeError(`Line ${odd + 1} of a matrix has ${rows[odd].length} numbers; the first line has ${width}.`);
  return tensorOf([rows]);
}

/** One matrix is Q, K and V; otherwise three, with an empty line between them. @returns {Source} */
export function sourceOfNumbers(text) {
  const matrices = text.trim().split(/\n\s*\n/).filter((part) => part.trim()).map(parseMatrix);
  if (matrices.length !== 1 && matrices.length !== 3) {
    throw new RangeError(`There are ${matrices.length} matrices; paste one, or Q, K and V with empty lines between them.`);
  }
  const [q, k, v] = matrices.length === 1 ? [matrices[0], matrices[0], matrices[0]] : matrices;
  return {note: 'Your numbers.', ...numbered(q.shape[2], k.shape[2]), q, k, v};
}

function numbered(queries, keys) {
  const names = (letter, count) => Array.from({length: count}, (_, n) => letter + n);
  return {queryLabels: names('q', queries), keyLabels: names('k', keys)};
}

// --- Arrays of files -----------------------------------------------------------------------------

const MODEL = 'model';  // whose weights rapt.capture kept: a text
const NAMES = {q: /(^|\W|_)(q|query|queries)$/i, k: /(^|\W|_)(k|key|keys)$/i, v: /(^|\W|_)(v|value|values)$/i};

/** The words of text files: of one those of queries, and of keys if there are as many; of two those whose name says so. */
function namedBy(labels, queries, keys) {
  const names = [...labels.keys()].filter((name) => name !== MODEL);
  const nameOf = (letter) => names.find((name) => NAMES[letter].test(name.replace(/\.txt$/i, '')));
  const ofKeys = nameOf('k'), ofQueries = nameOf('q') ?? names.find((name) => name !== ofKeys);
  const read = (name, count, what) => {
    const lines = labels.get(name);
    if (lines.length !== count) throw new RangeError(`${name} has ${lines.length} lines; there are ${count} ${what}.`);
    return labelsOf(lines.map((line) => line.replace(/\p{Cc}/gu, ' ').trim()));
  };
  const without = numbered(queries, keys);
  const queryLabels = ofQueries ? read(ofQueries, queries, 'queries') : without.queryLabels;
  if (ofKeys) return {queryLabels, keyLabels: read(ofKeys, keys, 'keys')};
  return {queryLabels, keyLabels: ofQueries && keys === queries ? queryLabels : without.keyLabels};
}

function checkNotEmpty({shape}, name) {
  if (shape.includes(0)) throw new RangeError(`${name} has shape [${shape}]; an axis of 0 has nothing to show.`);
}

function toRank4(t, name) {
  checkNotEmpty(t, name);
  if (t.shape.length < 2 || t.shape.length > 4) {
    throw new RangeError(`${name} has shape [${t.shape}]; it must have 2 to 4 axes: [batch, heads, tokens, size].`);
  }
  const shape = [...Array(4 - t.shape.length).fill(1), ...t.shape];
  const size = shape[1] * shape[2] * shape[3];
  return tensor(t.datatype, [1, ...shape.slice(1)], t.values.subarray(0, size));  // the first of the batch
}

/** [layers, heads, queries, keys] of rank 2 to 5; of a batch, the first is shown. */
function toWeights(t, name) {
  if (t.shape.length < 2 || t.shape.length > 5) {
    throw new RangeError(`${name} has shape [${t.shape}]; weights have 2 to 5 axes: [layers, batch, heads, queries, keys].`);
  }
  if (t.shape.length < 5) {
    const {shape, values} = toRank4(t, name);
    return tensor('FP32', shape, values);
  }
  checkNotEmpty(t, name);
  const [layers, batch, ...rest] = t.shape;
  if (batch === 1) return tensor('FP32', [layers, ...rest], t.values);
  const size = sizeOf(rest);
  const values = new Float32Array(layers * size);
  for (let layer = 0; layer < layers; ++layer) {
    const first = layer * batch * size;
    values.set(t.values.subarray(first, first + size), layer * size);
  }
  return tensor('FP32', [layers, ...rest], values);
}

/** Whether files have weights, and not the inputs of a call. */
export const isWeights = ({arrays}) => arrays.size === 1 && !NAMES.q.test([...arrays.keys()][0]);

/**
 * Arrays named q, k and v are inputs of attention; a single other array is shown as weights.
 * @param {{arrays: Map<string, import('./tensor.js').Tensor>, labels: Map<string, string[]>}} files
 * @returns {Source}
 */
export function sourceOfArrays({arrays, labels}) {
  const found = {};
  for (const [letter, pattern] of Object.entries(NAMES)) {
    const name = [...arrays.keys()].find((candidate) => pattern.test(candidate));
    if (name) found[letter] = toRank4(arrays.get(name), name);
  }
  if (found.q) {
    const q = found.q, k = found.k ?? q, v = found.v ?? k;
    return {note: `Arrays of your files: q [${q.shape}], k [${k.shape}], v [${v.shape}].`, ...namedBy(labels, q.shape[2], k.shape[2]), q, k, v};
  }
  const model = labels.get(MODEL)?.[0];
  if (arrays.size === 0) throw new RangeError('The files have words and no arrays; drop arrays, too.');
  if (arrays.size !== 1) {
    throw new RangeError(`The files have the arrays ${[...arrays.keys()].join(', ')}; name three of them q, k and v, or drop one array of weights.`);
  }
  const [[name, array]] = arrays;
  const weights = toWeights(array, name);
  const [layers, heads, queries, keys] = weights.shape;
  const outside = weights.values.reduce((count, x) => count + (x < 0 || x > 1), 0);
  const note = outside ? ` ${outside} of its numbers are not from 0 to 1: they have the colour of 0 or 1, whichever is nearer.` : '';
  const what = model ? `${model}, ${layers} layers × ${heads} heads: ` : '';
  return {
    note: `${what}${name} [${array.shape}], shown as it is; the server computed nothing.${note}`,
    ...namedBy(labels, queries, keys), weights,
  };
}
