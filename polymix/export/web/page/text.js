// Elements and numbers for the page.

export function element(tag, className, text, children = []) {
  const made = document.createElement(tag);
  if (className) made.className = className;
  if (text) made.textContent = text;
  made.append(...children);
  return made;
}

export function milliseconds(ms) {
  return `${ms.toFixed(ms < 1 ? 2 : ms < 10 ? 1 : 0)} ms`;
}

export function megabytes(bytes) {
  return `${(bytes / 1e6).toFixed(bytes < 1e7 ? 2 : 0)} MB`;
}

export function row(cells, tag = "td") {
  return element("tr", "", "", cells.map((cell) => element(tag, "", cell)));
}
