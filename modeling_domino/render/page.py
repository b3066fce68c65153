"""The static replay page: a trace, and a race if there is one, as one self-contained HTML file."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from html import escape
from typing import Any

from .marks import printable
from .race import draw_race
from .timeline import ARCHITECTURE, CSS, SCRIPT, draw_timeline


PAGE_CSS = """
:root { color-scheme: light dark; }
.domino { color-scheme: inherit; }
body { margin: 0; background: light-dark(#f8f9fc, #10131b); }
main { max-width: 1120px; margin: 0 auto; padding: 1.2em clamp(10px, 3vw, 28px) 3em; }
.domino h1 { font-size: 1.6em; margin: 0 0 .2em; }
.domino h2 { font-size: 1.1em; margin: 1.6em 0 .5em; }
.dm-text {
  white-space: pre-wrap; overflow-wrap: anywhere; unicode-bidi: plaintext; background: var(--dm-paper); font: inherit;
  border: 1px solid var(--dm-line); border-radius: 10px; padding: .8em 1em; margin: 0;
}
.dm-footer { color: var(--dm-soft); font-size: .87em; margin-top: 2em; }
.dm-architecture { overflow-x: auto; }
.dm-architecture svg { width: 100%; min-width: 560px; max-width: 860px; height: auto; }
"""


def draw_page(
    trace: Mapping[str, Any],
    decode: Callable[[list[int]], str],
    *,
    prompt: str | None = None,
    race: Mapping[str, Any] | None = None,
) -> str:
    """The page as text; it loads nothing and knows no model.

    Args:
        trace (`Mapping`): a whole trace (version 1 of the schema); its `environment`, where the run was made, may lack.
        decode (`Callable`): from a list of ids to text.
        prompt (`str`, *optional*): shown above the rounds.
        race (`Mapping`, *optional*): a recorded race, see [`draw_race`].
    """
    facts = [
        f"target {trace['target']}",
        f"drafter {trace['drafter']}",
        f"{trace['kind']} of block {trace['block_size']}, head {trace.get('head', 'not recorded')}",
        f"rule {trace['rule']}, temperature {trace['temperature']}",
        f"{len(trace['output_ids'])} tokens in {trace['seconds']:.2f} s, recording included",
        *_environment(trace.get("environment")),
    ]
    asked = f'<h2>Prompt</h2><pre class="dm-text">{escape(printable(prompt))}</pre>' if prompt else ""
    raced = f"<h2>Race</h2>{''.join(draw_race(race, decode))}" if race else ""
    text = escape(printable(decode(trace["output_ids"])))
    # The record itself, for whoever wants to count; a "<" could end the element it stands in.
    record = json.dumps(trace).replace("<", "\\u003c")
    return f"""<!doctype html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<title>Domino replay: {escape(trace["drafter"])}</title>
<link rel="icon" href="data:,">
<style>{CSS}{PAGE_CSS}</style>
</head>
<body>
<main class="domino">
<h1>🁫 Domino: a recorded run</h1>
<p>One parallel draft, one cheap causal correction, one check by the target. Nothing runs here: this is the record.</p>
{asked}
{raced}
<h2>Rounds</h2>
<div>{"".join(draw_timeline(trace, decode))}</div>
<h2>Text</h2>
<pre class="dm-text">{text}</pre>
<h2>How it works</h2>
<div class="dm-architecture" tabindex="0" role="group" aria-label="How it works">{ARCHITECTURE}</div>
<p class="dm-footer">{escape(" · ".join(facts))}</p>
</main>
<script type="application/json" id="trace">{record}</script>
<script>{SCRIPT}
dominoView(document.querySelector("main"));
</script>
</body>
</html>
"""


def _environment(facts: Mapping[str, str] | None) -> list[str]:
    """Without these the seconds say nothing, so their absence is said."""
    return [f"{name} {value}" for name, value in facts.items()] if facts else ["hardware not recorded"]
