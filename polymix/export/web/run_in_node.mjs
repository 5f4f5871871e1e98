// Runs ONNX files by onnxruntime-web in Node.js: reads jobs.json beside it, prints a list of errors, null for none.
import { readFileSync, writeFileSync } from "node:fs";
import * as ort from "./ort.js";
import { readNpy, writeNpy } from "./npy.js";

const beside = (name) => new URL(name, import.meta.url);
ort.env.wasm.numThreads = 1;
ort.env.logLevel = "fatal";
ort.env.wasm.wasmBinary = readFileSync(beside("ort-wasm-simd-threaded.wasm"));

const errors = [];
for (const { model, inputs, outputs } of JSON.parse(readFileSync(beside("jobs.json"), "utf-8"))) {
  try {
    const session = await ort.InferenceSession.create(new Uint8Array(readFileSync(model)));
    const feed = {};
    for (const name of session.inputNames) {
      const { type, data, dims } = readNpy(new Uint8Array(readFileSync(inputs[name])).buffer);
      feed[name] = new ort.Tensor(type, data, dims);
    }
    const results = await session.run(feed);
    for (const [name, path] of Object.entries(outputs)) writeFileSync(path, writeNpy(results[name]));
    await session.release();
    errors.push(null);
  } catch (error) {
    errors.push(String(error?.message ?? error));
  }
}
process.stdout.write(JSON.stringify(errors));
