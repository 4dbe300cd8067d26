// <rapt-lines>: words on both sides, and a line for each weight, as wide as it is large. A word that is pointed at or has the focus
// shows its own lines: on the left where it looks, on the right who looks at it.
import {el, longestOf, phrase, show, svg} from './text.js';

const MOST_WIDTH = 640, HEIGHT = 900, TOP = 34;
const LEAST_STEP = 17, MOST_STEP = 30;
const LETTER = 8;          // pixels, about
const MOST_LINES = 4096;   // beyond, only those of the word that is pointed at
const LEAST = 0.005;       // of a weight with a line
const MOST_TOLD = 3;

class Lines extends HTMLElement {
  #told = el('p', {className: 'quiet', id: 'told'});
  #words = [[], []];  // of the queries and of the keys
  #strong = svg('g');
  #shown = null;      // the matrix, the row that is chosen, and the places of words

  connectedCallback() {
    this.className = 'stack';
    this.addEventListener('pointerover', ({target}) => this.#follow(target));
    this.addEventListener('focusin', ({target}) => this.#follow(target));
    this.addEventListener('pointerleave', () => this.#point(0, this.#shown.row));
    this.addEventListener('focusout', () => this.#point(0, this.#shown.row));
    this.addEventListener('keydown', (event) => this.#onKey(event));
  }

  update({matrixOf, layer, head, row}) {
    const matrix = matrixOf(layer, head), {rows, columns, rowLabels, columnLabels} = matrix;
    const count = Math.max(rows, columns), step = Math.min(Math.max(HEIGHT / count, LEAST_STEP), MOST_STEP);
    const height = TOP + step * count;
    const width = Math.min(this.clientWidth || MOST_WIDTH, MOST_WIDTH);  // not scaled, so that words stay legible on a phone
    const side = Math.min(LETTER * Math.max(longestOf(rowLabels), longestOf(columnLabels), 12) + 10, width / 3);
    this.#shown = {matrix, row, step, left: side, right: width - side};
    const faint = svg('g');
    if (rows * columns <= MOST_LINES) {
      for (let i = 0; i < rows; ++i) faint.append(...this.#linesOf(0, i, (weight) => 0.12 * weight));
    }
    this.#words = [this.#makeWords(0, rowLabels, row), this.#makeWords(1, columnLabels, 0)];
    const names = ['Words that look', 'Words that are looked at'];
    this.replaceChildren(
      el('p', {className: 'quiet'}, 'Point at a word, or walk with the arrow keys: on the left it shows where it looks, on the right who looks at it.'),
      this.#told,
      svg('svg', {viewBox: `0 0 ${width} ${height}`, width, height, role: 'group', 'aria-label': 'Lines'},
        svg('text', {x: side - 10, y: 14, 'text-anchor': 'end', class: 'quiet'}, 'looks'),
        svg('text', {x: width - side + 10, y: 14, class: 'quiet'}, 'is looked at'),
        faint, this.#strong,
        ...this.#words.map((words, n) => svg('g', {role: 'listbox', 'aria-label': names[n]}, ...words))));
    this.#point(0, row);
  }

  /** The words of a side; Tab reaches one of them. */
  #makeWords(side, labels, first) {
    const {left, right, step} = this.#shown, room = left - 10;
    const fitting = (label) => (label.length * LETTER > room ? `${label.slice(0, Math.floor(room / LETTER) - 1)}…` : label);
    return labels.map((label, n) => {
      const y = TOP + step * n;
      const shade = svg('rect', {class: 'shade', x: side ? right + 2 : 0, y: y + 1, width: left - 2, height: step - 2, rx: 5});
      const text = svg('text', {x: side ? right + 10 : room, y: y + step / 2 + 5, 'text-anchor': side ? 'start' : 'end'}, fitting(label));
      return svg('g', {class: 'word', role: 'option', 'aria-label': label, 'aria-describedby': 'told', tabindex: n === first ? 0 : -1, 'data-side': side, 'data-n': n}, shade, text);
    });
  }

  /** The weights of a row (side 0) or of a column (side 1), and which of them are masked. */
  #weightsOf(side, n) {
    const {rows, columns, values, hidden} = this.#shown.matrix;
    return Array.from({length: side ? rows : columns}, (_, m) => {
      const at = side ? m * columns + n : n * columns + m;
      return hidden?.[at] ? 0 : values[at];
    });
  }

  #linesOf(side, n, opacityOf) {
    const {matrix: {rowLabels, columnLabels}, step, left, right} = this.#shown;
    const y = (at) => TOP + step * (at + 0.5), middle = (left + right) / 2;
    return this.#weightsOf(side, n).flatMap((weight, m) => {
      if (!(weight > LEAST)) return [];
      const [i, j] = side ? [m, n] : [n, m];
      const line = svg('path', {
        class: 'link', d: `M${left} ${y(i)}C${middle} ${y(i)} ${middle} ${y(j)} ${right} ${y(j)}`,
        'stroke-width': 1 + 7 * Math.min(weight, 1), 'stroke-opacity': opacityOf(Math.min(weight, 1)),
      });
      line.append(svg('title', {}, `${rowLabels[i]} attends to ${columnLabels[j]}: ${show(weight)}`));
      return [line];
    });
  }

  /** Shows the lines of a word, shades the words at their other ends, and tells the largest. */
  #point(side, n) {
    const weights = this.#weightsOf(side, n), most = weights.reduce((a, b) => Math.max(a, b), LEAST);
    this.#strong.replaceChildren(...this.#linesOf(side, n, (weight) => 0.35 + 0.65 * weight));
    this.#words.forEach((words, at) => words.forEach((word, m) => {
      const isPointed = at === side && m === n;
      word.setAttribute('aria-selected', isPointed);
      word.lastChild.setAttribute('font-weight', isPointed ? 700 : 400);
      word.firstChild.setAttribute('fill-opacity', at === side ? 0 : (0.5 * Math.max(weights[m], 0)) / most || 0);
    }));
    const {rowLabels, columnLabels} = this.#shown.matrix;
    const [own, others] = side ? [columnLabels, rowLabels] : [rowLabels, columnLabels];
    const order = weights.map((_, m) => m).filter((m) => weights[m] > 0).sort((a, b) => weights[b] - weights[a]).slice(0, MOST_TOLD);
    const what = side ? 'is attended to by' : 'attends to';
    this.#told.replaceChildren(...phrase`“${own[n]}” `, order.length ? `${what} ` : `${what} nothing.`,
      ...order.flatMap((m, at) => [...(at ? [', '] : []), ...phrase`“${others[m]}”`, ` ${show(weights[m])}`]));
  }

  #follow(target) {
    const word = target.closest('.word');
    if (word) this.#point(Number(word.dataset.side), Number(word.dataset.n));
  }

  #onKey(event) {
    const word = event.target.closest('.word');
    const step = {ArrowDown: 1, ArrowUp: -1}[event.key];
    if (!word || !step) return;
    event.preventDefault();
    const next = this.#words[word.dataset.side][Number(word.dataset.n) + step];
    if (!next) return;
    word.setAttribute('tabindex', -1);
    next.setAttribute('tabindex', 0);
    next.focus();
  }
}
customElements.define('rapt-lines', Lines);
