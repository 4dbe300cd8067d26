// Calls of the server that served this page.
import {fromBase64, fromBytes, tensor, toBase64, toBytes} from './tensor.js';

// Relative to this file, so that the page also works behind a path prefix.
const ROOT = new URL('../', import.meta.url);

export const serverUrl = ROOT.href.replace(/\/$/, '');

export class ServerError extends Error {
  constructor(message, status) {
    super(message);
    this.status = status;
  }
}

let token = '';  // in memory only
let askForToken = async () => '';
let asking = null;  // by the first of several calls that need one
let isCancelled = false;

/** @param {() => Promise<string>} ask returns '' if the user gives none */
export function onTokenNeeded(ask) {
  askForToken = ask;
}

/** After the user gave none, calls fail without asking until this is called: when the user acts. */
export function askForTokenAgain() {
  isCancelled = false;
}

export const usesToken = () => token !== '';

/** Returns whether there is another token than the one that was refused, or the same given again. */
async function hasNewToken(refused) {
  if (token === refused) {
    if (isCancelled) return false;
    asking ??= askForToken().finally(() => { asking = null; });
    token = await asking;
    isCancelled = token === '';
  }
  return token !== '';
}

async function send(path, init = {}) {
  const used = token;
  const headers = {...init.headers, ...(used && {Authorization: `Bearer ${used}`})};
  let response;
  try {
    response = await fetch(new URL(path, ROOT), {...init, headers});
  } catch (error) {
    if (error.name === 'AbortError') throw error;
    throw new ServerError('The server does not answer.', 0);
  }
  if (response.ok) return response;
  if (response.status === 401 && await hasNewToken(used)) return send(path, init);
  const text = await response.text();
  let message = text;
  try { message = JSON.parse(text).error; } catch { /* a proxy's page */ }
  throw new ServerError(message || `The server answered ${response.status}.`, response.status);
}

let described = null;

/** What describeServer() told last, or null. */
export const knownServer = () => described;

/** GetServerInfo: version, memory, limits; without `caches` the server keeps none. */
export async function describeServer(signal) {
  described = await ask('rapt/v1/server', undefined, signal);
  return described;
}

/** GET, or with a message POST, of JSON. */
export async function ask(path, message, signal) {
  const init = message && {method: 'POST', body: JSON.stringify(message), headers: {'Content-Type': 'application/json'}};
  return (await send(path, {...init, signal})).json();
}

/**
 * Inference with binary data.
 * @param {{inputs: Object<string, import('./tensor.js').Tensor>, parameters?: Object}} call
 * @param {string[]} outputs
 */
export async function infer(model, {inputs, parameters = {}}, outputs, signal) {
  const payloads = Object.values(inputs).map(toBytes);
  const head = new TextEncoder().encode(JSON.stringify({
    inputs: Object.entries(inputs).map(([name, {datatype, shape}], n) =>
      ({name, datatype, shape, parameters: {binary_data_size: payloads[n].length}})),
    outputs: outputs.map((name) => ({name, parameters: {binary_data: true}})),
    parameters,
  }));
  const response = await send(`v2/models/${encodeURIComponent(model)}/infer`, {
    method: 'POST',
    body: joined([head, ...payloads]),
    headers: {'Inference-Header-Content-Length': String(head.length)},
    signal,
  });
  return {...await readOutputs(response), ...reportOf(response)};
}

function joined(parts) {
  const bytes = new Uint8Array(parts.reduce((sum, part) => sum + part.length, 0));
  let at = 0;
  for (const part of parts) {
    bytes.set(part, at);
    at += part.length;
  }
  return bytes;
}

async function readOutputs(response) {
  const bytes = new Uint8Array(await response.arrayBuffer());
  const headLength = Number(response.headers.get('Inference-Header-Content-Length'));
  const head = JSON.parse(new TextDecoder().decode(bytes.subarray(0, headLength)));
  const outputs = {};
  let at = headLength;
  for (const {name, datatype, shape, parameters} of head.outputs) {
    const end = at + parameters.binary_data_size;
    outputs[name] = tensor(datatype, shape, fromBytes(datatype, bytes.subarray(at, end)));
    at = end;
  }
  return {outputs};
}

function reportOf(response) {
  return {
    plan: response.headers.get('rapt-plan') ?? '',
    computeUs: Number(response.headers.get('rapt-compute-us')),
  };
}

/** A tensor in the JSON of rapt.v1. */
export const toMessage = (t) => ({dtype: t.datatype, shape: t.shape, data: toBase64(toBytes(t))});

/** @returns {import('./tensor.js').Tensor} */
export function fromMessage({dtype, shape, data}) {
  return tensor(dtype, shape.map(Number), fromBytes(dtype, fromBase64(data ?? '')));
}
