// The page: what the folder holds is in site.json.
import { startChecks } from "./checks.js";
import { startDrawing } from "./draw.js";
import { hasFiles, startLatency } from "./latency.js";

const show = (text) => (document.querySelector("#state").textContent = text);

document.querySelector("#unserved").hidden = true;
try {
  show("Loading ONNX Runtime and the models …");
  const answer = await fetch("site.json");
  if (!answer.ok) throw new Error(`site.json could not be loaded (${answer.status}).`);
  const { models, curves, tokens } = await answer.json();
  const drawn = models.filter((model) => model.drawing);
  if (drawn.length) startDrawing(document.querySelector("#draw"), drawn);
  if (curves.some(hasFiles)) startLatency(document.querySelector("#latency"), curves, tokens);
  await startChecks(document.querySelector("#checks"), models);
  show("");
} catch (error) {
  show(error.message);
}
