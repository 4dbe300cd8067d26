// <rapt-heads>: every head of every layer as a small picture.
import {paint} from './matrix.js';
import {el} from './text.js';

const SIZE = 84;

/** Event: `choosehead` {layer, head}. */
export class Heads extends HTMLElement {
  #weights = null;  // that the pictures show
  #pictures = [];   // [canvas, matrix]
  #title = el('h3');
  #grid = el('div', {className: 'heads', role: 'group'});

  connectedCallback() {
    this.append(this.#title, this.#grid);
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
    [...this.#grid.children].forEach((button, n) => button.setAttribute('aria-pressed', n === chosen.layer * heads + chosen.head));
  }

  #draw(layers, heads, matrixOf) {
    this.#grid.style.gridTemplateColumns = layers > 1 ? `repeat(${heads}, minmax(40px, 1fr))` : '';
    this.#pictures = [];
    this.#grid.replaceChildren(...Array.from({length: layers * heads}, (_, n) => {
      const layer = Math.floor(n / heads), head = n % heads;
      const canvas = el('canvas', {'aria-hidden': 'true'});
      this.#pictures.push([canvas, matrixOf(layer, head)]);
      const button = el('button', {type: 'button'}, canvas, layers > 1 ? `layer ${layer}, head ${head}` : `head ${head}`);
      button.addEventListener('click', () =>
        this.dispatchEvent(new CustomEvent('choosehead', {detail: {layer, head}, bubbles: true})));
      return button;
    }));
    this.redraw();
  }

  redraw() {
    for (const [canvas, matrix] of this.#pictures) paint(canvas, matrix, SIZE / Math.max(matrix.rows, matrix.columns));
  }
}
customElements.define('rapt-heads', Heads);
