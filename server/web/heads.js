// <rapt-heads>: every head of every layer as a small picture.
import {paint} from './matrix.js';
import {el} from './text.js';

const SIZE = 84;

/** Event: `choosehead` {layer, head}. */
export class Heads extends HTMLElement {
  #title = el('h3');
  #grid = el('div', {className: 'heads'});

  connectedCallback() {
    this.append(this.#title, this.#grid);
  }

  /**
   * @param {(layer: number, head: number) => import('./matrix.js').Matrix} matrixOf
   * @param {{layer: number, head: number}} chosen
   */
  show(layers, heads, matrixOf, chosen) {
    this.hidden = layers * heads === 1;
    if (this.hidden) return;
    this.#title.textContent = layers > 1 ? 'Layers × heads' : 'Heads';
    this.#grid.style.gridTemplateColumns = layers > 1 ? `repeat(${heads}, minmax(40px, 1fr))` : '';
    const hadFocus = this.#grid.contains(document.activeElement);
    this.#grid.replaceChildren(...Array.from({length: layers * heads}, (_, n) => {
      const layer = Math.floor(n / heads), head = n % heads;
      const canvas = el('canvas', {'aria-hidden': 'true'});
      const matrix = matrixOf(layer, head);
      paint(canvas, matrix, SIZE / Math.max(matrix.rows, matrix.columns));
      const isChosen = layer === chosen.layer && head === chosen.head;
      const button = el('button', {type: 'button', 'aria-pressed': isChosen}, canvas, layers > 1 ? `layer ${layer}, head ${head}` : `head ${head}`);
      button.addEventListener('click', () =>
        this.dispatchEvent(new CustomEvent('choosehead', {detail: {layer, head}, bubbles: true})));
      return button;
    }));
    if (hadFocus) this.#grid.children[chosen.layer * heads + chosen.head].focus();
  }
}
customElements.define('rapt-heads', Heads);
