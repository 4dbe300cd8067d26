// <rapt-compare>: the same call without and with a causal mask.
import './heat-map.js';
import {largestOf, matrixOfWeights} from './matrix.js';
import {el, phrase, show} from './text.js';

const TITLES = ['Without the causal mask', 'With the causal mask: no word sees ahead'];

/** What the causal mask changed in a row. */
function changeOf(before, after, row) {
  const {columns, rowLabels, columnLabels} = after;
  const isHidden = ({hidden}, n) => Boolean(hidden?.[row * columns + n]);
  const keys = columnLabels.map((_, n) => n);
  const newlyHidden = keys.filter((n) => isHidden(after, n) && !isHidden(before, n));
  const word = rowLabels[row];
  if (newlyHidden.length === 0) return phrase`The causal mask hides no word from “${word}”: nothing changes.`;
  if (keys.every((n) => isHidden(after, n))) return phrase`The causal mask hides every word from “${word}”: its weights are 0.`;
  const lost = newlyHidden.reduce((sum, n) => sum + before.values[row * columns + n], 0);
  const {at, weight} = largestOf(after, row);
  const hides = `The causal mask hides ${newlyHidden.length} of ${columns} words from`;
  const shares = `and shares ${newlyHidden.length > 1 ? 'their' : 'its'} ${show(lost, 3)} among the others:`;
  return phrase`${hides} “${word}” ${shares} “${columnLabels[at]}” ${show(before.values[row * columns + at], 3)} → ${show(weight, 3)}.`;
}

class Compare extends HTMLElement {
  #sides = TITLES.map((title) => ({title: el('h3', {}, title), map: el('rapt-heat-map')}));
  #change = el('p');

  connectedCallback() {
    this.className = 'stack';
    this.append(this.#change, el('div', {className: 'columns'}, ...this.#sides.map(({title, map}) => el('div', {}, title, map))));
  }

  async update({weights, source, compute, head, row, state, signal}) {
    if (this.weights !== weights) {
      const answers = await Promise.all([false, true].map((causal) => compute({causal})));
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
