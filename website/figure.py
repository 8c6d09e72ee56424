"""Draws docs/speedrun.svg, the loss of the published speedrun over its minutes: `python -m website.figure`."""

import json
from pathlib import Path

ROOT = Path(__file__).parent.parent
LOG = ROOT / "benchmarks" / "results" / "speedrun" / "metrics.jsonl"
FILE = ROOT / "docs" / "speedrun.svg"
WIDTH, HEIGHT = 760, 300
LEFT, RIGHT, TOP, BOTTOM = 52, 20, 34, 44
LEAST, MOST = 3.0, 10.0  # nats
STYLE = """\
svg { --ground: #f8fafc; --text: #334155; --grid: #e2e8f0; --train: #94a3b8; --held: #4338ca; --target: #b45309; }
@media (prefers-color-scheme: dark) {
  svg { --ground: #0f172a; --text: #cbd5e1; --grid: #334155; --train: #64748b; --held: #a5b4fc; --target: #fcd34d; }
}
svg { font: 12px system-ui, sans-serif; } text { fill: var(--text); } .ground { fill: var(--ground); }
.grid { stroke: var(--grid); } .train { fill: none; stroke: var(--train); stroke-width: 1.5; }
.held { fill: none; stroke: var(--held); stroke-width: 2.5; } .target { stroke: var(--target); stroke-dasharray: 5 4; }
.end { text-anchor: end; } .middle { text-anchor: middle; }
text.held { fill: var(--held); stroke: none; } text.target { fill: var(--target); stroke: none; }"""


def figure(lines: list[dict[str, float]], minutes: float, target: float) -> str:
    """Draws training and held-out loss (nats) over a budget's minutes, as SVG."""

    def across(share: float) -> float:
        return LEFT + share * (WIDTH - LEFT - RIGHT)

    def down(loss: float) -> float:
        return TOP + (MOST - loss) / (MOST - LEAST) * (HEIGHT - TOP - BOTTOM)

    def curve(key: str) -> str:
        points = [(line["budget_fraction"], line[key]) for line in lines if line.get(key) is not None]
        return " ".join(f"{across(share):.1f},{down(loss):.1f}" for share, loss in points)

    last = next(line["eval_mlm_loss"] for line in reversed(lines) if "eval_mlm_loss" in line)
    bottom, right = HEIGHT - BOTTOM, WIDTH - RIGHT
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {HEIGHT}" role="img" aria-label="Masked-token'
        f' loss over {minutes:.0f} minutes of pretraining on two CPU cores, down to {last:.2f} nats on held-out text">',
        f"<style>\n{STYLE}\n</style>",
        f'<rect class="ground" width="{WIDTH}" height="{HEIGHT}" rx="12"/>',
        f'<text x="{LEFT}" y="21">masked-token loss, nats: pretraining of 7.4 M parameters on two CPU cores</text>',
    ]
    for loss in range(int(LEAST), int(MOST) + 1, 1):
        parts.append(f'<path class="grid" d="M{LEFT} {down(loss):.1f}H{right}"/>')
        parts.append(f'<text class="end" x="{LEFT - 8}" y="{down(loss) + 4:.1f}">{loss}</text>')
    for minute in range(0, int(minutes) + 1, 20):
        parts.append(f'<text class="middle" x="{across(minute / minutes):.1f}" y="{bottom + 18}">{minute}</text>')
    parts += [
        f'<text class="middle" x="{across(0.5):.1f}" y="{bottom + 36}">minutes</text>',
        f'<path class="target" d="M{LEFT} {down(target):.1f}H{right}"/>',
        f'<polyline class="train" points="{curve("mlm_loss")}"/>',
        f'<polyline class="held" points="{curve("eval_mlm_loss")}"/>',
        f'<text class="held end" x="{right}" y="{down(last) - 26:.1f}">held-out text: {last:.2f}</text>',
        f'<text class="target" x="{LEFT + 8}" y="{down(target) - 5:.1f}">target {target}</text>',
        "</svg>",
    ]
    return "\n".join(parts) + "\n"


def published() -> str:
    """Draws the published run, with 120 minutes and the target in docs/speedrun.md."""
    return figure([json.loads(line) for line in LOG.read_text(encoding="utf-8").splitlines()], 120.0, 3.3)


if __name__ == "__main__":
    FILE.write_text(published(), encoding="utf-8")
