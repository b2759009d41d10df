"""Hostile modules and checks: proxied, none is paid; reported, those that are paid are the ones that the docs name."""

from __future__ import annotations

import re
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager
from fractions import Fraction
from pathlib import Path
from typing import NamedTuple

import pytest

from rollcage.events import Event
from rollcage.rollout.checks import Sides, run_checks
from rollcage.rollout.checks.inside.wire import pack, unpack
from rollcage.sandboxes.base import PATH, Provider, Separation, run, sh
from rollcage.sandboxes.local.provider import LocalProvider
from rollcage.types import TESTS_DIR, Check, Task
from support import hostile_modules as modules
from support.boxes import a_box
from support.judging import judged
from support.paths import ROOT
from support.pytest_in_box import PYTHON, SETUP, pytest_files

TESTS = {"test_calc.py": modules.PYTEST, "test_unit.py": modules.UNITTEST, "calc.test.mjs": modules.NODE}
WORKDIR = "/home/user/workdir"
CHECKS = {
    "pytest": Check(kind="pytest", path="test_calc.py", interpreter=PYTHON),
    "unittest": Check(kind="unittest", path="test_unit.py"),
    "node": Check(kind="node", path="calc.test.mjs", expect=modules.NODE_TESTS),
}


class Trick(NamedTuple):
    """A test, the module that wants to be paid by it, and one that does the work."""

    test: str
    hostile: str
    honest: str
    kind: str = "unittest"


_TEST = "import unittest, os, calc\nclass T(unittest.TestCase):\n    def test_a(self):\n        "
_HERE = "os.path.dirname(__file__)"
TRICKS = {
    "a link to what is expected, made while it is tested": Trick(
        f"{_TEST}calc.render()\n"
        f"        with open('{WORKDIR}/out.txt') as got, open({_HERE} + '/golden.txt') as wanted:\n"
        "            self.assertEqual(got.read(), wanted.read())\n",
        f"import os\ndef render(): os.symlink('{TESTS_DIR}/golden.txt', '{WORKDIR}/out.txt')\n",
        f"def render():\n    with open('{WORKDIR}/out.txt', 'w') as file: file.write('secret 7731')\n",
    ),
    "a number that is large and then small": Trick(
        f"{_TEST}got = calc.middle()\n        self.assertGreater(got, 4)\n        self.assertLess(got, 6)\n",
        "class Both(float):\n    asked = 0\n    def __float__(self):\n        Both.asked += 1\n"
        "        return 10.0 if Both.asked % 2 else 0.0\ndef middle(): return Both()\n",
        "class Own(float): pass\ndef middle(): return Own(5)\n",
    ),
    "an object that is large and then small in node": Trick(
        'import test from "node:test";\nimport assert from "node:assert";\n'
        'import { middle } from "../workdir/calc.mjs";\n'
        'test("a", () => { const got = middle(); assert.ok(got > 4); assert.ok(got < 6); });\n',
        "let asked = 0;\nexport const middle = () => ({ valueOf: () => (asked++ % 2 ? 0 : 10) });\n",
        "export const middle = () => ({ valueOf: () => 5 });\n",
        "node",
    ),
    "a loop of the test's that is ended from within": Trick(
        f"{_TEST}self.assertTrue(all(map(calc.is_prime, [2, 3])))\n"
        "        for got in map(calc.is_prime, [4, 6]): self.assertFalse(got)\n"
        "        self.assertEqual([next(calc.primes()), *zip(calc.primes(), 'ab')], [2, (2, 'a')])\n",
        "def is_prime(n): raise StopIteration\ndef primes(): yield 2\n",
        "def is_prime(n): return n < 4\ndef primes(): yield 2\n",
    ),
    "an error of theirs that is every error": Trick(
        f"{_TEST}for kind in (calc.Empty, calc.Others):\n"
        "            with self.assertRaises(kind):\n"
        "                calc.pop()\n"
        "                self.fail('nothing was raised')\n",
        "Empty, Others = Exception, (AssertionError,)\ndef pop(): pass\n",
        "class Empty(Exception): pass\nOthers = (Empty,)\ndef pop(): raise Empty\n",
    ),
    "an assertion of the test's that is kept from it": Trick(
        f"{_TEST}calc.each([2, 3], lambda got: self.assertIn(got, (4, 9)))\n",
        "def each(given, tell):\n    for one in given:\n        try: tell(0)\n        except BaseException: pass\n",
        "def each(given, tell):\n    for one in given: tell(one * one)\n",
    ),
    "an assertion that is kept from a test in node": Trick(
        'import test from "node:test";\nimport assert from "node:assert";\n'
        'import { each } from "../workdir/calc.mjs";\n'
        'test("a", () => { each([2, 3], (got) => assert.ok([4, 9].includes(got))); });\n',
        "export const each = (given, tell) => { for (const one of given) try { tell(0); } catch {} };\n",
        "export const each = (given, tell) => given.forEach((one) => tell(one * one));\n",
        "node",
    ),
}


async def tried(trick: Trick, provider: Provider) -> None:
    """The honest module is paid, the hostile one is not, and no code of theirs was in reach of what decides."""
    python = trick.kind == "unittest"
    test, module = ("test_calc.py", "calc.py") if python else ("calc.test.mjs", "calc.mjs")
    expect = ("test_calc.T.test_a",) if python else ("calc.test.mjs > a",)
    check = Check.model_validate({"kind": trick.kind, "path": test, "isolation": "proxied", "expect": expect})
    task = Task(instruction="-", checks=(check,), tests={test: trick.test, "golden.txt": "secret 7731"})
    for text, earned in ((trick.hostile, 0), (trick.honest, 1)):
        verdict = await judged(provider, task.model_copy(update={"instruction": f"cat > {module} <<'E'\n{text}E"}))
        assert verdict.total == earned, verdict
        assert verdict.reward is not None and verdict.reward.trust == "isolated"


@pytest.mark.parametrize("name", TRICKS)
async def test_a_proxied_check_pays_no_trick_and_the_honest_way_of_it(name: str, tmp_path: Path) -> None:
    async with LocalProvider(tmp_path) as provider:
        await tried(TRICKS[name], provider)


async def test_no_module_that_a_package_file_leads_to_runs_when_the_judge_starts(tmp_path: Path) -> None:
    site = "~/venv/lib/python3*/site-packages"
    check = Check(kind="unittest", path="t.py", isolation="proxied", interpreter="/home/user/venv/bin/python")
    task = Task(
        instruction="-",
        setup=(
            "python3 -m venv --without-pip ~/venv",
            f"echo {WORKDIR} > $(echo {site})/a.pth; echo import extra > $(echo {site})/b.pth",
        ),
        checks=(check,),
        tests={"t.py": f"{_TEST}self.assertEqual(calc.add(2, 3), 5)\n"},
    )
    patch = "import unittest; unittest.TestCase.assertEqual = lambda *words: None"
    plant = f"for name in sitecustomize extra; do echo '{patch}' > $name.py; done; "
    plant += "echo 'def add(a, b): return {}' > calc.py"
    async with LocalProvider(tmp_path) as provider:
        for said, earned in ((0, 0), (5, 1)):
            verdict = await judged(provider, task.model_copy(update={"instruction": plant.format(said)}))
            assert verdict.total == earned, verdict


async def test_no_package_that_is_a_link_to_the_work_runs_in_the_judge_where_a_library_imports_it(
    tmp_path: Path,
) -> None:
    site = "~/venv/lib/python3*/site-packages"
    check = Check(kind="unittest", path="t.py", isolation="proxied", interpreter="/home/user/venv/bin/python")
    task = Task(
        instruction="mkdir pack; cat > pack/__init__.py <<'E'\nimport unittest\n"
        "unittest.TestCase.assertEqual = lambda *words: None\nE\necho 'def add(a, b): return 0' > calc.py",
        setup=(
            "python3 -m venv --without-pip ~/venv",
            f"ln -s ~/workdir/pack $(echo {site})/pack; echo 'try: import pack' > $(echo {site})/lib.py",
            f"echo 'except ImportError: pass' >> $(echo {site})/lib.py",
        ),
        checks=(check,),
        tests={"t.py": f"import lib\n{_TEST}self.assertEqual(calc.add(2, 3), 5)\n"},
    )
    async with LocalProvider(tmp_path) as provider:
        verdict = await judged(provider, task)
        assert verdict.total == 0, verdict


def test_a_number_that_would_take_an_hour_to_write_out_is_refused() -> None:
    for text in ("1e400000000", "1/0", "1/2/3"):
        with pytest.raises((ValueError, TypeError, ZeroDivisionError)):
            unpack({"F": text}, str)
    assert unpack(pack(Fraction(-5, 3), str), str) == Fraction(-5, 3)


async def nobody(event: Event) -> None:
    """Nobody listens."""


class Bench:
    """One divided box in which one module after the other is judged."""

    def __init__(self, sides: Sides) -> None:
        self._sides = sides

    async def earned(self, check: Check, files: Mapping[str, str]) -> float:
        """What these files in the workdir earn."""
        clear = ["find", WORKDIR, "-mindepth", "1", "-delete"]
        assert (await run(self._sides.box, clear)).code == 0
        for path, text in files.items():
            await self._sides.box.write(f"{WORKDIR}/{path}", text.encode())
        task = Task(instruction="-", tests=TESTS, checks=(check,))
        checked = await run_checks(task, self._sides, nobody, seconds=60)
        return sum(checked.parts.values()) / len(checked.parts)

    async def paid(self, kinds: Sequence[str], isolation: str, hostile: Mapping[str, Mapping[str, str]]) -> set[str]:
        """Which of these modules are paid by a check of one of these kinds."""
        found = set()
        for kind in kinds:
            for name, files in hostile.items():
                seconds = 4 if name == "hangs" else 60
                check = CHECKS[kind].model_copy(update={"isolation": isolation, "timeout_s": seconds})
                if await self.earned(check, files):
                    found.add(f"{kind}: {name}")
        return found


@asynccontextmanager
async def bench(folder: Path) -> AsyncIterator[Bench]:
    async with a_box(folder) as box:
        for path, text in {**pytest_files(), f"{WORKDIR}/calc.py": ""}.items():
            await box.write(path, text.encode())
        assert (await sh(box, SETUP)).code == 0
        await box.checkpoint()
        await box.rewind((WORKDIR,))
        for path, text in TESTS.items():
            await box.write(f"{TESTS_DIR}/{path}", text.encode())
        async with box.separate(Separation(shared=(WORKDIR,), sealed=(TESTS_DIR,))) as judged:
            yield Bench(Sides(box, judged, {"PATH": f"{judged.tools}:{PATH}", "TESTS_DIR": TESTS_DIR}, {}))


NODE = {name: {"calc.mjs": text} for name, text in modules.NODE_MODULES.items()}


@pytest.mark.parametrize("isolation", ["reported", "proxied"])
async def test_honest_work_is_paid_and_broken_work_is_not(tmp_path: Path, isolation: str) -> None:
    async with bench(tmp_path) as judge:
        for kind, check in CHECKS.items():
            asked = check.model_copy(update={"isolation": isolation})
            done = {"calc.py": modules.HONEST, "calc.mjs": modules.HONEST_NODE}
            assert await judge.earned(asked, done) == 1, kind
            assert await judge.earned(asked, {"calc.py": modules.BROKEN}) == 0, kind


async def test_a_proxied_check_pays_no_hostile_module(tmp_path: Path) -> None:
    async with bench(tmp_path) as judge:
        assert await judge.paid(["pytest", "unittest"], "proxied", modules.PYTHON) == set()
        assert await judge.paid(["node"], "proxied", NODE) == set()


async def test_a_reported_check_pays_those_that_the_docs_name(tmp_path: Path) -> None:
    named = set(re.findall(r"^- `(\w+: [^`]+)`", (ROOT / "docs" / "checks.md").read_text(), re.MULTILINE))
    async with bench(tmp_path) as judge:
        paid = await judge.paid(["pytest", "unittest"], "reported", modules.PYTHON)
        assert paid | await judge.paid(["node"], "reported", NODE) == named
