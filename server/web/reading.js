// What a row of weights says, in words.
import {phrase, show} from './text.js';

const WITH_SINK = 0.98;  // weights of a row without a sink sum to 1, in 16 bits about

/** The column and the value of the largest number in a row. */
function largestOf({columns, values}, row) {
  let at = 0;
  for (let column = 1; column < columns; ++column) {
    if (values[row * columns + column] > values[row * columns + at]) at = column;
  }
  return {at, weight: values[row * columns + at]};
}

/** “the” attends most to “cat” (0.612); nothing if it attends to none. @param {import('./matrix.js').Matrix} matrix */
export function mostOf(matrix, row) {
  const {at, weight} = largestOf(matrix, row);
  return weight > 0 ? [...phrase`“${matrix.rowLabels[row]}” attends most to “${matrix.columnLabels[at]}”`, ` (${show(weight)})`] : [];
}

/** What a causal mask changes in a row. @param {import('./matrix.js').Matrix} before @param {import('./matrix.js').Matrix} after */
export function changeOf(before, after, row) {
  const {columns, rowLabels, columnLabels} = after;
  const sumOf = ({values}, keys) => keys.reduce((sum, n) => sum + values[row * columns + n], 0);
  const isHidden = ({hidden}, n) => Boolean(hidden?.[row * columns + n]);
  const keys = columnLabels.map((_, n) => n);
  const newlyHidden = keys.filter((n) => isHidden(after, n) && !isHidden(before, n));
  const word = rowLabels[row];
  if (newlyHidden.length === 0) return phrase`The causal mask hides no word from “${word}”: it changes nothing here.`;
  if (keys.every((n) => isHidden(after, n))) return phrase`The causal mask hides every word from “${word}”: all its weights are 0.`;
  const lost = show(sumOf(before, newlyHidden));
  const {at, weight} = largestOf(after, row);
  const hides = `The causal mask hides ${newlyHidden.length} of ${columns} words from`;
  const have = `${newlyHidden.length > 1 ? 'which together have' : 'which has'} ${lost} without it`;
  if (lost === show(0)) return phrase`${hides} “${word}”, ${have}: it changes nothing here.`;
  const left = sumOf(after, keys) < WITH_SINK ? 'to the words that are left and to the sink' : 'to the words that are left';
  return phrase`${hides} “${word}”, ${have}. This moves ${left}: “${columnLabels[at]}” has ${show(weight)} instead of ${show(before.values[row * columns + at])}.`;
}
