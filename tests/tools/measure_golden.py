"""Prints the largest absolute difference from the golden arrays by test and quantity, as a Markdown table.

    python tests/tools/measure_golden.py [FILE.py ...]

Runs tests/test_golden*.py (or the given files) with pytest and exits with its code. Run it with the package's Python
from the root of the repository. torch is not needed, since the reference's arrays are in tests/testdata.
"""

import collections
import sys
from pathlib import Path

import numpy as np
import pytest

TESTS = Path(__file__).resolve().parent.parent
# The first of these that occurs in a comparison's name is its quantity.
QUANTITIES = {"gradient": "gradients", "slope": "slopes", "hidden": "hidden states", "logits": "logits", "loss": "loss"}
OTHERS = "values"


class Measure:
    """A pytest plugin that records what golden.assert_close compares."""

    def __init__(self) -> None:
        self.largest: dict[str, dict[str, float]] = collections.defaultdict(lambda: collections.defaultdict(float))
        self.test = ""

    def pytest_configure(self) -> None:
        sys.path.insert(0, str(TESTS))
        import golden

        compare = golden.assert_close

        def measured(got: object, wanted: np.ndarray, name: str) -> None:
            compare(got, wanted, name)
            found = float(np.abs(np.asarray(got) - np.asarray(wanted)).max(initial=0))
            quantity = next((quantity for part, quantity in QUANTITIES.items() if part in name), OTHERS)
            of_test = self.largest[self.test]
            of_test[quantity] = max(of_test[quantity], found)

        golden.assert_close = measured

    def pytest_runtest_setup(self, item: pytest.Item) -> None:
        self.test = item.name

    def table(self) -> str:
        columns = [*QUANTITIES.values(), OTHERS]
        lines = [["test", *columns], ["---"] * (len(columns) + 1)]
        for test, found in self.largest.items():
            lines.append([f"`{test}`", *(f"{found[name]:.1e}" if name in found else "" for name in columns)])
        return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def main() -> int:
    files = sys.argv[1:] or sorted(map(str, TESTS.glob("test_golden*.py")))
    measure = Measure()
    code = pytest.main(["-q", "-p", "no:cacheprovider", *files], plugins=[measure])
    print(measure.table())
    return int(code)


if __name__ == "__main__":
    sys.exit(main())
