// The section that times attention and the mixers for several numbers of tokens, with a plot of the results.
import { forget, time } from "./engine.js";
import { element, milliseconds, row } from "./text.js";

const LOOKS = ["var(--accent)", "var(--c1)", "var(--c2)", "var(--c3)", "var(--c4)", "var(--c6)"];
const HEIGHT = 320;
const MARGIN = { left: 56, right: 16, top: 12, bottom: 44 };

export const hasFiles = (line) => Object.keys(line.files).length > 0;

export function startLatency(section, lines, tokens) {
  const [button, state] = [section.querySelector("button"), section.querySelector(".state")];
  const measured = lines.filter(hasFiles);
  const others = measured.filter((line) => !line.attention);
  measured.forEach((line) => {
    line.colour = line.attention ? "var(--attention)" : LOOKS[others.indexOf(line) % LOOKS.length];
    line.ms = {};
  });
  section.querySelector(".notes").textContent = lines.map((line) => line.note).filter(Boolean).join(" ");
  const show = () => {
    plot(section.querySelector(".plot"), measured, tokens);
    table(section.querySelector("table"), measured, tokens);
  };
  button.addEventListener("click", async () => {
    button.disabled = true;
    section.dataset.done = "false";
    measured.forEach((line) => (line.ms = {}));
    const failures = [];
    for (const count of tokens) {
      for (const line of measured.filter(({ files }) => count in files || 0 in files)) {
        state.textContent = `${line.label}, ${count} tokens …`;
        try {
          line.ms[count] = await latency(line, count);
        } catch (error) {
          failures.push(`${line.label} fails at ${count} tokens: ${error.message}`);
        }
        show();
      }
    }
    state.textContent = failures.join(" ") || "Done.";
    section.dataset.done = "true";
    button.disabled = false;
  });
  addEventListener("resize", show);
  show();
  section.hidden = false;
}

async function latency(line, count) {
  const file = line.files[count] ?? line.files[0];
  const data = Float32Array.from({ length: count * line.dim }, (_, place) => Math.sin(place * 12.9898) * 1.4);
  const { ms } = await time(file, { x: { type: "float32", data, dims: [1, count, line.dim] } });
  if (count in line.files) await forget(file);
  return ms;
}

function table(place, lines, tokens) {
  const attention = lines.find((line) => line.attention);
  const others = lines.filter((line) => !line.attention);
  place.querySelector("thead").replaceChildren(row(["tokens", ...lines.map((line) => line.label), ...others.map((line) =>
    `${others.length > 1 ? `${line.label}, ` : ""}times as fast`)], "th"));
  const number = (value) => (value === undefined ? "" : milliseconds(value));
  place.querySelector("tbody").replaceChildren(...tokens.filter((count) => lines.some((line) => count in line.ms))
    .map((count) => row([String(count), ...lines.map((line) => number(line.ms[count])), ...others.map((line) => {
      const share = attention?.ms[count] / line.ms[count];
      return Number.isFinite(share) ? share.toFixed(share < 10 ? 1 : 0) : "";
    })])));
  place.hidden = !lines.some((line) => Object.keys(line.ms).length);
}

const SVG = "http://www.w3.org/2000/svg";

function draw(parent, tag, attributes, text) {
  const made = document.createElementNS(SVG, tag);
  for (const [name, value] of Object.entries(attributes)) made.setAttribute(name, value);
  if (text !== undefined) made.textContent = text;
  parent.append(made);
  return made;
}

// Milliseconds against tokens, both axes logarithmic.
function plot(place, lines, tokens) {
  const values = lines.flatMap((line) => Object.values(line.ms));
  place.replaceChildren();
  if (!values.length) return;
  const width = place.clientWidth;
  const picture = draw(place, "svg", { width, height: HEIGHT, viewBox: `0 0 ${width} ${HEIGHT}`, role: "img" });
  draw(picture, "title", {}, "Milliseconds per call against the number of tokens");
  const decades = [Math.floor(Math.log10(Math.min(...values))), Math.ceil(Math.log10(Math.max(...values)) + 1e-9)];
  const [first, last] = [Math.log(tokens[0]), Math.log(tokens.at(-1))];
  const x = (count) => MARGIN.left + ((Math.log(count) - first) / (last - first)) * (width - MARGIN.left - MARGIN.right);
  const y = (ms) => HEIGHT - MARGIN.bottom
    - ((Math.log10(ms) - decades[0]) / (decades[1] - decades[0])) * (HEIGHT - MARGIN.top - MARGIN.bottom);
  for (let power = decades[0]; power <= decades[1]; power++) {
    const level = y(10 ** power);
    draw(picture, "line", { x1: MARGIN.left, x2: width - MARGIN.right, y1: level, y2: level, class: "grid" });
    draw(picture, "text", { x: MARGIN.left - 6, y: level + 4, "text-anchor": "end" }, String(+(10 ** power).toPrecision(1)));
  }
  for (const count of tokens) {
    draw(picture, "text", { x: x(count), y: HEIGHT - MARGIN.bottom + 18, "text-anchor": "middle" }, String(count));
  }
  draw(picture, "text", { x: (MARGIN.left + width) / 2, y: HEIGHT - 6, "text-anchor": "middle" }, "tokens");
  const middle = (HEIGHT - MARGIN.bottom + MARGIN.top) / 2;
  draw(picture, "text", { x: 14, y: middle, "text-anchor": "middle", transform: `rotate(-90 14 ${middle})` }, "ms per call");
  for (const line of lines) {
    const known = tokens.filter((count) => count in line.ms);
    const points = known.map((count) => `${x(count)},${y(line.ms[count])}`).join(" ");
    const curve = draw(picture, "polyline", { points, fill: "none", "stroke-width": 2 });
    curve.style.stroke = line.colour;
    for (const count of known) {
      draw(picture, "circle", { cx: x(count), cy: y(line.ms[count]), r: 3.5 }).style.fill = line.colour;
    }
  }
  const names = element("p", "legend", "");
  for (const line of lines) {
    const mark = element("span", "mark", "");
    mark.style.background = line.colour;
    names.append(element("span", "", "", [mark, line.label]));
  }
  place.append(names);
}
