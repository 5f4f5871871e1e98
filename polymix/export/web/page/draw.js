// The section with the canvas: the answers of all models that classify drawings, while one draws.
import { run } from "./engine.js";
import { Pad, imageOf, inputOf, showImage } from "./canvas.js";
import { element, milliseconds } from "./text.js";

export function startDrawing(section, models) {
  const answers = section.querySelector(".answers");
  const parts = models.map((model) => answerOf(answers, model));
  const small = section.querySelector(".seen");
  let [strokes, running] = [[], false];

  async function answer() {
    running = true;
    while (strokes !== null) {
      const now = strokes;
      strokes = null;
      for (const part of parts) await part.show(now, small);
    }
    running = false;
  }

  const pad = new Pad(section.querySelector(".pad"), (drawn) => {
    strokes = drawn.map((stroke) => [...stroke]);
    section.querySelector(".hint").hidden = drawn.length > 0;
    if (!running) answer();
  });
  section.querySelector("button").addEventListener("click", () => pad.clear());
  section.hidden = false;
}

function answerOf(answers, model) {
  const { classes } = model.drawing;
  const best = element("output", "best", "?");
  const cost = element("p", "small", "");
  const bars = classes.map((name) => {
    const bar = element("span", "bar", "");
    const row = element("div", "row", "");
    row.append(element("span", "class", name), element("span", "track", "", [bar]));
    return { row, bar };
  });
  const part = element("div", "answer", "", [element("h3", "", model.label), best, ...bars.map(({ row }) => row), cost]);
  part.dataset.model = model.name;
  answers.append(part);
  const fill = (shares) => bars.forEach(({ row, bar }, place) => {
    bar.style.width = `${100 * shares[place]}%`;
    row.title = `${classes[place]}: ${(100 * shares[place]).toFixed(1)} %`;
  });

  async function show(strokes, small) {
    if (!strokes.length) {
      best.textContent = "?";
      cost.textContent = "";
      fill(classes.map(() => 0));
      small.getContext("2d").clearRect(0, 0, small.width, small.height);
      return;
    }
    const image = imageOf(strokes, model.drawing);
    showImage(small, image, model.drawing);
    const [input] = Object.keys(model.inputs);
    const [output] = Object.keys(model.outputs);
    try {
      const { outputs, ms } = await run(model.file, { [input]: inputOf(image, model.drawing) });
      const shares = softmax([...outputs[output].data]);
      const top = shares.indexOf(Math.max(...shares));
      best.textContent = classes[top];
      cost.textContent = `${(100 * shares[top]).toFixed(0)} % sure, ${milliseconds(ms)}`;
      fill(shares);
    } catch (error) {
      best.textContent = "?";
      cost.textContent = error.message;
    }
  }
  return { show };
}

function softmax(logits) {
  const top = Math.max(...logits);
  const powers = logits.map((value) => Math.exp(value - top));
  const sum = powers.reduce((a, b) => a + b);
  return powers.map((value) => value / sum);
}
