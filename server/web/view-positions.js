// <rapt-positions>: the sinusoidal encoding of positions, by the server's model positional_encoding.
import './heat-map.js';
import {lineChart} from './chart.js';
import {infer} from './server.js';
import {tensor} from './tensor.js';
import {el} from './text.js';

const FIELDS = {tokens: ['Positions', 48, 1, 1024], size: ['Numbers', 32, 2, 256], base: ['Base', 10000, 1.1, 1e9]};
const CURVES = [0, 1, 4, 5];

class Positions extends HTMLElement {
  #running = new AbortController();
  #fields = {};
  #map = el('rapt-heat-map');
  #chart = el('div');

  connectedCallback() {
    this.className = 'stack';
    for (const [name, [, value, min, max]] of Object.entries(FIELDS)) {
      this.#fields[name] = el('input', {type: 'number', value, min, max, step: name === 'base' ? 'any' : 1});
    }
    const form = el('form', {className: 'fields'}, ...Object.entries(FIELDS).map(([name, [label]]) => el('label', {}, label, this.#fields[name])));
    form.addEventListener('submit', (event) => event.preventDefault());
    form.addEventListener('change', () => this.#redraw());
    this.append(el('p', {className: 'quiet'},
      'Attention alone does not know where a word stands. This encoding, added to its vector, tells it: sines and cosines of the position, from fast to slow.'),
    form, el('div', {className: 'columns'}, el('div', {}, el('h3', {}, 'A row for each position'), this.#map), this.#chart));
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
    const [rows, columns, base] = Object.values(this.#fields).map((field) => Number(field.value));
    const X = tensor('FP32', [1, rows, columns], new Float32Array(rows * columns));
    const {outputs: {Y}} = await infer('positional_encoding', {inputs: {X}, parameters: {base}}, ['Y'], signal);
    signal.throwIfAborted();
    const numbers = (count) => Array.from({length: count}, (_, n) => String(n));
    this.#map.show({
      rows, columns, values: Y.values, rowLabels: numbers(rows), columnLabels: numbers(columns), range: {low: -1, high: 1, isAround0: true},
    }, {name: 'Encoding of positions', verb: 'number'});
    this.#chart.replaceChildren(lineChart({
      title: 'Some of its numbers over the positions', x: 'position', xs: numbers(rows).map(Number), showY: (y) => y.toFixed(2),
      series: CURVES.filter((n) => n < columns).map((n) => ({
        name: `number ${n}`, values: Array.from({length: rows}, (_, row) => Y.values[row * columns + n]),
      })),
    }));
  }
}
customElements.define('rapt-positions', Positions);
