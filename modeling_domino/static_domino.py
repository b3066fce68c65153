"""Static rounds: a whole round, of one size, on buffers that stay where they are, so that it can be one CUDA graph.

A round of the usual loop (`loop_domino.py`) launches some thousand kernels, with shapes that change from round to round;
on a fast device launching them takes longer than running them. Here every round drafts and verifies the same number of
tokens. How many rows of the caches count is a number on the device: what was rejected is hidden by a mask, and
overwritten by the next round. The host reads one small tensor a round, and whatever ends a text is decided there.

What differs from the usual loop is the shape of the work, not the drafts and not the text. Greedy chains of one prompt.
"""

from __future__ import annotations

import threading
import weakref
from collections.abc import Callable, Iterator

import torch

from .cache_domino import cache_keyword, set_length, static_cache
from .drafting_domino import SCORE_ONLY_PROCESSORS, DraftOptions, draft_chain
from .graphs_domino import WARM_UPS, Graphs, one_function
from .kernels_domino import kernels_of
from .loop_domino import DecodeLoop
from .packed_domino import NOTHING_PACKED, PackedPair
from .record_domino import Step
from .taps_domino import TargetTaps
from .target_domino import TargetView
from .verification_domino import accept_match


# Caches have a multiple of so many rows: texts of about one length share a round.
ROWS = 512
# Rotary embeddings that read the length of the text on the host.
READING_ROTARY = ("dynamic", "longrope")

_TAKING = threading.Lock()


class StaticContext:
    """The drafter's context in buffers of a fixed size; for drafting, what `DominoCache` is to the usual loop.

    Args:
        drafter (`DominoDraftModel`): its shapes, dtype and device.
        num_rows (`int`): of context; those of the block lie behind them.

    Attributes:
        start: where the next rows go, on the device, without dimensions.
    """

    def __init__(self, drafter, num_rows: int):
        config = drafter.config
        shape = (1, config.num_key_value_heads, num_rows + config.block_size, config.head_dim)
        like = {"dtype": drafter.dtype, "device": drafter.device}
        self.keys, self.values = (
            [torch.zeros(shape, **like) for _ in range(config.num_hidden_layers)] for _ in range(2)
        )
        self.num_visible = num_rows
        self.start = torch.zeros((), dtype=torch.long, device=drafter.device)

    def append(self, layer_idx: int, keys: torch.Tensor, values: torch.Tensor) -> None:
        """Writes context rows `[1, kv_heads, m, head_dim]` of one layer; the mask of a round says which of them count."""
        rows = self.start + torch.arange(keys.shape[2], device=keys.device)
        self.keys[layer_idx][:, :, rows] = keys
        self.values[layer_idx][:, :, rows] = values

    def commit(self, num_rows: int) -> None:
        """Nothing is counted here."""

    def with_block(
        self, layer_idx: int, keys: torch.Tensor, values: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """All context rows, to be masked, and the block's."""
        for states, block in ((self.keys[layer_idx], keys), (self.values[layer_idx], values)):
            states[:, :, self.num_visible :] = block
        return self.keys[layer_idx], self.values[layer_idx]


class StaticRound:
    """One round as a function of no arguments, the state it works on, and its graph. Used by one text at a time.

    The models belong to it between [`bind`] and [`release`] only: what is kept must not keep them.

    Args:
        num_rows (`int`): most rows of the target's cache.
        width (`int`): drafts of every round (n), 0 for none.
        options ([`DraftOptions`]): what drafts are chosen from.
        processors (*optional*): that look at the scores alone.

    Attributes:
        past: rows of the target's cache that count, which is the anchor's position; on the device, as all that follows.
        count: how many rows of `taps` count.
        last: the last position that the text can have.
        anchor: the last token of the text, `[1, 1]`.
        taps: what the target said of the last round's rows, `[1, n + 1, L * D]`.
        result: what the host reads: how many drafts were kept, the target's own token, the drafts, `[1, 2 + n]`.
    """

    @torch.inference_mode(False)
    @torch.no_grad()
    def __init__(self, view: TargetView, drafter, *, num_rows: int, width: int, options: DraftOptions, processors):
        target, config, device = view.target, drafter.config, drafter.device
        self.width, self.options, self.processors = width, options, processors
        self.keyword = cache_keyword(target)
        self.cache = static_cache(target, num_rows)
        # The first forward lays out the buffers, in the shapes that this target needs.
        target(
            input_ids=torch.zeros(1, 1, dtype=torch.long, device=device), use_cache=True, **{self.keyword: self.cache}
        )
        self.context = StaticContext(drafter, num_rows)
        self.past, self.count, self.last = (torch.zeros((), dtype=torch.long, device=device) for _ in range(3))
        self.anchor = torch.zeros(1, 1, dtype=torch.long, device=device)
        features = len(config.target_layer_ids) * config.hidden_size
        self.taps = torch.zeros(1, width + 1, features, dtype=drafter.dtype, device=device)
        self.result = torch.zeros(1, 2 + width, dtype=torch.long, device=device)
        self.columns = torch.arange(num_rows, device=device)
        self.graphs = Graphs()
        self.kept: tuple = ()
        self.key: tuple = ()
        self.drafted_by: str | None = None
        self.target, self.drafter = weakref.ref(target), weakref.ref(drafter)
        self.release()

    @property
    def is_busy(self) -> bool:
        """Whether a text is using it."""
        return self.view is not None

    def state(self) -> list[torch.Tensor]:
        """Every tensor that rounds read and write."""
        cached = [
            state for layer in self.cache.layers for state in (layer.keys, layer.values, layer.cumulative_length)
        ]
        own = [self.past, self.count, self.last, self.anchor, self.taps, self.result, self.context.start]
        return [*own, *self.context.keys, *self.context.values, *cached]

    def bind(self, view: TargetView, drafter, taps: TargetTaps, clock, max_length: int) -> Callable[[], None]:
        """Makes it ready for one text, and hands back the round to run: on a CUDA device its graph."""
        self.view, self._drafter, self._reader, self._clock = view, drafter, taps, clock
        report = kernels_of(drafter).report
        before = dict(report.chains)
        models = (view.target, drafter)
        # The text must not outlive them: a graph does not notice when weights go.
        self._weights = [tensor for model in models for tensor in (*model.parameters(), *model.buffers())]
        # A capture begins where an empty text does: there is room for its rounds.
        self.past.zero_()
        self.count.zero_()
        run = self.graphs.in_place(self.run, drafter.device, self._weights)
        if report.chains != before:
            self.drafted_by = next(name for name, done in report.chains.items() if done != before[name])
            report.chains.update(before)
        self.kept = (kernels_of(drafter).table, *self._gathered_rows())
        for tensor in self.state():
            tensor.zero_()
        self.last.fill_(max_length - 1)
        return run

    def _gathered_rows(self) -> list[tuple]:
        """What a draft vocabulary gathers; its cache may let go of it, the graph must not."""
        vocabulary, head = self.options.vocabulary, self._drafter.head
        if vocabulary is None or self.width == 0:
            return []
        layers = [self.view.target.get_output_embeddings(), *([] if head is None else [head.embed_proj[2]])]
        return [vocabulary.rows_of(layer) for layer in layers]

    def release(self) -> None:
        """Lets go of the models, and may be used by another text."""
        self.view: TargetView | None = None
        self._drafter = self._reader = self._clock = self._weights = None

    def read_prompt(self, ids: torch.Tensor) -> None:
        """The prompt `[1, S]`; its anchor is the target's own token behind it, in `anchor` and `result`."""
        length = ids.shape[1]
        positions = torch.arange(length, device=ids.device)[None]
        outputs = self._forward(ids, positions, None, num_logits=1)
        own = self._law(outputs.logits[:, -1:]).argmax(dim=-1)
        if self.width > 0:
            context = self._reader.read(outputs, device=ids.device).to(self._drafter.dtype)
            self._drafter.append_context(context, positions, self.context)
        self.past.fill_(length)
        self.anchor.copy_(own)
        self.result[:, 1:2] = own

    def run(self) -> None:
        """Draft, verify, accept, commit: reads the state, and leaves it as the next round needs it.

        No shape, no address and no branch depends on what the tensors hold, and nothing waits for the device.
        """
        with one_function():
            draft_ids = self._draft() if self.width > 0 else self.anchor[:, :0]
            rows = torch.arange(self.width + 1, device=self.anchor.device)
            behind = self.past + rows
            set_length(self.cache, self.past)
            like = self.view.target.get_input_embeddings().weight
            mask = like.new_zeros(1, 1, len(rows), len(self.columns))
            mask = mask.masked_fill(self.columns > behind[:, None], torch.finfo(like.dtype).min)
            ids = torch.cat([self.anchor, draft_ids], dim=1)
            # Rows behind the end of the text are not used, and some targets have no such positions.
            outputs = self._forward(ids, behind.clamp(max=self.last)[None], mask, num_logits=len(rows))
            logits = self._law(outputs.logits[:, -len(rows) :])
            accepted, own = accept_match(draft_ids, logits.argmax(dim=-1))
            self.result.copy_(torch.cat([accepted[:, None], own[:, None], draft_ids], dim=1))
            if self.width > 0:
                self.taps.copy_(self._reader.read(outputs, device=self.anchor.device))
            self.count.copy_(accepted[0] + 1)
            self.past.add_(self.count)
            self.anchor.copy_(own[:, None])

    def _draft(self) -> torch.Tensor:
        """Takes the last round's taps into the context, all rows of them, and drafts: `[1, n]`."""
        device, drafter = self.anchor.device, self._drafter
        self.context.start.copy_(self.past - self.count)
        new = self.context.start + torch.arange(self.width + 1, device=device)
        block = self.past + torch.arange(drafter.config.block_size, device=device)
        seen = self.columns < self.past
        if drafter.context_window is not None:
            seen = seen & (self.columns >= self.past - drafter.context_window)
        return draft_chain(
            drafter,
            self.view,
            self.context,
            prefix_ids=self.anchor,
            context_hidden_states=self.taps,
            position_ids=torch.cat([new, block])[None],
            num_drafts=self.width,
            clock=self._clock,
            attention_mask=torch.cat([seen, seen.new_ones(drafter.config.block_size)])[None],
            processors=self.processors,
            options=self.options,
        ).ids

    def _forward(self, ids: torch.Tensor, positions: torch.Tensor, mask: torch.Tensor | None, *, num_logits: int):
        kwargs = {self.keyword: self.cache, **self._reader.forward_kwargs, **self.view.logits_of_last(num_logits)}
        self._reader.listen()
        return self.view.target(input_ids=ids, attention_mask=mask, position_ids=positions, use_cache=True, **kwargs)

    def _law(self, logits: torch.Tensor) -> torch.Tensor:
        return self.processors(self.anchor, logits[0].float())[None] if self.processors else logits


class StaticLoop(DecodeLoop):
    """The decode loop with static rounds; the same steps and runs."""

    path = "static"

    @torch.no_grad()
    def steps(self, streamer=None) -> Iterator[dict[int, Step]]:
        """See [`DecodeLoop.steps`]."""
        self.round: StaticRound | None = None
        try:
            yield from super().steps(streamer)
        finally:
            if self.round is not None:
                self.round.release()

    def _packed(self) -> PackedPair:
        return NOTHING_PACKED

    def _keep_context(self) -> None:
        """The caches are not the caller's."""

    def _prefill(self) -> dict[int, Step]:
        self.round = self._take_round()
        try:
            self.run_round = self.round.bind(
                self.view, self.drafter, self.taps, self.clock, max_length=self.texts.max_length
            )
        except RuntimeError as error:
            raise RuntimeError(
                f"A round with {type(self.view.target).__name__} must be one that a CUDA graph can hold, which failed "
                f"({error}); leave `static` out."
            ) from error
        self.round.read_prompt(self.texts.ids[:, : self.texts.lengths[0]])
        # Now that the models have run: transformers hangs its own hooks up at the first forward.
        self.round.key = self._key()
        return self._finish(Step([], 0, self.round.result[0, 1].tolist(), is_prefill=True))

    def _round(self) -> dict[int, Step]:
        """One round. The only wait for the device is the `tolist` below."""
        report = kernels_of(self.drafter).report
        captured = self.run_round != self.round.run
        report.rounds["captured" if captured else "uncaptured"] += 1
        if captured and self.round.drafted_by is not None:
            report.chains[self.round.drafted_by] += 1
        self.run_round()
        accepted, own, *drafts = self.round.result[0].tolist()
        self.texts.write(self.round.result[:, 2:], ahead=0)
        step = Step(drafts, accepted, own)
        self.texts.end_at_stop(0, step)
        return self._finish(step)

    def _finish(self, step: Step) -> dict[int, Step]:
        self.clock.mark("verify")
        self.texts.commit({0: step})
        self.clock.mark("commit")
        step.stage_seconds = self.clock.take()
        return {0: step}

    def _take_round(self) -> StaticRound:
        """The round that is kept for such texts, or a new one; of those that nobody uses one is kept."""
        held, key = kernels_of(self.drafter).rounds, self._key()
        with _TAKING:
            idle = [each for each in held if not each.is_busy]
            fits = [each for each in idle if each.key == key and each.target() is self.view.target][:1]
            for each in idle:
                if each not in fits:
                    held.remove(each)
                    each.graphs.forget()
            if fits:
                fits[0].view = self.view
                return fits[0]
        size, processors = {"num_rows": self.num_rows, "width": self.width}, self.texts.processors
        made = StaticRound(self.view, self.drafter, **size, options=self.options, processors=processors)
        made.view = self.view
        held.append(made)
        return made

    @property
    def num_rows(self) -> int:
        """Rows of the caches: for the text and the drafts of its last round, and for the rounds of the capture."""
        needed = max(self.texts.max_length + self.width, (WARM_UPS + 1) * (self.width + 1))
        return -(-needed // ROWS) * ROWS

    def _key(self) -> tuple:
        """What the launches of a round depend on, beside the weights."""
        drafter, target, options = self.drafter, self.view.target, self.options
        ranked = None if options.vocabulary is None else tuple(drafter.draft_ranking[: len(options.vocabulary)])
        drafted = (options.candidates, options.temperatures, ranked, drafter.head_state, drafter.context_window)
        # A round keeps its processors, so that no other can take the place of one in memory.
        processors = tuple(id(each) for each in self.texts.processors or ())
        attention = tuple(model.config.get_text_config()._attn_implementation for model in (target, drafter))
        modules = tuple(
            (
                id(each),
                each.training,
                id(vars(each).get("forward")),
                len(each._forward_hooks),
                len(each._forward_pre_hooks),
            )
            for model in (target, drafter)
            for each in model.modules()
        )
        return self.num_rows, self.width, drafted, processors, attention, modules


def check_static(target, drafter, input_ids: torch.Tensor, cache, processors, generation_config, model_kwargs) -> None:
    """Refuses what static rounds cannot do.

    Raises:
        ValueError: one sentence with what is required, what came and what to do.
    """
    batch, length = input_ids.shape
    mask, positions = model_kwargs.get("attention_mask"), model_kwargs["position_ids"][..., -length:]
    padded = mask is not None and not bool(mask.all())
    moved = positions.dim() != 2 or not torch.equal(positions[0].cpu(), torch.arange(length))
    reading = [type(each).__name__ for each in processors or [] if type(each) not in SCORE_ONLY_PROCESSORS]
    attention = target.config.get_text_config()._attn_implementation
    modules = [module for model in (target, drafter) for module in model.modules()]
    adapted = any(hasattr(module, "base_layer") for module in modules)
    rotary = {str(getattr(module, "rope_type", "")) for module in modules}
    rotary = sorted(kind for kind in rotary if any(name in kind for name in READING_ROTARY))
    devices = sorted({str(tensor.device) for model in (target, drafter) for tensor in model.parameters()})
    for required, came, remedy in (
        ("one prompt", batch > 1 and f"a batch of {batch}", "pass one at a time"),
        ("greedy decoding", generation_config.do_sample and "do_sample=True", "set the temperature to 0"),
        ("a prompt without padding", padded and "an attention mask with zeros", "cut the padding off"),
        ("positions that count from 0", moved and "others", "leave those out"),
        ("an empty cache", int(cache.get_seq_length()) > 0 and "a filled one", "leave it out"),
        ("processors that look at the scores alone", ", ".join(reading), "leave those out"),
        ("no details", drafter.record_details and "`record_details`", "switch that off"),
        ("weights as they are", drafter.prepack and "`prepack=True`", "leave that out"),
        ("weights as they are", adapted and "adapters", "merge them"),
        ("no autocast", torch.is_autocast_enabled(drafter.device.type) and "it", "load the models in that dtype"),
        ("eager or sdpa attention", attention not in ("eager", "sdpa") and attention, "load the target with it"),
        ("target and drafter on one device", len(devices) > 1 and ", ".join(devices), "move them together"),
        ("rotary embeddings that do not read the text's length", ", ".join(rotary), "use another pair"),
    ):
        if came:
            raise ValueError(f"`static=True` needs {required}, got {came}; {remedy}, or leave `static` out.")
    static_cache(target, 1)
