// <rapt-words>: the sentence with the words highlighted that the chosen one attends to, and those with the largest weights.
import {mostOf} from './reading.js';
import {el, phrase, show} from './text.js';

const MOST_RANKED = 6;
const PLAY_MS = 900;

/** Colours words by their weights; the darkest has the largest. */
function shade(words, weights) {
  const most = Array.from(words, (_, n) => weights[n] ?? 0).reduce((a, b) => Math.max(a, b), 1e-9);
  [...words].forEach((word, n) => word.style.setProperty('--weight', Math.max(0, weights[n] / most || 0).toFixed(3)));
}

/** Event: `choose` {row}. */
export class Words extends HTMLElement {
  #rows = 0;
  #row = 0;
  #labels = [];
  #timer = 0;
  #title = el('h2');
  #text = el('div', {className: 'text', role: 'radiogroup', 'aria-label': 'The word that looks'});
  #others = el('p', {className: 'text', 'aria-hidden': 'true'});  // of another sentence; the list below has their weights
  #ranking = el('ol', {className: 'ranking', 'aria-label': 'Most attended words'});
  #most = el('p', {hidden: true, id: 'most'});  // with the word that gets the focus
  #slider = el('input', {type: 'range', min: 0, 'aria-label': 'Query'});
  #play = el('button', {type: 'button'}, 'Play');

  connectedCallback() {
    this.append(this.#title, el('div', {className: 'player'}, this.#play, this.#slider), this.#text, this.#others,
      el('h3', {}, 'Most attended'), this.#ranking, this.#most);
    this.#play.hidden = matchMedia('(prefers-reduced-motion: reduce)').matches;
    this.#slider.addEventListener('input', () => this.#choose(Number(this.#slider.value)));
    this.#play.addEventListener('click', () => this.#toggle());
    this.#text.addEventListener('click', ({target}) => {
      if (target.dataset.row) this.#choose(Number(target.dataset.row));
    });
    this.#text.addEventListener('keydown', (event) => this.#onKey(event));
  }

  /** @param {import('./matrix.js').Matrix} matrix */
  show(matrix, row) {
    const {rows, columns, values, hidden, rowLabels, columnLabels, isSelf} = matrix;
    this.#rows = rows;
    this.#row = row;
    this.#slider.max = rows - 1;
    this.#slider.value = row;
    this.#most.replaceChildren(...mostOf(matrix, row));
    this.#slider.setAttribute('aria-valuetext', this.#most.textContent || rowLabels[row]);
    this.#title.replaceChildren(...phrase`What “${rowLabels[row]}” attends to`);
    const weights = Array.from({length: columns}, (_, n) => values[row * columns + n]);
    this.#fillText(rowLabels, isSelf ? weights : [], row);
    this.#others.hidden = isSelf;
    if (!isSelf) this.#fillOthers(columnLabels, weights);
    this.#fillRanking(weights, columnLabels, (n) => hidden?.[row * columns + n]);
  }

  #fillText(labels, weights, row) {
    if (labels !== this.#labels) {
      this.#labels = labels;
      this.#text.replaceChildren(...labels.map((label, n) => el('button', {type: 'button', role: 'radio', 'data-row': n}, label)));
    }
    const hadFocus = this.#text.contains(document.activeElement);
    [...this.#text.children].forEach((word, n) => {
      word.tabIndex = n === row ? 0 : -1;
      word.setAttribute('aria-checked', n === row);
      if (n === row) word.setAttribute('aria-describedby', this.#most.id);
      else word.removeAttribute('aria-describedby');
    });
    shade(this.#text.children, weights);
    if (hadFocus) this.#text.children[row].focus();
  }

  #fillOthers(labels, weights) {
    this.#others.replaceChildren(...labels.map((label) => el('span', {}, label)));
    shade(this.#others.children, weights);
  }

  #fillRanking(weights, labels, isHidden) {
    const order = weights.map((_, n) => n).filter((n) => !isHidden(n)).sort((a, b) => weights[b] - weights[a]);
    this.#ranking.replaceChildren(...order.slice(0, MOST_RANKED).map((n) => {
      const bar = el('i');
      bar.style.width = `${Math.min(100, Math.max(0, weights[n] * 100))}%`;
      return el('li', {}, el('bdi', {title: labels[n]}, labels[n]), el('div', {className: 'bar', 'aria-hidden': 'true'}, bar), el('span', {}, show(weights[n])));
    }));
  }

  #choose(row) {
    this.dispatchEvent(new CustomEvent('choose', {detail: {row}, bubbles: true}));
  }

  #onKey(event) {
    const step = {ArrowRight: 1, ArrowDown: 1, ArrowLeft: -1, ArrowUp: -1}[event.key];
    if (!step) return;
    event.preventDefault();
    this.#choose((this.#row + step + this.#rows) % this.#rows);
  }

  #toggle() {
    if (this.#timer) {
      clearInterval(this.#timer);
      this.#timer = 0;
    } else {
      this.#timer = setInterval(() => this.#choose((this.#row + 1) % this.#rows), PLAY_MS);
    }
    this.#play.textContent = this.#timer ? 'Pause' : 'Play';
  }
}
customElements.define('rapt-words', Words);
