// The worker that runs the models, as functions that return promises.

const worker = new Worker(new URL("worker.js", import.meta.url), { type: "module" });
const waiting = new Map();
let count = 0;

worker.onmessage = ({ data: { id, error, ...answer } }) => {
  const { resolve, reject } = waiting.get(id);
  waiting.delete(id);
  if (error === undefined) resolve(answer);
  else reject(new Error(error));
};
worker.onerror = (event) => {
  for (const { reject } of waiting.values()) reject(new Error(event.message || "The worker could not be started."));
  waiting.clear();
};

function ask(call, options) {
  const id = count++;
  return new Promise((resolve, reject) => {
    waiting.set(id, { resolve, reject });
    worker.postMessage({ id, call, ...options });
  });
}

export const run = (model, inputs) => ask("run", { model, inputs });
export const time = (model, inputs) => ask("time", { model, inputs });
export const forget = (model) => ask("forget", { model });
