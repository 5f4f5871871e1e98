// The section that runs every model on the inputs that came with it, and compares its outputs with PyTorch's.
import { run, time } from "./engine.js";
import { difference, readNpy } from "./npy.js";
import { element, megabytes, milliseconds } from "./text.js";

export async function startChecks(section, models) {
  const body = section.querySelector("tbody");
  section.hidden = false;
  const cells = models.map((model) => {
    const [error, cost] = [element("td", "", "…"), element("td", "", "…")];
    const name = element("td", "", model.label);
    const line = element("tr", "", "", [name, element("td", "", megabytes(model.bytes)), error, cost]);
    line.dataset.model = model.name;
    body.append(line);
    return { line, error, cost };
  });
  for (const [place, model] of models.entries()) await check(model, cells[place]);
  section.dataset.done = "true";
}

async function check(model, { line, error, cost }) {
  try {
    const inputs = await arrays(model.inputs);
    const wanted = await arrays(model.outputs);
    const { outputs } = await run(model.file, inputs);
    const worst = Math.max(...Object.entries(wanted).map(([name, array]) => difference(outputs[name], array)));
    const passed = worst <= model.tolerance;
    error.textContent = `${worst.toExponential(1)}${passed ? "" : `, more than ${model.tolerance.toExponential()}`}`;
    line.className = passed ? "passed" : "failed";
    cost.textContent = milliseconds((await time(model.file, inputs)).ms);
  } catch (failure) {
    error.textContent = failure.message;
    cost.textContent = "";
    line.className = "failed";
  }
}

async function arrays(files) {
  const found = {};
  for (const [name, file] of Object.entries(files)) {
    const answer = await fetch(file);
    if (!answer.ok) throw new Error(`${file} could not be loaded (${answer.status}).`);
    found[name] = readNpy(await answer.arrayBuffer());
  }
  return found;
}
