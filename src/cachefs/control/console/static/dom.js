// Small helpers for the document. All texts go through `textContent`: names may be anything.
export const $ = (id) => document.getElementById(id);

/** Return a new element. `children` are nodes or texts. */
export function make(tag, attributes = {}, ...children) {
  const element = document.createElement(tag);
  for (const [name, value] of Object.entries(attributes)) {
    if (name.startsWith("on")) element.addEventListener(name.slice(2), value);
    else if (name === "class") element.className = value;
    else if (value === true) element.setAttribute(name, "");
    else if (value !== false && value !== null) element.setAttribute(name, value);
  }
  element.append(...children);
  return element;
}

export function setText(element, text) {
  if (element.textContent !== text) element.textContent = text;
}

/** Show a number with a small unit. */
export function setFigure(element, [number, unit]) {
  const key = `${number} ${unit}`;
  if (element.dataset.shown === key) return;
  element.dataset.shown = key;
  element.replaceChildren(number, ...(unit ? [make("small", {}, unit)] : []));
}

/** Show a bar. It says nothing to a screen reader: the text beside it does. */
export function meter(ratio, text, tone = "") {
  const inner = make("span");
  inner.style.width = `${Math.max(0, Math.min(1, ratio || 0)) * 100}%`;
  return [make("span", { class: `meter ${tone}`, "aria-hidden": "true" }, inner), make("span", {}, text)];
}

/**
 * Fill a table body. Each row is `{key, cells}`, and each cell `{text}` or `{is, make}`, with the
 * class `kind`: `make()` returns the nodes, and is called only if `is` has changed. Rows and cells
 * stay the same elements, so focus and a screen reader's place do not move.
 */
export function fillTable(body, rows) {
  const known = new Map([...body.rows].map((row) => [row.dataset.key, row]));
  let before = null;
  for (const { key, cells } of rows) {
    let row = known.get(key);
    known.delete(key);
    if (!row || row.cells.length !== cells.length) {
      row?.remove();
      row = make("tr", { "data-key": key });
      cells.forEach((cell, at) => row.append(
        make(at === (cells.headerAt ?? 0) ? "th" : "td", { class: cell.kind || "", ...(at === (cells.headerAt ?? 0) ? { scope: "row" } : {}) })));
    }
    const next = before ? before.nextSibling : body.firstChild;
    if (next !== row) body.insertBefore(row, next);
    before = row;
    cells.forEach((cell, at) => {
      const element = row.cells[at];
      const is = String(cell.make ? cell.is : cell.text);
      if (element.dataset.is === is) return;
      element.dataset.is = is;
      if (cell.make) element.replaceChildren(...[cell.make()].flat());
      else element.textContent = cell.text;
    });
  }
  for (const row of known.values()) row.remove();
}

/** Show what has become of an action. */
export function say(element, text, failed = false) {
  element.classList.toggle("failed", failed);
  setText(element, text);
}
