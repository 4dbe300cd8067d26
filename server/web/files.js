// Reads .npy, .npz and .safetensors, and words of .txt and of arrays of text, and writes .npy.
import {BYTES, fromBytes, latin, sizeOf, tensor, toBytes} from './tensor.js';

const NPY_TYPES = {'<f4': 'FP32', '<f8': 'FP64', '<f2': 'FP16', '|b1': 'BOOL', '<i4': 'INT32', '<i8': 'INT64'};
const SAFETENSORS_TYPES = {F32: 'FP32', F64: 'FP64', F16: 'FP16', BF16: 'BF16', BOOL: 'BOOL', I32: 'INT32', I64: 'INT64'};

const DEFLATE_RATIO = 1032;  // no deflated member is smaller by more

const view = (bytes) => new DataView(bytes.buffer, bytes.byteOffset, bytes.byteLength);

/** A part of a file, which may say that it has more than it has. */
function partOf(bytes, from, length, name) {
  if (!(from >= 0 && length >= 0 && from + length <= bytes.length)) throw new RangeError(`${name} ends early.`);
  return bytes.subarray(from, from + length);
}

/** @returns {import('./tensor.js').Tensor | {words: string[]}} words of an array of texts */
function readNpy(bytes, name) {
  if (bytes.length < 12 || latin(bytes.subarray(0, 6)) !== '\x93NUMPY') throw new RangeError(`${name} is not a .npy file.`);
  const isFirst = bytes[6] === 1;
  const length = isFirst ? view(bytes).getUint16(8, true) : view(bytes).getUint32(8, true);
  const start = isFirst ? 10 : 12;
  const head = latin(partOf(bytes, start, length, name));
  const descr = /'descr': *'([^']+)'/.exec(head)?.[1];
  const datatype = NPY_TYPES[descr], letters = /^<U([1-9]\d*)$/.exec(descr)?.[1];
  if (!datatype && !letters) throw new RangeError(`${name} has the type ${descr}; it must be one of ${Object.keys(NPY_TYPES).join(', ')}, or text.`);
  if (/'fortran_order': *True/.test(head)) throw new RangeError(`${name} is in Fortran order; save numpy.ascontiguousarray of it.`);
  const axes = /'shape': *\(([\d, ]*)\)/.exec(head)?.[1];
  if (axes === undefined) throw new RangeError(`${name} does not say its shape.`);
  const shape = axes.split(',').filter((axis) => axis.trim()).map(Number), content = bytes.subarray(start + length);
  return letters ? {words: readWords(name, Number(letters), sizeOf(shape), content)} : checked(name, datatype, shape, content);
}

/** Of UTF-32, ended by zeros. */
function readWords(name, letters, count, bytes) {
  const letter = view(partOf(bytes, 0, 4 * letters * count, name));
  return Array.from({length: count}, (_, n) => {
    const points = Array.from({length: letters}, (_, at) => letter.getUint32(4 * (n * letters + at), true));
    return points.map((point) => String.fromCodePoint(point <= 0x10ffff ? point : 0xfffd)).join('').replace(/\0+$/, '');
  });
}

function checked(name, datatype, shape, bytes) {
  const size = sizeOf(shape), width = BYTES[datatype];
  if (size * width > bytes.length) throw new RangeError(`${name} ends early: ${Math.floor(bytes.length / width)} of ${size} numbers.`);
  return tensor(datatype, shape, fromBytes(datatype, bytes.subarray(0, size * width)));
}

async function inflate(bytes, size, name) {
  if (size > bytes.length * DEFLATE_RATIO) throw new RangeError(`${name} says that it has ${size} bytes, which its data can't have.`);
  const content = new Uint8Array(size);
  const reader = new Blob([bytes]).stream().pipeThrough(new DecompressionStream('deflate-raw')).getReader();
  let at = 0;
  for (;;) {
    const {done, value} = await reader.read().catch(() => { throw new RangeError(`${name} is damaged.`); });
    if (done) break;
    if (at + value.length > size) throw new RangeError(`${name} is longer than it says.`);
    content.set(value, at);
    at += value.length;
  }
  if (at < size) throw new RangeError(`${name} ends early.`);
  return content;
}

const END = 0x06054b50, ENTRY = 0x02014b50, ENTRY_BYTES = 46, LOCAL_BYTES = 30;

/** The members of a zip, by its central directory. Together they are no longer than the file, which bounds what they inflate to. */
async function* membersOf(bytes, name) {
  let end = bytes.length - 22;
  while (end >= 0 && view(bytes).getUint32(end, true) !== END) end -= 1;
  if (end < 0) throw new RangeError(`${name} is not a .npz file.`);
  let at = view(bytes).getUint32(end + 16, true), left = bytes.length;
  for (let count = view(bytes).getUint16(end + 10, true); count > 0; --count) {
    const entry = view(partOf(bytes, at, ENTRY_BYTES, name));
    if (entry.getUint32(0, true) !== ENTRY) throw new RangeError(`${name} is damaged: its directory is not where its end says.`);
    const method = entry.getUint16(10, true), packedSize = entry.getUint32(20, true), size = entry.getUint32(24, true);
    const nameLength = entry.getUint16(28, true), offset = entry.getUint32(42, true);
    const member = latin(partOf(bytes, at + ENTRY_BYTES, nameLength, name));
    const local = view(partOf(bytes, offset, LOCAL_BYTES, name));
    const start = offset + LOCAL_BYTES + local.getUint16(26, true) + local.getUint16(28, true);
    const packed = partOf(bytes, start, packedSize, member);
    left -= packedSize;
    if (left < 0) throw new RangeError(`${name} is damaged: its members overlap.`);
    if (method !== 0 && method !== 8) throw new RangeError(`${member} is compressed by method ${method}; it must be 0 (stored) or 8 (deflated).`);
    yield [member, method === 0 ? packed : await inflate(packed, size, member)];
    at += ENTRY_BYTES + nameLength + entry.getUint16(30, true) + entry.getUint16(32, true);
  }
}

function readSafetensors(bytes, name) {
  const length = Number(view(partOf(bytes, 0, 8, name)).getBigUint64(0, true));
  const head = JSON.parse(new TextDecoder().decode(partOf(bytes, 8, length, name)));
  return Object.entries(head).filter(([key]) => key !== '__metadata__').map(([key, {dtype, shape, data_offsets: [from, to]}]) => {
    const datatype = SAFETENSORS_TYPES[dtype];
    if (!datatype) throw new RangeError(`${key} of ${name} has the type ${dtype}; it must be one of ${Object.keys(SAFETENSORS_TYPES).join(', ')}.`);
    return [key, checked(key, datatype, shape, partOf(bytes.subarray(8 + length), from, to - from, key))];
  });
}

const linesOf = (bytes) => new TextDecoder().decode(bytes).replace(/\r?\n$/, '').split(/\r?\n/);

/**
 * Returns the arrays of files by name, and the words of arrays of text and of text files by theirs.
 * @returns {Promise<{arrays: Map<string, import('./tensor.js').Tensor>, labels: Map<string, string[]>}>}
 */
export async function readFiles(files) {
  const arrays = new Map(), labels = new Map();
  const add = (name, array) => (array.words ? labels.set(name, array.words) : arrays.set(name, array));
  for (const file of files) {
    const bytes = new Uint8Array(await file.arrayBuffer());
    const stem = file.name.replace(/\.[^.]*$/, '');
    if (/\.npy$/i.test(file.name)) {
      add(stem, readNpy(bytes, file.name));
    } else if (/\.npz$/i.test(file.name)) {
      for await (const [member, content] of membersOf(bytes, file.name)) {
        add(member.replace(/\.npy$/, ''), readNpy(content, member));
      }
    } else if (/\.safetensors$/i.test(file.name)) {
      for (const [key, array] of readSafetensors(bytes, file.name)) arrays.set(key, array);
    } else if (/\.txt$/i.test(file.name)) {
      labels.set(file.name, linesOf(bytes));
    } else {
      throw new RangeError(`${file.name} is none of .npy, .npz, .safetensors and .txt.`);
    }
  }
  return {arrays, labels};
}

/** Returns the bytes of a .npy file; numpy has no BF16, which becomes FP32. */
export function writeNpy(t) {
  const datatype = t.datatype === 'BF16' ? 'FP32' : t.datatype;
  const descr = Object.keys(NPY_TYPES).find((key) => NPY_TYPES[key] === datatype);
  const shape = t.shape.length === 1 ? `${t.shape},` : t.shape.join(', ');
  let head = `{'descr': '${descr}', 'fortran_order': False, 'shape': (${shape}), }`;
  head = head.padEnd(Math.ceil((head.length + 11) / 64) * 64 - 11) + '\n';
  const start = [0x93, ...new TextEncoder().encode('NUMPY'), 1, 0, head.length & 255, head.length >> 8];
  return new Blob([Uint8Array.from(start), head, toBytes({...t, datatype})]);
}
