// <rapt-steps>: the five steps from scores to output for the chosen query, each as the server computed it.
import './heat-map.js';
import {attend} from './call.js';
import {rangeOf} from './colours.js';
import {headOf} from './tensor.js';
import {el, phrase} from './text.js';

const STEPS = [
  ['scores', '1. Scores', 'scale · Q Kᵀ: how well the query fits each key.'],
  ['softcapped', '2. Softcap', 'Scores after softcap · tanh(score / softcap); without a softcap, the same.'],
  ['biased', '3. Mask', 'Scores after mask and bias: −∞ hides a key.'],
  ['weights', '4. Weights', 'The normalizer of the row: not negative, and their sum is 1 without a sink.'],
];

class Steps extends HTMLElement {
  #maps = [...STEPS, ['output', '5. Output', 'The sum of the rows of V, each times its weight: a row of Y.']]
    .map(([name, title, text]) => ({name, title, text, map: el('rapt-heat-map')}));
  #heading = el('h3');

  connectedCallback() {
    this.className = 'stack';
    this.append(this.#heading, ...this.#maps.map(({title, text, map}) =>
      el('div', {}, el('h3', {}, title), el('p', {className: 'quiet'}, text), map)));
  }

  async update({call, hidden, source, head, row, signal}) {
    if (this.call !== call) {
      const results = await Promise.all(STEPS.map(([step]) => attend(call, step, signal)));
      signal.throwIfAborted();
      Object.assign(this, {call, results});
    }
    this.#heading.replaceChildren(...phrase`From “${source.queryLabels[row]}” to its output`);
    const rowOf = (t) => {
      const columns = t.shape[3];
      return headOf(t, head).subarray(row * columns, (row + 1) * columns);
    };
    this.#maps.forEach(({name, title, map}, n) => {
      const isOutput = name === 'output';
      const values = rowOf(isOutput ? this.results[0].y : this.results[n].scores);
      const isMasked = hidden && ['biased', 'weights'].includes(name);
      const labels = isOutput ? Array.from(values, (_, d) => `y${d}`) : source.keyLabels;
      map.show({
        rows: 1, columns: values.length, values, hidden: isMasked && rowOf(hidden), rowLabels: [source.queryLabels[row]], columnLabels: labels,
        range: rangeOf(values, name === 'weights'),
      }, {name: `${title} of ${source.queryLabels[row]}`, verb: '→'});
    });
  }
}
customElements.define('rapt-steps', Steps);
