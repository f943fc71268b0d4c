// Hover and keyboard values of the charts; inlined by html.py, which hashes it for the CSP.
"use strict";
for (const svg of document.querySelectorAll("svg.chart")) {
  const [x0, x1, y0, y1] = JSON.parse(svg.dataset.span);
  const [left, top, right, bottom] = JSON.parse(svg.dataset.box);
  const curves = [...svg.querySelectorAll("g[data-points]")].map(
    g => ({ name: g.dataset.name, g, points: JSON.parse(g.dataset.points) }))
    .filter(curve => curve.points.length);
  const steps = [...new Set(curves.flatMap(c => c.points.map(p => p[0])))].sort((a, b) => a - b);
  if (!steps.length) continue;
  const card = svg.closest(".card"), cross = svg.querySelector(".cross");
  const tip = document.createElement("div");
  tip.className = "tip"; tip.hidden = true; tip.setAttribute("role", "status");
  card.append(tip);
  const dots = curves.map(curve => {
    const dot = document.createElementNS("http://www.w3.org/2000/svg", "circle");
    dot.setAttribute("r", 4); dot.setAttribute("visibility", "hidden"); curve.g.append(dot);
    return dot;
  });
  const px = x => left + (right - left) * (x - x0) / (x1 - x0);
  const py = y => bottom - (bottom - top) *
    Math.min(1.02, Math.max(-0.02, (y - y0) / (y1 - y0)));
  const near = (points, x) => {
    let low = 0, high = points.length - 1;
    while (high - low > 1) {
      const middle = (low + high) >> 1;
      if (points[middle][0] < x) low = middle; else high = middle;
    }
    return x - points[low][0] <= points[high][0] - x ? points[low] : points[high];
  };
  const text = y => (y && Math.abs(y) < 1e-3 ? y.toExponential(3) :
    y.toLocaleString("en", { maximumSignificantDigits: 5 })) +
    (svg.dataset.unit ? " " + svg.dataset.unit : "");
  let at = steps.length - 1;
  const show = index => {
    at = Math.min(steps.length - 1, Math.max(0, index));
    const x = steps[at];
    const lines = [`step ${x.toLocaleString("en")}`];
    curves.forEach((curve, i) => {
      const [step, y] = near(curve.points, x);
      const close = Math.abs(px(step) - px(x)) < 8;
      dots[i].setAttribute("visibility", close ? "visible" : "hidden");
      dots[i].setAttribute("cx", px(step)); dots[i].setAttribute("cy", py(y));
      if (close) lines.push(`${curve.name}: ${text(y)}`);
    });
    cross.setAttribute("x1", px(x)); cross.setAttribute("x2", px(x));
    cross.setAttribute("y1", top); cross.setAttribute("y2", bottom);
    cross.style.opacity = 0.6;
    tip.replaceChildren(...lines.map(line => {
      const row = document.createElement("div"); row.textContent = line; return row;
    }));
    tip.hidden = false;
    const box = svg.getBoundingClientRect(), outer = card.getBoundingClientRect();
    const scale = box.width / svg.viewBox.baseVal.width;
    const place_x = box.left - outer.left + px(x) * scale;
    const flip = place_x + tip.offsetWidth + 16 > outer.width;
    tip.style.left = `${Math.max(0, flip ? place_x - tip.offsetWidth - 12 : place_x + 12)}px`;
    tip.style.top = `${box.top - outer.top + top * scale}px`;
  };
  const hide = () => {
    tip.hidden = true; cross.style.opacity = 0;
    dots.forEach(dot => dot.setAttribute("visibility", "hidden"));
  };
  svg.addEventListener("pointermove", event => {
    const box = svg.getBoundingClientRect();
    const view = (event.clientX - box.left) * svg.viewBox.baseVal.width / box.width;
    const x = x0 + (x1 - x0) * (view - left) / (right - left);
    show(steps.indexOf(near(steps.map(s => [s]), x)[0]));
  });
  svg.addEventListener("pointerleave", hide);
  svg.addEventListener("blur", hide);
  svg.addEventListener("keydown", event => {
    const move = { ArrowLeft: -1, ArrowRight: 1, PageUp: -20, PageDown: 20 }[event.key];
    if (move) { event.preventDefault(); show(at + move); }
    if (event.key === "Escape") hide();
  });
}
for (const svg of document.querySelectorAll("svg.heat")) {
  const [left, top, wide, high] = JSON.parse(svg.dataset.box);
  const [rows, columns] = JSON.parse(svg.dataset.names);
  const values = JSON.parse(svg.dataset.values), places = JSON.parse(svg.dataset.places);
  const card = svg.closest(".card"), cross = svg.querySelector(".cross");
  const tip = document.createElement("div");
  tip.className = "tip"; tip.hidden = true; tip.setAttribute("role", "status");
  card.append(tip);
  let row = 0, column = 0;
  const inside = (index, count) => Math.min(count - 1, Math.max(0, index));
  const show = (y, x) => {
    row = inside(y, values.length); column = inside(x, places.length);
    tip.textContent = `${rows} ${row}, ${columns} ${places[column].toLocaleString("en")}: ` +
      (values[row][column] === null ? "none" : `${values[row][column]} × the mean`);
    cross.setAttribute("x", left + column * wide); cross.setAttribute("y", top + row * high);
    cross.style.opacity = 1; tip.hidden = false;
    const box = svg.getBoundingClientRect(), outer = card.getBoundingClientRect();
    const scale = box.width / svg.viewBox.baseVal.width;
    const place_x = box.left - outer.left + (left + (column + 1) * wide) * scale;
    const flip = place_x + tip.offsetWidth + 16 > outer.width;
    const left_x = flip ? place_x - wide * scale - tip.offsetWidth - 8 : place_x + 8;
    tip.style.left = `${Math.max(0, left_x)}px`;
    tip.style.top = `${box.top - outer.top + (top + row * high) * scale}px`;
  };
  const hide = () => { tip.hidden = true; cross.style.opacity = 0; };
  svg.addEventListener("pointermove", event => {
    const box = svg.getBoundingClientRect(), scale = svg.viewBox.baseVal.width / box.width;
    const x = Math.floor(((event.clientX - box.left) * scale - left) / wide);
    const y = Math.floor(((event.clientY - box.top) * scale - top) / high);
    if (x in places && y in values) show(y, x); else hide();
  });
  svg.addEventListener("pointerleave", hide);
  svg.addEventListener("blur", hide);
  svg.addEventListener("keydown", event => {
    const [y, x] = { ArrowLeft: [0, -1], ArrowRight: [0, 1], ArrowUp: [-1, 0], ArrowDown: [1, 0] }[event.key] || [];
    if (x !== undefined) { event.preventDefault(); show(row + y, column + x); }
    if (event.key === "Escape") hide();
  });
}
