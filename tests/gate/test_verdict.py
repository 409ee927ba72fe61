"""The verdict as files: what is in them, and that nothing in a name can break them."""

import dataclasses
import re
from xml.etree import ElementTree

from gate_results import changed

from qbench.gate import check, verdict
from qbench.gate.verdict import GateResult, Verdict


def columns(text: str) -> int:
    """Of the table, where all its rows have as many."""
    rows = [line for line in text.splitlines() if line.startswith("|")]
    (result,) = {row.replace("\\|", "").count("|") - 1 for row in rows}
    return result


def test_the_verdict_is_told_as_markdown_and_junit(tmp_path, standard):
    store = changed(tmp_path, shift={"softpick/hqq-4bit": 0.4}, failed=("softmax/bf16",))
    result = check.check(store, standard)
    text = verdict.as_markdown(result)
    assert text.startswith("## qbench check: fail")
    assert re.search(r"^- baseline: softmax, softpick, 2\d{3}-\d\d-\d\d, ", text, re.MULTILINE)
    assert re.search(r"\| ✗ fail +\| softmax/bf16 +\| — +\|", text)
    assert columns(text) == 11
    short = verdict.as_markdown(result, passed=False)
    assert ("✓ pass" in text, "✓ pass" in short) == (True, False)
    assert short.count("✗ fail") == 6

    suite = ElementTree.fromstring(verdict.as_junit(result)).find("testsuite")
    failures = suite.findall("testcase/failure")
    assert int(suite.get("failures")) == len(failures) == result.count("fail") == 6
    assert int(suite.get("tests")) == len(suite.findall("testcase"))


def test_junit_has_inconclusive_lines_as_skipped_where_they_count_as_passed(tmp_path, standard):
    store = changed(tmp_path, shift={"softmax/hqq-4bit": 0.01})
    for counts_as, tag in (("pass", "skipped"), ("fail", "error")):
        result = check.check(store, standard, margins={"acc": 0.1}, inconclusive=counts_as)
        suite = ElementTree.fromstring(verdict.as_junit(result)).find("testsuite")
        assert len(suite.findall(f"testcase/{tag}")) == result.count("inconclusive") > 0


def test_no_name_or_reason_breaks_the_table_the_page_or_the_xml():
    evil = "a|b\nc <img src=x onerror=alert(1)> [x](javascript:y) `d` \x00\x1b[31m\ud800 end"
    gate = GateResult(cell=evil, task="", metric="", outcome="fail", reason=evil)
    result = Verdict(results=evil, baseline=evil, gates=(gate,), notes=(evil,), inconclusive="fail")
    text = verdict.as_markdown(result)
    assert columns(text) == 11
    assert "<img" not in text
    assert "](" not in text
    (case,) = ElementTree.fromstring(verdict.as_junit(result)).iter("testcase")
    assert case.get("classname").endswith(" end")
    assert "\x1b" not in case.find("failure").text


def test_a_default_margin_is_marked_and_the_mark_explained(good, standard):
    result = check.check(good, standard, margins={"perplexity": 9.0})
    text = verdict.as_markdown(result)
    assert re.search(r"\| +9 \|", text)
    assert re.search(r"\d\* \|", text)
    assert "* the smallest that the documents allow" in text
    given = dataclasses.replace(next(g for g in result.gates if g.score), given=True)
    assert (
        "*" not in verdict.as_markdown(dataclasses.replace(result, gates=(given,))).split("\n-")[0]
    )
