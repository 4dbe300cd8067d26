// <rapt-gradient>: how the chosen word's output depends on every number of Q, K and V, by the server's backward pass.
import './heat-map.js';
import {gradientsOf} from './call.js';
import {headOf} from './tensor.js';
import {el, phrase} from './text.js';

const PARTS = [
  ['dQ', 'Queries. Only its own can change the output of the chosen word.'],
  ['dK', 'Keys. A change of a word’s key moves weight to the word or away from it.'],
  ['dV', 'Values. A word’s value counts as much as its weight, in every number.'],
];

/** What rounding leaves of a gradient of 0, as a share of the largest of V's: it is not drawn in full colour. */
const NOISE = 1e-6;

class Gradient extends HTMLElement {
  #heading = el('h3');
  #maps = PARTS.map(([name, text]) => ({name, text, map: el('rapt-heat-map')}));

  connectedCallback() {
    this.className = 'stack';
    this.append(this.#heading, el('p', {className: 'quiet'},
      'How the sum of its output’s numbers changes with each number that goes in: red raises it, blue lowers it, white changes nothing.'),
    el('div', {className: 'columns thirds'}, ...this.#maps.map(({name, text, map}) =>
      el('div', {}, el('h3', {}, name), el('p', {className: 'quiet'}, text), map))));
  }

  async update({call, y, source, head, row, signal}) {
    const gradients = await gradientsOf(call, y.shape, head, row, signal);
    signal.throwIfAborted();
    this.#heading.replaceChildren(...phrase`What the output of “${source.queryLabels[row]}” depends on`);
    const least = NOISE * largestOf(gradients.dV.values);
    const queriesPerKey = call.inputs.Q.shape[1] / call.inputs.K.shape[1];
    for (const {name, map} of this.#maps) {
      const t = gradients[name];
      const [, , rows, columns] = t.shape;
      const values = headOf(t, name === 'dQ' ? head : Math.floor(head / queriesPerKey));
      map.show({
        rows, columns, values, rowLabels: name === 'dQ' ? source.queryLabels : source.keyLabels,
        columnLabels: Array.from({length: columns}, (_, n) => String(n)), range: around0(values, least),
      }, {name: `${name} for ${source.queryLabels[row]}`, verb: 'number', ends: ['lowers', 'raises']});
      map.mark(Math.min(row, rows - 1));
    }
  }
}

const largestOf = (values) => values.reduce((most, value) => Math.max(most, Math.abs(value)), 0);

/** `least`: the smallest end of the scale. */
function around0(values, least) {
  const size = Math.max(largestOf(values), least) || 1;
  return {low: -size, high: size, isAround0: true};
}
customElements.define('rapt-gradient', Gradient);
