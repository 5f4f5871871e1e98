// Arrays of numpy (.npy files, little-endian, C order) as { type, data, dims }, the parts of a tensor of ONNX Runtime.

const TYPES = {
  "<f4": ["float32", Float32Array], "<f8": ["float64", Float64Array], "<i8": ["int64", BigInt64Array],
  "<i4": ["int32", Int32Array], "|u1": ["uint8", Uint8Array], "|i1": ["int8", Int8Array], "|b1": ["bool", Uint8Array],
};

export function readNpy(buffer) {
  const view = new DataView(buffer);
  if (view.getUint32(0) !== 0x934e554d) throw new Error("This is no .npy file.");
  const long = view.getUint8(6) > 1;
  const start = long ? 12 : 10;
  const length = long ? view.getUint32(8, true) : view.getUint16(8, true);
  const header = new TextDecoder("latin1").decode(new Uint8Array(buffer, start, length));
  const [, code] = header.match(/'descr': '([^']+)'/);
  const [, shape] = header.match(/'shape': \(([^)]*)\)/);
  if (!(code in TYPES) || header.includes("'fortran_order': True")) throw new Error(`Arrays of ${code} are not read.`);
  const dims = shape.split(",").filter((part) => part.trim()).map(Number);
  const [type, Kind] = TYPES[code];
  return { type, data: new Kind(buffer.slice(start + length)), dims };
}

export function writeNpy({ type, data, dims }) {
  const [code] = Object.entries(TYPES).find(([, [name]]) => name === type);
  const shape = dims.length === 1 ? `${dims[0]},` : dims.join(", ");
  const header = `{'descr': '${code}', 'fortran_order': False, 'shape': (${shape}), }`;
  const padded = header.padEnd(Math.ceil((header.length + 11) / 64) * 64 - 11) + "\n";
  const bytes = new Uint8Array(10 + padded.length + data.byteLength);
  bytes.set([0x93, 0x4e, 0x55, 0x4d, 0x50, 0x59, 1, 0, padded.length & 255, padded.length >> 8]);
  bytes.set(new TextEncoder().encode(padded), 10);
  bytes.set(new Uint8Array(data.buffer, data.byteOffset, data.byteLength), 10 + padded.length);
  return bytes;
}

// The largest difference of an output, relative to the largest value of that output, as polymix.export.check counts it.
export function difference(given, wanted) {
  if (given === undefined || given.dims.join() !== wanted.dims.join()) return Infinity;
  let apart = 0;
  let scale = 0;
  for (let i = 0; i < wanted.data.length; i++) {
    const [left, right] = [Number(given.data[i]), Number(wanted.data[i])];
    if (Number.isNaN(left) !== Number.isNaN(right)) return Infinity;
    if (left !== right && !Number.isNaN(left)) apart = Math.max(apart, Math.abs(left - right));
    if (Number.isFinite(right)) scale = Math.max(scale, Math.abs(right));
  }
  return apart / (scale || 1);
}
