// Line charts as SVG, with a table of the same numbers.
import {el, svg, table} from './text.js';

const WIDTH = 640, HEIGHT = 320, LEFT = 116, RIGHT = 32, TOP = 18, BOTTOM = 56;
// Okabe and Ito's colours, which colour-blind readers tell apart, in the order of contrast to both backgrounds, and a grey.
const COLOURS = ['#0072b2', '#d55e00', '#009e73', '#cc79a7', '#e69f00', '#56b4e9', '#858585'];
const DASHED_FROM = 3;

/** A scale from numbers to pixels, linear or logarithmic, and its ticks. `endsAtTicks`: a linear one has a tick at both ends. */
function scaleOf(values, from, to, isLog, endsAtTicks = false) {
  let low = Math.min(...values), high = Math.max(...values);
  if (low === high) [low, high] = isLog ? [low / 2, high * 2] : [Math.min(low, 0), Math.max(high, low + 1)];
  const step = stepOf(low, high, values.every(Number.isInteger) ? 1 : 0);
  if (endsAtTicks && !isLog) [low, high] = [Math.floor(low / step) * step, Math.ceil(high / step) * step];
  const move = isLog ? Math.log2 : (x) => x;
  const place = (x) => from + ((move(x) - move(low)) / (move(high) - move(low))) * (to - from);
  return {place, ticks: isLog ? logTicks(low, high) : linearTicks(low, high, step)};
}

function logTicks(low, high) {
  const steps = Math.max(1, Math.ceil((Math.log2(high) - Math.log2(low)) / 6));
  const ticks = [];
  for (let power = Math.ceil(Math.log2(low)); power <= Math.log2(high); power += steps) ticks.push(2 ** power);
  return ticks;
}

/** Between linear ticks. */
function stepOf(low, high, least) {
  const rough = Math.max((high - low) / 5, least), magnitude = 10 ** Math.floor(Math.log10(rough));
  return magnitude * [1, 2, 5, 10].find((factor) => factor * magnitude >= rough);
}

function linearTicks(low, high, step) {
  const ticks = [];
  for (let tick = Math.ceil(low / step) * step; tick <= high + step / 1e6; tick += step) ticks.push(Number(tick.toPrecision(12)));
  return ticks;
}

/**
 * `colour` counts colours from 0, by default as series follow each other.
 * @param {{title: string, x: string, xs: number[], series: {name: string, values: number[], colour?: number}[], isLog?: boolean,
 *   showX?: (x: number) => string, showY?: (y: number) => string}} chart
 * @returns {HTMLElement}
 */
export function lineChart({title, x, xs, series, isLog = false, showX = String, showY = String}) {
  const ys = series.flatMap(({values}) => values).filter((y) => Number.isFinite(y) && (!isLog || y > 0));
  if (ys.length === 0) return el('p', {className: 'quiet'}, `${title}: nothing to show.`);
  const across = scaleOf(xs, LEFT, WIDTH - RIGHT, isLog), up = scaleOf(ys, HEIGHT - BOTTOM, TOP, isLog, true);
  const picture = svg('svg', {viewBox: `0 0 ${WIDTH} ${HEIGHT}`, class: 'chart', role: 'img', 'aria-label': `${title}; the table below has the numbers`});
  for (const tick of up.ticks) {
    const y = up.place(tick);
    picture.append(svg('line', {class: 'axis', x1: LEFT, x2: WIDTH - RIGHT, y1: y, y2: y}),
      svg('text', {class: 'quiet', x: LEFT - 8, y: y + 4, 'text-anchor': 'end'}, showY(tick)));
  }
  for (const tick of across.ticks) {
    picture.append(svg('text', {class: 'quiet', x: across.place(tick), y: HEIGHT - BOTTOM + 24, 'text-anchor': 'middle'}, showX(tick)));
  }
  picture.append(svg('text', {class: 'quiet', x: (LEFT + WIDTH) / 2, y: HEIGHT - 6, 'text-anchor': 'middle'}, x));
  const coloured = series.map((one, n) => ({colour: n, ...one}));
  for (const {values, colour} of coloured) {
    const points = values.map((y, at) => (isLog && !(y > 0) ? '' : `${across.place(xs[at])},${up.place(y)}`)).filter(Boolean);
    const line = svg('polyline', {points: points.join(' '), fill: 'none', stroke: COLOURS[colour % COLOURS.length], 'stroke-width': 2.5});
    if (colour >= DASHED_FROM) line.setAttribute('stroke-dasharray', '7 4');
    picture.append(line);
  }
  const symbols = el('div', {className: 'symbols'}, ...coloured.map(({name, colour}) => {
    const mark = el('i', {className: colour >= DASHED_FROM ? 'dashed' : ''});
    mark.style.borderColor = COLOURS[colour % COLOURS.length];
    return el('span', {}, mark, name);
  }));
  const rows = xs.map((at, n) => [showX(at), ...series.map(({values}) => (Number.isFinite(values[n]) ? showY(values[n]) : '–'))]);
  const numbers = el('details', {}, el('summary', {}, 'Numbers'),
    el('div', {className: 'scroll', tabIndex: 0, role: 'region', 'aria-label': `${title}, numbers`}, table(title, [x, ...series.map(({name}) => name)], rows)));
  return el('div', {className: 'stack'}, el('h3', {}, title), picture, symbols, numbers);
}
