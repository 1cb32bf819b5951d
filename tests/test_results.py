"""The kept measurements: every row is whole and honest, and the README's tables say what the rows say."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

from thalweg import cases
from thalweg.bench import run
from thalweg.bench.calls import IMPLS

ROOT = Path(__file__).parents[1]
sys.path.insert(0, str(ROOT / "tools"))

import figures  # noqa: E402

FIELDS = [*run.Row.__dataclass_fields__]
ROWS = [json.loads(line) for path in sorted((ROOT / "results").glob("*.jsonl")) for line in path.open()]
EXTRA = ("copy floor", "rmw floor", "one row a program", "early hopper", "early triton")  # what is timed beside them


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


def test_the_readme_says_what_the_rows_say():
    """It is what `tools/figures.py` writes; and a row that says something else changes it."""
    text, rows = (ROOT / "README.md").read_text(), figures.measured()
    assert figures.written(text, rows) == text
    others = ({**rows, key: {**row, "us": 2 * row["us"]}} for key, row in rows.items())
    assert sum(figures.written(text, other) != text for other in others) > 60


def test_a_table_is_made_of_the_cases_that_have_rows():
    rows = {("topk-d1", "triton"): {"us": 12.34, "err": 0.0}, ("topk-d16", "them topk"): {"us": 1234.5, "err": 0.0}}
    assert figures.table(["qsa_topk"], rows).splitlines() == [
        "| case, us | `triton` | `them topk` | bytes at 4.3 TB/s | error |",
        "| --- | --- | --- | --- | --- |",
        "| `topk-d1` | **12.3** |  | 0.03 | 0 |",
        "| `topk-d16` |  | 1,234 | 0.50 |  |",
    ]
    text = "x\n\n| case, ms | `triton` | more |\n|---|---|---|\n| `topk-d1`: one | **0.5** (now) | 3 |\n"
    assert figures.written(text, rows) == text.replace("0.5", "0.0")
    with pytest.raises(ValueError, match="no row of hopper on topk-d1"):
        figures.written(text.replace("triton", "hopper"), rows)
