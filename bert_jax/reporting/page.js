// Moving the pointer over a chart shows the nearest point of each curve; so do the arrow keys, once a chart has the
// focus. When the pointer or the focus leaves, the first read-out returns.
// TOP and BASE, the pixels between which curves lie, are defined by the page.
const namespace = "http://www.w3.org/2000/svg";
function shape(kind, attributes) {
  const node = document.createElementNS(namespace, kind);
  for (const [name, value] of Object.entries(attributes)) node.setAttribute(name, value);
  return node;
}
function nearest(xs, at) {
  let best = 0;
  for (let i = 1; i < xs.length; i++) if (Math.abs(xs[i] - at) < Math.abs(xs[best] - at)) best = i;
  return best;
}
for (const figure of document.querySelectorAll("figure.chart")) {
  const svg = figure.querySelector("svg"), cursor = svg.querySelector(".cursor");
  const readout = figure.querySelector(".readout"), last = readout.textContent;
  const curves = JSON.parse(figure.querySelector("script").textContent);
  let at = null;  // the pixel at which values are shown; null: none
  function show(x) {
    at = x;
    const points = curves.map((curve) => {
      const best = nearest(curve.x, at);
      return {
        name: curve.name, class: curve.class, shown: curve.shown[best], place: curve.places[best],
        x: curve.x[best], y: curve.y[best]
      };
    });
    // The line is at the point that is nearest to the place asked for.
    const first = points.reduce((best, point) => Math.abs(point.x - at) < Math.abs(best.x - at) ? point : best);
    cursor.replaceChildren(
      shape("line", {x1: first.x, x2: first.x, y1: TOP, y2: BASE}),
      ...points.map((point) => shape("circle", {class: point.class, cx: point.x, cy: point.y, r: 4}))
    );
    const texts = points.map((point) => {
      const where = point.place === first.place ? "" : " (" + point.place + ")";
      return point.name + " " + point.shown + where;
    });
    readout.textContent = first.place + ": " + texts.join(" · ");
  }
  function hide() { at = null; cursor.replaceChildren(); readout.textContent = last; }
  svg.addEventListener("pointermove", (event) => {
    show(new DOMPoint(event.clientX, event.clientY).matrixTransform(svg.getScreenCTM().inverse()).x);
  });
  svg.addEventListener("pointerleave", hide);
  svg.addEventListener("blur", hide);
  svg.addEventListener("keydown", (event) => {
    const step = {ArrowLeft: -1, ArrowRight: 1}[event.key];
    if (!step) return;
    event.preventDefault();
    const xs = [...new Set(curves.flatMap((curve) => curve.x))].sort((a, b) => a - b), end = xs.length - 1;
    const here = at === null ? (step > 0 ? -1 : end + 1) : nearest(xs, at);
    show(xs[Math.min(Math.max(here + step, 0), end)]);
  });
}
