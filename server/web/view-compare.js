// <rapt-compare>: the same call without and with a causal mask.
import './heat-map.js';
import {matrixOfWeights} from './matrix.js';
import {changeOf} from './reading.js';
import {el} from './text.js';

const TITLES = ['Without the causal mask', 'With the causal mask: no word sees ahead'];

class Compare extends HTMLElement {
  #sides = TITLES.map((title) => ({title: el('h3', {}, title), map: el('rapt-heat-map')}));
  #change = el('p');

  connectedCallback() {
    this.className = 'stack';
    this.append(this.#change, el('div', {className: 'columns'}, ...this.#sides.map(({title, map}) => el('div', {}, title, map))));
  }

  async update({weights, source, withoutAndWithCausal, head, row, state, signal}) {
    if (this.weights !== weights) {
      const answers = await withoutAndWithCausal();
      signal.throwIfAborted();
      Object.assign(this, {weights, answers, matrices: null});
    }
    if (!this.matrices || this.head !== head || this.isTable !== state.table) {
      Object.assign(this, {head, isTable: state.table, matrices: this.answers.map((answer) => matrixOfWeights({...answer, source}, 0, head))});
      this.#sides.forEach(({title, map}, n) => {
        title.hidden = state.table;  // the table has it as caption
        map.show(this.matrices[n], {name: title.textContent, isTable: state.table});
      });
    }
    for (const {map} of this.#sides) map.mark(row);
    this.#change.replaceChildren(...changeOf(...this.matrices, row));
  }
}
customElements.define('rapt-compare', Compare);
