// A canvas to draw on, and the image that a classifier gets of the drawing. Strokes are lists of [x, y].

const STEPS = 8; // of the search for the line's width

// The drawing as an image of side × side values, as those of the training: `drawing` says how large, where, how dark.
export function imageOf(strokes, drawing) {
  const { side, background, ink } = drawing;
  const fine = Math.max(2, Math.min(16, Math.floor(256 / side))); // pixels of the fine picture for one of the image
  let [low, high] = [0.1, side / 2];
  let cover = null;
  for (let step = 0; step < STEPS; step++) {
    const line = (low + high) / 2;
    cover = coverOf(strokes, drawing, line, fine);
    if (cover.reduce((sum, value) => sum + value, 0) / cover.length < drawing.coverage) low = line;
    else high = line;
  }
  return cover.map((value) => Math.round(background + value * (ink - background)));
}

function coverOf(strokes, drawing, line, fine) {
  const { side, height, width, centre_x, centre_y } = drawing;
  const points = strokes.flat();
  const [left, right] = extent(points.map(([x]) => x));
  const [top, bottom] = extent(points.map(([, y]) => y));
  const across = Math.max(width - line, 0) / Math.max(right - left, 1e-6);
  const tall = Math.max(height - line, 0) / Math.max(bottom - top, 1e-6);
  const scale = Math.min(across, tall);
  const picture = new OffscreenCanvas(side * fine, side * fine).getContext("2d", { willReadFrequently: true });
  Object.assign(picture, { lineCap: "round", lineJoin: "round", lineWidth: line * fine });
  for (const stroke of strokes) {
    picture.beginPath();
    for (const [x, y] of stroke.length > 1 ? stroke : [stroke[0], stroke[0]]) {
      picture.lineTo((centre_x + (x - (left + right) / 2) * scale) * fine,
                     (centre_y + (y - (top + bottom) / 2) * scale) * fine);
    }
    picture.stroke();
  }
  const { data } = picture.getImageData(0, 0, side * fine, side * fine);
  const cover = new Float64Array(side * side);
  for (let y = 0; y < side * fine; y++) {
    for (let x = 0; x < side * fine; x++) {
      cover[Math.floor(y / fine) * side + Math.floor(x / fine)] += data[4 * (y * side * fine + x) + 3];
    }
  }
  return cover.map((sum) => sum / (255 * fine * fine));
}

function extent(values) {
  return [Math.min(...values), Math.max(...values)];
}

// An image as the model's input: resized bilinearly (with a wider filter where it shrinks) and normalised.
export function inputOf(image, { side, size, mean, std }) {
  const weights = filter(side, size);
  const rows = resize(image, weights, side, size);
  const resized = resize(rows, weights, side, size);
  return { type: "float32", data: Float32Array.from(resized, (value) => (value - mean) / std), dims: [1, 1, size, size] };
}

function filter(side, size) {
  const scale = side / size;
  const support = Math.max(scale, 1);
  return Array.from({ length: size }, (_, place) => {
    const weights = Array.from({ length: side }, (_, j) => Math.max(0, 1 - Math.abs(j + 0.5 - (place + 0.5) * scale) / support));
    const sum = weights.reduce((a, b) => a + b);
    return weights.map((weight) => weight / sum);
  });
}

// Resizes the columns of an image and turns it over, so that two calls resize both axes.
function resize(image, weights, side, size) {
  const columns = image.length / side;
  const turned = new Float64Array(columns * size);
  for (let x = 0; x < columns; x++) {
    for (let place = 0; place < size; place++) {
      let sum = 0;
      for (let y = 0; y < side; y++) sum += weights[place][y] * image[y * columns + x];
      turned[x * size + place] = sum;
    }
  }
  return turned;
}

// Shows an image of side × side values in a small canvas, ink in the text's colour.
export function showImage(canvas, image, { side, background, ink }) {
  canvas.width = canvas.height = side;
  const picture = canvas.getContext("2d");
  picture.fillStyle = getComputedStyle(canvas).color;
  picture.clearRect(0, 0, side, side);
  image.forEach((value, place) => {
    picture.globalAlpha = (value - background) / (ink - background);
    picture.fillRect(place % side, Math.floor(place / side), 1, 1);
  });
}

// Lets people draw on a canvas by mouse, finger or pen; calls `changed(strokes)` while they do.
export class Pad {
  constructor(canvas, changed) {
    this.canvas = canvas;
    this.changed = changed;
    this.strokes = [];
    canvas.addEventListener("pointerdown", (event) => {
      event.preventDefault();
      canvas.setPointerCapture(event.pointerId);
      this.strokes.push([this.place(event)]);
      this.show();
    });
    canvas.addEventListener("pointermove", (event) => {
      if (!canvas.hasPointerCapture(event.pointerId) || !this.strokes.length) return;
      const events = event.getCoalescedEvents?.() ?? [];
      this.strokes.at(-1).push(...(events.length ? events : [event]).map((part) => this.place(part)));
      this.show();
    });
    matchMedia("(prefers-color-scheme: dark)").addEventListener("change", () => this.paint());
    this.paint();
  }

  place({ clientX, clientY }) {
    const box = this.canvas.getBoundingClientRect();
    return [((clientX - box.left) / box.width) * this.canvas.width, ((clientY - box.top) / box.height) * this.canvas.height];
  }

  clear() {
    this.strokes = [];
    this.show();
  }

  show() {
    this.paint();
    this.changed(this.strokes);
  }

  paint() {
    const picture = this.canvas.getContext("2d");
    picture.clearRect(0, 0, this.canvas.width, this.canvas.height);
    Object.assign(picture, { lineCap: "round", lineJoin: "round", lineWidth: this.canvas.width / 14 });
    picture.strokeStyle = getComputedStyle(this.canvas).color;
    for (const stroke of this.strokes) {
      picture.beginPath();
      for (const [x, y] of stroke.length > 1 ? stroke : [stroke[0], stroke[0]]) picture.lineTo(x, y);
      picture.stroke();
    }
  }
}
