// Moving the pointer over a chart shows the nearest point of each curve; when it leaves, the first read-out returns.
// TOP and BASE, the pixels between which curves lie, are defined by the page.
const namespace = "http://www.w3.org/2000/svg";
function shape(kind, attributes) {
  const node = document.createElementNS(namespace, kind);
  for (const [name, value] of Object.entries(attributes)) node.setAttribute(name, value);
  return node;
}
for (const figure of document.querySelectorAll("figure.chart")) {
  const svg = figure.querySelector("svg"), cursor = svg.querySelector(".cursor");
  const readout = figure.querySelector(".readout"), last = readout.textContent;
  const curves = JSON.parse(figure.querySelector("script").textContent);
  svg.addEventListener("pointermove", (event) => {
    const at = new DOMPoint(event.clientX, event.clientY).matrixTransform(svg.getScreenCTM().inverse()).x;
    const points = curves.map((curve, index) => {
      let best = 0;
      for (let i = 1; i < curve.x.length; i++) if (Math.abs(curve.x[i] - at) < Math.abs(curve.x[best] - at)) best = i;
      const {name, shown, places, x, y} = curve;
      return {name, shown: shown[best], place: places[best], x: x[best], y: y[best], index};
    });
    const [first] = points;
    cursor.replaceChildren(
      shape("line", {x1: first.x, x2: first.x, y1: TOP, y2: BASE}),
      ...points.map((point) => shape("circle", {class: "series-" + point.index, cx: point.x, cy: point.y, r: 4}))
    );
    const texts = points.map((point) => {
      const where = point.place === first.place ? "" : " (" + point.place + ")";
      return point.name + " " + point.shown + where;
    });
    readout.textContent = first.place + ": " + texts.join(" · ");
  });
  svg.addEventListener("pointerleave", () => { cursor.replaceChildren(); readout.textContent = last; });
}
