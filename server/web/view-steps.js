// <rapt-steps>: the five steps from scores to output for the chosen query, each as the server computed it.
import './heat-map.js';
import {attend} from './call.js';
import {rangeOf} from './colours.js';
import {headOf} from './tensor.js';
import {el, phrase} from './text.js';

const STEPS = [
  ['scores', '1. Scores', 'How well the word fits each word: the larger, the better. Its query times their keys, times the scale.', 'scale · Q Kᵀ'],
  ['softcapped', '2. Softcap', 'Large scores are bent to stay below the softcap. Without one, nothing changes.', 'softcap · tanh(score / softcap)'],
  ['biased', '3. Mask', 'Words that the mask hides get the score −∞. ALiBi lowers the scores of words that are far away.', 'score + bias'],
  ['weights', '4. Weights', 'Scores become shares, none below 0. They add up to 1, or to less with a sink.', 'softmax, or another normalizer'],
];
const OUTPUT = ['output', '5. Output', 'The values of all words, each times its weight, added up: the new vector of the word.', 'weights · V'];

class Steps extends HTMLElement {
  #maps = [...STEPS, OUTPUT].map(([name, title, text, formula]) => ({name, title, text, formula, map: el('rapt-heat-map')}));
  #heading = el('h3');

  connectedCallback() {
    this.className = 'stack';
    this.append(this.#heading, ...this.#maps.map(({title, text, formula, map}) =>
      el('div', {className: 'step'}, el('div', {}, el('h3', {}, title), el('p', {}, text), el('p', {className: 'quiet'}, el('code', {}, formula))), map)));
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
    const scores = this.results.slice(0, 3).flatMap((result) => [...rowOf(result.scores)]);  // of one range, so that they compare
    this.#maps.forEach(({name, title, map}, n) => {
      const isOutput = name === 'output';
      const values = rowOf(isOutput ? this.results[0].y : this.results[n].scores);
      const isMasked = hidden && ['biased', 'weights'].includes(name);
      const labels = isOutput ? Array.from(values, (_, d) => `y${d}`) : source.keyLabels;
      map.show({
        rows: 1, columns: values.length, values, hidden: isMasked && rowOf(hidden), rowLabels: [source.queryLabels[row]], columnLabels: labels,
        range: rangeOf(isOutput ? values : scores, name === 'weights'),
      }, {name: `${title} of ${source.queryLabels[row]}`, verb: '→'});
    });
  }
}
customElements.define('rapt-steps', Steps);
