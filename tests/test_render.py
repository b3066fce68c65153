"""The renderer: what each token of a round is, and that the terminal says it in colour and without."""

from __future__ import annotations

import io

import pytest
from rich.console import Console

from modeling_domino.render.marks import Mark, TextPieces, classify_round, printable
from modeling_domino.render.terminal import LOOKS, draw_legend, draw_round, draw_text


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
