"""The plug into transformers' assisted decoding: `target.generate(**inputs, assistant_model=drafter)`.

transformers has no hook for a drafter that reads the target's hidden states and corrects logits causally. The plug
wraps two private methods of `GenerationMixin` and does nothing unless the assistant is a Domino drafter; all its logic
lives in the drafter's own module, so drafters of several revisions share one thin wrapper. It also covers faults of
the core that hit every assistant: stopping criteria inside a block, a cache that the caller has already filled, and
hooks left behind.

Importing this module changes nothing; creating a drafter installs the plug, `remove_plug` takes it out.
"""

from __future__ import annotations

import contextvars
import functools
import time
import types

import torch
from transformers import (
    EosTokenCriteria,
    GenerationMixin,
    LogitsProcessor,
    LogitsProcessorList,
    MaxLengthCriteria,
    MaxTimeCriteria,
    StoppingCriteriaList,
)
from transformers.generation.candidate_generator import CandidateGenerator

from .cache_domino import DominoCache, cache_keyword, cache_of, check_cache, check_continued_cache, empty_filled_cache
from .drafting_domino import DraftChain, draft_chain, resolve_options
from .generation_domino import check_processors, resolve_rule, resolve_width
from .grouped_domino import grouped_heads
from .packed_domino import packed_pair
from .record_domino import Run, StageClock, Step, details_of, name_of, set_last_runs
from .taps_domino import TargetTaps
from .target_domino import TargetView


PATCHED = ("_get_candidate_generator", "_assisted_decoding")
VALIDATION = "_validate_generation_mode"
MARK = "_domino_original"
# transformers fills `num_assistant_tokens` with this when the caller says nothing.
UNSET_ASSISTANT_TOKENS = 20
FOREIGN_MARKS = ("DFlash", "Domino")
# Stop tokens are kept out of sampled drafts; length and time say nothing about what was drafted.
CONTENT_FREE = (EosTokenCriteria, MaxLengthCriteria, MaxTimeCriteria)

# The generation that is running in this thread or task: handed from `_assisted_decoding` to `_get_candidate_generator`.
_SESSION: contextvars.ContextVar[DominoCandidateGenerator | None] = contextvars.ContextVar("domino", default=None)


def install_plug() -> None:
    """Wraps the two methods of `GenerationMixin`, once per process.

    Raises:
        RuntimeError: if this transformers release has no such methods.
    """
    for name in PATCHED:
        original = getattr(GenerationMixin, name, None)
        if original is None:
            raise RuntimeError(
                f"transformers has no GenerationMixin.{name} any more, so `assistant_model=` cannot be served; use "
                "`drafter.spec_generate(target, input_ids)` and install a release within transformers>=5.8.1,<6."
            )
        if not hasattr(original, MARK):
            setattr(GenerationMixin, name, _wrap(original))
    # Only an error message depends on this one.
    original = getattr(GenerationMixin, VALIDATION, None)
    if original is not None and not hasattr(original, MARK):
        setattr(GenerationMixin, VALIDATION, _wrap_validation(original))


def remove_plug() -> None:
    """Restores the methods of `GenerationMixin`."""
    for name in (*PATCHED, VALIDATION):
        original = getattr(getattr(GenerationMixin, name, None), MARK, None)
        if original is not None:
            setattr(GenerationMixin, name, original)


def _wrap(original):
    # `generate` reads the signature of the decoding method, hence `functools.wraps`.
    @functools.wraps(original)
    def wrapper(self, *args, assistant_model=None, **kwargs):
        # By protocol, not by class: a drafter loaded by remote code has its own copy of every class.
        serve = getattr(assistant_model, f"_domino{original.__name__}", None)
        if serve is not None:
            return serve(original, self, *args, **kwargs)
        _refuse_foreign(assistant_model)
        return original(self, *args, assistant_model=assistant_model, **kwargs)

    setattr(wrapper, MARK, original)
    return wrapper


def _wrap_validation(original):
    # Of a drafter with another vocabulary the core says that it needs a tokenizer, which helps nobody.
    @functools.wraps(original)
    def wrapper(self, *args, **kwargs):
        for options in (*args, *kwargs.values()):
            assistant = options.get("assistant_model") if isinstance(options, dict) else None
            check = getattr(assistant, "_domino_check_vocabulary", None)
            if check is not None:
                check(self)
        return original(self, *args, **kwargs)

    setattr(wrapper, MARK, original)
    return wrapper


def _refuse_foreign(assistant) -> None:
    """Refuses a DFlash or Domino drafter that was loaded as something else: it would draft nonsense, slowly."""
    config = getattr(assistant, "config", None)
    names = [type(assistant).__name__, *(getattr(config, "architectures", None) or [])]
    foreign = any(mark in name for name in names for mark in FOREIGN_MARKS)
    if config is not None and (foreign or getattr(config, "dflash_config", None) is not None):
        source = getattr(config, "_name_or_path", "") or "<id>"
        raise ValueError(
            f"The assistant is a Domino or DFlash drafter loaded as {type(assistant).__name__}, which cannot draft; load "
            f'it with `DominoDraftModel.from_pretrained("{source}")`, or convert it once with `domino convert` and load '
            "that folder with `AutoModel.from_pretrained(folder, trust_remote_code=True)`."
        )


def run_assisted(
    drafter, original, target, input_ids, logits_processor, stopping_criteria, generation_config, **kwargs
):
    """Serves `_assisted_decoding` for a Domino drafter: prepares a generator, runs the core's loop, cleans up."""
    cache = cache_of(kwargs, cache_keyword(target))
    if input_ids.shape[0] != 1:
        raise ValueError(
            f"transformers' assisted decoding takes one sequence at a time, got a batch of {input_ids.shape[0]}; use "
            "`drafter.spec_generate(target, input_ids)`, which decodes batches."
        )
    check_cache(cache)
    check_processors(logits_processor)
    empty_filled_cache(cache, input_ids, kwargs, generation_config)
    check_continued_cache(cache, kwargs.get("attention_mask"))
    session = DominoCandidateGenerator(
        drafter, target, input_ids, logits_processor, stopping_criteria, generation_config
    )
    # A run that fails shall not leave the statistics of the one before.
    set_last_runs(drafter, [])
    token = _SESSION.set(session)
    try:
        with packed_pair(target, drafter, prepack=drafter.prepack) as packed, grouped_heads(target):
            result = original(
                target,
                input_ids,
                logits_processor=logits_processor,
                stopping_criteria=_NotOnPrompt(stopping_criteria, input_ids.shape[1]),
                generation_config=generation_config,
                assistant_model=drafter,
                **kwargs,
            )
        session.packed_bytes = packed.num_bytes
        session.finish(result if isinstance(result, torch.Tensor) else result.sequences)
        return result
    finally:
        session.close()
        _SESSION.reset(token)


def candidate_generator() -> DominoCandidateGenerator:
    """Serves `_get_candidate_generator`: the generator of the generation that runs in this thread or task."""
    session = _SESSION.get()
    if session is None:
        raise RuntimeError(
            "A Domino drafter drafts within `target.generate(..., assistant_model=drafter)`; call that, or "
            "`drafter.spec_generate(target, input_ids)`."
        )
    return session


class _NotOnPrompt(StoppingCriteriaList):
    """Stopping criteria that stay silent on the bare prompt.

    Before 5.18 the core asks them about prompt and drafts together, and a prompt that ends in a stop token with an
    empty first draft returned nothing.
    """

    def __init__(self, criteria, prompt_length: int):
        super().__init__(criteria)
        self.prompt_length = prompt_length

    def __call__(self, input_ids, scores, **kwargs):
        if input_ids.shape[1] <= self.prompt_length:
            return torch.zeros(input_ids.shape[0], dtype=torch.bool, device=input_ids.device)
        return super().__call__(input_ids, scores, **kwargs)


class _WithoutStops(LogitsProcessor):
    """The drafts' law without the tokens that stop the text.

    A stop token must come as the target's own, since the core writes on behind a draft. But a sampled draft that is
    taken back for what it is makes every other token likelier; one that cannot be drawn does no harm.
    """

    def __init__(self, processors: LogitsProcessorList, stop_ids: torch.Tensor):
        self.processors, self.stop_ids = processors, stop_ids

    def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        scores = self.processors(input_ids, scores.index_fill(1, self.stop_ids.to(scores.device), -torch.inf))
        # Where nothing but a stop token is allowed, any draft will do: the target refuses it.
        return scores.where(scores.amax(dim=1, keepdim=True) > -torch.inf, 0.0)


class DominoCandidateGenerator(CandidateGenerator):
    """Drafts for transformers' assisted decoding, from the outputs of the target's last forward.

    The first call passes the prompt through undrafted (there are no taps yet); each later call reads the taps of the
    tokens that were committed since, counted by the growth of `input_ids`.
    """

    requires_model_outputs = True

    def __init__(self, drafter, target, input_ids, logits_processor, stopping_criteria, generation_config):
        drafter.check_dtype()
        self.view = TargetView(target, drafter.config)
        self.drafter = drafter
        self.options = resolve_options(drafter, processors=logits_processor)
        self.processors = logits_processor or None
        self.criteria = stopping_criteria
        self.do_sample = generation_config.do_sample
        self.temperature = float(generation_config.temperature or 1.0) if self.do_sample else 0.0
        # Drafts that a stop string or a criterion of the user's own ends are taken back for what they are, which only
        # "match" allows; the other criteria do not look at the drafts.
        by_content = any(not isinstance(criterion, CONTENT_FREE) for criterion in stopping_criteria)
        self.rule = resolve_rule(None, self.do_sample, sampled="match" if by_content else "speculative")
        stop_ids = getattr(generation_config, "_eos_token_tensor", None)
        if self.rule == "speculative" and stop_ids is not None:
            self.processors = LogitsProcessorList([_WithoutStops(logits_processor, stop_ids.flatten())])
        self.max_length = generation_config.max_length
        asked = generation_config.num_assistant_tokens
        self.width = resolve_width(None if asked == UNSET_ASSISTANT_TOKENS else asked, drafter.config)
        self.cache = DominoCache(drafter.context_window)
        self.clock = StageClock(drafter.device, synchronize=drafter.record_details)
        self.chains: list[DraftChain] = []
        self.lengths: list[int] = []
        self.stage_seconds: list[dict[str, float]] = []
        self.packed_bytes = 0
        self.padded: bool | None = None
        self.prompt_length = input_ids.shape[1]
        self.started = time.perf_counter()
        wants_hidden = bool(generation_config.return_dict_in_generate and generation_config.output_hidden_states)
        self.taps = TargetTaps(
            self.view.layers, drafter.config.target_layer_ids, all_hidden_states=wants_hidden
        ).__enter__()
        self.model_kwargs_overrides = self.taps.forward_kwargs

    def get_candidates(
        self, input_ids, model_kwargs=None, model_outputs=None, is_first_iteration=False, n_last_matches=None, **kwargs
    ):
        """Committed ids followed by the drafts `[1, S + 1 + n]`, and the logits the drafts were sampled from."""
        if is_first_iteration:
            self.taps.listen()
            return input_ids, None
        self.clock.mark("verify")
        self.stage_seconds.append(self.clock.take())
        previous = self.lengths[-1] if self.lengths else None
        self.lengths.append(input_ids.shape[1])
        # All rows of the prompt, then the rows of the tokens that the last round added.
        num_rows = None if previous is None else input_ids.shape[1] - previous
        context = self.taps.read(model_outputs, num_rows, device=self.drafter.device).to(self.drafter.dtype)
        self.taps.listen()
        num_drafts = min(self.width, self.max_length - input_ids.shape[1] - 1)
        if num_drafts <= 0:
            self.chains.append(DraftChain(ids=input_ids[:, :0]))
            return input_ids, None
        positions, mask = self._positions_and_mask(model_kwargs, context.shape[1])
        chain = draft_chain(
            drafter=self.drafter,
            view=self.view,
            cache=self.cache,
            prefix_ids=input_ids,
            context_hidden_states=context,
            position_ids=positions,
            attention_mask=mask,
            num_drafts=num_drafts,
            clock=self.clock,
            processors=self.processors,
            do_sample=self.rule == "speculative",
            details=self.drafter.record_details,
            options=self.options,
        )
        candidates = torch.cat([input_ids, chain.ids.to(input_ids.device)], dim=1)
        keep = self._drafts_before_stop(candidates, input_ids.shape[1])
        chain.ids = chain.ids[:, :keep]
        self.chains.append(chain)
        logits = chain.logits[:, :keep] if chain.logits is not None and keep > 0 else None
        return candidates[:, : input_ids.shape[1] + keep], logits

    def _positions_and_mask(self, model_kwargs, num_context: int) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Positions of the new context and of the block `[1, S' + K]`, and the mask over all context and the block."""
        device, config = self.drafter.device, self.drafter.config
        positions = model_kwargs["position_ids"]
        if positions.dim() == 3:
            # A vision-language target has one row of positions per axis; for text they agree.
            positions = positions[0]
        positions = positions[:, -num_context - 1 :].to(device)
        block = positions[:, -1:] + torch.arange(1, config.block_size, device=device)
        mask = model_kwargs.get("attention_mask")
        if self.padded is None:
            # Only a prompt is padded; most masks hide nothing, and attention without one is cheaper.
            self.padded = mask is not None and not bool(mask.all())
        if self.padded:
            # Without the anchor's own entry, which is the first of the block's.
            rows = self.cache.get_seq_length() + num_context
            mask = torch.cat([mask[:, -rows - 1 : -1], mask.new_ones(1, config.block_size)], dim=1).to(device)
        return torch.cat([positions, block], dim=1), mask if self.padded else None

    def _drafts_before_stop(self, candidates: torch.Tensor, length: int) -> int:
        """How many drafts come before the first that would end the text: that one shall be the target's own token.

        The core asks the criteria once per round, about the whole block, and so writes on behind a stop string.
        """
        for end in range(length + 1, candidates.shape[1] + 1):
            if bool(self.criteria(candidates[:, :end], None).all()):
                return end - 1 - length
        return candidates.shape[1] - length

    def update_candidate_strategy(self, input_ids, scores, num_matches) -> None:
        """Nothing to adapt: the width of a block is fixed. Early releases call this and have no default."""

    def finish(self, sequences: torch.Tensor) -> None:
        """Turns the recorded rounds into the run, once the whole text is known."""
        self.clock.mark("verify")
        self.stage_seconds.append(self.clock.take())
        ids = sequences[0].tolist()
        run = Run(
            target=name_of(self.view.target),
            drafter=name_of(self.drafter),
            head=self.drafter.head_state,
            path="stock",
            block_size=self.drafter.config.block_size,
            prompt_tokens=self.prompt_length,
            temperature=self.temperature,
            rule=self.rule,
            packed_bytes=self.packed_bytes,
            seconds=time.perf_counter() - self.started,
        )
        chains = [DraftChain(ids=sequences[:, :0]), *self.chains]
        starts = [self.prompt_length, *self.lengths]
        ends = [*self.lengths, len(ids)]
        for i, (chain, start, end) in enumerate(zip(chains, starts, ends)):
            if end == start:
                # Time ran out before an undrafted round; releases before 5.18 then add nothing.
                continue
            step = Step(
                draft_ids=chain.ids[0].tolist(),
                accepted=end - start - 1,
                own_id=ids[end - 1],
                stage_seconds=self.stage_seconds[i],
                is_prefill=i == 0,
                **details_of(chain),
            )
            step.keep_drafts(len(step.draft_ids))
            run.steps.append(step)
        set_last_runs(self.drafter, [run])

    def close(self) -> None:
        """Removes the hooks from the target."""
        self.taps.close()


class Attachment:
    """A target that drafts with one drafter by itself: `target.generate(...)` needs no `assistant_model=`.

    Undone by `detach()`, or at the end of a `with` block.
    """

    def __init__(self, drafter, target):
        drafter.check_dtype()
        TargetView(target, drafter.config)
        # A compiled target hands on to the module inside, which is the one to mark.
        target = target.generate.__self__
        if "generate" in vars(target):
            raise ValueError("A drafter is already attached to this target; call `detach()` on it first.")
        self._target = target
        generate = target.generate.__func__

        @functools.wraps(generate)
        def generate_with_drafter(self, *args, **kwargs):
            # Another decoding method, or another assistant, was asked for by name.
            if kwargs.get("custom_generate") is None:
                kwargs.setdefault("assistant_model", drafter)
            return generate(self, *args, **kwargs)

        # Bound, so that a copy of the target generates with its own weights.
        target.generate = types.MethodType(generate_with_drafter, target)

    def detach(self) -> None:
        """Gives the target its own `generate` back; may be called twice."""
        vars(self._target).pop("generate", None)

    def __enter__(self) -> Attachment:
        return self

    def __exit__(self, *exception) -> None:
        self.detach()
