// Runs ONNX files apart from the page, which stays responsive. Answers each message { id, call, … } with { id, … }.
import * as ort from "./ort/ort.js";

ort.env.wasm.numThreads = 1; // more need headers that a static server does not send
ort.env.wasm.wasmPaths = { wasm: new URL("ort/ort-wasm-simd-threaded.wasm", import.meta.url).href };
ort.env.logLevel = "error";

const sessions = new Map();
const SAMPLES = 5;
const SAMPLE_MS = 40; // browsers round their clocks, so that short calls are timed together
const TOTAL_MS = 3000;

async function session(model) {
  if (!sessions.has(model)) {
    const answer = await fetch(new URL(model, import.meta.url));
    if (!answer.ok) throw new Error(`${model} could not be loaded (${answer.status}).`);
    sessions.set(model, await ort.InferenceSession.create(new Uint8Array(await answer.arrayBuffer())));
  }
  return sessions.get(model);
}

async function call(model, inputs) {
  const feed = {};
  for (const [name, { type, data, dims }] of Object.entries(inputs)) feed[name] = new ort.Tensor(type, data, dims);
  return (await session(model)).run(feed);
}

// The outputs by name, and how long the call took once the model was loaded.
async function run({ model, inputs }) {
  await session(model);
  const start = performance.now();
  const results = await call(model, inputs);
  const outputs = {};
  for (const [name, { type, data, dims }] of Object.entries(results)) outputs[name] = { type, data, dims: [...dims] };
  return { outputs, ms: performance.now() - start };
}

// The median time of a call in milliseconds.
async function time({ model, inputs }) {
  const timed = async (count) => {
    const start = performance.now();
    for (let i = 0; i < count; i++) await call(model, inputs);
    return performance.now() - start;
  };
  await timed(1); // the first call is slower
  const once = Math.max(await timed(1), 0.05);
  const count = Math.max(1, Math.round(SAMPLE_MS / once));
  const samples = [];
  const start = performance.now();
  while (samples.length < SAMPLES && (samples.length === 0 || performance.now() - start < TOTAL_MS)) {
    samples.push((await timed(count)) / count);
  }
  return { ms: samples.sort((a, b) => a - b)[samples.length >> 1] };
}

// Frees a model's memory.
async function forget({ model }) {
  await sessions.get(model)?.release();
  sessions.delete(model);
  return {};
}

let last = Promise.resolve(); // one call after another
self.onmessage = ({ data: { id, call: name, ...options } }) => {
  last = last.then(async () => {
    try {
      self.postMessage({ id, ...(await { run, time, forget }[name](options)) });
    } catch (error) {
      self.postMessage({ id, error: String(error?.message ?? error) });
    }
  });
};
