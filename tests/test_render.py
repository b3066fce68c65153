"""The renderer: what each token of a round is, and that terminal and page say it, in colour and without."""

from __future__ import annotations

import ast
import io
import json
import re
import sys
from html.parser import HTMLParser
from pathlib import Path

import pytest
from rich.console import Console

from modeling_domino.render import marks
from modeling_domino.render.charts import acceptance_by_position, tokens_per_round
from modeling_domino.render.marks import Mark, TextPieces, classify_round, classify_without_head, printable
from modeling_domino.render.page import draw_page
from modeling_domino.render.race import draw_race
from modeling_domino.render.terminal import LOOKS, draw_legend, draw_round, draw_text
from modeling_domino.render.timeline import DID_NOT_RUN, draw_timeline, shown_token


WORDS = {1: " one", 2: " two", 3: " three", 4: " four", 5: "\n", 6: "\x1b[31m", 7: "[bold]", 8: "", 10: " ten"}
# "é" of two tokens, as byte-level tokenizers cut it.
BYTES = {20: b"\xc3", 21: b"\xa9", 22: b"a"}


def decode(ids: list[int]) -> str:
    return "".join(WORDS[i] for i in ids)


def decode_bytes(ids: list[int]) -> str:
    return b"".join(BYTES[i] for i in ids).decode(errors="replace")


def round_record(drafts, accepted, own, base=None):
    return {"draft_ids": drafts, "accepted": accepted, "own_id": own, "base_ids": base}


def shown(text, **console_kwargs) -> str:
    out = io.StringIO()
    Console(file=out, width=200, **console_kwargs).print(text, end="", soft_wrap=True)
    return out.getvalue()


def test_a_partly_accepted_round():
    marks = classify_round(round_record([1, 2, 3, 4], 2, 10, base=[1, 3, 3, 1]))
    assert marks == [
        Mark("accepted", 1, slot=0),
        Mark("head", 2, base_id=3, slot=1),
        Mark("missed", 3, slot=2),
        Mark("own", 10),
        Mark("unused", 4, base_id=1, slot=3),
    ]


@pytest.mark.parametrize(
    "drafts, accepted, kinds",
    [
        ([1, 2], 2, ["accepted", "accepted", "own"]),
        ([1, 2], 0, ["missed", "own", "unused"]),
        ([1], 0, ["missed", "own"]),
        ([], 0, ["own"]),
    ],
)
def test_all_none_and_no_drafts(drafts, accepted, kinds):
    assert [mark.kind for mark in classify_round(round_record(drafts, accepted, 10))] == kinds


def test_without_base_ids_nothing_is_credited_to_the_head():
    record = round_record([1, 2], 2, 10)
    del record["base_ids"]
    assert [mark.kind for mark in classify_round(record)] == ["accepted", "accepted", "own"]


def test_a_tree_follows_the_accepted_path():
    # Nodes 0 and 1 hang on the anchor, 2 and 3 on node 1, 4 on node 3.
    tree = {**round_record([1, 2, 3, 4, 1], 1, 10), "parents": [-1, -1, 1, 1, 3]}
    marks = classify_round({**tree, "path": [1]})
    assert [(mark.kind, mark.token_id) for mark in marks] == [
        ("accepted", 2),
        ("missed", 3),
        ("own", 10),
        ("unused", 1),
        ("unused", 4),
        ("unused", 1),
    ]
    whole = classify_round({**tree, "accepted": 3, "path": [1, 3, 4]})
    assert [mark.kind for mark in whole] == ["accepted"] * 3 + ["own"] + ["unused"] * 2
    none = classify_round({**tree, "accepted": 0, "path": []})
    assert [mark.kind for mark in none] == ["missed", "own"] + ["unused"] * 4


def test_the_text_is_the_kept_text_with_brackets_where_styles_do_not_show():
    marks = classify_round(round_record([1, 2, 3, 4], 2, 10, base=[1, 3, 3, 1]))
    assert shown(draw_text(marks, TextPieces(decode), brackets=True)) == "[ one]{ two} ten"
    assert draw_text(marks, TextPieces(decode), brackets=False).plain == " one two ten"


def test_styles_are_a_second_cue_without_colour():
    marks = classify_round(round_record([1, 2], 1, 10))
    out = shown(draw_text(marks, TextPieces(decode), brackets=False), force_terminal=True, no_color=True)
    assert "\x1b[4m one\x1b[0m" in out
    assert out.endswith(" ten")


def test_every_kind_differs_in_colour_and_in_cue():
    assert len({look.style for look in LOOKS.values()}) == len(LOOKS)
    assert len({look.before for look in LOOKS.values()}) == len(LOOKS)


def test_a_round_on_one_line():
    marks = classify_round(round_record([1, 2, 5, 4], 2, 10, base=[1, 3, 3, 1]))
    assert draw_round(7, marks, decode).plain == "   7  [ one]{ two≠ three}~↵~< ten>( four)  3 / 5"


def test_each_token_of_a_round_has_its_own_style():
    marks = classify_round(round_record([1, 2], 1, 10))
    out = shown(draw_round(1, marks, decode), force_terminal=True, color_system="standard")
    assert "\x1b[4;32m one\x1b[0m" in out
    assert "\x1b[9;31m two\x1b[0m" in out
    assert "\x1b[33m ten\x1b[0m" in out


def test_a_character_of_two_tokens_comes_out_whole_and_once():
    pieces = TextPieces(decode_bytes)
    assert [pieces.push(i) for i in (22, 20, 21, 22)] == ["a", "", "é", "a"]
    assert pieces.flush() == ""


def test_a_text_that_ends_inside_a_character_is_flushed():
    pieces = TextPieces(decode_bytes)
    assert [pieces.push(i) for i in (22, 20)] == ["a", ""]
    assert pieces.flush() == "\N{REPLACEMENT CHARACTER}"
    assert pieces.flush() == ""


def test_what_a_model_writes_does_not_steer_the_terminal():
    marks = classify_round(round_record([6, 7], 2, 5))
    out = shown(draw_text(marks, TextPieces(decode), brackets=True), force_terminal=True, no_color=True)
    assert "\x1b[31m" not in out
    assert "␛[31m[bold]" in out
    assert printable("a\tb\nc\x07\x7f\x9b") == "a\tb\nc␇␡\N{REPLACEMENT CHARACTER}"


def test_empty_pieces_get_no_brackets():
    marks = classify_round(round_record([8], 1, 10))
    assert draw_text(marks, TextPieces(decode), brackets=True).plain == " ten"


def test_the_legend_shows_each_mark_as_it_is_drawn():
    assert draw_legend(rounds=False).plain == (
        "[accepted draft]   {accepted thanks to the head (≠ the backbone's own pick)}   the target's own token"
    )
    assert draw_legend(rounds=False, brackets=False).plain.startswith("accepted draft   accepted thanks")
    for look in LOOKS.values():
        assert f"{look.before}{look.meaning}{look.after}" in draw_legend(rounds=True).plain


def test_with_the_head_off_a_round_ends_at_the_backbones_first_wrong_pick():
    record = round_record([1, 2, 3, 4], 3, 10, base=[1, 4, 3, 4])
    assert classify_without_head(record) == [
        Mark("accepted", 1, slot=0),
        Mark("missed", 4, slot=1),
        Mark("own", 2),
        Mark("unused", 3, slot=2),
        Mark("unused", 4, slot=3),
    ]


@pytest.mark.parametrize(
    "drafts, accepted, own, base, kinds",
    [
        # The head was right all along, the backbone too.
        ([1, 2], 2, 10, [1, 2], ["accepted", "accepted", "own"]),
        # The backbone was right where the head was wrong; what the target would have said next is not known.
        ([1, 2, 3], 1, 4, [1, 4, 8], ["accepted", "accepted", "unused"]),
        ([1, 2], 0, 1, [1, 8], ["accepted", "unused"]),
        ([1], 0, 10, [2], ["missed", "own"]),
        ([], 0, 10, [], ["own"]),
    ],
)
def test_what_is_known_of_a_round_without_the_head(drafts, accepted, own, base, kinds):
    assert [mark.kind for mark in classify_without_head(round_record(drafts, accepted, own, base=base))] == kinds


# Two rounds of four drafts behind a first token: the head rescues one draft, the second round misses at once.
TRACE = {
    "version": 1,
    "target": "acme/target",
    "drafter": "acme/<drafter>",
    "kind": "chain",
    "head": "domino",
    "block_size": 4,
    "rule": "greedy",
    "temperature": 0.0,
    "prompt_tokens": 3,
    "rounds": [
        {
            **round_record([1, 2, 3, 4], 3, 10, base=[1, 4, 3, 4]),
            "probabilities": [0.9, 0.625, 0.5, 0.4],
            "base_probabilities": [0.9, 0.125, 0.5, 0.4],
            "stage_seconds": {"verify": 0.25},
        },
        {**round_record([2, 1], 0, 1, base=[1, 1]), "stage_seconds": {}},
    ],
    "output_ids": [9, 1, 2, 3, 10, 1],
    "seconds": 0.5,
}
TREE_TRACE = {
    **TRACE,
    "kind": "tree",
    "rounds": [{**round_record([1, 2, 3, 4, 1], 2, 10), "parents": [-1, -1, 1, 1, 3], "path": [1, 3]}],
    "output_ids": [9, 2, 4, 10],
}
MARKUP = {**WORDS, 1: "<b>", 2: "</span><script>alert(1)</script>", 3: '" onfocus="x', 9: "&"}


def decode_markup(ids: list[int]) -> str:
    return "".join(MARKUP[i] for i in ids)


class Page(HTMLParser):
    """Elements of a page as (tag, classes, attributes, text directly in it)."""

    def __init__(self, html: str):
        super().__init__()
        self.elements, self._open = [], []
        self.feed(html)
        assert not self._open, "an element is not closed"

    def handle_starttag(self, tag, attributes):
        attributes = dict(attributes)
        element = {
            "tag": tag,
            "classes": (attributes.get("class") or "").split(),
            "attributes": attributes,
            "text": "",
        }
        self.elements.append(element)
        if tag not in ("input", "meta", "link", "br"):
            self._open.append(element)

    def handle_endtag(self, tag):
        assert self._open.pop()["tag"] == tag

    def handle_data(self, data):
        if self._open:
            self._open[-1]["text"] += data

    def all(self, name: str) -> list[dict]:
        return [element for element in self.elements if name in element["classes"]]


def test_a_page_has_a_row_a_round_and_a_chip_a_token():
    page = Page("".join(draw_timeline(TRACE, decode_markup)))
    # The first row is the forward that read the prompt; the legend's chips say nothing.
    rows = [row for row in page.all("dm-row") if "dm-prompt" not in row["classes"]]
    assert [(row["attributes"]["data-given"], row["attributes"]["data-ms"]) for row in rows] == [
        ("4", "250"),
        ("1", "0"),
    ]
    spoken = [chip["attributes"]["aria-label"] for chip in page.all("dm-tok") if "aria-label" in chip["attributes"]]
    assert len([label for label in spoken if label.startswith("The first token")]) == 1
    # Both views of both rounds: with the head 5 and 3 chips, without it 5 and, as the end is not known, 2.
    assert len(spoken) == 1 + (5 + 3) + (5 + 2)
    assert (
        "Draft 2, “</span><script>alert(1)</script>”: accepted thanks to the Domino head. Token 3 of the text. Probability "
        "0.62 corrected, 0.12 from the backbone alone. The backbone alone would have picked “four”." in spoken
    )
    assert any(label.endswith("The backbone alone would have picked “<b>”, and been right.") for label in spoken)
    assert "≥ " in "".join(given["text"] for given in page.all("dm-off"))
    assert page.all("dm-tau")[0]["text"] == "τ = 2.50"


def test_what_a_model_writes_is_never_markup():
    for html in ("".join(draw_timeline(TRACE, decode_markup)), draw_page(TRACE, decode_markup, prompt="<b>&amp;")):
        page = Page(html)
        assert not [element for element in page.elements if "onfocus" in element["attributes"]]
        assert "alert(1)" not in "".join(e["text"] for e in page.elements if e["tag"] == "script")
        inside = [element["text"] for element in page.elements if element["tag"] == "i"]
        assert {"<b>", "</span><script>alert(1)</script>", '" onfocus="x'} <= set(inside)


def test_a_tree_hangs_together():
    page = Page("".join(draw_timeline(TREE_TRACE, decode_markup)))
    chips = [
        chip for chip in page.all("dm-tok") if chip["attributes"].get("aria-label", "").startswith(("Draft", "“"))
    ]
    assert len(chips) == 6 and len(page.all("dm-node")) == 6
    # The two drafts of the kept path, and the own token at its end.
    assert len(page.all("dm-kept")) == 3
    assert [given["text"] for given in page.all("dm-given") if "dm-on" in given["classes"]] == [" / 4"]
    # Without the head it would have been another tree, so there is no switch.
    assert page.all("dm-headoff") == [] and page.all("dm-scrub")


def test_a_run_that_drafted_nothing_is_loud():
    plain = {**TRACE, "rounds": [round_record([], 0, 1)] * 2, "output_ids": [9, 1, 1]}
    (alert,) = [
        e
        for e in Page("".join(draw_timeline(plain, decode_markup))).elements
        if e["attributes"].get("role") == "alert"
    ]
    assert alert["text"] == DID_NOT_RUN
    assert "Reading the prompt" in "".join(draw_timeline({"rounds": [], "output_ids": []}, decode, finished=False))


def test_a_text_of_one_token_had_nothing_to_draft_and_is_no_alarm():
    html = "".join(draw_timeline({**TRACE, "rounds": [], "output_ids": [9]}, decode_markup))
    assert "Nothing was drafted: the text ended with its first token" in html and "alert" not in html


def test_the_tokens_of_the_text_are_numbered_without_a_gap():
    # The target's own token was numbered as if the miss before it were part of the text.
    for trace, views in ((TRACE, ("dm-on", "dm-off")), (TREE_TRACE, ("dm-on",))):
        for view in views:
            html = "".join(draw_timeline(trace, decode_markup))
            rows = re.findall(rf'<span class="dm-toks {view}.*?(?=<span class="dm-given)', html, re.DOTALL)
            for row, position in zip(rows, (1, 5)):
                numbers = sorted(int(number) for number in re.findall(r"Token (\d+) of the text", row))
                assert numbers == list(range(position + 1, position + 1 + len(numbers)))


def test_numbers_say_what_they_count():
    html = "".join(draw_timeline(TRACE, decode_markup))
    assert "2 target forwards for 5 tokens after the first" in html
    assert "tokens the round gave, of the most it could" in html
    assert 'title="At least so many: the record ends here">≥ ' in html


def test_a_page_says_where_its_seconds_were_measured_or_that_nobody_knows():
    assert "hardware not recorded" in draw_page(TRACE, decode_markup)
    made = {**TRACE, "environment": {"hardware": "CPU <acme>, threads 2", "dtype": "float32"}}
    assert "recording included · hardware CPU &lt;acme&gt;, threads 2 · dtype float32" in draw_page(
        made, decode_markup
    )


def test_charts_count_what_the_trace_holds():
    assert tokens_per_round(TRACE["rounds"]) == {1: 1, 2: 0, 3: 0, 4: 1, 5: 0}
    # The second round had two drafts only, so the later positions are those of the first.
    assert acceptance_by_position(TRACE["rounds"]) == [0.5, 0.5, 1.0, 0.0]
    assert acceptance_by_position(TRACE["rounds"], without_head=True) == [1.0, 0.0, 0.0, 0.0]
    assert tokens_per_round(TREE_TRACE["rounds"]) == {1: 0, 2: 0, 3: 1, 4: 0}


def test_tokens_that_would_be_invisible_are_shown():
    assert [shown_token(text) for text in (" of", "\n\n", " \t", "   ", "", "\x1b[m", "<", " a\nb")] == [
        "of",
        "↵↵",
        "⇥",
        "␣␣␣",
        "∅",
        "␛[m",
        "&lt;",
        "a↵b",
    ]


def lane(method: str, output_ids: list[int], seconds: float) -> dict:
    points = [[seconds * (i + 1) / len(output_ids), i + 1] for i in range(len(output_ids))]
    return {"method": method, "points": points, "output_ids": output_ids, "tau": 1.0, "seconds": seconds}


def test_a_race_stands_where_its_first_lane_arrives_and_names_the_first_difference():
    race = {
        "recorded": [lane("plain", [1, 2, 3, 4], 2.0), lane("chain", [1, 2, 3, 4], 1.0)],
        "next": None,
        "reference": [1, 2, 3, 4],
    }
    page = Page("".join(draw_race(race, decode)))
    assert [count["text"] for count in page.all("dm-count")] == ["2/4", "4/4"]
    assert "All 2 texts are identical" in page.all("dm-verdict")[0]["text"]
    assert [e["text"] for e in page.elements if e["tag"] == "b"] == ["2.0", "1.00×", "4.0", "2.00×"]
    race["recorded"][1] = lane("chain", [1, 2, 10, 4], 1.0)
    (verdict,) = Page("".join(draw_race(race, decode))).all("dm-verdict")
    assert verdict["text"] == "Not identical: Domino chain differs first at token 3: “ten” instead of “three”."
    race["recorded"][1] = lane("chain", [1, 2], 1.0)
    (verdict,) = Page("".join(draw_race(race, decode))).all("dm-verdict")
    assert "token 3: the end instead of “three”" in verdict["text"]
    # A drafter without a head is no Domino.
    drawn = "".join(draw_race({**race, "family": "DFlash", "next": "tree"}, decode))
    assert "DFlash chain" in drawn and "Recording DFlash tree" in drawn and "Domino" not in drawn


def test_a_page_needs_nothing_from_anywhere_and_carries_its_record():
    html = draw_page(TRACE, decode_markup, prompt="ask")
    assert not re.findall(r"(?:src|href)=\"(?!data:)|url\((?!#)|@import", html)
    record = re.search(r'<script type="application/json" id="trace">(.*?)</script>', html, re.DOTALL)[1]
    assert json.loads(record) == TRACE
    assert "acme/&lt;drafter&gt;" in html and "<drafter>" not in html


def test_the_files_that_travel_to_the_space_need_python_alone():
    folder = Path(marks.__file__).parent
    for path in folder.glob("*.py"):
        roots = set()
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Import):
                roots |= {alias.name.split(".")[0] for alias in node.names}
            elif isinstance(node, ast.ImportFrom) and not node.level:
                roots.add(node.module.split(".")[0])
        assert roots - set(sys.stdlib_module_names) == ({"rich"} if path.name == "terminal.py" else set()), path.name
