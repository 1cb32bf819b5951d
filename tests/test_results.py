"""The kept measurements: every row is whole and honest, and the README's tables say what the rows say."""

import json
import re
import subprocess
from pathlib import Path

import pytest

from thalweg import cases
from thalweg.bench import run
from thalweg.bench.calls import IMPLS

ROOT = Path(__file__).parents[1]
FIELDS = [*run.Row.__dataclass_fields__]
ROWS = [json.loads(line) for path in sorted((ROOT / "results").glob("*.jsonl")) for line in path.open()]
EXTRA = ("copy floor", "rmw floor", "one row a program")  # what is timed beside implementations and peers


def test_rows_have_the_fields_and_no_case_and_implementation_twice():
    keys = [(row["gpu"], row["case"], row["impl"]) for row in ROWS]
    assert len(keys) == len({*keys}) > 100
    for row in ROWS:
        timed = [name for name in FIELDS if row["ok"] or not name.startswith("us")]
        assert [*row] == timed, row
        assert row["case"] in cases.TIMED, row["case"]
        names = [impl.name for impl in IMPLS[cases.TIMED[row["case"]].op]]
        assert row["peer"] or row["impl"] in names or row["impl"] in EXTRA, row["impl"]
        if row["ok"]:
            spread = [row["us_min"], row["us"], row["us_max"]]
            assert row["us"] > 0 and (spread == [None, row["us"], None] or spread == sorted(spread)), row


def test_floors_are_those_of_the_cases_bytes():
    for row in ROWS:
        floor = cases.TIMED[row["case"]].bytes / run.KNOWN_BYTES_PER_US[row["gpu"]]
        assert row["floor_us"] == pytest.approx(floor, rel=0.01, abs=6e-4), row["case"]
        assert not row["ok"] or row["us"] > 0.8 * floor, f"{row['case']} {row['impl']}: faster than its bytes"


def test_commits_of_rows_are_in_the_history():
    def git(*words):
        return subprocess.run(["git", *words], cwd=ROOT, capture_output=True, text=True)

    if git("rev-parse", "--is-shallow-repository").stdout.strip() != "false":
        pytest.skip("not a whole git history")
    for commit in {row["commit"] for row in ROWS}:
        assert git("merge-base", "--is-ancestor", commit.rstrip("+"), "HEAD").returncode == 0, commit


def tables():
    """The README's tables of measurements on the H200: the paragraph before, cells of the head, cells of each row."""
    text = (ROOT / "README.md").read_text().split("\nOn an H200", 1)[1].split("\n## ", 1)[0]
    for block in re.finditer(r"([^\n]*\n)*?\n*((?:\|.*\n)+)", text):
        lines = [[cell.strip() for cell in line.strip("|\n ").split("|")] for line in block[2].splitlines()]
        before = text[: block.start(2)].rstrip().rsplit("\n\n", 1)[-1]
        yield before, lines[0], lines[2:]


def figures():
    """(case, implementation, unit, cell) of every cell of a table of cases, or of decode shapes, that is one number."""
    for before, head, rows in tables():
        unit = 1e3 if re.search(r"\bms\b", before + head[0]) else 1.0
        for label, *cells in rows:
            for name, cell in zip(head[1:], cells):
                shape = re.fullmatch(r"(\d+) x (\d+)", name)
                if head[0].startswith("case"):
                    id, impl = label.strip("`").partition("`")[0], "`" in name and name.replace("`", "")
                elif shape:
                    id, impl = f"decode-h{shape[1]}-b{shape[2]}", "`" in label and label.split("`")[1]
                else:
                    continue
                number = re.fullmatch(r"\*{0,2}([\d,]+\.?\d*)\*{0,2}( \(.*\))?", cell)
                if impl and number:
                    yield id, impl, unit, number[1].replace(",", "")


def test_the_readme_says_what_the_rows_say():
    said = {}
    for row in ROWS:
        if row["gpu"] == "NVIDIA H200" and row["ok"]:
            said[row["case"], row["impl"]] = row["us"]
    found = [*figures()]
    assert len(found) > 20
    for id, impl, unit, number in found:
        us = [
            value
            for (case, name), value in said.items()
            if case == id and (name == impl or name.startswith(impl + " "))
        ]
        assert us, f"no row of {impl} on {id}"
        digits = len(number.partition(".")[2])
        assert abs(us[0] / unit - float(number)) <= 0.501 * 10**-digits, f"{id} {impl}: {number}, the row {us[0]} us"
