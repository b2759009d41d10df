"""A report of tests counts as a whole or not at all; frameworks' own reports are read as they write them."""

from __future__ import annotations

import json
import tracemalloc

import pytest

from rollcage.rollout.checks.commands import read_cargo, read_go, read_junit
from rollcage.rollout.checks.report import MOST_TESTS, CheckReport, read_report, told
from rollcage.sandboxes.base import CapturedOutput, Exit

NONCE = "5f" * 16
BEGUN, END = {"begun": True}, {"end": 0}
PASSED = {"test": "t", "outcome": "passed"}


def report_of(*said: object, code: int = 0, timed_out: bool = False, truncated: bool = False) -> CheckReport:
    lines = "".join(each if isinstance(each, str) else f"{NONCE} {json.dumps(each)}\n" for each in said)
    nothing = CapturedOutput(b"", False)
    return read_report(Exit(code, CapturedOutput(lines.encode(), truncated), nothing, 1.0, timed_out), NONCE)


def test_a_complete_report_counts() -> None:
    report = report_of(
        BEGUN, "what code under test prints\n", PASSED, {"test": "u", "outcome": "failed", "why": "x"}, END
    )
    assert (report.of("t"), report.of("u"), report.of("v")) == ("passed", "failed: x", "failed: it was not reported")


@pytest.mark.parametrize(
    ("report", "why"),
    [
        (report_of(BEGUN, PASSED), "it ended early"),
        (report_of(BEGUN, PASSED, END, code=1), "it ended with exit code 1 and not 0"),
        (report_of(BEGUN, PASSED, END, PASSED), "its report went on after the end"),
        (report_of(BEGUN, PASSED, END, timed_out=True, code=124), "it ran out of time"),
        (report_of(BEGUN, PASSED, END, truncated=True), "its report is too long"),
        (report_of(BEGUN, PASSED, f"{NONCE} [1]\n", END), "its report is nonsense"),
        (report_of(BEGUN, {"test": "t"}, END), "its report is nonsense"),
        (report_of(BEGUN, PASSED, {"end": True}), "it ended early"),
        (report_of("0" * 32 + f" {json.dumps(PASSED)}\n" + json.dumps(END)), "it ended early"),
    ],
)
def test_any_other_report_earns_nothing(report: CheckReport, why: str) -> None:
    assert report.of("t").startswith(f"failed: {why}")


def test_a_test_that_is_reported_twice_has_not_passed() -> None:
    assert report_of(BEGUN, PASSED, PASSED, END).of("t") == "failed: it was reported twice"


def test_a_name_stands_for_all_parameters() -> None:
    some = {"test": "t[1]", "outcome": "passed"}
    assert report_of(BEGUN, some, {"test": "t[2]", "outcome": "passed"}, END).of("t") == "passed"
    assert report_of(BEGUN, some, {"test": "t[2]", "outcome": "skipped"}, END).of("t") == "skipped"
    assert report_of(BEGUN, some, END).of("t[2]") == "failed: it was not reported"


def test_go_tests_count_where_their_package_ended() -> None:
    rows = [
        {"Action": "run", "Package": "m/calc", "Test": "TestAdd"},
        {"Action": "pass", "Package": "m/calc", "Test": "TestAdd/small"},
        {"Action": "pass", "Package": "m/calc", "Test": "TestAdd"},
        {"Action": "fail", "Package": "m/calc", "Test": "TestSub"},
        {"Action": "skip", "Package": "m/calc", "Test": "TestSlow"},
        {"Action": "fail", "Package": "m/calc"},
        {"Action": "pass", "Package": "m/gone", "Test": "TestHalf"},
    ]
    report = CheckReport(output="\n".join(["# m/calc: not JSON", "[]", *map(json.dumps, rows)]))
    read_go(report)
    assert report.outcomes == {
        "m/calc::TestAdd/small": "passed",
        "m/calc::TestAdd": "passed",
        "m/calc::TestSub": "failed",
        "m/calc::TestSlow": "skipped",
    }


CARGO = """\
   Compiling calc v0.1.0 (/home/user/workdir)
    Finished `test` profile [unoptimized + debuginfo] target(s) in 2.36s
     Running unittests src/lib.rs (target/debug/deps/calc-cf43)

running 2 tests
test tests::later ... ignored
test tests::inner ... ok

test result: ok. 1 passed; 0 failed; 1 ignored; 0 measured; 0 filtered out; finished in 0.00s

     Running tests/calc.rs (target/debug/deps/calc-f0fe)

running 2 tests
test adds ... ok
test fails ... FAILED

failures:

---- fails stdout ----
thread 'fails' panicked at tests/calc.rs:2:22

test result: FAILED. 1 passed; 1 failed; 0 ignored; 0 measured; 0 filtered out; finished in 0.32s

     Running tests/ended.rs (target/debug/deps/ended-77aa)

running 2 tests
test half ... ok
     Running tests/forged.rs (target/debug/deps/forged-12bb)
test forged ... ok
test result: ok. 2 passed; 0 failed; 0 ignored; 0 measured; 0 filtered out; finished in 0.00s
   Doc-tests calc

running 1 test
test src/lib.rs - add (line 1) ... ok

test result: ok. 1 passed; 0 failed; 0 ignored; 0 measured; 0 filtered out; finished in 0.00s
"""


def test_cargo_tests_count_where_the_result_agrees_with_them() -> None:
    report = CheckReport(output=CARGO)
    read_cargo(report)
    assert report.outcomes == {
        "src/lib.rs::tests::later": "skipped",
        "src/lib.rs::tests::inner": "passed",
        "tests/calc.rs::adds": "passed",
        "tests/calc.rs::fails": "failed",
        "calc::src/lib.rs - add (line 1)": "passed",
    }


def test_junit_reports_are_read_with_and_without_classes() -> None:
    report = CheckReport(
        document="""<?xml version="1.0"?><testsuites><testsuite>
        <testcase classname="calc.Add" name="small"/>
        <testcase classname="calc.Add" name="big"><failure message="no"/></testcase>
        <testcase name="alone"><skipped/></testcase>
        <testcase name="broken"><error/></testcase></testsuite></testsuites>"""
    )
    read_junit(report)
    assert report.outcomes == {
        "calc.Add::small": "passed",
        "calc.Add::big": "failed: no",
        "alone": "skipped",
        "broken": "failed",
    }


@pytest.mark.parametrize(
    "document", ["", "<testsuite>", '<!DOCTYPE a [<!ENTITY b "c">]><a>&b;</a>'], ids=["none", "half", "entities"]
)
def test_a_junit_report_that_is_none_earns_nothing(document: str) -> None:
    report = CheckReport(document=document)
    read_junit(report)
    assert report.incomplete


def test_half_characters_are_replaced() -> None:
    said = {"test": "t\ud800", "outcome": "failed", "why": "\udfff"}
    report = report_of(BEGUN, said, {"problem": "\ud800"}, END)
    assert told(report, ["t?"]) == "failed: ?  t?\nproblem: ?"


def test_a_report_of_very_many_tests_earns_nothing_and_is_told_in_few_lines() -> None:
    expected = [f"expected{number}" for number in range(2000)]
    cases = "".join(f'<testcase name="t{number}"/>' for number in range(3 * MOST_TESTS))
    report = CheckReport(document=f"<testsuite>{cases}</testsuite>")
    read_junit(report)
    assert "more than 100,000 tests" in report.of("t1")
    report.incomplete = ""
    assert len(report.outcomes) == MOST_TESTS
    # Each of these was once a walk over all of the others, in the server's only thread.
    text = told(report, expected)
    assert text.count("\n") < 4000 and text.endswith("not counted: 99,000 more")


def test_suites_of_suites_in_a_report_are_no_tree_in_memory() -> None:
    report = CheckReport(document="<a>" * 500_000 + '<testcase name="t"/>' + "</a>" * 500_000)
    tracemalloc.start()
    read_junit(report)
    _, most = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert "nested too deeply" in report.of("t") and most < 8 << 20
