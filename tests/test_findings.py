"""Every number of the summary, docs/findings.md, is that of the page of evidence, whose numbers
other tests recompute, or of another page that it links."""

import re

from readme_results import EVIDENCE, RESULTS, ROOT, part, rows

FINDINGS = (ROOT / "docs" / "findings.md").read_text()
DIGITS = r"[−-]?\d[\d.,]*(?<=\d)"
WORDS = "two|three|four|five|seven|eight|nine|fifteen|third|half"


def plain(page: str) -> str:
    """Its words without markup, in one line."""
    return " ".join(re.sub(r"\[([^]]*)\]\([^)]*\)", r"\1", page).replace("*", "").split())


def numbers(text: str) -> set[str]:
    return set(re.findall(rf"{DIGITS}|\b(?:{WORDS})\b", text.lower()))


SOURCES = [EVIDENCE, *((RESULTS / name).read_text() for name in (
    "bench/sample-efficiency.md", "sinks-124m/sizes.md"))]  # fmt: skip
KNOWN = " ".join(plain(page) for page in SOURCES)
# What the summary says with a number → where it is taken from; None: said there in the same words
HELD = {
    "models have 340 M and 1.8 B": "The paper's have 340 M and 1.8 B.",
    "27 M parameters, the same 400 M tokens in the same order": (
        "model of 27 M parameters. Both read the same 400 M tokens in the same order"
    ),
    "Three seeds of each": None,
    "a third of that text: 59 M tokens, each 6.8 times": None,
    "sinks in 54.1 % of heads": "By the softpick paper's definition it is 54.1 % (0 %).",
    "in the first pair in 0.39 %": "| softmax | 3.84 | 0.39 | 103.04 |",
    "in the seeds in 0.09 %": "These softmax models too have few sinks: 0.09 % of heads at ε 0.3",
    "600 M tokens each, of 243 M unique": None,
    "fifteen more trainings of 27 M, 80 M tokens, three seeds each": (
        "fifteen more trainings of 27 M parameters, three seeds each. With rotary positions: "
        "softmax, softpick and sigmoid (recipe). With ALiBi, as the paper has it: softmax and "
        "sigmoid (recipe). Sigmoid's bias is −log n. All read the same 80 M tokens"
    ),
    "ctivations of 8, 6 and 4 bits": None,
    "KV caches of 8": "KV cache, 8 bits, a scale a head and token",
    "to 2 bits.": "KV cache, 2 bits, a scale a head and token",
    "t most 500 documents of each task": None,
    "Below 1, softpick is hurt less": "below 1 softpick is hurt less",
    "95 % intervals": None,
    "29.62 % of softmax's heads are sinks, 0.52 % of softpick's": (
        "| softmax | 13.74 | 29.62 | 55.75 | 8828.70 | 636 | | softpick | 14.18 | 0.52 |"
    ),
    "on a page 36.8 % of": None,
    "GPTQ at 2 and 3 bits hurts softpick more": (
        "What holds at both sizes is that GPTQ at 2 and at 3 bits hurts softpick more"
    ),
    "softpick moves more under 7 of 8 precisions": "It moves more under 7 of 8 precisions",
    "and under 3 at 27 M": "It moves more under 7 of 8 precisions, at 27 M under 3.",
    "in every seed under 7 of 9 precisions": None,
    "it moves more under 8 of 9": "softpick moves more under 8 of 9 precisions",
    "its perplexity grows × 1.94, softmax's × 8.80": (
        "takes softmax's perplexity × 8.80 and softpick's × 1.94"
    ),
    "0.256 nats behind": None,
    "at 3.541 beside 3.518": "| held-out loss, nats a token | 3.518 | 3.483 | 3.541 |",
    "forward pass reads 4.26 M tokens a second, softmax's 4.32 M": None,
    "half as much as softmax's or less at 4, 3 and 2 bits": (
        "at 4, 3 and 2 bits it moves half as much as softmax or less"
    ),
    "static int8 range moves it more than three times as much": (
        "a static int8 range more than three times as much"
    ),
    "one expert too many reach n^−0.25 (printed −0.24)": (
        "one expert more than the truth converge at n^−0.25 (printed −0.24)"
    ),
    "exactly as many as the truth n^−0.53 (printed −0.51)": (
        "sigmoid gates with exactly as many at n^−0.53 (printed −0.51)"
    ),
    "with exactly two, softmax gates reach n^−0.55": (
        "With exactly two ReLU experts softmax gates reach n^−0.55"
    ),
    "with exactly two, softmax gates are faster": (
        "With exactly two experts it is the other way round: softmax gates reach n^−0.53, sigmoid "
        "gates n^−0.30"
    ),
    "first pair's 39 such differences 20 have the same sign in all three seeds": (
        "first pair's documents call 39 differences significant (10 of weights, 13 of the cache, "
        "16 of activations). Of these, 20 have the same sign in all three seeds"
    ),
    "Of all 279, one is significant over seeds: GPTQ 2-bit, against": (
        "Of all 279 differences, one is significant over seeds after Holm's correction: "
        "WikiText under GPTQ 2-bit, against softpick"
    ),
    "Of sigmoid's 405, one: a 2-bit cache": (
        "one of 405 differences is significant after Holm's correction: WikiText perplexity "
        "under a 2-bit cache, with ALiBi"
    ),
    "One int8 scale (earlier × 0.861)": (
        "int8, one scale for all tokens | WikiText | × 3.140 | × 1.099 | × 0.350 [0.329, 0.366] "
        "| × 0.861"
    ),
    "HQQ 2-bit (× 0.612)": (
        "HQQ 2-bit | WikiText | × 3.26 | × 2.51 | × 0.769 [0.752, 0.792] | × 0.612"
    ),
    "One int8 scale hurts softpick far less": (
        "int8, one scale for all tokens | WikiText | × 3.140 | × 1.099 | × 0.350 [0.329, 0.366]"
    ),
    "With int4 it loses more": "int4, a scale a token | WikiText | × 1.512 | × 1.660 | × 1.098",
    "int4 in WikiText turned": "Did not stand: that int4 activations hurt it less in WikiText",
    "(rotary, one H200)": "with rotary positions on one H200",
    "HQQ 2-bit hurt": "one int8 scale for all tokens and HQQ 2-bit hurt softpick less",
    "In 15 of 26 LAMBADA": "In 15 of these 26 softmax scores better quantized than not",
    "Three turned one of three answers": "Three seeds turned one of three answers",
    "The two kinds of pair": None,
    "Two trainings of one recipe differ much": None,
    "three seeds": None,
    "27 M": None,  # names of models, like those of columns
    "126 M": None,
}


def test_every_number_in_the_text_is_that_of_the_evidence():
    left = plain("\n".join(line for line in FINDINGS.splitlines() if not line.startswith("|")))
    for said, passage in HELD.items():
        assert said in left
        assert (passage or said) in KNOWN
        assert numbers(said) <= numbers(passage or said)
        left = left.replace(said, "")
    assert numbers(left) == set()


def test_the_table_of_answers_is_taken_from_those_of_the_evidence():
    seeds = rows(part("| | task | first pair |", "The first pair's"))[2:]
    first = {row[0]: row[2:4] for row in seeds if row[1] == "WikiText"}
    weights = rows(part("wikitext [test_document_level]", "‡ differs"))
    first["weights, HQQ 2-bit"] = [row[6] for row in weights if row[2] == "hqq-2bit"] + [""]
    sizes = rows(part("| softpick's damage / softmax's", "**Do the"))[2:]
    larger = {row[0]: [cell.rstrip("‡") for cell in row[1:]] for row in sizes}
    head, _, *told = rows(FINDINGS[: FINDINGS.index("## Sigmoid")])
    assert head == ["", "first pair", "three seeds", "real sinks", "126 M"]
    assert len(told) == 6
    for name, *cells in told:
        assert cells == first.get(name, ["", ""]) + larger[name]


def test_the_table_of_counts_is_taken_from_the_evidence():
    pairs = rows(part("| | this pair |", "HQQ has"))[2:5]
    text = plain(part("## At 126 M", "## What would"))
    larger = re.findall(r"(\d+ and \d+) of (\d+) for (?:the )?(weights|KV cache|activations)", text)
    ours = {kind: (count, every) for count, every, kind in larger}
    expected = [["", "first pair", "real sinks", "126 M"]]
    for name, sinks, _, first in pairs:
        kind, every = re.fullmatch(r"(.*), of (\d+).*", name).groups()
        count, of = ours[kind]
        expected.append([f"{kind}, of {every}", first, sinks, count])
        expected[-1][0] += f" (last column: {of})" * (of != every)
    head, _, *told = rows(FINDINGS[FINDINGS.index("## How sure") :])
    assert [head, *told] == expected


def test_sections_that_are_linked_are_there():
    titles = re.findall(r"^#+ (.*)", EVIDENCE, re.MULTILINE)
    sections = {re.sub(r"[^\w -]", "", title).lower().replace(" ", "-") for title in titles}
    pages = [*(ROOT / "docs").glob("*.md"), RESULTS / "bench" / "sinks.md"]
    linked = {one for p in pages for one in re.findall(r"evidence\.md#([\w-]+)", p.read_text())}
    assert len(linked) > 6
    assert linked <= sections
