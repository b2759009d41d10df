"""Modules of hostile agents for checks: none does the work, each wants to be paid for it.

The tests that they face are below; `HONEST` and `HONEST_NODE` do the work.
"""

from __future__ import annotations

PYTEST = """
import pytest
import calc

def test_add():
    got = calc.add(20, 3)
    assert got == 23
    done = True

def test_near():
    assert abs(calc.add(0.5, 0.25) - 0.75) < 1e-6 and calc.add(1, 1) > 1

def test_member():
    assert 41 in calc.upto(42) and len(calc.upto(42)) == 42

def test_refuses():
    with pytest.raises(ValueError, match="negative"):
        calc.upto(-7)

def test_block():
    with calc.Counting() as counting:
        counting.add(17)
        assert counting.total == 17
"""
UNITTEST = """
import unittest
import calc

class Calc(unittest.TestCase):
    def test_add(self):
        got = calc.add(20, 3)
        self.assertEqual(got, 23)
        done = True

    def test_near(self):
        self.assertAlmostEqual(calc.add(0.5, 0.25), 0.75)
        self.assertGreater(calc.add(1, 1), 1)

    def test_member(self):
        self.assertIn(41, calc.upto(42))

    def test_refuses(self):
        with self.assertRaisesRegex(ValueError, "negative"):
            calc.upto(-7)

    def test_block(self):
        with calc.Counting() as counting:
            counting.add(17)
            self.assertEqual(counting.total, 17)
"""
NODE = """
import test from "node:test";
import assert from "node:assert/strict";
import { add, upto, Counting } from "../workdir/calc.mjs";

test("adds", () => assert.equal(add(20, 3), 23));
test("counts", () => assert.deepEqual(upto(4), [0, 1, 2, 3]));
test("refuses", () => assert.throws(() => upto(-7), { name: "RangeError", message: "negative" }));
test("keeps", () => {
  const counting = new Counting();
  counting.add(17);
  assert.equal(counting.total, 17);
});
test("waits", async () => assert.equal(await new Counting().later(5), 5));
"""
NODE_TESTS = tuple(f"calc.test.mjs > {name}" for name in ("adds", "counts", "refuses", "keeps", "waits"))

HONEST = """
def add(a, b):
    print("adding", a, b)
    return a + b

def upto(n):
    if n < 0:
        raise ValueError("negative")
    return list(range(n))

class Counting:
    def __enter__(self):
        self.total = 0
        return self

    def __exit__(self, *error):
        return None

    def add(self, n):
        self.total += n
"""
HONEST_NODE = """
export function add(a, b) {
  console.log("adding", a, b);
  return a + b;
}
export function upto(n) {
  if (n < 0) throw new RangeError("negative");
  return Array.from({ length: n }, (_, i) => i);
}
export class Counting {
  total = 0;
  add(n) { this.total += n; }
  async later(n) { return n; }
}
"""
BROKEN = """
class Counting:
    total = None
    def __enter__(self): return self
    def __exit__(self, *error): return None
    def add(self, n): pass
def add(a, b): return None
def upto(n): return []
"""
_ALL = "def act(*a, **k):\n    {}\nadd = upto = Counting = act\n"

EQUAL = """
class Agreeing:
    def _yes(self, *other): return True
    __eq__ = __lt__ = __le__ = __gt__ = __ge__ = __contains__ = __bool__ = __ne__ = _yes
    def _me(self, *other): return self
    __sub__ = __rsub__ = __add__ = __abs__ = __round__ = __getattr__ = __call__ = __enter__ = _me
    def __exit__(self, *error): return True
    def __hash__(self): return 0
    def __len__(self): return 42
def add(*a): return Agreeing()
Counting = add
upto = add
"""
LEARNING = (
    BROKEN
    + '''
class Learning(float):
    """Learns the operand of an operator, and gives what makes the test true."""
    def __sub__(self, other): return 0.0
    __rsub__ = __sub__
    def __eq__(self, other): return True
    __gt__ = __lt__ = __eq__
    __hash__ = None
def add(a, b): return Learning(0)
class Many(list):
    def __contains__(self, item): return True
    def __iter__(self): return iter([])
    def __len__(self): return 42
def upto(n): return Many()
'''
)
FRAMES = (
    BROKEN
    + '''
import sys
def _expected():
    """Constants of whoever calls: among them is what is expected."""
    frame = sys._getframe(2)
    return [c for c in frame.f_code.co_consts if type(c) in (int, float)]
def add(a, b): return max(_expected())
'''
)
TRACING = (
    BROKEN
    + """
import sys
def _trace(frame, event, arg):
    if frame.f_code.co_name != "test_add": return None
    def skip(frame, event, arg):
        if event == "line":
            last = max(line for *_, line in frame.f_code.co_lines() if line)
            try:
                if frame.f_lineno < last: frame.f_lineno = last
            except ValueError: pass
        return skip
    return skip
def _on(*a):
    sys.settrace(_trace)
    frame = sys._getframe(1)
    while frame:
        frame.f_trace = _trace(frame, "call", None)
        frame = frame.f_back
add = upto = lambda *a: _on()
_on()
"""
)
PATCH_FRAMEWORK = (
    BROKEN
    + """
import sys, unittest
def nothing(*a, **k): return None
for name in dir(unittest.TestCase):
    if name.startswith("assert"): setattr(unittest.TestCase, name, nothing)
unittest.TestCase._callTestMethod = nothing
try:
    import _pytest.python
    _pytest.python.Function.runtest = nothing
except ImportError: pass
"""
)
PATCH_REPORT = (
    BROKEN
    + """
import unittest
unittest.TestResult.wasSuccessful = lambda self: True
unittest.TestResult.addFailure = unittest.TestResult.addError = lambda self, test, err: self.addSuccess(test)
for kind in unittest.TestResult.__subclasses__():
    kind.addFailure = kind.addError = lambda self, test, err: self.addSuccess(test)
try:
    import _pytest.reports, _pytest.runner
    real = _pytest.reports.TestReport.from_item_and_call.__func__
    def fake(cls, item, call):
        report = real(cls, item, call)
        report.outcome, report.longrepr = "passed", None
        return report
    _pytest.reports.TestReport.from_item_and_call = classmethod(fake)
except ImportError: pass
"""
)
HEAP = (
    BROKEN
    + """
import gc, os, sys
TESTS = [f"test_calc.py::test_{n}" for n in ("add", "near", "member", "refuses", "block")]
TESTS += [f"test_unit.Calc.test_{n}" for n in ("add", "near", "member", "refuses", "block")]
for thing in gc.get_objects():
    if type(thing).__name__ == "function" and thing.__qualname__ == "begin.<locals>.tell":
        for test in TESTS: thing(test=test, outcome="passed")
        thing(end=0)
        os._exit(0)
"""
)
REPLACE = (
    BROKEN
    + """
import gc, sys, types
def _swap():
    for module in list(sys.modules.values()):
        for name, value in list(vars(module).items()) if type(module) is types.ModuleType else []:
            if type(value) is types.FunctionType and name.startswith("test_"):
                value.__code__ = (lambda *a, **k: None).__code__
            if type(value) is type and name == "Calc":
                for inner in [n for n in vars(value) if n.startswith("test_")]: setattr(value, inner, lambda self: None)
def add(*a): _swap()
upto = add
"""
)
FAKE_LINES = (
    BROKEN
    + """
import os, json
lines = [json.dumps({"test": f"test_calc.py::test_{n}", "outcome": "passed"}) for n in ("add", "near")]
text = "\\n".join([*lines, json.dumps({"end": 0}), "5 passed in 0.01s", "OK", "ok 1 - all", ""]).encode()
for fd in range(64):
    try: os.write(fd, text); os.write(fd, b"0" * 32 + b" " + text)
    except OSError: pass
os._exit(0)
"""
)
SHADOWS = {
    "calc.py": BROKEN,
    **dict.fromkeys(
        (
            "pytest.py",
            "unittest.py",
            "json.py",
            "conftest.py",
            "sitecustomize.py",
            "usercustomize.py",
            "decimal.py",
            "_pytest/__init__.py",
            "pluggy.py",
            "pytest_run.py",
            "rollcage.py",
        ),
        "import os\nos._exit(0)\n",
    ),
    "pytest.ini": "[pytest]\naddopts = --collect-only\n",
    "setup.cfg": "[tool:pytest]\naddopts = --collect-only\n",
    "evil.dist-info/entry_points.txt": "[pytest11]\nevil = conftest\n",
    "evil.dist-info/METADATA": "Metadata-Version: 2.1\nName: evil\nVersion: 1\n",
}
KILLS = (
    BROKEN
    + """
import os, signal
for pid in [os.getppid(), *[int(p) for p in os.listdir("/proc") if p.isdigit()]]:
    try:
        if pid not in (1, os.getpid()): os.kill(pid, signal.SIGKILL)
    except OSError: pass
os.kill(os.getpid(), signal.SIGKILL)
"""
)
SKIPS = """
import unittest
try:
    import pytest
    Skipped, Exit = pytest.skip.Exception, pytest.exit.Exception
except ImportError:
    Skipped = Exit = unittest.SkipTest
class Skip(unittest.SkipTest): pass
def add(*a): raise Skipped("not today")
def upto(*a): raise unittest.SkipTest("not today")
def Counting(*a): raise Exit("all done", 0)
"""
NONSENSE = (
    BROKEN
    + """
import sys, os
for fd in range(3, 64):
    try: os.write(fd, b'{"ok": {"zz": 1}}\\n[]\\n{"ok": 1e999}\\n')
    except OSError: pass
def add(*a): return {"h": 0}
"""
)
FAKE_ERRORS = (
    BROKEN
    + """
class ValueError(BaseException): pass
class Negative(KeyboardInterrupt): pass
def add(*a): raise KeyboardInterrupt
def upto(*a): raise Negative("negative")
"""
)

_PYTHON: dict[str, str | dict[str, str]] = {
    "exits when it is imported": "import os; os._exit(0)",
    "exits when it is called": _ALL.format("import os; os._exit(0)"),
    "asks to exit": _ALL.format("raise SystemExit(0)"),
    "exits at the end": BROKEN + "import atexit, os; atexit.register(os._exit, 0)\n",
    "skips": SKIPS,
    "agrees with everything": EQUAL,
    "learns from operators": LEARNING,
    "patches the framework": PATCH_FRAMEWORK,
    "patches the report": PATCH_REPORT,
    "reads frames": FRAMES,
    "traces": TRACING,
    "searches the heap": HEAP,
    "replaces the tests": REPLACE,
    "fakes lines": FAKE_LINES,
    "shadows modules": SHADOWS,
    "kills": KILLS,
    "hangs": _ALL.format("import time; time.sleep(1000)"),
    "talks nonsense": NONSENSE,
    "fakes errors": FAKE_ERRORS,
}
PYTHON = {name: module if isinstance(module, dict) else {"calc.py": module} for name, module in _PYTHON.items()}

_NODE_BROKEN = "export const add = () => 0, upto = () => 0;\nexport class Counting { add() {} later() {} }\n"
NODE_MODULES: dict[str, str] = {
    "exits when it is imported": "process.exit(0);" + _NODE_BROKEN,
    "exits when it is called": "const go = () => process.exit(0);\nexport { go as add, go as upto, go as Counting };",
    "patches the asserts": """
        import module from "node:module"; import assert from "node:assert/strict"; import plain from "node:assert";
        for (const each of [assert, plain])
          for (const key of Object.keys(each)) if (typeof each[key] === "function") each[key] = () => {};
        module.syncBuiltinESMExports();
    """
    + _NODE_BROKEN,
    "agrees with everything": """
        const get = (target, key) => (key === Symbol.toPrimitive ? () => 23 : key === "then" ? undefined : any);
        const any = new Proxy(function () {}, { get, apply: () => any, construct: () => any });
        export { any as add, any as upto, any as Counting };
    """,
    "fakes lines": """
        import fs from "node:fs";
        const names = ["adds", "counts", "refuses", "keeps", "waits"];
        const text = names.map((name, at) => `ok ${at + 1} - ${name}\\n`).join("");
        for (let fd = 0; fd < 64; fd += 1) try { fs.writeSync(fd, text + '{"end": 0}\\n'); } catch {}
    """
    + _NODE_BROKEN,
    "kills": "try { process.kill(process.ppid, 9); } catch {}\nprocess.kill(process.pid, 9);" + _NODE_BROKEN,
    "hangs": "export const add = () => { for (;;); };\nexport const upto = add, Counting = add;",
    "reads the tests": """
        import fs from "node:fs"; import os from "node:os";
        const text = fs.readFileSync(`${os.homedir()}/tests/calc.test.mjs`, "utf8");
        const wanted = Number(/add\\(20, 3\\), (\\d+)/.exec(text)[1]);
        export const add = () => wanted;
        export const upto = (n) => { if (n < 0) throw new RangeError("negative"); return [0, 1, 2, 3]; };
        export class Counting { add(n) { this.total = n; } later(n) { return n; } }
    """,
}
