"""Our decode loop: draft, verify, commit, as a stream of `Step`s.

The loop is a decoding method in the sense of `generate(custom_generate=...)`: transformers prepares ids, masks, cache,
logits processors and stopping criteria, so every generation option applies; the loop then takes one target forward per
round and waits for the device once, to read how many drafts were kept. Section 2 of
https://huggingface.co/papers/2605.29707 describes the round.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from typing import Any

import torch
from transformers import EosTokenCriteria, MaxLengthCriteria, StoppingCriteriaList, StopStringCriteria
from transformers.generation import GenerateDecoderOnlyOutput

from .cache_domino import DominoCache, cache_keyword, cache_of, drop_last, empty_filled_cache, start_recording
from .drafting_domino import DraftChain, draft_chain
from .record_domino import Run, StageClock, Step, set_last_run
from .taps_domino import TargetTaps
from .target_domino import TargetView
from .verification_domino import accept_match, accept_speculative, sample_rows


RULES = ("greedy", "match", "speculative")


def stream(
    target,
    drafter,
    input_ids: torch.Tensor | None = None,
    *,
    rule: str | None = None,
    verify_width: int | None = None,
    streamer=None,
    **generate_kwargs,
) -> Iterator[Step]:
    """Generates with `target` and `drafter`, one [`Step`] at a time.

    Args:
        target (`PreTrainedModel`): the model whose text is written.
        drafter (`DominoDraftModel`): proposes the drafts.
        input_ids: the prompt, `[1, S]`.
        rule (`str`, *optional*): "greedy" at temperature 0; "speculative" (the default) or "match" when sampling.
        verify_width (`int`, *optional*): most drafts to verify per round; by default all of a block.
        streamer (`BaseStreamer`, *optional*): gets the prompt, then the tokens of each step.
        generate_kwargs: everything `target.generate` takes (`attention_mask`, `max_new_tokens`, `do_sample`,
            `stop_strings` with `tokenizer`, `logits_processor`, ...).

    Yields:
        The prefill step, then one step per round. `drafter.last_run` is complete once the iterator is exhausted or closed.

    Raises:
        ValueError: if the pair does not fit or an option cannot be honoured; raised before the first forward.
    """
    criteria = StoppingCriteriaList(generate_kwargs.pop("stopping_criteria", None) or [])
    # The core drops `tokenizer` and `streamer` for custom decoding methods, so both are served here.
    if stop_strings := generate_kwargs.pop("stop_strings", None):
        tokenizer = generate_kwargs.pop("tokenizer", None)
        if tokenizer is None:
            raise ValueError("`stop_strings` needs the target's tokenizer: pass `tokenizer=`.")
        criteria.append(StopStringCriteria(tokenizer, stop_strings))
    generate_kwargs.pop("tokenizer", None)
    return target.generate(
        input_ids,
        custom_generate=_open_stream,
        stopping_criteria=criteria,
        drafter=drafter,
        rule=rule,
        verify_width=verify_width,
        step_streamer=streamer,
        **generate_kwargs,
    )


def spec_generate(
    self,
    target,
    input_ids: torch.Tensor,
    max_new_tokens: int | None = None,
    stop_token_ids: int | list[int] | None = None,
    temperature: float = 0.0,
    *,
    return_dict: bool = False,
    **kwargs,
):
    """Generates with this drafter in one call; the signature of the published DFlash and Domino models.

    Args:
        target (`PreTrainedModel`): the model whose text is written.
        input_ids: the prompt, `[1, S]`.
        max_new_tokens (`int`, *optional*): by default the target's generation config decides.
        stop_token_ids (`int` or `list[int]`, *optional*): by default the target's end-of-sequence ids.
        temperature (`float`): 0 for greedy decoding; above, plain sampling from the target's law at that temperature.
        return_dict (`bool`): return a `GenerateDecoderOnlyOutput` instead of the ids.
        kwargs: those of [`stream`].

    Returns:
        Prompt and generated ids, `[1, S + new]`; `self.last_run` holds the statistics.
    """
    if temperature < 0:
        raise ValueError(f"`temperature` must be 0 (greedy) or positive, got {temperature}.")
    if temperature > 0:
        # `generate` would otherwise apply its default top-k of 50.
        kwargs = {"do_sample": True, "temperature": temperature, "top_k": 0, "top_p": 1.0, **kwargs}
    else:
        kwargs = {"do_sample": False, **kwargs}
    if max_new_tokens is not None:
        kwargs["max_new_tokens"] = max_new_tokens
    if stop_token_ids is not None:
        kwargs["eos_token_id"] = stop_token_ids
    tokens = [token for step in stream(target, self, input_ids, **kwargs) for token in step.token_ids]
    sequences = torch.cat([input_ids, input_ids.new_tensor([tokens])], dim=1)
    return GenerateDecoderOnlyOutput(sequences=sequences) if return_dict else sequences


def _open_stream(
    model,
    input_ids: torch.Tensor,
    logits_processor,
    stopping_criteria,
    generation_config,
    drafter=None,
    rule: str | None = None,
    verify_width: int | None = None,
    step_streamer=None,
    **model_kwargs,
) -> Iterator[Step]:
    """The decoding method: checks what can be checked, then hands back the running stream."""
    drafter.check_dtype()
    view = TargetView(model, drafter.config)
    if input_ids.shape[0] != 1 or generation_config.num_return_sequences > 1:
        raise ValueError(
            f"The Domino loop decodes one sequence at a time, got a batch of {input_ids.shape[0]} with "
            f"num_return_sequences={generation_config.num_return_sequences}; call it once per prompt."
        )
    if generation_config.num_beams > 1:
        raise ValueError(f"Speculative decoding has no beams, got num_beams={generation_config.num_beams}; use 1.")
    keyword = cache_keyword(model)
    cache = cache_of(model_kwargs, keyword)
    if cache is None or not model_kwargs.get("use_cache", True):
        raise ValueError("Speculative decoding needs the target's cache; call with use_cache=True.")
    empty_filled_cache(cache, input_ids, model_kwargs, generation_config)
    loop = DecodeLoop(
        view,
        drafter,
        input_ids,
        cache,
        keyword,
        position_ids=model_kwargs["position_ids"],
        attention_mask=model_kwargs.get("attention_mask"),
        processors=logits_processor or None,
        criteria=stopping_criteria,
        generation_config=generation_config,
        rule=resolve_rule(rule, generation_config.do_sample),
        width=resolve_width(verify_width, drafter.config),
    )
    return loop.steps(step_streamer)


def resolve_rule(rule: str | None, do_sample: bool) -> str:
    """The accept rule of a run: the asked one if it suits, "greedy" or "speculative" by default."""
    if rule is None:
        return "speculative" if do_sample else "greedy"
    if rule not in RULES:
        raise ValueError(f"`rule` must be one of {', '.join(RULES)}, got {rule!r}.")
    if (rule == "greedy") == do_sample:
        raise ValueError(
            f"`rule={rule!r}` needs {'do_sample=False' if rule == 'greedy' else 'do_sample=True'}, got "
            f"do_sample={do_sample}."
        )
    return rule


def resolve_width(verify_width: int | None, config) -> int:
    """How many drafts a round verifies at most."""
    if verify_width is None:
        return config.num_draft_tokens
    if verify_width < 1:
        raise ValueError(f"The verify width must be at least 1, got {verify_width}.")
    return min(verify_width, config.num_draft_tokens)


class DecodeLoop:
    """State of one generation: committed ids, the two caches, and the context that the drafter has not read yet."""

    def __init__(
        self,
        view: TargetView,
        drafter,
        input_ids: torch.Tensor,
        cache: Any,
        keyword: str,
        *,
        position_ids: torch.Tensor,
        attention_mask: torch.Tensor | None,
        processors,
        criteria: StoppingCriteriaList,
        generation_config,
        rule: str,
        width: int,
    ):
        self.view, self.drafter = view, drafter
        self.cache, self.keyword = cache, keyword
        self.processors, self.rule, self.width = processors, rule, width
        self.do_sample = generation_config.do_sample
        self.max_length = generation_config.max_length
        eos = getattr(generation_config, "_eos_token_tensor", None)
        self.stop_ids = set() if eos is None else set(eos.flatten().tolist())
        self.criteria = StoppingCriteriaList(
            c for c in criteria if not isinstance(c, (MaxLengthCriteria, EosTokenCriteria))
        )
        self.draft_cache = DominoCache()
        self.taps = TargetTaps(view.layers, drafter.config.target_layer_ids)
        self.clock = StageClock(drafter.device, synchronize=drafter.record_details)

        # Ids, mask and positions live in buffers of the final size: nothing is concatenated as the text grows. Rows
        # that the caller's cache already holds come before the ids and are counted by `offset`.
        prompt = input_ids.shape[1]
        self.offset = cache.get_seq_length()
        size = max(self.max_length, prompt) + drafter.config.block_size + 1
        self.ids = input_ids.new_zeros(1, size)
        self.ids[:, :prompt] = input_ids
        self.length = prompt
        known = self.offset + prompt
        self.positions = position_ids.new_empty(*position_ids.shape[:-1], self.offset + size)
        self.positions[..., :known] = position_ids[..., -known:]
        self.positions[..., known:] = position_ids[..., -1:] + torch.arange(
            1, size - prompt + 1, device=input_ids.device
        )
        self.mask = None
        if attention_mask is not None and not bool(attention_mask.all()):
            self.mask = attention_mask.new_ones(1, self.offset + size)
            self.mask[:, :known] = attention_mask
        self.context = None
        self.run = Run(
            target=view.target.config._name_or_path or type(view.target).__name__,
            drafter=drafter.config._name_or_path or type(drafter).__name__,
            head=drafter.head_state,
            path="loop",
            block_size=drafter.config.block_size,
            prompt_tokens=prompt,
            temperature=float(generation_config.temperature or 1.0) if self.do_sample else 0.0,
            rule=rule,
        )

    @torch.no_grad()
    def steps(self, streamer=None) -> Iterator[Step]:
        """Runs the rounds; hooks are removed and the run is recorded even if the consumer stops early."""
        started = time.perf_counter()
        try:
            with self.taps:
                start_recording(self.cache)
                if streamer is not None:
                    streamer.put(self.ids[:, : self.length].cpu())
                finished = False
                while not finished:
                    step, finished = self._round() if self.run.steps else self._prefill()
                    self.run.steps.append(step)
                    self.run.seconds = time.perf_counter() - started
                    if streamer is not None:
                        streamer.put(torch.tensor(step.token_ids))
                    yield step
        finally:
            set_last_run(self.drafter, self.run)
            if streamer is not None:
                streamer.end()

    def _prefill(self) -> tuple[Step, bool]:
        """Reads the prompt and picks the first token, the first anchor."""
        outputs = self._forward(self.ids[:, : self.length], 0, num_logits=1)
        logits = self._process(outputs.logits[:, -1:], self.ids[:, : self.length])
        own = sample_rows(logits) if self.do_sample else logits.argmax(dim=-1)
        self.context = self.taps.read(outputs, device=self.drafter.device)
        self.clock.mark("verify")
        step = Step(draft_ids=[], accepted=0, own_id=own.item(), is_prefill=True)
        return self._commit(step)

    def _round(self) -> tuple[Step, bool]:
        """One round: draft, verify, accept, commit. The only wait for the device is the `tolist` below."""
        num_drafts = min(self.width, self.max_length - self.length - 1)
        chain = self._draft(num_drafts) if num_drafts > 0 else DraftChain(ids=self.ids[:, :0])
        start = self.length - 1
        self.ids[:, self.length : self.length + num_drafts] = chain.ids
        verify_ids = self.ids[:, start : self.length + num_drafts]
        outputs = self._forward(verify_ids, start, num_logits=num_drafts + 1)
        logits = self._process(outputs.logits[:, -num_drafts - 1 :], self.ids[:, : self.length + num_drafts])
        draft_ids = verify_ids[:, 1:]
        if self.rule == "speculative" and num_drafts > 0:
            accepted, own = accept_speculative(draft_ids, chain.logits.to(logits.device), logits)
        else:
            picks = sample_rows(logits) if self.do_sample else logits.argmax(dim=-1)
            accepted, own = accept_match(draft_ids, picks.to(draft_ids.device))
        accepted, own, *drafts = torch.cat([accepted, own, draft_ids[0]]).tolist()
        self.clock.mark("verify")
        step = Step(draft_ids=drafts, accepted=accepted, own_id=own, **chain.details())
        self._end_at_stop(step)
        drop_last(self.cache, num_drafts - step.accepted)
        self.context = self.taps.read(outputs, step.accepted + 1, device=self.drafter.device)
        return self._commit(step)

    def _draft(self, num_drafts: int) -> DraftChain:
        device = self.drafter.device
        anchor_row = self.offset + self.length - 1
        block_end = anchor_row + self.drafter.config.block_size
        positions = self.positions[:, anchor_row - self.context.shape[1] : block_end]
        if self.positions.dim() == 3:
            # A vision-language target has one row of positions per axis; for text they agree.
            positions = self.positions[0, :, anchor_row - self.context.shape[1] : block_end]
        return draft_chain(
            self.drafter,
            self.view,
            self.draft_cache,
            prefix_ids=self.ids[:, : self.length],
            context_hidden_states=self.context.to(self.drafter.dtype),
            position_ids=positions.to(device),
            num_drafts=num_drafts,
            clock=self.clock,
            attention_mask=None if self.mask is None else self.mask[:, self.offset : block_end].to(device),
            processors=self.processors,
            # Under "match" the likeliest draft is the best one at every temperature.
            do_sample=self.rule == "speculative",
            details=self.drafter.record_details,
        )

    def _forward(self, input_ids: torch.Tensor, start: int, *, num_logits: int):
        """The target over `input_ids`, which sit at `start`.. of the id buffer."""
        first = self.offset + start
        end = first + input_ids.shape[1]
        kwargs = {self.keyword: self.cache, **self.taps.forward_kwargs}
        if self.view.target._supports_logits_to_keep():
            kwargs["logits_to_keep"] = num_logits
        return self.view.target(
            input_ids=input_ids,
            attention_mask=None if self.mask is None else self.mask[:, :end],
            position_ids=self.positions[..., first:end],
            use_cache=True,
            **kwargs,
        )

    def _process(self, logits: torch.Tensor, ids: torch.Tensor) -> torch.Tensor:
        """The target's law: processors see, for each row, just the tokens before it."""
        if not self.processors and not self.do_sample:
            return logits
        logits = logits.float()
        if not self.processors:
            return logits
        first = ids.shape[1] - logits.shape[1] + 1
        rows = [self.processors(ids[:, : first + i], logits[:, i]) for i in range(logits.shape[1])]
        return torch.stack(rows, dim=1)

    def _end_at_stop(self, step: Step) -> None:
        """Ends the text at the first token that stops it: that token becomes the own token of a shorter round.

        The drafts behind it count as never made, as on the stock path, which cuts them before the verification.
        """
        for i, token in enumerate(step.draft_ids):
            if token in self.stop_ids or (len(self.criteria) > 0 and self._criteria_stop(self.length + i + 1)):
                if i < step.accepted:
                    step.accepted, step.own_id = i, token
                step.keep_drafts(i)
                return

    def _criteria_stop(self, length: int) -> bool:
        return bool(self.criteria(self.ids[:, :length], None).all())

    def _commit(self, step: Step) -> tuple[Step, bool]:
        """Takes the step's tokens into the text and says whether it ends here."""
        end = self.length + step.accepted + 1
        self.ids[:, end - 1] = step.own_id
        self.length = end
        finished = (
            step.own_id in self.stop_ids
            or self.length >= self.max_length
            or (len(self.criteria) > 0 and self._criteria_stop(self.length))
        )
        self.clock.mark("commit")
        step.stage_seconds = self.clock.take()
        return step, finished
