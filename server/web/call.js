// A call of attention: a source's tensors with the controls' attributes.
import {ask, fromMessage, infer, ServerError, toMessage} from './server.js';
import {sizeOf, tensor} from './tensor.js';

/**
 * @typedef {Object} Call
 * @property {Object<string, import('./tensor.js').Tensor>} inputs by their names in the Open Inference Protocol
 * @property {Object} parameters likewise
 * @property {boolean} isBottomRight the alignment, which only rapt.v1 has
 */

const STEPS = ['scores', 'softcapped', 'biased', 'weights'];  // the values of qk_matmul_output_mode

const isGiven = (text) => text !== '' && Number.isFinite(Number(text));

/** Which blocks of keys a block of queries sees. */
const PATTERNS = {
  local: (i, j) => Math.abs(i - j) <= 1,
  diagonal: (i, j) => i === j,
  strided: (i, j) => i === j || (i - j) % 2 === 0,
  global: (i, j) => i === 0 || j === 0 || i === j,
};

function blockMaskOf({blocks, block}, queries, keys) {
  const rows = Math.ceil(queries / block), columns = Math.ceil(keys / block);
  const values = new Uint8Array(rows * columns);
  for (let i = 0; i < rows; ++i) {
    for (let j = 0; j < columns; ++j) values[i * columns + j] = PATTERNS[blocks](i, j);
  }
  return tensor('BOOL', [1, 1, rows, columns], values);
}

/** Hidden cells as "query-key", separated by commas. */
export const hiddenCells = (hide) => new Set(hide ? hide.split(',') : []);

function maskOf(hide, queries, keys) {
  const values = new Uint8Array(queries * keys).fill(1);
  for (const cell of hiddenCells(hide)) {
    const [i, j] = cell.split('-').map(Number);
    if (i < queries && j < keys) values[i * keys + j] = 0;
  }
  return tensor('BOOL', [1, 1, queries, keys], values);
}

/** @returns {Call} */
export function callOf({q, k, v}, state) {
  const [, heads, queries, size] = q.shape;
  const keys = k.shape[2];
  const typed = (t) => tensor(state.type, t.shape, t.values);
  const inputs = {Q: typed(q), K: typed(k), V: typed(v)};
  const parameters = {};
  if (state.causal) parameters.is_causal = true;
  if (isGiven(state.left)) parameters.left_window_size = Number(state.left);
  if (isGiven(state.right)) parameters.right_window_size = Number(state.right);
  if (isGiven(state.scale) || state.t !== 1) {
    parameters.scale = (isGiven(state.scale) ? Number(state.scale) : 1 / Math.sqrt(size)) / state.t;
  }
  if (isGiven(state.softcap)) parameters.softcap = Number(state.softcap);
  if (state.alibi) parameters.alibi = true;
  if (state.norm !== 'softmax') parameters.normalizer = state.norm;
  if (state.norm === 'entmax') parameters.alpha = state.alpha;
  if (state.blocks !== 'none') {
    inputs.block_mask = blockMaskOf(state, queries, keys);
    Object.assign(parameters, {block_q: state.block, block_k: state.block});
  }
  if (state.hide) inputs.attn_mask = maskOf(state.hide, queries, keys);
  if (isGiven(state.sink)) inputs.head_sink = tensor('FP32', [heads], Array(heads).fill(Number(state.sink)));
  return {inputs, parameters, isBottomRight: state.align === 'bottom_right'};
}

function hidesKeys({inputs, parameters: p}) {
  return Boolean(p.is_causal || 'left_window_size' in p || 'right_window_size' in p || inputs.attn_mask || inputs.block_mask);
}

/** The call as a rapt.v1.AttendRequest in JSON. */
export function toAttendRequest({inputs, parameters: p, isBottomRight}) {
  const {Q, K, V, attn_mask: mask, head_sink: sink, block_mask: blocks} = inputs;
  return {
    q: toMessage(Q), k: toMessage(K), v: toMessage(V),
    ...(mask && {mask: toMessage(mask)}), ...(sink && {headSink: toMessage(sink)}), ...(blocks && {blockMask: toMessage(blocks)}),
    attention: {
      causal: p.is_causal, scale: p.scale, softcap: p.softcap, alibi: p.alibi, alpha: p.alpha, blockQ: p.block_q, blockK: p.block_k,
      alignment: isBottomRight ? 'BOTTOM_RIGHT' : 'TOP_LEFT',
      window: {left: p.left_window_size, right: p.right_window_size},
      normalizer: (p.normalizer ?? 'softmax').toUpperCase(),
    },
  };
}

/**
 * Computes a call at the server.
 * @param {string} step the intermediate result: scores, softcapped, biased or weights
 * @returns {Promise<{scores: import('./tensor.js').Tensor, y: import('./tensor.js').Tensor, plan: string, computeUs: number}>}
 */
export async function attend(call, step, signal) {
  const mode = STEPS.indexOf(step);
  if (needsJson(call)) {
    const answer = await askAligned('rapt/v1/attend', {...toAttendRequest(call), scoreOutput: mode + 1}, signal);
    return {
      scores: fromMessage(answer.scores), y: fromMessage(answer.y), plan: answer.plan, computeUs: Number(answer.timing?.computeUs ?? 0),
    };
  }
  const parameters = {...call.parameters, qk_matmul_output_mode: mode};
  const {outputs, plan, computeUs} = await infer('attention', {inputs: call.inputs, parameters}, ['Y', 'qk_matmul_output'], signal);
  return {scores: outputs.qk_matmul_output, y: outputs.Y, plan, computeUs};
}

/** The Open Inference Protocol has one alignment; with as many keys as queries both are the same. */
const needsJson = ({inputs: {Q, K}, isBottomRight}) => isBottomRight && Q.shape[2] !== K.shape[2];

async function askAligned(path, message, signal) {
  try {
    return await ask(path, message, signal);
  } catch (error) {
    if (error.status !== 413) throw error;
    throw new ServerError('The alignment “last query with last key” is computed by a call in JSON, and this one is longer than the server’s --max_json_bytes. Show fewer tokens or heads.', 413);
  }
}

/** Marks what the mask hides: scores of zeros are -∞ after it there alone, while those of the call may also overflow. */
async function hiddenOf(call, signal) {
  const zeros = (t) => tensor(t.datatype, t.shape, new Float32Array(sizeOf(t.shape)));
  const inputs = {...call.inputs, Q: zeros(call.inputs.Q), K: zeros(call.inputs.K)};
  const {scores} = await attend({...call, inputs, parameters: {...call.parameters, scale: 1}}, 'biased', signal);
  return tensor('BOOL', scores.shape, Uint8Array.from(scores.values, (score) => score === -Infinity));
}

/** The weights of a call and what its mask hides, null without one. */
export async function attendAndShowMask(call, signal) {
  const [hidden, answer] = await Promise.all([hidesKeys(call) ? hiddenOf(call, signal) : null, attend(call, 'weights', signal)]);
  return {...answer, hidden};
}

/** The gradients of Q, K and V for a gradient of Y that is 1 in the row of a query, 0 elsewhere. */
export async function gradientsOf(call, yShape, head, row, signal) {
  const size = yShape[3];
  const values = new Float32Array(sizeOf(yShape));
  values.fill(1, (head * yShape[2] + row) * size, (head * yShape[2] + row + 1) * size);
  const dY = tensor(call.inputs.Q.datatype, yShape, values);
  if (needsJson(call)) {
    const {dq, dk, dv} = await askAligned('rapt/v1/attend-backward', {call: toAttendRequest(call), dy: toMessage(dY)}, signal);
    return {dQ: fromMessage(dq), dK: fromMessage(dk), dV: fromMessage(dv)};
  }
  const inputs = {...call.inputs, dY};
  const {outputs} = await infer('attention_backward', {inputs, parameters: call.parameters}, ['dQ', 'dK', 'dV'], signal);
  return outputs;
}
