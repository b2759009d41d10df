"""Grading of SWE logs beside the `swebench` package itself, on the same logs."""

from __future__ import annotations

import json
import random
import subprocess
import sys
from pathlib import Path

import pytest

from rollcage.tasks.logs import END, EXIT_CODE, PARSERS, START, NotGraded, outcomes_of, statuses_of

pytestmark = pytest.mark.slow

LINES = """PASSED t.py::a|PASSED t.py::b[x]|PASSED t.py::b[x y]|FAILED t.py::a - assert 1 - 2|FAILED t.py::b[x] - no
ERROR t.py::a|SKIPPED [2] t.py:3: why|SKIPPED t.py::a|XFAIL t.py::c|XFAIL|PASSED t.py::d[/tmp/x/y]|PASSED t.py::d[//x/y]
t.py::a PASSED|t.py::a PASSED [ 10%]|t.py::b[x] FAILED [ 20%]|\x1b[32mPASSED\x1b[0m t.py::\x1b[1ma\x1b[0m|PASSED [100%]
PASSED t.py::e[MouseButton.LEFT]|FAILED t.py::e[MouseButton.RIGHT]|test_a ok|test_a F|test_b E|test_c f
____ t.py:test_a ____
test_a (t.A) ... ok|test_a (t.A) ... FAIL|test_b (t.A) ... ERROR|test_b (t.A) ... skipped 'no'|test_c (t.A) ...  OK
FAIL: test_a (t.A)|ERROR: test_b (t.A)|test_d (t.A) ... said something|ok|  ok
nothing of it||--version is equivalent to version
test_e (t.A) ... System check identified no issues (0 silenced)|Applying sites.0002_x... OK
Applying sites.0002_alter_domain_unique...test_no_migrations (t.A) ... ok""".replace("\n", "|").split("|")
NAMES = [
    "t.py::a",
    "t.py::b",
    "t.py::b[x]",
    "t.py::b[x",
    "t.py::c",
    "t.py::d[/y]",
    "t.py::e[1]",
    "test_a",
    "test_a (t.A)",
]
NAMES += ["test_b (t.A)", "test_c (t.A)", "test_d (t.A)", "[100%]", "not there"]

THEIRS = """
import json, sys, types
from pathlib import Path
lib, folder = map(Path, sys.argv[1:])
# Its package of this name imports Docker, datasets and more; grading needs none of them.
package = types.ModuleType("swebench.harness")
package.__path__ = [str(lib / "swebench" / "harness")]
sys.path.insert(0, str(lib))
sys.modules["swebench.harness"] = package
from swebench.harness.grading import get_eval_report, get_logs_eval
from swebench.types import TestSpec
said = []
for number, case in enumerate(json.loads((folder / "cases.json").read_text())):
    path = folder / "log"
    path.write_text(case["log"])
    spec = TestSpec(instance_id="i", image="", eval_script_list=[], repo="", version="", FAIL_TO_PASS=case["f2p"],
        PASS_TO_PASS=case["p2p"], log_parser=case["parser"], eval_type="pass_and_fail", image_assets={})
    prediction = {"instance_id": "i", "model_patch": "x", "model_name_or_path": "m"}
    said.append([get_logs_eval(spec, str(path)), get_eval_report(spec, prediction, str(path), True)["i"]])
print(json.dumps(said))
"""


def drawn(dice: random.Random, parser: str) -> dict[str, object]:
    text = "\n".join(dice.choices(LINES, k=dice.randint(0, 10)))
    code = dice.choice(("", "0", "1", "2"))
    end = f"{EXIT_CODE}: {code}\n" if code else ""
    log = f"+ : '{START}'\n{text}\n" + (f"+ : '{END}'\n{end}" if dice.random() > 0.05 else "")
    names = dice.sample(NAMES, 3)
    return {"log": log, "parser": parser, "f2p": names[:1], "p2p": names[1 : dice.randint(1, 3)]}


def test_grading_agrees_with_the_swebench_package_on_the_same_logs(tmp_path: Path) -> None:
    get = [sys.executable, "-m", "pip", "install", "-q", "--no-deps", "--target", str(tmp_path / "lib")]
    done = subprocess.run([*get, "swebench==5.0.2", "unidiff"], capture_output=True, text=True)
    if done.returncode:
        pytest.skip(f"swebench cannot be installed: {done.stderr.strip()[-200:]}")
    dice = random.Random(5)
    cases = [drawn(dice, f"parse_log_{name}") for name in PARSERS if name != "r2e" for _ in range(150)]
    (tmp_path / "cases.json").write_text(json.dumps(cases))
    run = [sys.executable, "-c", THEIRS, str(tmp_path / "lib"), str(tmp_path)]
    theirs = json.loads(subprocess.run(run, check=True, stdout=subprocess.PIPE, text=True).stdout)
    resolved = graded = 0
    for case, ((found, there), report) in zip(cases, theirs, strict=True):
        log, parser, f2p, p2p = (case[key] for key in ("log", "parser", "f2p", "p2p"))
        assert isinstance(log, str) and isinstance(parser, str) and isinstance(f2p, list) and isinstance(p2p, list)
        try:
            own = statuses_of(log, parser)
        except NotGraded:
            assert not there, (parser, log)
            continue
        assert there and own == found, (parser, log)
        graded += 1
        passed = [test for test, so, _ in outcomes_of(own, f2p, p2p) if so]
        status = report["tests_status"]
        good, bad = ([*status["FAIL_TO_PASS"][how], *status["PASS_TO_PASS"][how]] for how in ("success", "failure"))
        assert passed == good, (parser, log)
        # A status that is none of the five (`ERROR:`) is in neither of its lists, and then does not count at all.
        if len(good) + len(bad) == len(f2p) + len(p2p):
            assert (len(passed) == len(f2p) + len(p2p)) is report["resolved"]
        resolved += report["resolved"]
    assert graded > 500 and resolved > 5
