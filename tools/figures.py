"""The README's measurements, from the rows in `results/`: `python tools/figures.py` writes them anew.

Between `<!-- rows of OP ... -->` and `<!-- end of rows -->` a table is made whole: a line for every case of these ops
that has rows. In every other table whose first column is a case, or whose columns are decode's `heads x rows`, each
cell that is one number under (or, for decode, beside) an implementation's name is replaced, with as many digits.
`tests/test_results.py` holds the file to what this would write.
"""

import json
import re
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[1]
sys.path.insert(0, str(ROOT))  # the package of this tree, installed or not

from thalweg import cases  # noqa: E402
from thalweg.bench.calls import IMPLS  # noqa: E402

GPU = "NVIDIA H200"
BLOCK = re.compile(r"(<!-- rows of ([\w ]+) -->\n)(.*?)(<!-- end of rows -->\n)", re.DOTALL)
TABLE = re.compile(r"(?:^\|.*\n)+", re.MULTILINE)
NUMBER = re.compile(r"(\*{0,2})([\d,]*\.?\d+)(\*{0,2})((?: \(.*\))?)")
Rows = Mapping[tuple[str, str], Mapping[str, Any]]


def measured(root: Path = ROOT) -> Rows:
    """Rows that are right, by case and implementation."""
    lines = [json.loads(line) for path in sorted((root / "results").glob("*.jsonl")) for line in path.open()]
    return {(row["case"], row["impl"]): row for row in lines if row["ok"] and row["gpu"] == GPU}


def short(us: float) -> str:
    """Three digits, all of them before the point."""
    return f"{us:,.0f}" if us >= 100 else f"{us:.1f}" if us >= 10 else f"{us:.2f}"


def table(ops: list[str], rows: Rows) -> str:
    """Cases of some ops: us of our implementations (the least is bold), of peers and floors; bytes; the worst error."""
    own = [id for id, case in cases.TIMED.items() if case.op in ops and any(id == key[0] for key in rows)]
    if not own:
        return "(No rows yet.)\n"
    names = list(dict.fromkeys(impl.name for op in ops for impl in IMPLS[op]))
    there = list(dict.fromkeys(name for id, name in rows if id in own))
    rank = {name: (0 if name in names else 2 if name.endswith("floor") else 1) for name in there}
    columns = sorted(there, key=lambda name: (rank[name], names.index(name) if name in names else 0))
    head = ["case, us", *(f"`{name}`" for name in columns), "bytes at 4.3 TB/s", "error"]
    lines = [head, ["---"] * len(head)]
    for id in own:
        ours = {name: rows[id, name] for name in columns if rank[name] == 0 and (id, name) in rows}
        best = min(ours, key=lambda name: ours[name]["us"], default=None)
        cells = [short(rows[id, name]["us"]) if (id, name) in rows else "" for name in columns]
        cells = [f"**{cell}**" if name == best else cell for name, cell in zip(columns, cells)]
        worst = max((row["err"] for row in ours.values()), default=None)
        error = "" if worst is None else f"{worst:.1e}".replace("e-0", "e-") if worst else "0"
        lines.append([f"`{id}`", *cells, short(cases.TIMED[id].bytes / 4.3e6), error])
    return "".join("| " + " | ".join(line) + " |\n" for line in lines)


def cell(text: str, id: str, impl: str, unit: float, rows: Rows) -> str:
    """A cell with its number replaced by what the row of (id, impl) says; a cell of something else as it is."""
    number = NUMBER.fullmatch(text)
    found = [row for (case, name), row in rows.items() if case == id and (name == impl or name.startswith(impl + " "))]
    if not number:
        return text
    if not found:
        raise ValueError(f"README.md: no row of {impl} on {id}")
    digits = len(number[2].partition(".")[2])
    return f"{number[1]}{found[0]['us'] / unit:,.{digits}f}{number[3]}{number[4]}"


def cells(lines: list[list[str]], unit: float, rows: Rows) -> Iterator[list[str]]:
    """The lines of a table, single numbers replaced where a case and an implementation are named."""
    head = lines[0]
    for line in lines:
        label = line[0].strip("`").partition("`")[0]
        made = line[:1]
        for name, text in zip(head[1:], line[1:]):
            shape = re.fullmatch(r"(\d+) x (\d+)", name)
            if head[0].startswith("case") and "`" in name:
                text = cell(text, label, name.replace("`", ""), unit, rows)
            elif shape and "`" in line[0]:
                text = cell(text, f"decode-h{shape[1]}-b{shape[2]}", line[0].split("`")[1], unit, rows)
            made.append(text)
        yield made


def written(text: str, rows: Rows) -> str:
    """The README's text with all of its measurements as the rows say."""
    text = BLOCK.sub(lambda block: block[1] + "\n" + table(block[2].split(), rows) + "\n" + block[4], text)

    def anew(found: re.Match[str]) -> str:
        before = text[: found.start()].rstrip().rsplit("\n\n", 1)[-1]
        lines = [[part.strip() for part in line.strip()[1:-1].split("|")] for line in found[0].splitlines()]
        unit = 1e3 if re.search(r"\bms\b", before + lines[0][0]) else 1.0
        return "".join("| " + " | ".join(line) + " |\n" for line in cells(lines, unit, rows))

    return TABLE.sub(lambda found: found[0] if "\n|---" not in found[0] else _kept(found[0], anew(found)), text)


def _kept(old: str, new: str) -> str:
    """The new table, its lines as they were where only spaces differ."""
    pairs = zip(old.splitlines(keepends=True), new.splitlines(keepends=True))
    return "".join(was if was.split() == now.split() or was.startswith("|---") else now for was, now in pairs)


if __name__ == "__main__":
    readme = ROOT / "README.md"
    readme.write_text(written(readme.read_text(), measured()))
