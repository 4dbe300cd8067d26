// <rapt-compare>: the same call without and with a causal mask.
import './heat-map.js';
import {attend, hiddenOf} from './call.js';
import {rangeOf} from './colours.js';
import {headOf, tensor} from './tensor.js';
import {el, show} from './text.js';

const TITLES = ['Full: every word sees every word', 'Causal: no word sees ahead'];

/** The weights of all heads, and what is masked. */
async function answerOf(call, isCausal, signal) {
  const changed = {...call, parameters: {...call.parameters, is_causal: isCausal}};
  const [{scores}, biased] = await Promise.all([attend(changed, 'weights', signal), attend(changed, 'biased', signal)]);
  return {scores, hidden: tensor('BOOL', scores.shape, hiddenOf(biased.scores))};
}

function matrixOf({scores, hidden}, source, head) {
  const [, , rows, columns] = scores.shape;
  return {
    rows, columns, values: headOf(scores, head), hidden: headOf(hidden, head),
    rowLabels: source.queryLabels, columnLabels: source.keyLabels, range: rangeOf([], true),
  };
}

class Compare extends HTMLElement {
  #sides = TITLES.map((title) => ({title: el('h3', {}, title), map: el('rapt-heat-map'), text: el('p', {className: 'quiet'})}));

  connectedCallback() {
    this.append(el('div', {className: 'columns'}, ...this.#sides.map(({title, map, text}) => el('div', {}, title, map, text))));
  }

  async update({call, source, head, row, state, signal}) {
    if (this.call !== call) {
      const answers = await Promise.all([false, true].map((isCausal) => answerOf(call, isCausal, signal)));
      signal.throwIfAborted();
      Object.assign(this, {call, answers, matrices: null});
    }
    if (!this.matrices || this.head !== head || this.isTable !== state.table) {
      Object.assign(this, {head, isTable: state.table, matrices: this.answers.map((answer) => matrixOf(answer, source, head))});
      this.#sides.forEach(({title, map}, n) => map.show(this.matrices[n], {name: title.textContent, isTable: state.table}));
    }
    this.#sides.forEach(({map, text}, n) => {
      map.mark(row);
      text.textContent = this.#describe(this.matrices[n], row);
    });
  }

  #describe({columns, values, rowLabels, columnLabels}, row) {
    const weights = values.subarray(row * columns, (row + 1) * columns);
    const most = weights.reduce((best, weight, n) => (weight > weights[best] ? n : best), 0);
    return `“${rowLabels[row]}” attends most to “${columnLabels[most]}” (${show(weights[most], 3)}).`;
  }
}
customElements.define('rapt-compare', Compare);
