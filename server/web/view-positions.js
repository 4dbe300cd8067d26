// <rapt-positions>: what encodings of positions do, by the server's models.
import './heat-map.js';
import {lineChart} from './chart.js';
import {rangeOf} from './colours.js';
import {infer} from './server.js';
import {sizeOf, tensor} from './tensor.js';
import {brief, el} from './text.js';

const FIELDS = {tokens: ['Positions', 48, 1, 1024], size: ['Numbers', 32, 2, 256], base: ['Base', 10000, 1.1, 1e9]};
const CURVES = [0, 1, 4, 5];
const AROUND_0 = {low: -1, high: 1, isAround0: true};

const filled = (shape, valueOf) => tensor('FP32', shape, Float32Array.from({length: sizeOf(shape)}, (_, at) => valueOf(at)));

/** `ask` returns [model, call, output]; the output has a row for each position. */
const ENCODINGS = {
  sinusoidal: {
    text: 'Attention alone does not know where a word stands. This encoding, added to its vector, tells it: sines and cosines of the position, from fast to slow.',
    unit: 'number',
    ask: (rows, columns, base) => ['positional_encoding', {inputs: {X: filled([1, rows, columns], () => 0)}, parameters: {base}}, 'Y'],
  },
  rotary: {
    text: 'Pairs of numbers of each query and key are turned by an angle that grows with the position, so that scores depend on distances. Here every pair was (1, 0).',
    unit: 'number',
    ask: (rows, columns, base) =>
      ['rotary_embedding', {inputs: {X: filled([1, 1, rows, columns], (at) => 1 - (at % 2))}, parameters: {interleaved: true, rope_theta: base}}, 'Y'],
  },
  ALiBi: {
    text: 'No vector changes: the score of a key is lowered by its distance, times a slope of the head. Here all other scores are 0.',
    unit: 'key',
    ask: (rows) => {
      const X = filled([1, 1, rows, 1], () => 0);
      return ['attention', {inputs: {Q: X, K: X, V: X}, parameters: {alibi: true, qk_matmul_output_mode: 2}}, 'qk_matmul_output'];
    },
  },
};

class Positions extends HTMLElement {
  #running = new AbortController();
  #fields = {};
  #map = el('rapt-heat-map');
  #chart = el('div');
  #text = el('p', {className: 'quiet'});
  #kind = el('select', {}, ...Object.keys(ENCODINGS).map((name) => el('option', {}, name)));

  connectedCallback() {
    this.className = 'stack';
    for (const [name, [, value, min, max]] of Object.entries(FIELDS)) {
      this.#fields[name] = el('input', {type: 'number', value, min, max, step: name === 'base' ? 'any' : 1});
    }
    const form = el('form', {className: 'fields'}, el('label', {}, 'Encoding', this.#kind), ...Object.entries(FIELDS).map(([name, [label]]) => el('label', {}, label, this.#fields[name])));
    form.addEventListener('submit', (event) => event.preventDefault());
    form.addEventListener('change', () => this.#redraw());
    this.append(this.#text, form, el('div', {className: 'columns'}, el('div', {}, el('h3', {}, 'A row for each position'), this.#map), this.#chart));
  }

  async update() {
    if (!this.#map.matrix) await this.#redraw();
  }

  /** Ends a drawing that still waits for its answer. */
  async #redraw() {
    this.#running.abort();
    this.#running = new AbortController();
    const {signal} = this.#running;
    try {
      await this.#draw(signal);
    } catch (error) {
      if (!signal.aborted) this.#chart.textContent = error.message;
    }
  }

  async #draw(signal) {
    if (Object.values(this.#fields).some((field) => !field.checkValidity())) return;
    const {text, unit, ask} = ENCODINGS[this.#kind.value];
    const [model, call, output] = ask(...Object.values(this.#fields).map((field) => Number(field.value)));
    const {outputs: {[output]: Y}} = await infer(model, call, [output], signal);
    signal.throwIfAborted();
    this.#text.textContent = text;
    const [rows, columns] = Y.shape.slice(-2);
    const numbers = (count) => Array.from({length: count}, (_, n) => String(n));
    this.#map.show({
      rows, columns, values: Y.values, rowLabels: numbers(rows), columnLabels: numbers(columns),
      range: unit === 'key' ? rangeOf(Y.values, false) : AROUND_0,
    }, {name: 'Encoding of positions', verb: unit});
    this.#chart.replaceChildren(lineChart({
      title: `Some ${unit}s over the positions`, x: 'position', xs: numbers(rows).map(Number), showY: brief,
      series: CURVES.filter((n) => n < columns).map((n) => ({
        name: `${unit} ${n}`, values: Array.from({length: rows}, (_, row) => Y.values[row * columns + n]),
      })),
    }));
  }
}
customElements.define('rapt-positions', Positions);
