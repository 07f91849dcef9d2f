"""The conformance run's bookkeeping: what is due, what is flaky, and the page that says so."""

from __future__ import annotations

import re
import sys
import tomllib
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[2] / "bootstrap"))

from conformance_lib import report
from conformance_lib.results import Result, Results, batches, focus, read_junit, sig

A = "[sig-node] Pods should be (very) good [Conformance]"
B = "[sig-storage] Volumes should hold [Serial] [Conformance]"

JUNIT = """<?xml version="1.0" encoding="UTF-8"?>
<testsuites><testsuite name="Kubernetes e2e suite">
<testcase name="[It] [sig-node] Pods should be (very) good [Conformance]" status="passed"
 time="2.31"></testcase>
<testcase name="[It] [sig-storage] Volumes should hold [Serial] [Conformance]" status="failed"
 time="301"><failure message="timed out
 waiting" type="failed">more</failure></testcase>
<testcase name="[It] [sig-apps] Other" status="skipped" time="0"><skipped/></testcase>
<testcase name="[SynchronizedBeforeSuite]" status="passed" time="1"></testcase>
</testsuite></testsuites>"""


def test_junit_tells_what_ran_and_why_it_failed() -> None:
    assert read_junit(JUNIT) == [
        Result(A, True, 2.3),
        Result(B, False, 301.0, "timed out waiting"),
    ]


def test_an_interrupted_run_goes_on(tmp_path: Path) -> None:
    results = Results(tmp_path / "results.jsonl")
    results.add([Result(A, False, 1.0, "x"), Result(B, False, 1.0, "y")])
    results.add([Result(A, True, 1.0)])
    again = Results(tmp_path / "results.jsonl")
    assert again.due([A, B, "new"]) == [B, "new"]
    assert again.due([A, B], attempts=1) == []
    assert again.flaky(A) and not again.flaky(B)
    again.forget([A])
    assert Results(tmp_path / "results.jsonl").due([A, B]) == [A, B]


def test_focus_names_exactly_the_tests() -> None:
    pattern = focus([A, B])
    assert re.search(pattern, f"Kubernetes e2e suite {A}")
    assert not re.search(pattern, f"{A} and more")
    assert not re.search(pattern, A.replace("(very)", "very"))
    assert batches([A, B, A], 2) == [[A, B], [A]]
    assert sig(B) == "storage"


def test_the_page_counts_and_explains(tmp_path: Path) -> None:
    results = Results(tmp_path / "results.jsonl")
    results.add([Result(A, False, 1.0), Result(A, True, 1.0), Result(B, False, 1.0, "no | disk")])
    page = report.document([A, B], results)
    assert "**1 of 2 pass**" in page
    assert "| storage | 0 | 1 |" in page
    assert f"| {report.cell(B)} | {report.UNEXPLAINED} |" in page
    assert f"- {report.cell(A)}" in page
    assert report.reason(B, {"Volumes": "short", "Volumes should hold": "long"}) == "long"


def test_reasons_are_one_line_each() -> None:
    for key, text in tomllib.loads(report.REASONS.read_text()).items():
        assert key and text and "\n" not in text
