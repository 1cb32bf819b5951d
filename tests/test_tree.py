"""The shape of the repository: which module imports which, the README's list of files, sizes, names, what files say."""

import ast
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
PACKAGE = ROOT / "thalweg"
MODULES = sorted(path for path in PACKAGE.rglob("*.py"))
SOURCES = sorted([*MODULES, *(ROOT / "tests").glob("*.py"), *(ROOT / "tools").glob("*.py")])


def tracked() -> list[str]:
    listed = subprocess.run(["git", "ls-files"], cwd=ROOT, capture_output=True, text=True)
    if listed.returncode or not listed.stdout:
        pytest.skip("not a git checkout")
    return [name for name in listed.stdout.splitlines() if (ROOT / name).exists()]


def name_of(path: Path) -> str:
    parts = path.relative_to(ROOT).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


# Imports

NAMES = {name_of(path) for path in MODULES}
PLAIN = ("contract", "device", "dispatch", "gluon", "inputs", "accuracy", "timing", "state")
FREE = {f"thalweg.{name}" for name in PLAIN}
API = {"thalweg.kda", "thalweg.qsa", "thalweg.kda.api", "thalweg.qsa.api"}
REFERENCES = {"thalweg.kda.reference", "thalweg.qsa.reference"}
AROUND = ("__init__", "api", "arguments", "library", "reference", "reference_ops", "workspace")  # not stages
STAGES = {name_of(p) for p in MODULES if p.parent.name in ("kda", "qsa") and p.stem not in AROUND} | {"thalweg.gluon"}
STAGES.add("thalweg.bench.states")  # the kernel of a floor


PAGES = {  # pages that compose stages
    "prefill": ("prepare", "scan"),
    "split": ("tokens", "steps", "norm"),
    "verify": ("tokens", "steps", "norm"),
    "select": ("score", "score_gluon", "topk", "survivors"),
    "survivors": ("score_gluon", "survivors_gluon"),
    "attention": ("attention_gluon",),
    "topk": ("few_gluon",),
    "shared": ("attention", "union", "union_gluon"),
}


def imported(path: Path, top_only: bool = False) -> set[str]:
    """Modules of the package that a file imports (at its top level only, or anywhere)."""
    tree = ast.parse(path.read_text())
    found = set()
    for node in tree.body if top_only else ast.walk(tree):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}: relative import"
            full = {f"{node.module}.{alias.name}" for alias in node.names}
            found |= {name if name in NAMES else node.module for name in full}
    return {name for name in found if name.split(".")[0] == "thalweg"}


def allowed(module: str) -> set[str]:
    """What a module may import of the package."""
    family = ".".join(module.split(".")[:2])
    if module in REFERENCES or module in FREE:
        return set()
    if module == "thalweg":
        return API
    if module in ("thalweg.kda", "thalweg.qsa"):
        return {f"{family}.api", f"{family}.reference", f"{family}.workspace"}
    if family in ("thalweg.kda", "thalweg.qsa"):
        own = {name for name in NAMES if name.startswith(f"{family}.")}
        shared = {"thalweg.contract", "thalweg.dispatch"}
        if module in (f"{family}.api", f"{family}.library", f"{family}.arguments"):
            return own | shared | {"thalweg.device"}
        if module == f"{family}.reference_ops":
            return shared | {f"{family}.reference"}
        # What every stage may use: device functions, where exponents start, how memory is shared out.
        names = ("anchor", "chunks", "gate", "products", "slots", "substitution", "halving", "workspace", "step_gluon")
        names += ("gather", "heads_gluon", "share_gluon", "rank")
        names += PAGES.get(module.split(".")[-1], ())
        pieces = {f"{family}.{name}" for name in names} - {module}
        # A stage: no other stage, not the reference.
        return {"thalweg.contract", "thalweg.device", "thalweg.gluon"} | pieces
    bench = {name for name in NAMES if name.startswith("thalweg.bench")}
    return {
        "thalweg.cases": {"thalweg.inputs"},
        "thalweg.layers": {"thalweg.state"} | API | REFERENCES,
        "thalweg.graphs": {"thalweg.state", "thalweg.dispatch"},
        "thalweg.model": {"thalweg.state", "thalweg.layers", "thalweg.graphs"} | API,
        "thalweg.bench": FREE | API | REFERENCES | bench | {"thalweg.cases", "thalweg.model", "thalweg.layers"},
        "thalweg.generate": {"thalweg.model"},
        "thalweg.cli": {"thalweg.cases", "thalweg.model", "thalweg.generate"} | bench,
        "thalweg.__main__": {"thalweg.cli"},
    }[family]


@pytest.mark.parametrize("path", MODULES, ids=name_of)
def test_imports_point_one_way(path):
    assert imported(path) <= allowed(name_of(path))


def packages(path: Path) -> set[str]:
    """Top-level packages a file imports anywhere."""
    nodes = list(ast.walk(ast.parse(path.read_text())))
    plain = {alias.name for node in nodes if isinstance(node, ast.Import) for alias in node.names}
    return {name.split(".")[0] for name in plain | {n.module or "" for n in nodes if isinstance(n, ast.ImportFrom)}}


@pytest.mark.parametrize("path", MODULES, ids=name_of)
def test_kernel_languages_are_not_imported_where_the_package_is(path):
    """Only a stage file may need Triton, and only `run` of an implementation imports a stage file."""
    assert "transformers" not in packages(path)
    if name_of(path) not in STAGES:
        assert "triton" not in packages(path) and not imported(path, top_only=True) & STAGES


def test_the_package_imports_and_the_reference_works_without_triton():
    code = (
        "import sys\n"
        "for name in ('triton', 'transformers', 'matplotlib'): sys.modules[name] = None\n"
        f"for name in {sorted(NAMES - STAGES - {'thalweg.__main__'})}: __import__(name)\n"
        "import thalweg, torch\n"
        "x = torch.ones(2, 16)\n"
        "print(thalweg.gated_rms_norm(x, x, x[0], 1e-6).shape)\n"
    )
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0 and done.stdout == "torch.Size([2, 16])\n", done.stderr


def test_importing_the_package_brings_no_optional_one_along():
    code = "import sys, thalweg; print(sorted({'triton', 'transformers', 'typer', 'rich'} & set(sys.modules)))"
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, timeout=300)
    assert done.stdout == "[]\n", done.stderr


# The README's list of files


def listed() -> list[str]:
    """Paths of the README's tree; folders end in a slash."""
    tree = (ROOT / "README.md").read_text().split("## Files", 1)[1].split("```text\n", 1)[1].split("```", 1)[0]
    paths, folders = [], []
    for line in tree.splitlines():
        depth, name = (len(line) - len(line.lstrip())) // 2, line.split()[0]
        folders = folders[:depth]
        paths.append("".join(folders) + name)
        if name.endswith("/"):
            folders.append(name)
    return paths


def test_the_tree_of_the_readme_is_on_disk():
    missing = [path for path in listed() if not (ROOT / path).exists() or path.endswith("/") != (ROOT / path).is_dir()]
    assert not missing


def test_what_is_on_disk_is_in_the_tree_of_the_readme():
    """A folder listed without its files stands for all of them; the families' `__init__` need no line."""
    paths = listed()
    whole = tuple(p for p in paths if p.endswith("/") and not any(q != p and q.startswith(p) for q in paths))
    rest = [f for f in tracked() if f not in paths and not f.startswith(whole)]
    assert not [f for f in rest if not re.fullmatch(r"thalweg/\w+/__init__\.py", f)]


def test_the_example_of_the_readme_prints_what_it_says(capsys):
    example = (ROOT / "README.md").read_text().split("## Example", 1)[1]
    code, result = (example.split(f"```{kind}\n", 1)[1].split("```", 1)[0] for kind in ("python", "text"))
    exec(compile(code, "README.md", "exec"), {})
    assert capsys.readouterr().out == result


def test_makefile_targets_are_those_the_readme_and_contributing_name():
    targets = set(re.findall(r"^([a-z][a-z-]*):", (ROOT / "Makefile").read_text(), re.M))
    for name in ("README.md", "CONTRIBUTING.md", ".ci/run"):
        text = (ROOT / name).read_text()
        blocks = "".join(re.split(r"```sh|```", text)[1::2])
        said = re.findall(r"`(make [^`]+)`", text) + re.findall(r"^(make .*)$", blocks, re.M)
        assert {line.split()[1] for line in said} <= targets, name


# Sizes and names


def functions(path: Path) -> list[tuple[str, int, bool]]:
    """Name, lines of the body without its docstring, and whether it is a kernel, of every function."""
    found = []
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)):
            body = node.body[1:] if ast.get_docstring(node) is not None else node.body
            lines = body[-1].end_lineno - body[0].lineno + 1 if body else 0
            found.append((node.name, lines, node.name.endswith("_kernel")))
    return found


@pytest.mark.parametrize("path", SOURCES, ids=lambda path: path.relative_to(ROOT).as_posix())
def test_files_and_functions_stay_small(path):
    assert len(path.read_text().splitlines()) <= 400
    assert not [(name, lines) for name, lines, kernel in functions(path) if lines > (150 if kernel else 60)]


def test_no_file_is_named_for_a_place():
    forbidden = {"utils", "util", "common", "helpers", "helper", "misc", "v2", "wip", "tmp", "old", "new"}
    names = [re.split(r"[_\-.]", part.lower()) for path in tracked() for part in Path(path).parts]
    assert not [name for name in names if forbidden & set(name)]


# What the files say


def test_no_absolute_paths_and_no_hosts_but_those_of_sources():
    hosts = {"www.apache.org", "arxiv.org"}
    path = re.compile(r"(?<![\w./~])/(?:home|root|work|tmp|opt|mnt|Users|usr/local)/\w")
    said = []
    for name in tracked():
        if name.endswith((".safetensors", ".png")):
            continue
        text = (ROOT / name).read_text()
        said += [(name, found) for found in path.findall(text)]
        said += [(name, host) for host in re.findall(r"https?://([^\s/\"')>\]]+)", text) if host not in hosts]
    assert not said
