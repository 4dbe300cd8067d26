// Draws matrices on canvases, and heat maps as pictures.
import {colourOf, css, inkOn, MASKED, maskedNow, pixelOf, pixelOfRgb, rangeOf} from './colours.js';
import {headOf} from './tensor.js';
import {remOf, show, svg} from './text.js';

/**
 * @typedef {Object} Matrix
 * @property {number} rows
 * @property {number} columns
 * @property {ArrayLike<number>} values
 * @property {ArrayLike<number>} [hidden] 1 where a mask hides a key
 * @property {string[]} rowLabels
 * @property {string[]} columnLabels
 * @property {import('./colours.js').Range} range
 * @property {boolean} [isSelf] the words of the rows look at each other
 */

/**
 * The weights of a head.
 * @param {{weights: import('./tensor.js').Tensor, hidden: ?import('./tensor.js').Tensor, source: import('./sources.js').Source,
 *   keyLabels?: string[]}} answer with weights [layers, heads, queries, keys]
 * @returns {Matrix}
 */
export function matrixOfWeights({weights, hidden, source, keyLabels = source.keyLabels}, layer, head) {
  const [, count, rows, columns] = weights.shape;
  const at = layer * count + head;
  return {
    rows, columns, values: headOf(weights, at), hidden: hidden && headOf(hidden, at),
    rowLabels: source.queryLabels, columnLabels: keyLabels, range: rangeOf([], true), isSelf: source.keyLabels === source.queryLabels,
  };
}

const GAP_FROM = 12;  // pixels of a cell
const HATCH_FROM = 5;
const NUMBERS_FROM = 34;
const MOST_OF_CELL = 0.92;      // of the width, for a number
const SMALLEST_NUMBERS = 6;     // pixels; longer ones are left out
const SIZE_OF_NUMBERS = 0.28;   // the font's, as a share of the cell
const LARGEST_NUMBERS = 13;     // pixels
const LARGEST_REM = 0.85;

/** One pixel for each element. */
function pixelsOf({rows, columns, values, hidden, range}, masked) {
  const image = new ImageData(columns, rows);
  const pixels = new Uint32Array(image.data.buffer), pixel = pixelOf(range), maskedPixel = pixelOfRgb(masked.ground);
  for (let at = 0; at < rows * columns; ++at) pixels[at] = hidden?.[at] ? maskedPixel : pixel(values[at]);
  const canvas = new OffscreenCanvas(columns, rows);
  canvas.getContext('2d').putImageData(image, 0, 0);
  return canvas;
}

function hatching(context, masked) {
  const tile = new OffscreenCanvas(6, 6);
  const lines = tile.getContext('2d');
  lines.strokeStyle = css(masked.hatch);
  for (const at of [0, 6, 12]) {  // the corners belong to the neighbouring tiles' lines
    lines.moveTo(at - 6.5, 6.5);
    lines.lineTo(at + 0.5, -0.5);
  }
  lines.stroke();
  return context.createPattern(tile, 'repeat');
}

/**
 * Fills a context with the matrix. @param {number} cell the pixels of an element @param masked the colours of what is hidden
 * @param {number} largest the most pixels of the font of numbers
 */
function drawMatrix(context, matrix, cell, masked, largest) {
  const {rows, columns, hidden} = matrix;
  const width = columns * cell, height = rows * cell;
  context.imageSmoothingEnabled = cell < 1;
  context.drawImage(pixelsOf(matrix, masked), 0, 0, width, height);
  if (hidden && cell >= HATCH_FROM) {
    context.fillStyle = hatching(context, masked);
    for (let at = 0; at < rows * columns; ++at) {
      if (hidden[at]) context.fillRect((at % columns) * cell, Math.floor(at / columns) * cell, cell, cell);
    }
  }
  if (cell < GAP_FROM) return;
  for (let column = 1; column < columns; ++column) context.clearRect(column * cell - 0.5, 0, 1, height);
  for (let row = 1; row < rows; ++row) context.clearRect(0, row * cell - 0.5, width, 1);
  if (cell >= NUMBERS_FROM) drawNumbers(context, matrix, cell, largest);
}

function drawNumbers(context, matrix, cell, largest) {
  const {texts, size} = numbersOf(matrix, cell, Math.min(largest, SIZE_OF_NUMBERS * cell));
  context.font = fontOf(size);
  context.textAlign = 'center';
  context.textBaseline = 'middle';
  texts.forEach((text, at) => {
    context.fillStyle = inkOn(colourOf(matrix.values[at], matrix.range));
    context.fillText(text, ((at % matrix.columns) + 0.5) * cell, (Math.floor(at / matrix.columns) + 0.5) * cell);
  });
}

const fontOf = (size) => `${size}px system-ui, sans-serif`;

/** The numbers of all cells as they are everywhere on the page, in one size, in which the longest fits; '' where a cell is masked. */
function numbersOf({values, hidden}, cell, largest) {
  const texts = Array.from(values, (value, at) => (hidden?.[at] ? '' : show(value)));
  const measure = new OffscreenCanvas(1, 1).getContext('2d');
  measure.font = fontOf(largest);
  const widest = texts.reduce((most, text) => Math.max(most, measure.measureText(text).width), 0);
  const size = Math.min(largest, (largest * MOST_OF_CELL * cell) / widest);
  return {size, texts: size < SMALLEST_NUMBERS ? texts.fill('') : texts};
}

/** Makes the canvas show the matrix in cells of this many CSS pixels. */
export function paint(canvas, matrix, cell) {
  const ratio = window.devicePixelRatio || 1;
  const width = matrix.columns * cell, height = matrix.rows * cell;
  canvas.width = Math.max(1, Math.round(width * ratio));
  canvas.height = Math.max(1, Math.round(height * ratio));
  canvas.style.width = `${width}px`;
  canvas.style.height = `${height}px`;
  const context = canvas.getContext('2d');
  context.scale(canvas.width / width, canvas.height / height);
  drawMatrix(context, matrix, cell, maskedNow(), LARGEST_REM * remOf());
}

// --- Pictures ------------------------------------------------------------------------------------

const PICTURE_CELL = 40, LABEL_ROOM = 90, MOST_SVG_CELLS = 65536;

/** @returns {Promise<Blob>} */
export async function pngOf(matrix) {
  const {rows, columns, rowLabels, columnLabels} = matrix;
  const cell = Math.max(1, Math.min(PICTURE_CELL, Math.floor(2048 / Math.max(rows, columns))));
  const hasLabels = cell >= GAP_FROM, room = hasLabels ? LABEL_ROOM : 0;
  const canvas = new OffscreenCanvas(room + columns * cell, room + rows * cell);
  const context = canvas.getContext('2d');
  context.translate(room, room);
  drawMatrix(context, matrix, cell, MASKED.light, LARGEST_NUMBERS);
  context.globalCompositeOperation = 'destination-over';
  context.fillStyle = '#fff';
  context.fillRect(-room, -room, canvas.width, canvas.height);
  context.globalCompositeOperation = 'source-over';
  context.font = `${Math.min(13, cell)}px system-ui, sans-serif`;
  context.textBaseline = 'middle';
  if (hasLabels) {
    context.fillStyle = '#222';
    context.textAlign = 'right';
    rowLabels.forEach((label, row) => context.fillText(label, -8, (row + 0.5) * cell, room - 12));
    context.textAlign = 'left';
    columnLabels.forEach((label, column) => {
      context.save();
      context.translate((column + 0.5) * cell, -8);
      context.rotate(-Math.PI / 2);
      context.fillText(label, 0, 0, room - 12);
      context.restore();
    });
  }
  return canvas.convertToBlob({type: 'image/png'});
}

/** Characters that a document of XML can't have; words may have them. */
const NOT_OF_XML = /[^\t\n\r\x20-\ud7ff\ue000-\ufffd\u{10000}-\u{10ffff}]/gu;

/** @returns {Blob} */
export function svgOf(matrix) {
  const {rows, columns, values, hidden, rowLabels, columnLabels, range} = matrix;
  if (rows * columns > MOST_SVG_CELLS) throw new RangeError(`The matrix has ${rows} × ${columns} cells; an SVG has at most ${MOST_SVG_CELLS}. Save a PNG.`);
  const cell = PICTURE_CELL, width = LABEL_ROOM + columns * cell, height = LABEL_ROOM + rows * cell;
  const picture = svg('svg', {viewBox: `0 0 ${width} ${height}`, width, height, 'font-family': 'sans-serif', 'font-size': 13});
  const numbers = numbersOf(matrix, cell, SIZE_OF_NUMBERS * cell);
  picture.append(svg('rect', {width, height, fill: '#fff'}));
  rowLabels.forEach((label, row) => picture.append(
    svg('text', {x: LABEL_ROOM - 8, y: LABEL_ROOM + (row + 0.5) * cell + 4, 'text-anchor': 'end'}, label)));
  columnLabels.forEach((label, column) => {
    const x = LABEL_ROOM + (column + 0.5) * cell + 4, y = LABEL_ROOM - 8;
    picture.append(svg('text', {x, y, transform: `rotate(-90 ${x} ${y})`}, label));
  });
  for (let at = 0; at < rows * columns; ++at) {
    const x = LABEL_ROOM + (at % columns) * cell, y = LABEL_ROOM + Math.floor(at / columns) * cell;
    const rgb = hidden?.[at] ? MASKED.light.ground : colourOf(values[at], range);
    picture.append(svg('rect', {x, y, width: cell - 1, height: cell - 1, fill: css(rgb)}));
    const text = hidden?.[at] ? '–' : numbers.texts[at];
    picture.append(svg('text', {x: x + cell / 2, y: y + cell / 2 + 4, 'text-anchor': 'middle', 'font-size': numbers.size, fill: inkOn(rgb)}, text));
  }
  return new Blob([new XMLSerializer().serializeToString(picture).replace(NOT_OF_XML, '\ufffd')], {type: 'image/svg+xml'});
}
