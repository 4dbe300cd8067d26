// What a row of weights says, in words.
import {phrase, show} from './text.js';

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
  const isHidden = ({hidden}, n) => Boolean(hidden?.[row * columns + n]);
  const keys = columnLabels.map((_, n) => n);
  const newlyHidden = keys.filter((n) => isHidden(after, n) && !isHidden(before, n));
  const word = rowLabels[row];
  if (newlyHidden.length === 0) return phrase`The causal mask hides no word from “${word}”: it changes nothing here.`;
  if (keys.every((n) => isHidden(after, n))) return phrase`The causal mask hides every word from “${word}”: all its weights are 0.`;
  const lost = newlyHidden.reduce((sum, n) => sum + before.values[row * columns + n], 0);
  const {at, weight} = largestOf(after, row);
  const hides = `The causal mask hides ${newlyHidden.length} of ${columns} words from`;
  const lose = `${newlyHidden.length > 1 ? 'which together have' : 'which has'} ${show(lost)} without it. This moves to the words that are left:`;
  return phrase`${hides} “${word}”, ${lose} “${columnLabels[at]}” has ${show(weight)} instead of ${show(before.values[row * columns + at])}.`;
}
