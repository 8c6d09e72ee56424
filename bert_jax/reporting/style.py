"""The style sheet of all pages, for light and dark screens and for print, and the script of the charts' read-outs.

Colour-blind readers can tell blue from orange, and both have a contrast of 3:1 against both backgrounds.
"""

STYLE = """
:root {
  color-scheme: light dark;
  --background: #fcfcfb; --card: #ffffff; --border: #e4e2dc; --grid: #eceae5; --axis: #b9b6ae;
  --ink: #161513; --soft: #55534d; --faint: #7b7871; --correct: #0b7a4b; --correct-ground: #e3f4ea; --warn: #8a5a00;
  --color-0: #2a78d6; --color-1: #d4571b; --color-2: #13855c; --color-3: #8a4fc0;
}
@media screen and (prefers-color-scheme: dark) {
  :root {
    --background: #161615; --card: #1f1f1d; --border: #34332f; --grid: #2c2b28; --axis: #5c5a54;
    --ink: #f2f1ee; --soft: #c1bfb8; --faint: #96938b; --correct: #62d19b; --correct-ground: #173527; --warn: #e8b559;
    --color-0: #5c9ef0; --color-1: #f08350; --color-2: #3fbf8c; --color-3: #b78be0;
  }
}
* { box-sizing: border-box; }
body {
  margin: 0 auto; max-width: 1160px; padding: 2.5rem 1.5rem 4rem; background: var(--background); color: var(--ink);
  font: 16px/1.5 system-ui, -apple-system, "Segoe UI", Roboto, "Helvetica Neue", Arial, sans-serif;
}
header p, .note { color: var(--soft); margin: .25rem 0; max-width: 46rem; }
h1 { font-size: 2rem; line-height: 1.2; margin: 0; overflow-wrap: anywhere; }
h2 { font-size: 1.25rem; margin: 2.75rem 0 .75rem; }
h3 { font-size: .95rem; margin: 0; font-weight: 650; }
h3 span { color: var(--faint); font-weight: 400; }
.state { color: var(--warn); font-weight: 600; }
.tiles {
  display: grid; grid-template-columns: repeat(auto-fit, minmax(min(100%, 140px), 1fr)); gap: .75rem;
  margin-top: 1.5rem;
}
.tile { background: var(--card); border: 1px solid var(--border); border-radius: 10px; padding: .8rem 1rem; }
.tile b { display: block; font-size: 1.6rem; line-height: 1.25; font-weight: 650; }
.tile span { display: block; color: var(--soft); font-size: .85rem; }
.tile small { color: var(--faint); font-size: .8rem; }
.charts { display: grid; grid-template-columns: repeat(auto-fit, minmax(min(100%, 430px), 1fr)); gap: 1rem; }
.chart {
  margin: 0; background: var(--card); border: 1px solid var(--border); border-radius: 10px; padding: .9rem 1rem .6rem;
  break-inside: avoid;
}
.chart figcaption {
  display: flex; flex-wrap: wrap; justify-content: space-between; gap: .25rem 1rem; align-items: baseline;
}
.chart svg { display: block; width: 100%; height: auto; margin-top: .4rem; touch-action: pan-y; }
.legend {
  list-style: none; display: flex; flex-wrap: wrap; gap: 0 .9rem; margin: 0; padding: 0; color: var(--soft);
  font-size: .85rem;
}
.legend i {
  display: inline-block; width: 14px; height: 3px; border-radius: 2px; margin-right: .4rem; vertical-align: middle;
  background: currentColor;
}
.legend .series-0 i { background: var(--color-0); } .legend .series-1 i { background: var(--color-1); }
.legend .series-2 i { background: var(--color-2); } .legend .series-3 i { background: var(--color-3); }
svg text { font-size: 12px; fill: var(--faint); font-variant-numeric: tabular-nums; }
svg text.reference { fill: var(--soft); paint-order: stroke; stroke: var(--card); stroke-width: 4px; }
svg .grid { stroke: var(--grid); } svg .axis { stroke: var(--axis); }
svg line.reference { stroke: var(--soft); stroke-dasharray: 4 4; }
svg polyline { fill: none; stroke-width: 2; stroke-linejoin: round; stroke-linecap: round; }
svg .noise { stroke-width: 1; opacity: .35; }
svg .series-0 polyline { stroke: var(--color-0); } svg .series-1 polyline { stroke: var(--color-1); }
svg .series-2 polyline { stroke: var(--color-2); } svg .series-3 polyline { stroke: var(--color-3); }
svg g.series-0 :is(circle, rect), svg circle.series-0 { fill: var(--color-0); }
svg g.series-1 :is(circle, rect), svg circle.series-1 { fill: var(--color-1); }
svg g.series-2 :is(circle, rect), svg circle.series-2 { fill: var(--color-2); }
svg g.series-3 :is(circle, rect), svg circle.series-3 { fill: var(--color-3); }
svg .cursor line { stroke: var(--axis); } svg .cursor circle { stroke: var(--card); stroke-width: 2; }
.readout {
  margin: 0; min-height: 1.5em; color: var(--soft); font-size: .85rem; font-variant-numeric: tabular-nums;
  text-align: right;
}
table { border-collapse: collapse; width: 100%; font-size: .92rem; }
th { text-align: left; color: var(--soft); font-weight: 600; font-size: .85rem; }
th, td { padding: .45rem .9rem .45rem 0; border-bottom: 1px solid var(--border); vertical-align: top; }
td.number, th.number { text-align: right; font-variant-numeric: tabular-nums; white-space: nowrap; }
.scroll { overflow-x: auto; }
mark {
  background: var(--color-0); color: var(--background); border-radius: 4px; padding: 0 .3em; font-size: .85em;
  font-weight: 650;
}
mark small { font-weight: 400; opacity: .85; }
mark.random { background: var(--color-1); } mark.kept { background: none; color: inherit; font-weight: 400; }
mark.kept { box-shadow: inset 0 0 0 1.5px var(--color-2); }
.mask { color: var(--faint); font-size: .8em; }
.panels { display: grid; grid-template-columns: repeat(auto-fit, minmax(min(100%, 235px), 1fr)); gap: 1rem 2.5rem; }
.panels h3 { margin-bottom: .35rem; }
.example { margin: 0 0 1rem; padding: .8rem 1rem; background: var(--card); border: 1px solid var(--border); }
.example { border-radius: 10px; break-inside: avoid; }
.example h3 { display: flex; flex-wrap: wrap; justify-content: space-between; gap: 0 1rem; }
.example p { margin: .4rem 0 0; line-height: 1.75; overflow-wrap: anywhere; }
.example b { color: var(--faint); font-weight: 650; margin-right: .4rem; }
.sentence { width: 52%; } .label { font-weight: 650; }
.bars { list-style: none; margin: 0; padding: 0; min-width: 14rem; }
.bars li {
  display: grid; grid-template-columns: 7.5rem 1fr 3.4rem; gap: .6rem; align-items: center; padding: 0 .4rem;
  border-radius: 5px;
}
.bars li.highlighted { background: var(--correct-ground); color: var(--correct); font-weight: 650; }
.bars div { background: var(--grid); border-radius: 4px; }
.bars i { display: block; height: 7px; border-radius: 4px; background: var(--color-0); min-width: 2px; }
.bars .highlighted i { background: var(--correct); }
.bars span { overflow: hidden; text-overflow: ellipsis; white-space: nowrap; }
.bars em { font-style: normal; text-align: right; font-variant-numeric: tabular-nums; }
.panel {
  margin: 0; max-width: 460px; background: var(--card); border: 1px solid var(--border); border-radius: 10px;
  padding: .9rem 1rem .6rem; break-inside: avoid;
}
.panel svg { display: block; width: 100%; height: auto; margin-top: .4rem; }
svg .gap { fill: var(--color-1); opacity: .45; } svg .strip { fill: var(--axis); }
svg .points circle { fill-opacity: .45; }
.pair { display: grid; grid-template-columns: repeat(auto-fit, minmax(min(100%, 420px), 1fr)); gap: 1.5rem 2.5rem; }
.pair > div { min-width: 0; }
table.matrix { width: auto; border-collapse: separate; border-spacing: 2px; font-variant-numeric: tabular-nums; }
.matrix th, .matrix td { border: 0; padding: .3rem .5rem; }
.matrix tbody th { text-align: right; white-space: nowrap; }
.matrix td { min-width: 2.6rem; text-align: right; border-radius: 4px; background: var(--card); }
.matrix .hit { background: color-mix(in srgb, var(--color-0) calc(var(--share) * 100%), var(--card)); }
.matrix .miss { background: color-mix(in srgb, var(--color-1) calc(var(--share) * 100%), var(--card)); }
.matrix .dark { color: var(--background); }
.matrix .corner { font-weight: 400; color: var(--faint); white-space: nowrap; vertical-align: bottom; }
.matrix .turned { vertical-align: bottom; text-align: right; white-space: nowrap; }
.stacked { display: grid; gap: 1.25rem; } .stacked > div { min-width: 0; }
.worst h3 span { font-weight: 400; }
.worst .columns { display: grid; grid-template-columns: 1fr minmax(15rem, 24rem); gap: 0 1.5rem; align-items: center; }
.worst .columns p:only-child { grid-column: 1 / -1; }
.worst mark { background: var(--color-1); }
.missed { color: var(--faint); font-size: .85rem; padding-left: .4rem; }
.settings { columns: 2 26rem; column-gap: 2.5rem; }
.settings table { break-inside: avoid; margin-bottom: 1.5rem; }
.settings caption { text-align: left; font-weight: 650; padding-bottom: .2rem; }
.settings td {
  padding: .25rem .9rem .25rem 0; font-family: ui-monospace, "SF Mono", Menlo, Consolas, monospace;
  font-size: .82rem; overflow-wrap: anywhere;
}
.settings td:first-child { color: var(--soft); width: 45%; }
footer { margin-top: 3rem; color: var(--faint); font-size: .85rem; }
@media (max-width: 700px) {
  .worst .columns { grid-template-columns: 1fr; }
  body { padding: 1.25rem .9rem 3rem; } h1 { font-size: 1.6rem; }
  .masked-tokens thead { display: none; }
  .masked-tokens tr { display: block; border-bottom: 1px solid var(--border); padding: .6rem 0; }
  .masked-tokens td { display: block; width: auto; border: 0; padding: .15rem 0; }
  .label::before { content: "label: "; font-weight: 400; color: var(--soft); }
}
@media print {
  :root { color-scheme: light; } body { max-width: none; padding: 0; font-size: 10pt; }
  * { print-color-adjust: exact; -webkit-print-color-adjust: exact; }
  .charts { grid-template-columns: 1fr 1fr; } .readout { display: none; } tr { break-inside: avoid; }
}
"""

# Moving the pointer over a chart shows the nearest point of each curve; when it leaves, the first read-out returns.
SCRIPT = """
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
"""
