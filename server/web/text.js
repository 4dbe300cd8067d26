// Numbers and elements as text and DOM.

/** The text of a large number, which has an exponent; that of another one is made by `write`. */
const orExponent = (value, write) => (Math.abs(value) >= 1e5 ? value.toExponential(2) : write());

/** Returns a value as the page and the copied Python show it: three decimals. */
export function show(value, decimals = 3) {
  if (Number.isNaN(value)) return 'NaN';
  if (!Number.isFinite(value)) return value > 0 ? '∞' : '−∞';
  const text = orExponent(value, () => value.toFixed(decimals));
  return Number(text) === 0 ? text.replace('-', '') : text.replace('-', '−');
}

/** Returns a number of a scale: three digits at most. */
export const brief = (value) => orExponent(value, () => String(Number(value.toPrecision(3)))).replace('-', '−');

const UNITS = ['B', 'KiB', 'MiB', 'GiB', 'TiB'];

export function showBytes(bytes) {
  let unit = 0;
  while (bytes >= 1024 && unit < UNITS.length - 1) {
    bytes /= 1024;
    unit += 1;
  }
  return `${unit === 0 || bytes >= 100 ? Math.round(bytes) : bytes.toFixed(1)} ${UNITS[unit]}`;
}

/** Pixels of a rem. */
export const remOf = () => parseFloat(getComputedStyle(document.documentElement).fontSize);

/** Returns the number of characters of the longest label. */
export const longestOf = (labels) => labels.reduce((most, label) => Math.max(most, label.length), 0);

/** Returns an element with properties, attributes (`role`, `aria-*`, `data-*`) and children. */
export function el(name, properties = {}, ...children) {
  const element = document.createElement(name);
  for (const [key, value] of Object.entries(properties)) {
    if (/^(role$|scope$|aria-|data-)/.test(key)) element.setAttribute(key, value);
    else element[key] = value;
  }
  element.append(...children);
  return element;
}

/** Nodes of a text with words in it, which may be written from right to left: phrase`What “${word}” attends to`. */
export const phrase = (parts, ...words) => parts.flatMap((part, n) => (n < words.length ? [part, el('bdi', {}, words[n])] : [part]));

export function svg(name, attributes = {}, ...children) {
  const element = document.createElementNS('http://www.w3.org/2000/svg', name);
  for (const [key, value] of Object.entries(attributes)) element.setAttribute(key, value);
  element.append(...children);
  return element;
}

/** Returns a table with a header row and a header column; cells are texts, numbers or elements. */
export function table(caption, columns, rows) {
  return el('table', {},
    el('caption', {}, caption),
    el('thead', {}, el('tr', {}, ...columns.map((text) => el('th', {scope: 'col'}, text)))),
    el('tbody', {}, ...rows.map(([first, ...rest]) =>
      el('tr', {}, el('th', {scope: 'row'}, first), ...rest.map((text) => el('td', {}, text))))));
}
