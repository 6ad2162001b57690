"""The mutation run: the mistakes it makes, where it looks for tests, and what it says of a suite with a hole."""

from __future__ import annotations

import ast
import random
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from tests.mutants.__main__ import _judge, _listed, _sample, dangerous
from tests.mutants.slips import Place, Slip, Source, changes, slips

REPOSITORY = Path(__file__).parents[1]


def mistakes(text: str) -> set[str]:
    source = Source(text)
    return {source.with_edit(slip.start, slip.end, slip.new) for slip in slips("m.py", text) if changes(source, slip)}


@pytest.mark.parametrize(
    ("right", "wrong"),
    [
        ("if a < b:\n    c()", "if a <= b:\n    c()"),
        ("if (a) <= (b): c()", "if (a) < (b): c()"),
        ("if a < b:\n    raise E", "if False:\n    raise E"),
        ("x = a and b", "x = a or b"),
        ("x = a and b and c", "x = a and c"),
        ("x = a if b else c", "x = (c)"),
        ("x = a not in b", "x = a in b"),
        ("x = [a for a in b if a]", "x = [a for a in b if True]"),
        ("x = a.sum(axis=1)", "x = a.sum(axis=0)"),
        ("x = a.sum(axis=1)", "x = a.sum()"),
        ("x = f(a, key=b)", "x = f(a)"),
        ("x = f(a, b)", "x = f(b, a)"),
        ("x = sorted(a, key=b)", "x = list(a)"),
        ("x = np.sort(é)", "x = (é)"),
        ("x = max(a, b)", "x = min(a, b)"),
        ("x = a.any()", "x = a.all()"),
        ("x += 1", "x = 1"),
        ("x = a - b", "x = a"),
        ("x = -a", "x = a"),
        ("x = a[1:]", "x = a[:]"),
        ("x = a['key']", "x = a['key_']"),
        ("x = {'key': 1}", "x = {'key_': 1}"),
        ("def f(a=3): pass", "def f(a=4): pass"),
        ("def f(*, a=True): pass", "def f(*, a=False): pass"),
        ("LIMIT = 1000", "LIMIT = 2000"),
        ("f(a)", "pass"),
        ("for a in b:\n    continue", "for a in b:\n    pass"),
        ("try: a\nexcept B: raise C from None", "try: a\nexcept B: pass"),
        ("try: a\nexcept (B, C): b", "try: a\nexcept (B, B): b"),
    ],
)
def test_a_slip_is_made(right: str, wrong: str) -> None:
    assert wrong in mistakes(right)


@pytest.mark.parametrize(
    "text",
    [
        '"""A docstring."""',
        "x: list[int]",
        "def f(a: int) -> Literal[3]: ...",
        "raise E(f'layer {1 + 2}')",
        "@dataclass(frozen=True)\nclass A: ...",
        "__all__ = ['a', 'b'][1:]",
        "zip(a, b(), strict=True).x",
    ],
)
def test_words_and_types_stay(text: str) -> None:
    assert not mistakes(text)


def test_a_mistake_is_looked_for_by_those_who_run_its_statement() -> None:
    source = Source(
        "LIMIT = 3\n@decorated\ndef f(a=1):\n    x = [\n        2,\n    ]\n    if x:\n        return 4\n    return 5\n"
    )
    places = {source.line(slip.start): source.place(slip.start) for slip in slips("m.py", source.text)}
    assert places == {
        1: Place(range(1, 2), "LIMIT"),
        3: Place(range(2, 4), "f"),
        5: Place(range(4, 7), None),
        7: Place(range(7, 8), None),
        8: Place(range(8, 9), None),
        9: Place(range(9, 10), None),
    }


SIGNALS = {"kill", "killpg", "pidfd_send_signal", "raise_signal", "send_signal", "terminate"}


def test_no_mistake_is_put_into_code_that_signals_processes() -> None:
    """Such a mistake ended every process of the machine once."""
    found = set()
    for path in sorted((REPOSITORY / "eplb_cli").rglob("*.py")):
        file, source = str(path.relative_to(REPOSITORY)), Source(path.read_text())
        for node in ast.walk(source.tree):
            if isinstance(node, ast.Attribute) and node.attr in SIGNALS:
                found.add(file)
                assert dangerous(source, Slip(file, source.start(node), source.end(node), "", "")), (file, node.lineno)
    assert found == {"eplb_cli/serve/server.py", "eplb_cli/serve/session.py"}


def test_a_dangerous_mistake_is_neither_made_nor_judged() -> None:
    sources = {
        file: Source((REPOSITORY / file).read_text())
        for file in ("eplb_cli/serve/session.py", "eplb_cli/serve/server.py")
    }
    made = _sample(sources, list(sources), 10_000, random.Random(0), [])
    assert {mutant.slip.file for mutant in made} == {"eplb_cli/serve/server.py"}
    server = sources["eplb_cli/serve/server.py"]
    old = "end_all(self.process.pid)"
    assert not any(server.text.index("def stop") < mutant.slip.start < server.text.index(old) for mutant in made)
    listed = _listed(server, {"file": "eplb_cli/serve/server.py", "old": old, "new": "end_all(0)", "meaning": ""})
    assert listed is not None
    # Without a copy or tests to run: it would fail if it went on.
    verdict = _judge(listed, sources, None, None, False)  # type: ignore[arg-type]
    assert verdict.verdict == "never run"


@pytest.fixture
def checkout(tmp_path: Path) -> Path:
    """A project of one function and the mutation run, with tests that leave one line unwatched."""
    root = tmp_path / "checkout"
    (root / "eplb_cli").mkdir(parents=True)
    (root / "eplb_cli" / "__init__.py").write_text("")
    (root / "eplb_cli" / "one.py").write_text("def half(a):\n    if a < 0:\n        a = -a\n    return a // 2\n")
    shutil.copytree(REPOSITORY / "tests" / "mutants", root / "tests" / "mutants")
    (root / "tests" / "__init__.py").write_text("")
    (root / "tests" / "test_one.py").write_text(
        "from eplb_cli.one import half\n\ndef test_half():\n    assert half(5) == 2\n    half(-1)\n"
    )
    (root / "tests" / "mutants" / "listed.toml").write_text("")
    subprocess.run(["git", "init", "-q"], cwd=root, check=True)
    return root


def run(checkout: Path, *arguments: str) -> tuple[int, str]:
    command = [sys.executable, "-m", "tests.mutants", "--jobs", "1", *arguments]
    done = subprocess.run(command, cwd=checkout, capture_output=True, text=True)
    return done.returncode, done.stdout + done.stderr


@pytest.mark.slow
def test_a_hole_in_the_tests_is_shown_and_fails(checkout: Path) -> None:
    code, said = run(checkout)
    assert code == 1
    assert "NOT NOTICED       eplb_cli/one.py:3" in said and "    - a = -a\n" in said
    assert "noticed           eplb_cli/one.py:4" in said and "by tests/test_one.py::test_half" in said
    assert (checkout / "eplb_cli" / "one.py").read_text().endswith("return a // 2\n")
    with (checkout / "tests" / "test_one.py").open("a") as file:
        file.write("    assert [half(-4), half(-1), half(0), half(1)] == [2, 0, 0, 0]\n")
    rows = [("if a < 0:", "if a <= 0:"), ("if a < 0:", "if a < 1:")]
    (checkout / "tests" / "mutants" / "equivalent.toml").write_text(
        "".join(
            f"[[mutant]]\nfile = 'eplb_cli/one.py'\nold = '{old}'\nnew = '{new}'\nequivalent = '-0 is 0'\n"
            for old, new in rows
        )
    )
    code, said = run(checkout)
    assert "NOT NOTICED" not in said and "100.0% of" in said and code == 0, said
    assert "| eplb_cli | 2 | 2 | 1 | 100.0% |" in said, said


@pytest.mark.slow
def test_a_listed_mistake_whose_code_is_gone_fails(checkout: Path) -> None:
    (checkout / "tests" / "mutants" / "listed.toml").write_text(
        "[[mutant]]\nfile = 'eplb_cli/one.py'\nold = 'a // 3'\nnew = 'a'\nmeaning = 'thirds'\n"
    )
    code, said = run(checkout, "--sample", "0")
    assert code == 1 and "GONE              eplb_cli/one.py" in said
