// Layers of the server's model repository: models that take a sequence of vectors and return weights.
import {ask, infer} from './server.js';
import {toyVectors} from './sources.js';
import {sizeOf, tensor} from './tensor.js';

const AT_ONCE = 8;

function pathOf(name) {
  // A URL would take these as steps between folders.
  if (['.', '..'].includes(name)) throw new RangeError(`Layer is “${name}”; it must be the name of a layer of this server.`);
  return `v2/models/${encodeURIComponent(name)}`;
}

const isLayer = ({inputs, outputs}) => inputs.some(({name}) => name === 'query') && outputs.some(({name}) => name === 'weights');

/** `each` of the names, a few at once; those that fail are left out. */
export async function forLayers(names, each) {
  const found = [];
  for (let at = 0; at < names.length; at += AT_ONCE) {
    const answers = await Promise.allSettled(names.slice(at, at + AT_ONCE).map(each));
    found.push(...answers.filter(({status}) => status === 'fulfilled').map(({value}) => value));
  }
  return found;
}

/** @returns {Promise<string[]>} */
export async function listLayers() {
  const models = await ask('v2/repository/index', {});
  const names = models.filter(({state}) => state === 'READY').map(({name}) => name);
  // One that was unloaded meanwhile is no layer any more.
  const described = await forLayers(names, (name) => ask(pathOf(name)));
  return described.filter(isLayer).map(({name}) => name);
}

/**
 * @typedef {Object} Description
 * @property {string} datatype
 * @property {{query: number, key: number, value: number}} sizes of vectors
 * @property {boolean} isCausal as configured
 */

/** @returns {Promise<Description>} */
export async function describeLayer(name, signal) {
  const [model, {parameters}] = await Promise.all([ask(pathOf(name), undefined, signal), ask(`${pathOf(name)}/config`, undefined, signal)]);
  if (!isLayer(model)) throw new RangeError(`Layer is “${name}”, which is another model; it must be the name of a layer of this server.`);
  const {inputs} = model;
  return {
    datatype: inputs.find((input) => input.name === 'query').datatype,
    sizes: Object.fromEntries(inputs.map((input) => [input.name, input.shape.at(-1)])),
    isCausal: parameters.is_causal?.string_value === 'true',
  };
}

/**
 * A call of a layer with toy vectors for the words. Without `keyWords` of their own, words look at each other.
 * @param {import('./sources.js').Source} source
 * @param {Description} description
 * @param {{causal: boolean, average: boolean}} controls
 */
export function layerCallOf({layer, words, keyWords}, {datatype, sizes}, {causal, average}) {
  const vectors = (texts, size) => tensor(datatype, [1, texts.length, size], new Float32Array(toyVectors(texts, size).flat()));
  const inputs = {query: vectors(words, sizes.query)};
  if (keyWords || sizes.key !== sizes.query) inputs.key = vectors(keyWords ?? words, sizes.key);
  if (sizes.value !== sizes.key) inputs.value = vectors(keyWords ?? words, sizes.value);
  return {model: layer, inputs, parameters: {is_causal: causal, ...(average && {average_attn_weights: true})}};
}

/** Query i of a causal layer sees the words 0 to i, and a key of the layer's own. */
function hiddenByCausality(shape, words) {
  const [, , queries, keys] = shape;
  const values = Uint8Array.from({length: sizeOf(shape)}, (_, at) => {
    const key = at % keys, query = Math.floor(at / keys) % queries;
    return key > query && key < words;
  });
  return tensor('BOOL', shape, values);
}

/** Weights [1, heads, queries, keys] of a call of a layer, and which of them its causality hides. */
export async function attendInLayer(layerCall, source, signal) {
  const {model, inputs, parameters} = layerCall;
  const {outputs, plan, computeUs} = await infer(model, {inputs, parameters}, ['weights'], signal);
  const [queries, keys] = outputs.weights.shape.slice(-2);
  const heads = outputs.weights.shape.length === 4 ? outputs.weights.shape[1] : 1;  // the average has no axis of heads
  const shape = [1, heads, queries, keys];
  const words = source.keyLabels.length;
  return {
    weights: tensor(outputs.weights.datatype, shape, outputs.weights.values),
    hidden: parameters.is_causal ? hiddenByCausality(shape, words) : null,
    keyLabels: keys > words ? [...source.keyLabels, 'bias_k'] : source.keyLabels,  // a key of the layer's own
    plan, computeUs,
  };
}
