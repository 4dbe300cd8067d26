// <rapt-cost>: memory and time against length, for exact attention and for what replaces it.
import {lineChart} from './chart.js';
import {ask, infer} from './server.js';
import {tensor} from './tensor.js';
import {el, showBytes} from './text.js';

const MEMORY_LENGTHS = [128, 256, 512, 1024, 2048, 4096, 8192, 16384, 32768, 65536];
const EXACT = 'exact, fused (this server)';
const MEMORY = {
  'all scores at once': (e) => e.standardBytes,
  'scores in chunks': (e) => e.chunkedBytes,
  [EXACT]: (e) => e.fusedBytes,
  LSH: (e) => e.lsh.workspaceBytes,
  'linear (FAVOR+)': (e) => e.linear.workspaceBytes,
};

const SIZE = 64, BLOCK = 64, WINDOW = 128, REPEATS = 3;
const TIME_LENGTHS = [256, 512, 1024, 2048, 4096, 8192];

/** Each returns [model, inputs, parameters, output] for Q, K and V of one head; the output is Y if absent. */
const TIMED = {
  [EXACT]: (x) => ['attention', {Q: x, K: x, V: x}, {}],
  [`window of ${WINDOW}`]: (x) => ['attention', {Q: x, K: x, V: x}, {left_window_size: WINDOW / 2, right_window_size: WINDOW / 2}],
  'block-sparse': (x) => ['attention', {Q: x, K: x, V: x, block_mask: blockMask(x.shape[2])}, {block_q: BLOCK, block_k: BLOCK}],
  LSH: (x) => ['lsh_attention', {Q: x, V: x}, {chunk_length: BLOCK, num_hashes: 2, seed: 1}],
  'linear (FAVOR+)': (x) => {
    const flat = tensor(x.datatype, [1, x.shape[2], SIZE], x.values);
    const parameters = {q_num_heads: 1, kv_num_heads: 1, update_rule: 'linear', feature_map: 'favor', normalize: true, num_features: 128, seed: 1, is_causal: false};
    return ['linear_attention', {query: flat, key: flat, value: flat}, parameters, 'output'];
  },
};
const METHODS = [...new Set([...Object.keys(TIMED), ...Object.keys(MEMORY)])];
const colourOf = (name) => METHODS.indexOf(name);  // the same in both charts

/** Each block sees itself, the one before and the first. */
function blockMask(length) {
  const blocks = length / BLOCK;
  const values = Uint8Array.from({length: blocks * blocks}, (_, at) => {
    const i = Math.floor(at / blocks), j = at % blocks;
    return j === 0 || j === i || j === i - 1;
  });
  return tensor('BOOL', [1, 1, blocks, blocks], values);
}

function inputOf(length) {
  return tensor('FP32', [1, 1, length, SIZE], Float32Array.from({length: length * SIZE}, (_, n) => Math.sin(n * n) / 2));
}

async function microseconds(make, input) {
  const [model, inputs, parameters, output = 'Y'] = make(input);
  let least = Infinity;
  for (let n = 0; n < REPEATS; ++n) {
    const {computeUs} = await infer(model, {inputs, parameters}, [output]);
    least = Math.min(least, Math.max(computeUs, 1));
  }
  return least;
}

class Cost extends HTMLElement {
  #memory = el('div');
  #time = el('div', {className: 'stack'});

  connectedCallback() {
    this.append(el('div', {className: 'columns'}, this.#memory, this.#time));
    const start = el('button', {type: 'button', className: 'primary'}, 'Measure time');
    start.addEventListener('click', async () => {
      start.disabled = true;
      try {
        await this.#measure();
      } catch (error) {
        this.#time.replaceChildren(start, el('p', {}, error.message));
      }
      start.disabled = false;
    });
    this.#time.append(start, el('p', {className: 'quiet'}, `Asks the server for one head of ${SIZE}, up to ${TIME_LENGTHS.at(-1)} tokens: the least of ${REPEATS} times that it reports.`));
  }

  async update() {
    if (this.#memory.hasChildNodes()) return;
    const {estimates} = await ask('rapt/v1/estimate-memory', {batch: 1, queryHeads: 1, headSize: SIZE, lengths: MEMORY_LENGTHS});
    this.#memory.replaceChildren(lineChart({
      title: 'Memory besides Q, K, V and Y, one head of 64', x: 'tokens', xs: MEMORY_LENGTHS, isLog: true, showY: showBytes,
      series: Object.entries(MEMORY).map(([name, bytesOf]) => ({name, colour: colourOf(name), values: estimates.map((e) => Number(bytesOf(e)))})),
    }));
  }

  async #measure() {
    const start = this.#time.firstChild;
    const series = Object.keys(TIMED).map((name) => ({name, colour: colourOf(name), values: []}));
    for (const [n, length] of TIME_LENGTHS.entries()) {
      if (!this.isConnected) return;
      const input = inputOf(length);
      for (const {name, values} of series) values.push(await microseconds(TIMED[name], input));
      const xs = TIME_LENGTHS.slice(0, n + 1);
      this.#time.replaceChildren(start, lineChart({
        title: 'Compute time in the server', x: 'tokens', xs, isLog: true, series,
        showY: (us) => (us < 1000 ? `${Math.round(us)} µs` : `${(us / 1000).toFixed(1)} ms`),
      }));
    }
  }
}
customElements.define('rapt-cost', Cost);
