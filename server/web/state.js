// The state of the page, which its address contains: what is shown, and every control.
import {DEMO} from './sources.js';

export const DEFAULTS = {
  source: 'sentence', s: DEMO, n: '', model: '',
  heads: 1, kv: 1,
  causal: false, left: '', right: '', align: 'top_left', blocks: 'none', block: 2, hide: '', paint: false,
  scale: '', t: 1, softcap: '', sink: '', alibi: false,
  norm: 'softmax', alpha: 1.5, type: 'FP32',
  layer: 0, head: 0, row: 0, table: false, view: 'compare',
};

const ADDRESS_BYTES = 8000;  // longer pasted numbers stay out of the address

/** Returns the state that a location's hash describes; what it doesn't name has its default. */
export function parseState(hash) {
  const state = {...DEFAULTS};
  for (const [name, text] of new URLSearchParams(hash.replace(/^#/, ''))) {
    if (!(name in DEFAULTS)) continue;
    const kind = typeof DEFAULTS[name];
    if (kind === 'boolean') state[name] = text === '1';
    else if (kind !== 'number') state[name] = text;
    else if (Number.isFinite(Number(text))) state[name] = Number(text);
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
