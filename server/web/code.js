// A call as code that gives the same numbers: Python, C++, curl.
import {serverUrl, usesToken} from './server.js';
import {sizeOf} from './tensor.js';

const MOST_NUMBERS = 4000;  // in code; beyond, Python reads files

/** The shortest decimals that are this FP32 number. */
function decimals(value) {
  if (!Number.isFinite(value)) return String(value);
  for (let digits = 1; digits < 9; ++digits) {
    const text = Number(value.toPrecision(digits));
    if (Math.fround(text) === Math.fround(value)) return String(text);
  }
  return String(Math.fround(value));
}

/** Nested brackets around the numbers of a tensor. */
function nested({shape, values}, write, [open, close], indent) {
  const level = (axis, first) => {
    const below = sizeOf(shape.slice(axis + 1));
    const parts = Array.from({length: shape[axis]}, (_, n) =>
      axis === shape.length - 1 ? write(values[first + n]) : level(axis + 1, first + n * below));
    const isRow = axis === shape.length - 1;
    return open + parts.join(isRow ? ', ' : `,\n${' '.repeat(indent + axis + 1)}`) + close;
  };
  return level(0, 0);
}

const NAMES = {Q: 'q', K: 'k', V: 'v', attn_mask: 'mask', head_sink: 'head_sink', block_mask: 'block_mask'};

const same = (a, b) => String(a.shape) === String(b.shape) && a.values.every((x, n) => Object.is(x, b.values[n]));

export const isLong = (call) => Object.values(call.inputs).reduce((sum, t) => sum + sizeOf(t.shape), 0) > MOST_NUMBERS;

// --- Python --------------------------------------------------------------------------------------

const NUMPY = {FP32: 'np.float32', FP16: 'np.float16', FP64: 'np.float64', BF16: 'ml_dtypes.bfloat16', BOOL: 'bool'};
/** @param {string[]} [labels] of the rows, each of which is a line */
function pythonArray(target, t, labels) {
  const write = t.datatype === 'BOOL' ? (x) => (x ? 'True' : 'False') : (x) => decimals(x).replace('Infinity', 'np.inf').replace('NaN', 'np.nan');
  const start = `${target} = np.array(`;
  const text = `${start}${nested(t, write, '[]', start.length)}, ${NUMPY[t.datatype]})`;
  return labels ? text.split('\n').map((line, row) => `${line}  # ${labels[row % labels.length]}`).join('\n') : text;
}

function pythonOptions({inputs, parameters: p, isBottomRight}) {
  const options = [];
  const add = (name, value) => options.push(`${name}=${value}`);
  for (const name of Object.keys(inputs).slice(3)) add(NAMES[name], NAMES[name]);
  if (p.is_causal) add('causal', 'True');
  if ('left_window_size' in p || 'right_window_size' in p) add('window', `(${p.left_window_size ?? 'None'}, ${p.right_window_size ?? 'None'})`);
  if (isBottomRight) add('alignment', '"bottom_right"');
  for (const name of ['scale', 'softcap', 'alpha', 'block_q', 'block_k']) if (name in p) add(name, p[name]);
  if (p.alibi) add('alibi', 'True');
  if (p.normalizer) add('normalizer', `"${p.normalizer}"`);
  return options;
}

function pythonClient(lines) {
  const token = usesToken() ? ', token=os.environ["RAPT_TOKEN"]' : '';
  return ['', `with rapt.Client("${serverUrl}"${token}) as client:`, ...lines.map((line) => `    ${line}`)];
}

function pythonImports(usesBf16) {
  return [...(usesToken() ? ['import os', ''] : []), ...(usesBf16 ? ['import ml_dtypes'] : []), 'import numpy as np', 'import rapt', ''];
}

function pythonOfLayer({model, inputs, parameters}, {queryLabels, keyLabels}) {
  const options = Object.entries(parameters).map(([name, isOn]) => `"${name}": ${isOn ? 'True' : 'False'}`);
  const names = Object.keys(inputs);
  return [
    ...pythonImports(false),
    ...names.map((name) => pythonArray(name, inputs[name], name === 'query' ? queryLabels : keyLabels)),
    ...pythonClient([
      `inputs = {${names.map((name) => `"${name}": ${name}`).join(', ')}}`,
      `result = client.infer("${model}", inputs, ["weights"], parameters={${options.join(', ')}})`]),
    `print(result["weights"].round(3))  # [batch, ${parameters.average_attn_weights ? '' : 'head, '}query, key]`,
  ].join('\n');
}

/**
 * @param {import('./call.js').Call} call or one of a layer
 * @param {import('./sources.js').Source} source
 */
export function pythonOf(call, source) {
  if (call.model) return pythonOfLayer(call, source);
  const {inputs} = call, {queryLabels, keyLabels} = source;
  const options = pythonOptions(call);
  const lines = [...pythonImports(inputs.Q.datatype === 'BF16'), `# Settings: ${options.join(', ') || 'none'}`];
  if (isLong(call)) {
    lines.push('# Save the arrays with the button “Inputs”.');
    for (const [name, t] of Object.entries(inputs)) {
      lines.push(`${NAMES[name]} = np.load("${NAMES[name]}.npy")${t.datatype === 'BF16' ? '.astype(ml_dtypes.bfloat16)' : ''}`);
    }
  } else {
    const {Q, K, V, ...more} = inputs;
    const isSelf = same(Q, K), isValue = same(K, V);
    lines.push(pythonArray('q', Q, queryLabels));
    if (!isSelf) lines.push(pythonArray(isValue ? 'k = v' : 'k', K, keyLabels));
    else lines.push(isValue ? 'k = v = q' : 'k = q');
    if (!isValue) lines.push(pythonArray('v', V, keyLabels));
    for (const [name, t] of Object.entries(more)) lines.push(pythonArray(NAMES[name], t));
  }
  lines.push(...pythonClient([`result = client.attend(q, k, v, scores="weights"${options.map((option) => `, ${option}`).join('')})`]),
    'print(result.scores.round(3))  # [batch, head, query, key]');
  return lines.join('\n');
}

// --- C++ -----------------------------------------------------------------------------------------

const NORMALIZERS = {sparsemax: 'kSparsemax', entmax15: 'kEntmax15', entmax: 'kEntmax'};

/** In the order of the struct's members. */
function cppFields({inputs, parameters: p, isBottomRight}) {
  const fields = Object.keys(NAMES).filter((name) => name in inputs).map((name) => `.${NAMES[name]} = ${NAMES[name]}_view`);
  if (p.scale !== undefined) fields.push(`.scale = ${p.scale}`);
  if (p.softcap) fields.push(`.softcap = ${p.softcap}`);
  if (p.is_causal) fields.push('.causal = true');
  if (isBottomRight) fields.push('.alignment = rapt::client::Alignment::kBottomRight');
  const sides = ['left', 'right'].filter((side) => `${side}_window_size` in p).map((side) => `.${side} = ${p[`${side}_window_size`]}`);
  if (sides.length) fields.push(`.window = {${sides.join(', ')}}`);
  if (p.alibi) fields.push('.alibi = true');
  if (p.normalizer) fields.push(`.normalizer = rapt::client::Normalizer::${NORMALIZERS[p.normalizer]}`);
  for (const name of ['alpha', 'block_q', 'block_k']) if (name in p) fields.push(`.${name} = ${p[name]}`);
  fields.push('.score_output = rapt::client::ScoreOutput::kWeights');
  return fields.join(',\n                          ');
}

export function cppOf(call) {
  if (call.model) return '// Layers are called by rapt::client::Client::LayerAttend(); see rapt/layer.h. Python and curl have this call.';
  if (isLong(call)) return '// The arrays are too long for code. The program rapt reads files:\n// rapt attend --q q.npy --k k.npy --v v.npy --weights weights.npy -o y.npy';
  if (call.inputs.Q.datatype !== 'FP32') return '// This code is written for FP32: choose the type FP32.';
  const arrays = Object.entries(call.inputs).map(([name, t]) => {
    const type = t.datatype === 'BOOL' ? 'bool' : 'float';
    const numbers = Array.from(t.values, (x) => (type === 'bool' ? (x ? 'true' : 'false') : decimals(x))).join(', ');
    const variable = NAMES[name];
    return `  const ${type} ${variable}[] = {${numbers}};\n  const auto ${variable}_view = rapt::client::View<${type}>({${t.shape.join(', ')}}, ${variable});`;
  });
  return `#include <cstdio>

#include "rapt/client.h"

int main() {
  const auto client = rapt::client::Client::Connect("127.0.0.1:8001");  // the server's --grpc_address
  if (!client.ok()) return 1;
${arrays.join('\n')}
  const auto result = (*client)->Attend(
      rapt::client::AttendCall{${cppFields(call)}});
  if (!result.ok()) return 1;
  for (float weight : result->scores->values<float>()) std::printf("%.3f\\n", weight);
}`;
}

// --- curl ----------------------------------------------------------------------------------------

export function curlOf(call) {
  if (isLong(call)) return '# The arrays are too long for a command line. Use Python.';
  if (call.isBottomRight) return '# The alignment at the end is in rapt.v1 and Python, not in the Open Inference Protocol. Use Python.';
  const write = (x) => (Number.isFinite(x) ? decimals(x) : `"${decimals(x)}"`);
  const inputs = Object.entries(call.inputs).map(([name, t]) => {
    const data = Array.from(t.values, t.datatype === 'BOOL' ? String : write).join(', ');
    return `  {"name": "${name}", "datatype": "${t.datatype}", "shape": [${t.shape.join(', ')}],\n   "data": [${data}]}`;
  });
  const [model, output, more] = call.model ? [call.model, 'weights', {}] : ['attention', 'qk_matmul_output', {qk_matmul_output_mode: 3}];
  const parameters = JSON.stringify({...call.parameters, ...more});
  const token = usesToken() ? '-H "Authorization: Bearer $RAPT_TOKEN" ' : '';
  return `curl -s ${token}${serverUrl}/v2/models/${model}/infer -d '{"inputs": [
${inputs.join(',\n')}],
 "outputs": [{"name": "${output}"}],
 "parameters": ${parameters}}'`;
}
