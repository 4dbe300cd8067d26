// <rapt-compare>: the same call without and with a causal mask.
import './heat-map.js';
import {attend, hiddenOf} from './call.js';
import {rangeOf} from './colours.js';
import {headOf, tensor} from './tensor.js';
import {el, show} from './text.js';

const TITLES = ['Full: every word sees every word', 'Causal: no word sees ahead'];

class Compare extends HTMLElement {
  #sides = TITLES.map((title) => ({title: el('h3', {}, title), map: el('rapt-heat-map'), text: el('p', {className: 'quiet'})}));

  connectedCallback() {
    this.append(el('div', {className: 'columns'}, ...this.#sides.map(({title, map, text}) => el('div', {}, title, map, text))));
  }

  async update({call, source, head, row, state, signal}) {
    if (this.shown !== call || this.head !== head) {
      const matrices = await Promise.all([false, true].map((isCausal) => this.#matrixOf(call, source, head, isCausal, signal)));
      signal.throwIfAborted();
      this.#sides.forEach(({title, map}, n) => map.show(matrices[n], {name: title.textContent, isTable: state.table}));
      Object.assign(this, {shown: call, head, matrices});
    }
    this.#sides.forEach(({map, text}, n) => {
      map.mark(row);
      text.textContent = this.#describe(this.matrices[n], row);
    });
  }

  async #matrixOf(call, source, head, isCausal, signal) {
    const changed = {...call, parameters: {...call.parameters, is_causal: isCausal}};
    const [{scores}, biased] = await Promise.all([attend(changed, 'weights', signal), attend(changed, 'biased', signal)]);
    const hidden = tensor('BOOL', scores.shape, hiddenOf(biased.scores));
    const [, , rows, columns] = scores.shape;
    return {
      rows, columns, values: headOf(scores, head), hidden: headOf(hidden, head),
      rowLabels: source.queryLabels, columnLabels: source.keyLabels, range: rangeOf([], true),
    };
  }

  #describe({columns, values, rowLabels, columnLabels}, row) {
    const weights = Array.from(values.subarray(row * columns, (row + 1) * columns));
    const most = weights.indexOf(Math.max(...weights));
    return `“${rowLabels[row]}” attends most to “${columnLabels[most]}” (${show(weights[most], 3)}).`;
  }
}
customElements.define('rapt-compare', Compare);
