"""Sizes of a round: how many drafts are worth their verification, and whether drafting pays at all.

Three deciders, none of which touches a model: `Costs` weighs what a draft may bring against what its row costs, by a curve
that was measured once (see `costs_domino.py`); `PastWidth` does the same where the drafts themselves must not be looked at;
`AutoOff` compares the speed of drafted rounds with that of plain steps while a text is written. None changes the text.

Sizing by cost: https://huggingface.co/papers/2606.01813.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass

import torch


# Share of a round that leaving out all of its drafts must save before it is asked which to leave out.
WORTH_LOOKING = 0.1


@dataclass(frozen=True)
class Costs:
    """Seconds of the two halves of a round, by size.

    Args:
        verify: of a forward of the target, by its number of rows (at least one entry). Between them costs are interpolated.
        draft: of drafting a block or a tree, the part that does not depend on how much of it is verified.
        per_draft: of each draft of a chain on top of it.
    """

    verify: dict[int, float]
    draft: float
    per_draft: float = 0.0

    def __post_init__(self):
        values = [*self.verify.values(), self.draft, self.per_draft]
        if not self.verify or min(self.verify) < 1 or not all(value >= 0 for value in values):
            raise ValueError(f"Costs must be seconds by a number of rows of at least 1, got {self}.")
        if min(self.verify.values()) == 0:
            raise ValueError(f"A forward must take time, got {self}.")

    def verify_seconds(self, most_rows: int) -> list[float]:
        """Seconds for 1, 2, ..., `most_rows` rows; never falling, since noise alone says that more rows cost less."""
        known = sorted(self.verify.items())
        seconds: list[float] = []
        below, *larger = known
        for rows in range(1, most_rows + 1):
            while larger and larger[0][0] <= rows:
                below = larger.pop(0)
            if below[0] >= rows:
                value = below[1]
            elif not larger:
                # Beyond the last measured size every row costs what it cost on average before.
                value = below[1] * rows / below[0]
            else:
                share = (rows - below[0]) / (larger[0][0] - below[0])
                value = below[1] + share * (larger[0][1] - below[1])
            seconds.append(max(value, seconds[-1] if seconds else 0.0))
        return seconds

    def best_length(self, probabilities: torch.Tensor) -> int:
        """How many drafts of a chain to verify, from the probability of each given those before it, `[B, n]`.

        Reads one number from the device. All drafts are made already, so they all count as drafted.
        """
        batch, num_drafts = probabilities.shape
        gain = probabilities.float().nan_to_num(nan=0.0).cumprod(dim=1).sum(dim=0)
        draft = self.draft + self.per_draft * num_drafts
        seconds = self.verify_seconds(batch * (num_drafts + 1))[batch - 1 :: batch]
        return self._best(gain, float(batch), draft, seconds)

    def best_nodes(self, scores: torch.Tensor) -> int:
        """How many nodes of a tree to verify, from the log-probabilities of their paths, best first, `[1, N]`.

        Reads one number from the device.
        """
        return self._best(scores[0].float().exp(), 1.0, self.draft, self.verify_seconds(scores.shape[1] + 1))

    def best_width(self, reach: list[float], batch: int = 1) -> int:
        """How many drafts of a chain to make and verify, from the probability that each is kept."""
        seconds = self.verify_seconds(batch * (len(reach) + 1))[batch - 1 :: batch]
        rates, tokens = [1.0 / seconds[0]], 1.0
        for i, probability in enumerate(reach, start=1):
            tokens += probability
            rates.append(tokens / (self.draft + self.per_draft * i + seconds[i]))
        return max(range(len(rates)), key=rates.__getitem__)

    def _best(self, gain: torch.Tensor, own: float, draft: float, seconds: list[float]) -> int:
        tokens = torch.cat([gain.new_full((1,), own), own + gain.cumsum(dim=0)])
        seconds = torch.tensor([draft + value for value in seconds], device=gain.device)
        return int((tokens / seconds).argmax())


def may_shorten(costs: Costs, num_drafts: int, batch: int = 1) -> bool:
    """Whether leaving out drafts can gain enough to look at their probabilities, which takes a pass over the logits.

    Where many rows cost what one costs, as on packed weights, it cannot. Not a method: costs may come from another copy of
    this code.
    """
    draft = costs.draft + costs.per_draft * num_drafts
    seconds = costs.verify_seconds(batch * (num_drafts + 1))[batch - 1 :: batch]
    return (seconds[-1] - seconds[0]) > WORTH_LOOKING * (draft + seconds[-1])


class PastWidth:
    """The number of drafts of a round from what the rounds before it kept.

    Under "speculative" and "block" the size of a block must not depend on what was drawn for it, or the text would lean
    towards what is drafted with confidence. What other rounds kept says nothing about this one's drafts.

    Args:
        costs ([`Costs`]): of the pair.
        most (`int`): drafts of a block.
    """

    # A fresh run trusts the drafter; a depth that was not tried for a while is trusted again, a little at a time.
    TRUST, WEIGHT, FADING = 0.8, 4.0, 0.98

    def __init__(self, costs: Costs, most: int):
        self.costs = costs
        self.tried = [0.0] * most
        self.kept = [0.0] * most

    def reach(self) -> list[float]:
        """The estimated probability that draft 1, 2, ... is kept."""
        reach, probability = [], 1.0
        for tried, kept in zip(self.tried, self.kept):
            probability *= (kept + self.TRUST * self.WEIGHT) / (tried + self.WEIGHT)
            reach.append(probability)
        return reach

    def width(self, batch: int = 1) -> int:
        """Drafts of the next round; at least one, since a run without drafts would learn nothing."""
        return max(1, self.costs.best_width(self.reach(), batch))

    def note(self, verified: int, accepted: list[int]) -> None:
        """A round of `verified` drafts, of which each sequence kept `accepted`."""
        for counts in (self.tried, self.kept):
            counts[:] = [count * self.FADING for count in counts]
        for number in accepted:
            for i in range(min(number + 1, verified)):
                self.tried[i] += 1
                self.kept[i] += number > i


class AutoOff:
    """Says before each round whether to draft, from the measured speed of drafted rounds and of plain steps.

    The first `TRIAL` rounds draft, then `PLAIN` steps do not, and the faster way goes on. While drafting, plain steps are
    measured anew every `CHECK` rounds, since a growing context changes both. While it is off, every `REST` steps (twice
    as many after each failure, at most `MOST_REST`) some rounds are drafted to see whether it pays again.

    Args:
        clock (`Callable`): seconds; its readings are compared, never slept on.
    """

    TRIAL, PLAIN, CHECK, REST, MOST_REST, PROBE = 8, 3, 64, 32, 256, 4
    # Rounds and steps that a speed is taken from.
    WINDOW = 16

    def __init__(self, clock: Callable[[], float] = time.perf_counter):
        self._clock = clock
        self._speeds = {True: deque(maxlen=self.WINDOW), False: deque(maxlen=self.WINDOW)}
        self._drafting, self._left, self._rest = True, self.TRIAL, self.REST
        # What the present phase is for: "trial" and "probe" draft, "plain" and "off" do not, "on" drafts.
        self._phase = "trial"
        # The first round pays for the prompt, which the drafter reads, and for what is made at first use.
        self._started, self._fresh = 0.0, True

    def begin(self) -> bool:
        """Starts a round; whether it shall draft."""
        if self._left == 0:
            self._next_phase()
        self._started = self._clock()
        return self._drafting

    def end(self, tokens: float) -> None:
        """Ends a round that gave so many tokens (a sequence, on average)."""
        seconds = self._clock() - self._started
        self._left -= 1
        if self._fresh:
            # The first round of a phase pays for the one before it: the drafter reads the context that has waited.
            self._fresh = False
            return
        self._speeds[self._drafting].append((tokens, seconds))

    def _next_phase(self) -> None:
        if self._phase in ("trial", "on"):
            self._enter("plain", False, self.PLAIN)
        elif self._phase == "off":
            self._enter("probe", True, self.PROBE)
        elif self._pays():
            self._rest = self.REST
            self._enter("on", True, self.CHECK)
        else:
            if self._phase == "probe":
                self._rest = min(2 * self._rest, self.MOST_REST)
            self._enter("off", False, self._rest)

    def _enter(self, phase: str, drafting: bool, rounds: int) -> None:
        if phase in ("plain", "probe"):
            self._speeds[drafting].clear()
        self._fresh = drafting != self._drafting
        self._phase, self._drafting, self._left = phase, drafting, rounds

    def _pays(self) -> bool:
        return self._speed(True) >= self._speed(False)

    def _speed(self, drafting: bool) -> float:
        tokens, seconds = map(sum, zip(*self._speeds[drafting]))
        return tokens / max(seconds, 1e-9)
