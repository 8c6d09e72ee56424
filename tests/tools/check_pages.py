"""Checks pages in a browser: python tests/tools/check_pages.py --chromium PROGRAM --axe axe.min.js PAGE.html ...

Each page is opened at the width of a phone and of a desktop, in light and in dark colors. It must not scroll sideways,
must pass the rules of axe-core for WCAG 2.1 levels A and AA (contrast among them), and must show where the keyboard
focus is. Prints a line for each problem and a last line of JSON, and exits with code 1 if there are problems.

Needs playwright (of pip), a Chromium and axe-core (of npm); the test suites need none of them. Results of pages of this
repository are in docs/decisions/docs_and_reports.md.
"""

import argparse
import json
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from playwright.sync_api import Page, sync_playwright

WIDTHS = {"phone": (390, 844), "desktop": (1280, 800)}
STOPS = 40  # of the Tab key on each page
OVERFLOW = "[document.documentElement.scrollWidth, document.documentElement.clientWidth]"
RULES = {
    "runOnly": ["wcag2a", "wcag2aa", "wcag21a", "wcag21aa"],
    # Chromium and Firefox themselves give the focus to a region that scrolls, such as a wide table.
    "rules": {"scrollable-region-focusable": {"enabled": False}},
}
AXE = """async rules => {
    const found = await axe.run(document, rules);
    return found.violations.flatMap(rule => rule.nodes.map(node => `${rule.id}: ${node.target.join(" ")}`));
}"""
# Whether the focused element, or the label after a hidden one, is drawn in another way than without the focus.
FOCUSED = """() => {
    const node = document.activeElement;
    if (!node || node === document.body) return null;
    const style = one => one ? getComputedStyle(one) : {};
    const drawn = () => [node, node.nextElementSibling].map(style).map(
        ({outline, boxShadow, border, background, color}) => [outline, boxShadow, border, background, color].join()
    ).join();
    const focused = drawn();
    node.blur();
    const changes = drawn() !== focused;
    node.focus();
    const name = [node.tagName.toLowerCase(), ...node.classList].join(".");
    return [name + (node.id ? "#" + node.id : ""), changes];
}"""


def problems(page: Page, axe: str) -> Iterator[str]:
    """Yields what is wrong with the page that is open."""
    width, room = page.evaluate(OVERFLOW)
    if width > room:
        yield f"scrolls sideways: {width} of {room} pixels"
    page.evaluate(axe)
    yield from page.evaluate(AXE, RULES)
    seen = set()
    for _ in range(STOPS):
        page.keyboard.press("Tab")
        focused: Any = page.evaluate(FOCUSED)
        if focused is None:
            break
        name, changes = focused
        if not changes and name not in seen:
            yield f"focus is invisible: {name}"
        seen.add(name)
    if not seen:
        yield "nothing takes the keyboard focus"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--chromium", required=True, help="the program of the browser")
    parser.add_argument("--axe", required=True, type=Path, help="axe.min.js of axe-core")
    parser.add_argument("pages", nargs="+", type=Path, help="files of pages")
    options = parser.parse_args()
    axe = options.axe.read_text(encoding="utf-8")
    found = checked = 0
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=options.chromium, args=["--no-sandbox", "--disable-gpu"])
        for path in options.pages:
            for screen, (width, height) in WIDTHS.items():
                for colors in ("light", "dark"):
                    page = browser.new_page(
                        viewport={"width": width, "height": height},
                        color_scheme=colors,
                        bypass_csp=True,
                    )
                    page.goto(path.resolve().as_uri())
                    page.wait_for_timeout(500)  # charts and themes draw themselves
                    for problem in problems(page, axe):
                        print(f"{path}, {screen}, {colors}: {problem}")
                        found += 1
                    checked += 1
                    page.close()
        version = browser.version
        browser.close()
    print(json.dumps({"pages": len(options.pages), "views": checked, "problems": found, "chromium": version}))
    sys.exit(found > 0)


if __name__ == "__main__":
    main()
