// Reads .npy, .npz, .safetensors and words of .txt, and writes .npy.
import {fromBytes, latin, sizeOf, tensor, toBytes} from './tensor.js';

const NPY_TYPES = {'<f4': 'FP32', '<f8': 'FP64', '<f2': 'FP16', '|b1': 'BOOL', '<i4': 'INT32', '<i8': 'INT64'};
const SAFETENSORS_TYPES = {F32: 'FP32', F64: 'FP64', F16: 'FP16', BF16: 'BF16', BOOL: 'BOOL', I32: 'INT32', I64: 'INT64'};

const view = (bytes) => new DataView(bytes.buffer, bytes.byteOffset, bytes.byteLength);

function readNpy(bytes, name) {
  if (latin(bytes.subarray(0, 6)) !== '\x93NUMPY') throw new RangeError(`${name} is not a .npy file.`);
  const isFirst = bytes[6] === 1;
  const length = isFirst ? view(bytes).getUint16(8, true) : view(bytes).getUint32(8, true);
  const start = isFirst ? 10 : 12;
  const head = latin(bytes.subarray(start, start + length));
  const descr = /'descr': *'([^']+)'/.exec(head)?.[1];
  const datatype = NPY_TYPES[descr];
  if (!datatype) throw new RangeError(`${name} has the type ${descr}; it must be one of ${Object.keys(NPY_TYPES).join(', ')}.`);
  if (/'fortran_order': *True/.test(head)) throw new RangeError(`${name} is in Fortran order; save numpy.ascontiguousarray of it.`);
  const shape = /'shape': *\(([^)]*)\)/.exec(head)[1].split(',').filter((axis) => axis.trim()).map(Number);
  return checked(name, datatype, shape, bytes.subarray(start + length));
}

function checked(name, datatype, shape, bytes) {
  const values = fromBytes(datatype, bytes);
  const size = sizeOf(shape);
  if (values.length < size) throw new RangeError(`${name} ends early: ${values.length} of ${size} numbers.`);
  return tensor(datatype, shape, values.subarray(0, size));
}

async function inflate(bytes) {
  const stream = new Blob([bytes]).stream().pipeThrough(new DecompressionStream('deflate-raw'));
  return new Uint8Array(await new Response(stream).arrayBuffer());
}

/** The members of a zip, by its central directory. */
async function* membersOf(bytes, name) {
  const data = view(bytes);
  let end = bytes.length - 22;
  while (end >= 0 && data.getUint32(end, true) !== 0x06054b50) end -= 1;
  if (end < 0) throw new RangeError(`${name} is not a .npz file.`);
  let at = data.getUint32(end + 16, true);
  for (let count = data.getUint16(end + 10, true); count > 0; --count) {
    const nameLength = data.getUint16(at + 28, true);
    const member = latin(bytes.subarray(at + 46, at + 46 + nameLength));
    const local = data.getUint32(at + 42, true);
    const start = local + 30 + data.getUint16(local + 26, true) + data.getUint16(local + 28, true);
    const packed = bytes.subarray(start, start + data.getUint32(at + 20, true));
    yield [member, data.getUint16(at + 10, true) === 0 ? packed : await inflate(packed)];
    at += 46 + nameLength + data.getUint16(at + 30, true) + data.getUint16(at + 32, true);
  }
}

function readSafetensors(bytes, name) {
  const length = Number(view(bytes).getBigUint64(0, true));
  const head = JSON.parse(new TextDecoder().decode(bytes.subarray(8, 8 + length)));
  return Object.entries(head).filter(([key]) => key !== '__metadata__').map(([key, {dtype, shape, data_offsets: [from, to]}]) => {
    const datatype = SAFETENSORS_TYPES[dtype];
    if (!datatype) throw new RangeError(`${key} of ${name} has the type ${dtype}; it must be one of ${Object.keys(SAFETENSORS_TYPES).join(', ')}.`);
    return [key, checked(key, datatype, shape, bytes.subarray(8 + length + from, 8 + length + to))];
  });
}

const linesOf = (bytes) => new TextDecoder().decode(bytes).replace(/\r?\n$/, '').split(/\r?\n/);

/**
 * Returns the arrays of files by name, and the lines of text files by theirs.
 * @returns {Promise<{arrays: Map<string, import('./tensor.js').Tensor>, labels: Map<string, string[]>}>}
 */
export async function readFiles(files) {
  const arrays = new Map(), labels = new Map();
  for (const file of files) {
    const bytes = new Uint8Array(await file.arrayBuffer());
    const stem = file.name.replace(/\.[^.]*$/, '');
    if (/\.npy$/i.test(file.name)) {
      arrays.set(stem, readNpy(bytes, file.name));
    } else if (/\.npz$/i.test(file.name)) {
      for await (const [member, content] of membersOf(bytes, file.name)) {
        arrays.set(member.replace(/\.npy$/, ''), readNpy(content, member));
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
