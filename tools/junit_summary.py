"""Add up the JUnit reports in a folder and print one closing line in pytest's form; exit 5 if no test ran.

python tools/junit_summary.py FOLDER
"""

import sys
from pathlib import Path
from xml.etree import ElementTree


def summary(folder: Path) -> tuple[int, str]:
    """(tests that ran, closing line) of all `*.xml` in `folder`."""
    total = {"tests": 0, "failures": 0, "errors": 0, "skipped": 0}
    seconds = 0.0
    for path in sorted(folder.glob("*.xml")):
        for suite in ElementTree.parse(path).iter("testsuite"):
            for name in total:
                total[name] += int(suite.attrib[name])
            seconds += float(suite.attrib["time"])
    passed = total["tests"] - total["failures"] - total["errors"] - total["skipped"]
    counts = {"failed": total["failures"], "passed": passed, "skipped": total["skipped"], "errors": total["errors"]}
    text = ", ".join(f"{count} {word}" for word, count in counts.items() if count) or "no tests ran"
    return total["tests"] - total["skipped"], f" {text} in {seconds:.2f}s ".center(100, "=")


if __name__ == "__main__":
    ran, line = summary(Path(sys.argv[1]))
    print(f"\n{line}")
    raise SystemExit(0 if ran else 5)
