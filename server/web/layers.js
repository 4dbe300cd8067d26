// Layers of the server's model repository: models that take a sequence of vectors and return weights.
import {ask, infer} from './server.js';
import {toyVectors} from './sources.js';
import {tensor} from './tensor.js';

const AT_ONCE = 8;

/** Whether the words of one sentence can be its queries and its keys, and it tells its weights. */
function isSelfAttention({inputs, outputs}) {
  const sizeOf = (wanted) => inputs.find(({name}) => name === wanted)?.shape.at(-1);
  return outputs.some(({name}) => name === 'weights') && sizeOf('query') > 0 && sizeOf('query') === sizeOf('key');
}

/** @returns {Promise<string[]>} */
export async function listLayers() {
  const models = await ask('v2/repository/index', {});
  const names = models.filter(({state}) => state === 'READY').map(({name}) => name);
  const described = [];
  for (let at = 0; at < names.length; at += AT_ONCE) {
    described.push(...await Promise.allSettled(names.slice(at, at + AT_ONCE).map((name) => ask(`v2/models/${encodeURIComponent(name)}`))));
  }
  // One that was unloaded meanwhile is no layer any more.
  return described.filter(({status, value}) => status === 'fulfilled' && isSelfAttention(value)).map(({value}) => value.name);
}

/** Sends toy vectors of the words of a source through its layer; it is causal if asked, or if it is configured so. */
export async function weightsOfLayer(source, isCausal, signal) {
  const {layer: name, words} = source;
  const {inputs} = await ask(`v2/models/${encodeURIComponent(name)}`, undefined, signal);
  const {datatype, shape} = inputs.find((input) => input.name === 'query');
  const size = shape.at(-1);
  const query = tensor(datatype, [1, words.length, size], new Float32Array(toyVectors(words, size).flat()));
  const {outputs, plan, computeUs} = await infer(name, {inputs: {query}, parameters: isCausal ? {is_causal: true} : {}}, ['weights'], signal);
  const {weights} = outputs;
  // A layer with bias_k has one key more than words.
  const keyLabels = weights.shape.at(-1) > words.length ? [...source.keyLabels, 'bias_k'] : source.keyLabels;
  return {source: {...source, keyLabels}, weights, plan, computeUs};
}
