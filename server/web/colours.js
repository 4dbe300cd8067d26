// Colours of matrices: viridis as `rapt plot` has it, and a scale around 0. Both are safe for colour-blind readers.

const VIRIDIS = [0x440154, 0x482475, 0x414487, 0x355f8d, 0x2a788e, 0x21918c, 0x22a884, 0x44bf70, 0x7ad151, 0xbddf26, 0xfde725];
const AROUND_0 = [0x2166ac, 0x67a9cf, 0xd1e5f0, 0xf7f7f7, 0xfddbc7, 0xef8a62, 0xb2182b];

const channels = (colour) => [colour >> 16, (colour >> 8) & 255, colour & 255];

function along(stops, share) {
  const at = Math.min(Math.max(share, 0), 1) * (stops.length - 1);
  const below = Math.min(Math.floor(at), stops.length - 2);
  const low = channels(stops[below]), high = channels(stops[below + 1]);
  return low.map((channel, n) => Math.round(channel + (high[n] - channel) * (at - below)));
}

/** @typedef {{low: number, high: number, isAround0: boolean, isRoot?: boolean}} Range `isRoot`: colours of the square root, for weights */

/** Weights are from 0 to 1; other values around 0 if they have both signs. @returns {Range} */
export function rangeOf(values, isWeight) {
  if (isWeight) return {low: 0, high: 1, isAround0: false};
  let low = Infinity, high = -Infinity;
  for (const value of values) {
    if (!Number.isFinite(value)) continue;
    low = Math.min(low, value);
    high = Math.max(high, value);
  }
  if (low > high) return {low: 0, high: 1, isAround0: false};
  if (low >= 0) return {low: 0, high: high || 1, isAround0: false};
  const size = Math.max(-low, high);
  return {low: -size, high: size, isAround0: true};
}

/** @returns {number[]} red, green, blue */
export function colourOf(value, {low, high, isAround0, isRoot}) {
  if (Number.isNaN(value)) return [213, 0, 140];
  const share = (value - low) / (high - low);
  return along(isAround0 ? AROUND_0 : VIRIDIS, isRoot ? Math.sqrt(Math.max(share, 0)) : share);
}

/** What a mask hides, as style.css has it for the legend. Saved pictures are light. */
export const MASKED = {
  light: {ground: [226, 229, 233], hatch: [139, 149, 161]},
  dark: {ground: [35, 43, 53], hatch: [108, 120, 136]},
};

export const maskedNow = () => (matchMedia('(prefers-color-scheme: dark)').matches ? MASKED.dark : MASKED.light);

/** A pixel of an ImageData. */
export const pixelOfRgb = ([r, g, b]) => ((255 << 24) | (b << 16) | (g << 8) | r) >>> 0;

const LEVELS = 1024;

/** Colours as pixels of an ImageData, for many values of one range. @returns {(value: number) => number} */
export function pixelOf(range) {
  const {low, high} = range;
  const pixel = (value) => pixelOfRgb(colourOf(value, range));
  const levels = Uint32Array.from({length: LEVELS + 1}, (_, n) => pixel(low + ((high - low) * n) / LEVELS));
  const nan = pixel(NaN), step = LEVELS / (high - low);
  return (value) => (value === value ? levels[Math.min(Math.max(Math.round((value - low) * step), 0), LEVELS)] : nan);
}

export const css = (rgb) => `rgb(${rgb.join()})`;

/** Black or white, whichever is easier to read on the colour. */
export function inkOn(rgb) {
  const [r, g, b] = rgb.map((channel) => {
    const c = channel / 255;
    return c <= 0.04045 ? c / 12.92 : ((c + 0.055) / 1.055) ** 2.4;
  });
  return 0.2126 * r + 0.7152 * g + 0.0722 * b > 0.1791 ? '#000' : '#fff';
}
