// <rapt-heat-map>: a matrix on a canvas, under a grid of cells that the keyboard walks and a screen reader reads. The cells have
// labels and no text: Orca reads the text instead of the label if there is one.
import {colourOf, css} from './colours.js';
import {paint} from './matrix.js';
import {mostOf} from './reading.js';
import {brief, el, longestOf, remOf, show, table} from './text.js';

const MOST_CELLS = 1600;  // of a larger matrix, the grid has only the cell that has the focus
const LABELS_FROM = 11;   // pixels of a label; where cells are smaller, some have none
const LABEL_GAP = 6;      // between labels side by side
const ATTENDS = 'attends to';
const GAP = 12;           // between labels and cells, as in style.css
const SIZE_OF_LABELS = 0.75;  // the font's, as a share of the cell
const LETTER_REM = 0.57;      // the width of a letter, about
const LABEL_REM = 8, LABEL_SHARE = 0.25;  // the most of a label, and of the width
const LARGEST_REM = 4.5;
const SMALLEST_FOR_KEYS = 8;
const LEGEND_STEPS = 10;
const MOVES = {ArrowUp: [-1, 0], ArrowDown: [1, 0], ArrowLeft: [0, -1], ArrowRight: [0, 1]};

/**
 * Events: `choose` {row, column} when a cell gets the focus or the pointer's press; `paintcell` {row, column} for Space
 * and for dragging while `paints` is set.
 */
export class HeatMap extends HTMLElement {
  /** @type {import('./matrix.js').Matrix} */
  #matrix;
  #cell = 0;
  #row = 0;
  #column = 0;
  #isTable = false;
  #name = '';
  #verb = '';
  paints = false;

  constructor() {
    super();
    this.#canvas.setAttribute('aria-hidden', 'true');
    this.#observer = new ResizeObserver(() => {
      this.#fitReadout();
      this.#fit();
    });
  }

  #observer;
  #canvas = el('canvas');
  #grid = el('div', {role: 'grid', className: 'cells'});
  #columnLabels = el('div', {className: 'column-labels', 'aria-hidden': 'true'});
  #rowLabels = el('div', {className: 'row-labels', 'aria-hidden': 'true'});
  #marker = el('div', {className: 'row-marker', 'aria-hidden': 'true'});
  #readout = el('p', {className: 'readout'});
  #plot = el('div', {className: 'plot'});
  #legend = el('div', {className: 'legend', 'aria-hidden': 'true'});
  #table = el('div', {className: 'scroll', tabIndex: 0, role: 'region', hidden: true});

  connectedCallback() {
    if (this.#plot.isConnected) return;
    this.#plot.append(this.#columnLabels, this.#rowLabels, el('div', {className: 'matrix'}, this.#canvas, this.#marker, this.#grid));
    this.append(this.#readout, this.#plot, this.#legend, this.#table);
    this.#grid.addEventListener('keydown', (event) => this.#onKey(event));
    this.#grid.addEventListener('pointermove', (event) => this.#onPointer(event, event.buttons === 1));
    this.#grid.addEventListener('pointerdown', (event) => this.#onPress(event));
    this.#grid.addEventListener('focusin', ({target}) => this.#choose(target));
    this.#observer.observe(this);
  }

  disconnectedCallback() {
    this.#observer.disconnect();
  }

  get matrix() { return this.#matrix; }

  /**
   * @param {import('./matrix.js').Matrix} matrix
   * @param {{name: string, verb?: string, ends?: string[], isTable?: boolean}} options `verb`: "the" VERB "cat" 0.31; `ends`: what
   *   the ends of the scale mean
   */
  show(matrix, {name, verb = ATTENDS, ends = ['', ''], isTable = false}) {
    this.#matrix = matrix;
    this.#cell = 0;  // drawn again, now or once there is room
    this.#isTable = isTable;
    this.#verb = verb;
    this.#name = name;
    this.#grid.setAttribute('aria-label', name);
    this.#table.setAttribute('aria-label', `${name}, as a table`);
    this.#row = Math.min(this.#row, matrix.rows - 1);
    this.#column = Math.min(this.#column, matrix.columns - 1);
    this.#plot.hidden = this.#legend.hidden = isTable;
    this.#showLegend(ends);
    this.#marker.hidden = matrix.rows === 1;
    this.#table.hidden = !isTable;
    if (isTable) this.#showTable();
    else this.#fit();
    this.#sayMost();
  }

  /** Puts the focus on the cell of the marked row, or on the table. */
  focus() {
    (this.#isTable ? this.#table : this.#cellAt(this.#row, this.#column))?.focus();
  }

  /** Draws again what is drawn. */
  redraw() {
    if (this.#cell) paint(this.#canvas, this.#matrix, this.#cell);
  }

  /** Marks the row of a query. */
  mark(row) {
    if (!this.#matrix || row === this.#row) return;
    this.#setCurrent(row, this.#column);
    this.#sayMost();
    this.#followRow();
    if (this.#isTable) this.#showTable();
  }

  #describe(row, column) {
    const {columns, values, hidden, rowLabels, columnLabels} = this.#matrix;
    const at = row * columns + column;
    const isHidden = hidden?.[at] ? 'masked, ' : '';
    return [rowLabels[row], this.#verb, columnLabels[column], `${isHidden}${show(values[at])}`];
  }

  #textOf(row, column) {
    const [query, verb, key, value] = this.#describe(row, column);
    return `${query} ${verb} ${key}: ${value}`;
  }

  #say(row, column) {
    const [query, verb, key, value] = this.#describe(row, column);
    this.#fillReadout([el('bdi', {}, query), ` ${verb} `, el('bdi', {}, key), `: ${value}`]);
  }

  /** Until a cell is pointed at: the largest weight of the row, if these are weights. */
  #sayMost() {
    this.#fillReadout(this.#verb === ATTENDS ? mostOf(this.#matrix, this.#row) : []);
  }

  #fillReadout(nodes) {
    this.#readout.replaceChildren(...nodes);
    this.#fitReadout();
  }

  #showLegend([lowMeans, highMeans]) {
    const {range, hidden} = this.#matrix, {low, high} = range;
    const scale = el('i');
    const stops = Array.from({length: LEGEND_STEPS + 1}, (_, n) => css(colourOf(low + ((high - low) * n) / LEGEND_STEPS, range)));
    scale.style.backgroundImage = `linear-gradient(to right, ${stops.join()})`;
    this.#legend.replaceChildren(el('span', {}, `${lowMeans} ${brief(low)}`.trim()), scale, el('span', {}, `${brief(high)} ${highMeans}`.trim()),
      ...(hidden ? [el('span', {className: 'masked'}, 'masked')] : []));
  }

  // --- Layout ---

  /** Cuts words only where there is no room: a screen reader pauses at each word that may be cut. */
  #fitReadout() {
    this.#readout.classList.toggle('tight', this.#readout.textContent.length * LETTER_REM * remOf() > this.clientWidth);
  }

  #fit() {
    const matrix = this.#matrix;
    if (!matrix || this.#isTable || this.clientWidth === 0) return;
    const rem = remOf(), letter = LETTER_REM * rem;
    const mostOfLabel = Math.min(LABEL_REM * rem, LABEL_SHARE * this.clientWidth);
    const labelWidth = Math.min(longestOf(matrix.rowLabels) * letter + 10, mostOfLabel);
    this.#rowLabels.style.setProperty('--most', `${mostOfLabel}px`);
    const room = this.clientWidth - labelWidth - 2 * GAP;
    let cell = Math.min(LARGEST_REM * rem, room / matrix.columns, Math.max(this.clientWidth, 480) / matrix.rows);
    if (cell >= 2) cell = Math.floor(cell);
    if (cell === this.#cell) return;
    this.#cell = cell;
    paint(this.#canvas, matrix, cell);
    this.#placeLabels();
    this.#placeCells(cell);
    this.#placeMarker();
  }

  /** Where a label is larger than its cell, every nth and that of the marked row. */
  #placeLabels() {
    const {rowLabels, columnLabels} = this.#matrix, cell = this.#cell;
    const size = Math.max(cell, LABELS_FROM), step = Math.ceil(LABELS_FROM / cell);
    const fill = (box, labels, axis, chosen) => {
      const isShown = (n) => n === chosen || (n % step === 0 && Math.abs(n - chosen) >= step && n + step <= labels.length);
      box.replaceChildren(...labels.map((_, n) => n).filter(isShown).map((n) => {
        const label = el('span', {title: labels[n]}, labels[n]);
        const first = Math.max(0, Math.min(n, labels.length - step)), shift = (n + 0.5 - first - step / 2) * cell;
        label.style[`grid${axis}`] = `${first + 1} / span ${step}`;
        label.style.translate = axis === 'Row' ? `0 ${shift}px` : `${shift}px`;  // to the middle of its own cell
        return label;
      }));
      box.style[`gridTemplate${axis}s`] = `repeat(${labels.length}, ${cell}px)`;
    };
    fill(this.#columnLabels, columnLabels, 'Column', -step);
    fill(this.#rowLabels, rowLabels, 'Row', this.#row);
    this.#columnLabels.classList.toggle('upright', step > 1 || longestOf(columnLabels) * LETTER_REM * remOf() + LABEL_GAP > cell);
    this.#plot.style.fontSize = `min(0.93rem, ${SIZE_OF_LABELS * size}px)`;
  }

  #placeCells(cell) {
    const {rows, columns} = this.#matrix;
    const hadFocus = this.#grid.contains(document.activeElement);
    const isWhole = rows * columns <= MOST_CELLS;
    this.#grid.setAttribute('aria-rowcount', rows);
    this.#grid.setAttribute('aria-colcount', columns);
    this.#grid.style.gridTemplateColumns = isWhole ? `repeat(${columns}, ${cell}px)` : '';
    this.#grid.style.gridAutoRows = isWhole ? `${cell}px` : '';
    this.#grid.classList.toggle('whole', isWhole);
    const range = (count, first) => Array.from({length: isWhole ? count : 1}, (_, n) => (isWhole ? n : first));
    this.#grid.replaceChildren(...range(rows, this.#row).map((row) =>
      el('div', {role: 'row', 'aria-rowindex': row + 1}, ...range(columns, this.#column).map((column) => this.#makeCell(row, column)))));
    if (hadFocus) this.#cellAt(this.#row, this.#column).focus({preventScroll: true});
  }

  #makeCell(row, column) {
    const isCurrent = row === this.#row && column === this.#column;
    const cell = el('div', {
      role: 'gridcell', tabIndex: isCurrent ? 0 : -1, 'aria-colindex': column + 1, 'aria-label': this.#textOf(row, column),
    });
    if (!this.#grid.classList.contains('whole')) this.#place(cell, row, column);
    return cell;
  }

  #place(cell, row, column) {
    const size = Math.max(this.#cell, SMALLEST_FOR_KEYS);
    Object.assign(cell.style, {
      left: `${(column + 0.5) * this.#cell - size / 2}px`, top: `${(row + 0.5) * this.#cell - size / 2}px`,
      width: `${size}px`, height: `${size}px`,
    });
  }

  #followRow() {
    if (this.#cell > 0 && this.#cell < LABELS_FROM) this.#placeLabels();
    this.#placeMarker();
  }

  #placeMarker() {
    if (!this.#matrix) return;
    this.#marker.style.top = `${this.#row * this.#cell}px`;
    this.#marker.style.height = `${this.#cell}px`;
  }

  #showTable() {
    const {rows, columns, values, hidden, rowLabels, columnLabels} = this.#matrix;
    const isWhole = rows * columns <= 4 * MOST_CELLS;
    const shown = isWhole ? rowLabels.map((_, row) => row) : [this.#row];
    this.#table.replaceChildren(table(isWhole ? this.#name : `${this.#name}: the chosen row of ${rows}`, ['', ...columnLabels], shown.map((row) =>
      [rowLabels[row], ...columnLabels.map((_, column) => {
        const at = row * columns + column;
        return hidden?.[at] ? el('span', {role: 'img', 'aria-label': 'masked'}, '–') : show(values[at]);
      })])));
  }

  // --- Input ---

  #cellAt(row, column) {
    if (!this.#grid.classList.contains('whole')) return this.#grid.querySelector('[role=gridcell]');
    return this.#grid.children[row]?.children[column];
  }

  /** Makes a cell the one that Tab reaches. Returns it, if the grid is shown. */
  #setCurrent(row, column) {
    const {rows, columns} = this.#matrix;
    const before = this.#cellAt(this.#row, this.#column);
    this.#row = Math.min(Math.max(row, 0), rows - 1);
    this.#column = Math.min(Math.max(column, 0), columns - 1);
    if (!before) return null;
    const isWhole = this.#grid.classList.contains('whole');
    const cell = isWhole ? this.#cellAt(this.#row, this.#column) : this.#makeCell(this.#row, this.#column);
    if (isWhole) {
      before.tabIndex = -1;
      cell.tabIndex = 0;
    } else {
      before.parentElement.setAttribute('aria-rowindex', this.#row + 1);
      before.replaceWith(cell);
    }
    return cell;
  }

  #move(row, column) {
    this.#setCurrent(row, column)?.focus();
  }

  #onKey(event) {
    const {rows, columns} = this.#matrix;
    const step = event.shiftKey ? 10 : 1;
    if (MOVES[event.key]) {
      const [down, right] = MOVES[event.key];
      this.#move(this.#row + down * step, this.#column + right * step);
    } else if (event.key === 'Home') {
      this.#move(event.ctrlKey ? 0 : this.#row, 0);
    } else if (event.key === 'End') {
      this.#move(event.ctrlKey ? rows - 1 : this.#row, columns - 1);
    } else if (event.key === ' ') {
      if (this.paints) this.#emit('paintcell', this.#row, this.#column);
    } else {
      return;
    }
    event.preventDefault();
  }

  #under(event) {
    const {left, top} = this.#grid.getBoundingClientRect();
    const {rows, columns} = this.#matrix;
    const row = Math.floor((event.clientY - top) / this.#cell), column = Math.floor((event.clientX - left) / this.#cell);
    return [Math.min(Math.max(row, 0), rows - 1), Math.min(Math.max(column, 0), columns - 1)];
  }

  #onPointer(event, isDragged) {
    const [row, column] = this.#under(event);
    this.#say(row, column);
    if (isDragged && this.paints && (row !== this.#row || column !== this.#column)) this.#press(row, column);
  }

  #onPress(event) {
    event.preventDefault();
    this.#press(...this.#under(event));
  }

  #press(row, column) {
    this.#move(row, column);
    if (this.paints) this.#emit('paintcell', row, column);
  }

  #choose(cell) {
    const row = Number(cell.parentElement.getAttribute('aria-rowindex')) - 1, column = Number(cell.getAttribute('aria-colindex')) - 1;
    if (row !== this.#row || column !== this.#column) this.#setCurrent(row, column);
    this.#say(this.#row, this.#column);
    this.#followRow();
    this.#emit('choose', this.#row, this.#column);
  }

  #emit(type, row, column) {
    this.dispatchEvent(new CustomEvent(type, {detail: {row, column}, bubbles: true}));
  }
}
customElements.define('rapt-heat-map', HeatMap);
