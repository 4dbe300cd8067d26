// <rapt-heads>: every head of every layer as a small picture.
import {paint} from './matrix.js';
import {el} from './text.js';

const SIZE = 84;

/** Event: `choosehead` {layer, head}. */
export class Heads extends HTMLElement {
  #weights = null;  // that the pictures show
  #buttons = [];
  #pictures = [];   // [canvas, matrix]
  #title = el('h3');
  #hint = el('p', {className: 'quiet', hidden: true}, 'Colours are those of the square root of a weight, so that small ones are seen.');
  #grid = el('div', {className: 'heads', role: 'group'});

  connectedCallback() {
    this.append(this.#title, this.#hint, this.#grid);
    this.#grid.addEventListener('keydown', (event) => this.#onKey(event));
  }

  /**
   * @param {import('./tensor.js').Tensor} weights [layers, heads, queries, keys]; the pictures are drawn when they are others
   * @param {(layer: number, head: number) => import('./matrix.js').Matrix} matrixOf
   * @param {{layer: number, head: number}} chosen
   * @param {string} [title] with one, a single head is shown, too
   */
  show(weights, matrixOf, chosen, title = '') {
    const [layers, heads] = weights.shape;
    this.hidden = !title && layers * heads === 1;
    if (this.hidden) return;
    if (weights !== this.#weights) this.#draw(layers, heads, matrixOf);
    this.#title.textContent = title || (layers > 1 ? 'Layers × heads' : 'Heads');
    this.#grid.setAttribute('aria-label', this.#title.textContent);
    this.#weights = weights;
    this.#buttons.forEach((button, n) => {
      const isChosen = n === chosen.layer * heads + chosen.head;
      button.setAttribute('aria-pressed', isChosen);
      button.tabIndex = isChosen || layers === 1 ? 0 : -1;  // of a table, Tab reaches the chosen one
    });
  }

  /** One layer as buttons with their names; several as a table of pictures, a row for each layer. */
  #draw(layers, heads, matrixOf) {
    const isTable = layers > 1;
    this.#hint.hidden = !isTable;
    this.#grid.classList.toggle('table', isTable);
    this.#grid.style.gridTemplateColumns = isTable ? `auto repeat(${heads}, minmax(24px, 1fr))` : '';
    this.#pictures = [];
    const number = (n) => el('span', {className: 'quiet', 'aria-hidden': 'true'}, n);
    this.#buttons = Array.from({length: layers * heads}, (_, n) => this.#button(Math.floor(n / heads), n % heads, isTable, matrixOf));
    this.#grid.replaceChildren(...this.#buttons);
    if (isTable) {
      this.#grid.prepend(...['', ...Array(heads).keys()].map(number));
      for (let layer = 0; layer < layers; ++layer) this.#buttons[layer * heads].before(number(layer));
    }
    this.redraw();
  }

  #onKey(event) {
    const [layers, heads] = this.#weights.shape;
    const step = {ArrowRight: 1, ArrowLeft: -1, ArrowDown: heads, ArrowUp: -heads}[event.key];
    if (!step || layers === 1) return;
    event.preventDefault();
    this.#buttons[this.#buttons.indexOf(event.target) + step]?.focus();
  }

  #button(layer, head, isTable, matrixOf) {
    const canvas = el('canvas', {'aria-hidden': 'true'}), name = `layer ${layer}, head ${head}`;
    const matrix = matrixOf(layer, head);
    this.#pictures.push([canvas, {...matrix, range: {...matrix.range, isRoot: isTable}}]);
    const button = el('button', {type: 'button'}, canvas, ...(isTable ? [] : [`head ${head}`]));
    if (isTable) {
      button.title = name;
      button.setAttribute('aria-label', name);
    }
    button.addEventListener('click', () =>
      this.dispatchEvent(new CustomEvent('choosehead', {detail: {layer, head}, bubbles: true})));
    return button;
  }

  redraw() {
    for (const [canvas, matrix] of this.#pictures) paint(canvas, matrix, SIZE / Math.max(matrix.rows, matrix.columns));
  }
}
customElements.define('rapt-heads', Heads);
