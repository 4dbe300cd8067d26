// <rapt-lines>: words on both sides, and a line for each weight, as wide as it is large.
import {el, longestOf, phrase, show, svg} from './text.js';

const STEP = 30, MOST_WIDTH = 640, TOP = 34;
const LETTER = 8;  // pixels, about
const MOST_LINES = 4096;  // beyond, only those of the chosen query

class Lines extends HTMLElement {
  update({matrixOf, layer, head, row}) {
    const {rows, columns, values, hidden, rowLabels, columnLabels} = matrixOf(layer, head);
    const height = TOP + STEP * Math.max(rows, columns);
    const width = Math.min(this.clientWidth || MOST_WIDTH, MOST_WIDTH);  // not scaled, so that words stay legible on a phone
    const side = Math.min(LETTER * Math.max(longestOf(rowLabels), longestOf(columnLabels), 12) + 10, width / 3);
    const picture = svg('svg', {
      viewBox: `0 0 ${width} ${height}`, width, height, role: 'img',
      'aria-label': `Lines from “${rowLabels[row]}” and the other words to the words that they attend to; the list of most attended words has the numbers`,
    });
    const y = (n) => TOP + STEP * (n + 0.5);
    const right = width - side;
    const fitting = (label) => (label.length * LETTER > side - 10 ? `${label.slice(0, Math.floor((side - 10) / LETTER) - 1)}…` : label);
    picture.append(
      svg('text', {x: side - 10, y: 14, 'text-anchor': 'end', class: 'quiet'}, 'looks'),
      svg('text', {x: right + 10, y: 14, class: 'quiet'}, 'is looked at'));
    for (let i = 0; i < rows; ++i) {
      if (i !== row && rows * columns > MOST_LINES) continue;
      for (let j = 0; j < columns; ++j) {
        const weight = values[i * columns + j];
        if (hidden?.[i * columns + j] || !(weight > 0.005)) continue;
        const line = svg('path', {
          class: 'link', d: `M${side} ${y(i)}C${width / 2} ${y(i)} ${width / 2} ${y(j)} ${right} ${y(j)}`,
          'stroke-width': 1 + 7 * weight, 'stroke-opacity': i === row ? 0.35 + 0.65 * weight : 0.12 * weight,
        });
        line.append(svg('title', {}, `${rowLabels[i]} attends to ${columnLabels[j]}: ${show(weight)}`));
        picture.append(line);
      }
    }
    rowLabels.forEach((label, n) => picture.append(
      svg('text', {x: side - 10, y: y(n) + 5, 'text-anchor': 'end', 'font-weight': n === row ? 700 : 400}, fitting(label))));
    columnLabels.forEach((label, n) => picture.append(svg('text', {x: right + 10, y: y(n) + 5}, fitting(label))));
    this.replaceChildren(
      el('p', {className: 'quiet'}, ...phrase`The strong lines belong to “${rowLabels[row]}”; choose another word in the map.`), picture);
  }
}
customElements.define('rapt-lines', Lines);
