"""Variants of a method: the same method with an option changed, measured beside it on the same prompts.

A variant is written `METHOD:OPTION=VALUE`, options as on the command line, several behind one another:
`chain:verify-width=3`, `chain:rule=match`, `tree:tree-nodes=8:tree-lanes=4`. No torch here, for the report.
"""

from __future__ import annotations


CHAIN_OPTIONS = ("rule", "verify-width", "candidates", "draft-vocab", "auto-off")
# By method; a method that is not here has no options.
OPTIONS = {
    "prompt-lookup": ("lookup-tokens",),
    "dflash": CHAIN_OPTIONS,
    "head-off": CHAIN_OPTIONS,
    "chain": CHAIN_OPTIONS,
    "tree": ("tree-nodes", "tree-lanes", "tree-candidates", "tree-children", "draft-vocab", "auto-off"),
    "chain-stock": ("verify-width", "candidates", "draft-vocab"),
}
WORDS = {"rule": ("match", "speculative", "block"), "auto-off": ("on", "off")}
SIZES = ("verify-width", "tree-nodes")


def method_of(name: str) -> str:
    """The method that a variant is one of; of a method itself, its own name."""
    return name.partition(":")[0]


def options_of(name: str) -> dict[str, str | int]:
    """The options that a variant changes; none for a method itself.

    Raises:
        ValueError: if the method has no such option, or the option no such value.
    """
    method, *words = name.split(":")
    options: dict[str, str | int] = {}
    for word in words:
        option, _, text = word.partition("=")
        known = OPTIONS.get(method, ())
        if option not in known or option in options:
            raise ValueError(
                f"A variant is METHOD:OPTION=VALUE, each option once, got {name}; options of {method}: "
                f"{', '.join(known) or 'none'}."
            )
        options[option] = _value(name, option, text)
    return options


def _value(name: str, option: str, text: str) -> str | int:
    if option in WORDS:
        if text in WORDS[option]:
            return text
        raise ValueError(f"`{option}` is {' or '.join(WORDS[option])}, got {name}.")
    least = 0 if option in ("candidates", "draft-vocab") else 1
    return size_of(option, text, least=least, auto=option in SIZES, came=name)


def size_of(
    option: str, text: str | None, *, least: int = 1, auto: bool = True, came: str | None = None
) -> str | int | None:
    """The number that an option was given, or "auto" where it may be; `None` if it was left out.

    Args:
        came (`str`, *optional*): what the error shows, by default `text`.

    Raises:
        ValueError: if it is neither.
    """
    if text is None or (auto and text == "auto"):
        return text
    if text.isascii() and text.isdigit() and int(text) >= least:
        return int(text)
    raise ValueError(
        f"`{option}` must be a number of at least {least}{', or auto' if auto else ''}, got {text if came is None else came}."
    )
