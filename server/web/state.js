// The state of the page, which its address contains: what is shown, and every control.
import {DEMO} from './sources.js';

export const DEFAULTS = {
  source: 'sentence', s: DEMO, s2: '', n: '', model: '', average: false,
  heads: 1, kv: 1,
  causal: false, left: '', right: '', align: 'top_left', blocks: 'none', block: 2, hide: '', paint: false,
  scale: '', t: 1, softcap: '', sink: '', alibi: false,
  norm: 'softmax', alpha: 1.5, type: 'FP32',
  layer: 0, head: 0, row: 0, table: false, view: 'compare',
};

const ADDRESS_BYTES = 8000;  // longer pasted numbers stay out of the address

const LIMITS = {  // of numbers: least and most
  heads: [1, 64], kv: [1, 64], block: [1, 65536], t: [0.1, 5], alpha: [1, 2],
  layer: [0, 65535], head: [0, 65535], row: [0, 2 ** 31],
  // Those that may be absent are texts.
  left: [0, Number.MAX_SAFE_INTEGER], right: [0, Number.MAX_SAFE_INTEGER],
  scale: [-Number.MAX_VALUE, Number.MAX_VALUE], softcap: [0, Number.MAX_VALUE], sink: [-Number.MAX_VALUE, Number.MAX_VALUE],
};
const FRACTIONS = ['t', 'alpha', 'scale', 'softcap', 'sink'];  // the other numbers are integers
const DECIMAL = /^-?(\d+(\.\d+)?|\.\d+)(e[-+]?\d+)?$/i;       // as fields of numbers have it
const CHOICES = {
  source: ['sentence', 'files', 'numbers'], align: ['top_left', 'bottom_right'],
  blocks: ['none', 'diagonal', 'local', 'strided', 'global'], norm: ['softmax', 'sparsemax', 'entmax15', 'entmax'],
  type: ['FP32', 'FP16', 'BF16', 'FP64'],
};

/** The value of a field in an address, or undefined if the field can't have it. */
function valueOf(name, text) {
  const kind = typeof DEFAULTS[name];
  if (kind === 'boolean') return text === '1';
  if (!Object.hasOwn(LIMITS, name)) return CHOICES[name]?.includes(text) ?? true ? text : undefined;
  const value = DECIMAL.test(text) ? Number(text) : NaN, [least, most] = LIMITS[name];
  if (!(value >= least && value <= most && (FRACTIONS.includes(name) || Number.isInteger(value)))) return undefined;
  return kind === 'string' ? text : value;
}

/** Returns the state that a location's hash describes; what it doesn't name, or what can't be, has its default. */
export function parseState(hash) {
  const state = {...DEFAULTS};
  for (const [name, text] of new URLSearchParams(hash.replace(/^#/, ''))) {
    if (Object.hasOwn(DEFAULTS, name)) state[name] = valueOf(name, text) ?? DEFAULTS[name];
  }
  return state;
}

export function formatState(state) {
  const parameters = new URLSearchParams();
  for (const [name, value] of Object.entries(state)) {
    if (value === DEFAULTS[name] || String(value).length > ADDRESS_BYTES) continue;
    parameters.set(name, value === true ? '1' : value === false ? '0' : String(value));
  }
  return parameters.size ? `#${parameters}` : '';
}
