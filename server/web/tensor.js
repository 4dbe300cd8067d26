// Tensors as the protocols carry them: a type, a shape, and numbers in row-major order.

/** @typedef {{datatype: string, shape: number[], values: ArrayLike<number>}} Tensor */

export const BYTES = {FP64: 8, FP32: 4, FP16: 2, BF16: 2, BOOL: 1, INT32: 4, INT64: 8};

/** @returns {Tensor} */
export function tensor(datatype, shape, values) {
  return {datatype, shape, values};
}

export const sizeOf = (shape) => shape.reduce((product, axis) => product * axis, 1);

/** Returns the numbers of one head of [1, H, rows, columns]. */
export function headOf(tensor, head) {
  const [rows, columns] = tensor.shape.slice(-2);
  return tensor.values.subarray(head * rows * columns, (head + 1) * rows * columns);
}

const scratch = new DataView(new ArrayBuffer(4));

function bitsOfFloat(value) {
  scratch.setFloat32(0, value);
  return scratch.getUint32(0);
}

function roundToBf16(value) {
  const bits = bitsOfFloat(value);
  if (Number.isNaN(value)) return 0x7fc0;
  return (bits + 0x7fff + ((bits >>> 16) & 1)) >>> 16;
}

function fromBf16(bits) {
  scratch.setUint32(0, bits << 16);
  return scratch.getFloat32(0);
}

function roundToHalf(value) {
  const sign = value < 0 || Object.is(value, -0) ? 0x8000 : 0;
  const size = Math.abs(value);
  if (Number.isNaN(size)) return 0x7e00;
  if (size >= 65520) return sign | 0x7c00;
  const exponent = Math.max(Math.floor(Math.log2(size || 1e-30)), -14);
  const steps = roundToEven(size / 2 ** (exponent - 10));  // a carry out of the fraction raises the exponent
  return sign | (((exponent + 14) << 10) + steps);
}

function roundToEven(x) {
  const below = Math.floor(x);
  const rest = x - below;
  return rest > 0.5 || (rest === 0.5 && below % 2 === 1) ? below + 1 : below;
}

function fromHalf(bits) {
  const exponent = (bits >> 10) & 31, fraction = bits & 1023;
  const sign = bits & 0x8000 ? -1 : 1;
  if (exponent === 31) return fraction ? NaN : sign * Infinity;
  return sign * (exponent ? 2 ** (exponent - 25) * (1024 + fraction) : 2 ** -24 * fraction);
}

/** Returns the little-endian bytes that the wire and .npy files have. */
export function toBytes({datatype, values}) {
  switch (datatype) {
    case 'FP64': return bytesOf(new Float64Array(values));
    case 'FP32': return bytesOf(new Float32Array(values));
    case 'FP16': return bytesOf(Uint16Array.from(values, roundToHalf));
    case 'BF16': return bytesOf(Uint16Array.from(values, roundToBf16));
    case 'INT64': return bytesOf(BigInt64Array.from(values, BigInt));
    case 'BOOL': return new Uint8Array(values);
  }
  throw new TypeError(`${datatype} can't be sent`);
}

const bytesOf = (array) => new Uint8Array(array.buffer, array.byteOffset, array.byteLength);

/** Returns numbers from little-endian bytes. */
export function fromBytes(datatype, bytes) {
  const width = BYTES[datatype];
  if (!width) throw new TypeError(`numbers of type ${datatype} can't be read`);
  const buffer = bytes.buffer.slice(bytes.byteOffset, bytes.byteOffset + bytes.byteLength);
  switch (datatype) {
    case 'FP64': return new Float64Array(buffer);
    case 'FP32': return new Float32Array(buffer);
    case 'FP16': return Float32Array.from(new Uint16Array(buffer), fromHalf);
    case 'BF16': return Float32Array.from(new Uint16Array(buffer), fromBf16);
    case 'INT32': return Float64Array.from(new Int32Array(buffer));
    case 'INT64': return Float64Array.from(new BigInt64Array(buffer), Number);
    default: return new Float32Array(bytes);
  }
}

/** Returns a character for each byte. */
export function latin(bytes) {
  let text = '';
  for (let at = 0; at < bytes.length; at += 0x8000) {  // a call has a limited number of arguments
    text += String.fromCharCode(...bytes.subarray(at, at + 0x8000));
  }
  return text;
}

export const toBase64 = (bytes) => btoa(latin(bytes));

export const fromBase64 = (text) => Uint8Array.from(atob(text), (c) => c.charCodeAt(0));
