// A call as code that gives the same numbers: Python, C++, curl.
import {serverUrl, usesToken} from './server.js';
import {sizeOf, toBytes} from './tensor.js';

const MOST_NUMBERS = 4000;  // in code; beyond, Python reads files

/** The shortest decimals that are this FP32 number, or this one of FP64. */
function decimals(value) {
  if (!Number.isFinite(value) || Math.fround(value) !== value) return String(value);
  for (let digits = 1; digits < 9; ++digits) {
    const text = Number(value.toPrecision(digits));
    if (Math.fround(text) === value) return String(text);
  }
  return String(value);
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

const NAMES = {Q: 'q', K: 'k', V: 'v', attn_mask: 'mask'};  // in code, of inputs that have others in the protocol

/** The name of an input in code, and of its file. */
export const nameOf = (input) => NAMES[input] ?? input;

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
  for (const name of Object.keys(inputs).slice(3)) add(nameOf(name), nameOf(name));
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

function pythonLoads(inputs) {
  return ['# Save the arrays with the button “Inputs as .npy”.', ...Object.entries(inputs).map(([input, {datatype}]) =>
    `${nameOf(input)} = np.load("${nameOf(input)}.npy")${datatype === 'BF16' ? '.astype(ml_dtypes.bfloat16)' : ''}`)];
}

function pythonOfLayer(call, {queryLabels, keyLabels}) {
  const {model, inputs, parameters} = call;
  const options = Object.entries(parameters).map(([name, isOn]) => `"${name}": ${isOn ? 'True' : 'False'}`);
  const names = Object.keys(inputs);
  return [
    ...pythonImports(inputs.query.datatype === 'BF16'),
    ...(isLong(call) ? pythonLoads(inputs) : names.map((name) => pythonArray(name, inputs[name], name === 'query' ? queryLabels : keyLabels))),
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
    lines.push(...pythonLoads(inputs));
  } else {
    const {Q, K, V, ...more} = inputs;
    const isSelf = same(Q, K), isValue = same(K, V);
    lines.push(pythonArray('q', Q, queryLabels));
    if (!isSelf) lines.push(pythonArray(isValue ? 'k = v' : 'k', K, keyLabels));
    else lines.push(isValue ? 'k = v = q' : 'k = q');
    if (!isValue) lines.push(pythonArray('v', V, keyLabels));
    for (const [name, t] of Object.entries(more)) lines.push(pythonArray(nameOf(name), t));
  }
  lines.push(...pythonClient([`result = client.attend(q, k, v, scores="weights"${options.map((option) => `, ${option}`).join('')})`]),
    'print(result.scores.round(3))  # [batch, head, query, key]');
  return lines.join('\n');
}

// --- C++ -----------------------------------------------------------------------------------------

const NORMALIZERS = {sparsemax: 'kSparsemax', entmax15: 'kEntmax15', entmax: 'kEntmax'};

/** In the order of the struct's members. */
function cppFields({inputs, parameters: p, isBottomRight}) {
  const order = ['Q', 'K', 'V', 'attn_mask', 'head_sink', 'block_mask'];
  const fields = order.filter((input) => input in inputs).map((input) => `.${nameOf(input)} = ${nameOf(input)}_view`);
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

/** The command that computes a call of files. */
function commandOf({inputs, parameters: p, isBottomRight}) {
  const flags = Object.keys(inputs).map((input) => `--${nameOf(input).replace('_', '-')}=${nameOf(input)}.npy`);
  if (p.is_causal) flags.push('--causal');
  if (isBottomRight) flags.push('--bottom-right');
  if ('left_window_size' in p || 'right_window_size' in p) flags.push(`--window=${p.left_window_size ?? -1},${p.right_window_size ?? -1}`);
  if (p.alibi) flags.push('--alibi');
  for (const name of ['scale', 'softcap', 'normalizer', 'alpha', 'block_q', 'block_k']) if (name in p) flags.push(`--${name.replace('_', '-')}=${p[name]}`);
  return `rapt attend ${flags.join(' ')} --weights=weights.npy --output=y.npy`;
}

const CPP = {FP32: 'float', FP64: 'double', BOOL: 'bool'};  // C++20 has no 16-bit floats: their bits are written
const HALVES = {FP16: 'kFloat16', BF16: 'kBFloat16'};

function cppNumber(value, datatype) {
  if (datatype === 'BOOL') return value ? 'true' : 'false';
  return decimals(value).replace('Infinity', 'INFINITY').replace('NaN', 'NAN');
}

function cppArray(name, t) {
  const shape = t.shape.join(', ');
  if (t.datatype in HALVES) {
    const bits = Array.from(new Uint16Array(toBytes(t).buffer), (x) => `0x${x.toString(16).padStart(4, '0')}`).join(', ');
    return `  const uint16_t ${name}[] = {${bits}};
  const rapt::client::TensorView ${name}_view{rapt::client::DType::${HALVES[t.datatype]}, {${shape}},
      {reinterpret_cast<const std::byte*>(${name}), sizeof(${name})}};`;
  }
  const type = CPP[t.datatype], numbers = Array.from(t.values, (x) => cppNumber(x, t.datatype)).join(', ');
  return `  const ${type} ${name}[] = {${numbers}};\n  const auto ${name}_view = rapt::client::View<${type}>({${shape}}, ${name});`;
}

/** How a weight is printed from the answer's bytes. */
const PRINTS = {
  FP32: 'for (float weight : result->scores->values<float>()) std::printf("%.3f\\n", weight);',
  FP64: 'for (double weight : result->scores->values<double>()) std::printf("%.3f\\n", weight);',
  FP16: `const auto* bits = reinterpret_cast<const uint16_t*>(result->scores->bytes().data());
  for (size_t n = 0; n < result->scores->bytes().size() / 2; ++n) {
    const int exponent = bits[n] >> 10, fraction = bits[n] & 1023;  // a weight has no sign
    std::printf("%.3f\\n", exponent ? std::ldexp(1024 + fraction, exponent - 25) : std::ldexp(fraction, -24));
  }`,
  BF16: `const auto* bits = reinterpret_cast<const uint16_t*>(result->scores->bytes().data());
  for (size_t n = 0; n < result->scores->bytes().size() / 2; ++n) {
    std::printf("%.3f\\n", std::bit_cast<float>(uint32_t{bits[n]} << 16));
  }`,
};

export function cppOf(call) {
  if (call.model) return '// Layers are called by rapt::client::Client::Infer(); see rapt/model.h. Python and curl have this call.';
  const {datatype} = call.inputs.Q;
  if (isLong(call)) {
    return datatype === 'BF16' ? '// The arrays are too long for code, and files of NumPy have no BF16. Use Python.'
      : `// The arrays are too long for code. The program rapt reads those that the button “Inputs as .npy” saves:\n// ${commandOf(call)}`;
  }
  const arrays = Object.entries(call.inputs).map(([input, t]) => cppArray(nameOf(input), t));
  return `#include <bit>
#include <cmath>
#include <cstdint>
#include <cstdio>

#include "rapt/client.h"

int main() {
  const auto client = rapt::client::Client::Connect("127.0.0.1:8001");  // the server's --grpc_address
  if (!client.ok()) return 1;
${arrays.join('\n')}
  const auto result = (*client)->Attend(
      rapt::client::AttendCall{${cppFields(call)}});
  if (!result.ok()) return 1;
  ${PRINTS[datatype]}
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
