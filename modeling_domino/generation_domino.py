"""Generation with a drafter outside transformers' own assisted decoding: a stream of `Step`s, and `spec_generate`.

The decode loop is entered as a decoding method in the sense of `generate(custom_generate=...)`: transformers prepares
ids, masks, cache, logits processors and stopping criteria, so every generation option applies.
"""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Iterator
from typing import Any

import torch
from transformers import StoppingCriteriaList, StopStringCriteria
from transformers.generation import GenerateDecoderOnlyOutput

from .cache_domino import (
    cache_keyword,
    cache_of,
    check_cache,
    empty_filled_cache,
    take_context,
    without_sliding_layers,
)
from .costs_domino import costs_of
from .drafting_domino import resolve_options
from .loop_domino import DecodeLoop
from .record_domino import Step
from .sizing_domino import AutoOff, Costs
from .static_domino import StaticLoop, check_static
from .target_domino import TargetView, check_movable_rows
from .tree_domino import TreeShape


AUTO = "auto"
# Most nodes of a tree that is sized by its costs.
AUTO_NODES = 64
RULES = ("greedy", "match", "speculative", "block")
READ_INPUTS = ("attention_mask", "position_ids", "cache_position")
STATEFUL_PROCESSORS = {
    "UnbatchedClassifierFreeGuidanceLogitsProcessor": "guidance_scale",
    "SynthIDTextWatermarkLogitsProcessor": "watermarking_config",
}
OTHER_METHODS = ("prompt_lookup_num_tokens", "penalty_alpha", "dola_layers", "assistant_early_exit")
EXTRA_OUTPUTS = ("output_scores", "output_logits", "output_attentions", "output_hidden_states")


def stream(
    target,
    drafter,
    input_ids: torch.Tensor | None = None,
    *,
    rule: str | None = None,
    verify_width: int | str | None = None,
    tree: TreeShape | int | str | None = None,
    candidates: int | None = None,
    draft_vocab: int | None = None,
    costs: Costs | None = None,
    auto_off: AutoOff | bool | None = None,
    static: bool = False,
    streamer=None,
    **generate_kwargs,
) -> Iterator[Step]:
    """Generates one sequence with `target` and `drafter`, one [`Step`] at a time.

    Args:
        target (`PreTrainedModel`): the model whose text is written.
        drafter (`DominoDraftModel`): proposes the drafts.
        input_ids: the prompt, `[1, S]`.
        rule (`str`, *optional*): "greedy" at temperature 0. When sampling, "block" (the default for chains),
            "speculative" or "match" (the default for trees, and their only one).
        verify_width (`int` or "auto", *optional*): most drafts to verify per round; by default all of a block, and 0 turns
            drafting off: plain decoding by our loop. With "auto" each round verifies as many as pay by the pair's costs on
            this machine, which are measured on first use and kept (see `costs_domino.py`): from the drafts' own
            probabilities, or, where drafts are sampled, from what earlier rounds kept.
        tree (`TreeShape`, `int` or "auto", *optional*): draft a tree of that shape, or of so many nodes, instead of a
            chain; "auto" takes as many nodes in each round as pay.
        candidates (`int`, *optional*): tokens per draft that the head corrects, the likeliest of the base logits, and that
            the draft is chosen from; 0 for the whole vocabulary. By default the drafter's config decides, or else 64 on a
            CPU and all elsewhere. For trees those of each depth.
        draft_vocab (`int`, *optional*): draft from so many of the most frequent tokens, if the drafter has a ranking of
            them (`domino draft-vocab`); 0 for the whole vocabulary. Their rows of the output head are copied once.
        costs (`Costs`, *optional*): the costs that "auto" goes by, instead of measured ones.
        auto_off (`bool`): stop drafting where plain steps are measured to be faster, and try again now and then; the run
            says how many steps were plain (`drafter.last_run.plain_steps`). The text is the target's either way. Off by
            default, because what depends on the clock does not repeat: sampled texts would change from run to run.
        static (`bool`): run rounds of one fixed size on buffers that stay where they are, on a CUDA device as one graph; for
            greedy chains of one prompt. Room for `max_new_tokens` is taken at once and kept for the next text.
        streamer (`BaseStreamer`, *optional*): gets the prompt, then the tokens of each step.
        generate_kwargs: everything `target.generate` takes (`attention_mask`, `max_new_tokens`, `do_sample`,
            `stop_strings` with `tokenizer`, `logits_processor`, ...).

    Yields:
        The prefill step, then one step per round. `drafter.last_run` is complete once the iterator is exhausted or closed.

    Raises:
        ValueError: if the pair does not fit or an option cannot be honoured; raised before the first forward.
    """
    options = {"rule": rule, "verify_width": verify_width, "tree": tree}
    options.update(candidates=candidates, draft_vocab=draft_vocab, costs=costs, auto_off=auto_off, static=static)
    loop = open_loop(target, drafter, input_ids, **options, **generate_kwargs)
    if len(loop.texts.rows) > 1:
        raise ValueError(
            f"A stream writes one sequence, got {len(loop.texts.rows)}; `drafter.spec_generate(target, input_ids)` decodes batches."
        )
    return _only_sequence(loop, streamer)


def _only_sequence(loop: DecodeLoop, streamer) -> Iterator[Step]:
    with contextlib.closing(loop.steps(streamer)) as rounds:
        for steps in rounds:
            yield steps[0]


def spec_generate(
    self,
    target,
    input_ids: torch.Tensor,
    max_new_tokens: int | None = None,
    stop_token_ids: int | list[int] | None = None,
    temperature: float = 0.0,
    *,
    return_dict: bool = False,
    streamer=None,
    **kwargs,
):
    """Generates with this drafter in one call; the signature of the published DFlash and Domino models.

    Args:
        target (`PreTrainedModel`): the model whose text is written.
        input_ids: the prompts, `[B, S]`; those of a batch are padded on the left and need an `attention_mask`.
        max_new_tokens (`int`, *optional*): by default the target's generation config decides.
        stop_token_ids (`int` or `list[int]`, *optional*): by default the target's end-of-sequence ids.
        temperature (`float`): 0 for greedy decoding; above, plain sampling from the target's law at that temperature.
        return_dict (`bool`): return a `GenerateDecoderOnlyOutput` instead of the ids.
        streamer (`BaseStreamer`, *optional*): for one sequence.
        kwargs: those of [`stream`].

    Returns:
        Prompts and generated ids, `[B, S + new]`, shorter sequences filled up with the pad token; `self.last_run` holds
        the statistics of the (first) sequence, `self.last_runs` those of all.
    """
    if not isinstance(temperature, int | float) or not 0 <= temperature < float("inf"):
        raise ValueError(f"`temperature` must be a number, 0 (greedy) or positive, got {temperature!r}.")
    if temperature > 0:
        # `generate` would otherwise apply its default top-k of 50.
        kwargs = {"do_sample": True, "temperature": temperature, "top_k": 0, "top_p": 1.0, **kwargs}
    else:
        kwargs = {"do_sample": False, **kwargs}
    if max_new_tokens is not None:
        kwargs["max_new_tokens"] = max_new_tokens
    if stop_token_ids == []:
        raise ValueError("`stop_token_ids` must hold an id, got []; leave it out for the target's own stop tokens.")
    if stop_token_ids is not None:
        kwargs["eos_token_id"] = stop_token_ids
    loop = open_loop(target, self, input_ids, **kwargs)
    if streamer is not None and len(loop.texts.rows) > 1:
        raise ValueError(f"A streamer takes one sequence, got {len(loop.texts.rows)}; leave it out for a batch.")
    for _ in loop.steps(streamer):
        pass
    sequences = loop.texts.sequences()
    return GenerateDecoderOnlyOutput(sequences=sequences) if return_dict else sequences


def open_loop(target, drafter, input_ids: torch.Tensor | None = None, **kwargs) -> DecodeLoop:
    """A decode loop that is ready to run; the arguments are those of [`stream`], and `input_ids` may be a batch.

    The loop is opened from within `target.generate`, as its decoding method, so that transformers prepares everything.
    """
    if not hasattr(target, "generate"):
        raise ValueError(
            f"A drafter drafts for a target, got {type(target).__name__} for it; load one with AutoModelForCausalLM and "
            "pass it first."
        )
    if input_ids is not None and not torch.is_tensor(input_ids):
        raise ValueError(f"`input_ids` must be a tensor of token ids `[B, S]`, got {type(input_ids).__name__}.")
    if input_ids is not None and (input_ids.dim() != 2 or input_ids.shape[1] == 0 or input_ids.is_floating_point()):
        raise ValueError(
            f"`input_ids` must hold at least one token id for each sequence, `[B, S]`, got shape {tuple(input_ids.shape)} of "
            f"{input_ids.dtype}."
        )
    if kwargs.get("assistant_model") is not None:
        raise ValueError("Our loop has its drafter already, got `assistant_model` too; use one of the two ways.")
    criteria = StoppingCriteriaList(kwargs.pop("stopping_criteria", None) or [])
    # The core drops `tokenizer` for custom decoding methods, so stop strings are served here.
    tokenizer = kwargs.pop("tokenizer", None)
    if stop_strings := kwargs.pop("stop_strings", None):
        if tokenizer is None:
            raise ValueError("`stop_strings` needs the target's tokenizer: pass `tokenizer=`.")
        criteria.append(StopStringCriteria(tokenizer, stop_strings))
    if kwargs.get("static") and any(kwargs.get(name) is not None for name in ("cache", "past_key_values")):
        raise ValueError("`static=True` decodes on caches of its own, got one; leave the cache or `static` out.")
    # Under the name that this target's release knows.
    for name in ("cache", "past_key_values"):
        if kwargs.get(name) is not None:
            kwargs[cache_keyword(target)] = kwargs.pop(name)
    return target.generate(
        input_ids, custom_generate=_decoding_method, stopping_criteria=criteria, drafter=drafter, **kwargs
    )


def _decoding_method(
    model,
    input_ids: torch.Tensor,
    logits_processor,
    stopping_criteria,
    generation_config,
    drafter=None,
    rule: str | None = None,
    verify_width: int | str | None = None,
    tree: TreeShape | int | str | None = None,
    candidates: int | None = None,
    draft_vocab: int | None = None,
    costs: Costs | None = None,
    auto_off: AutoOff | bool | None = None,
    static: bool = False,
    **model_kwargs,
) -> DecodeLoop:
    """Checks what can be checked, and hands back the loop instead of running it."""
    drafter.check_dtype()
    view = TargetView(model, drafter.config)
    if generation_config.num_beams > 1:
        raise ValueError(f"Speculative decoding has no beams, got num_beams={generation_config.num_beams}; use 1.")
    keyword = cache_keyword(model)
    cache = cache_of(model_kwargs, keyword)
    check_cache(cache if model_kwargs.get("use_cache", True) else None)
    check_processors(logits_processor)
    _check_inputs(model_kwargs, generation_config)
    _check_deciders(tree, costs, auto_off)
    sized = AUTO in (verify_width, tree)
    if tree == AUTO:
        tree = TreeShape(nodes=AUTO_NODES)
    # Not by class: a shape may come from another copy of this code.
    tree = tree if tree is None or hasattr(tree, "nodes") else TreeShape(nodes=tree)
    options = resolve_options(drafter, candidates=candidates, draft_vocab=draft_vocab, processors=logits_processor)
    if tree is not None:
        if candidates is not None:
            tree = dataclasses.replace(tree, candidates=candidates or drafter.config.vocab_size)
        check_movable_rows(model, cache, what="Draft trees")
    rule = resolve_rule(
        rule, generation_config.do_sample, sampled="block" if tree is None else "match", tree=tree is not None
    )
    width = resolve_width(None if verify_width == AUTO else verify_width, drafter.config, least=0)
    if static not in (True, False):
        raise ValueError(f"`static` must be True or False, got {static!r}.")
    if static:
        if sized or tree is not None or costs is not None or auto_off:
            raise ValueError(
                "`static=True` verifies chains of one length, got a tree or a size that changes; leave `tree`, `costs`, "
                '`auto_off` and "auto", or `static`, out.'
            )
        check_static(model, drafter, input_ids, cache, logits_processor, generation_config, model_kwargs)
    # What is refused is refused before the caller's cache is touched.
    store = take_context(cache, model, drafter, input_ids, model_kwargs)
    if store is None:
        empty_filled_cache(cache, input_ids, model_kwargs, generation_config)
    cache = without_sliding_layers(cache)
    if input_ids.shape[0] > 1:
        check_movable_rows(model, cache, what="Batches")
        if tree is not None or cache.get_seq_length() > 0:
            raise ValueError(
                f"Trees and filled caches are for one sequence at a time, got a batch of {input_ids.shape[0]}; leave "
                "`tree` and the cache out."
            )
    if not sized:
        costs = None
    elif costs is None:
        rows = tree.nodes + 1 if tree is not None else input_ids.shape[0] * (width + 1)
        costs = costs_of(view, drafter, options, rows=rows, tree=tree)
    return (StaticLoop if static else DecodeLoop)(
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
        rule=rule,
        width=width,
        options=options,
        tree=tree,
        costs=costs,
        # Not by class: tests and other copies of this code bring their own clock.
        auto_off=auto_off if hasattr(auto_off, "begin") else AutoOff() if auto_off else None,
        store=store,
    )


def _check_deciders(tree, costs, auto_off) -> None:
    """Refuses what is no size, no costs and no switch; not by class, since they may come from another copy of this code."""
    if isinstance(tree, type) or (isinstance(tree, str) and tree != AUTO):
        raise ValueError(f'`tree` must be a number of nodes, "auto" or a `TreeShape`, got {tree!r}.')
    if costs is not None and not hasattr(costs, "verify_seconds"):
        raise ValueError(
            f"`costs` must be `Costs` of `sizing_domino.py`, got {costs!r}; leave it out to have them measured."
        )
    if not isinstance(auto_off, bool | None) and (isinstance(auto_off, type) or not hasattr(auto_off, "begin")):
        raise ValueError(f"`auto_off` must be True, False or an `AutoOff`, got {auto_off!r}.")


def check_processors(logits_processor) -> None:
    """Refuses processors that remember their calls: they would take rejected drafts for text.

    Raises:
        ValueError: with the option that asked for one.
    """
    for processor in logits_processor or []:
        option = STATEFUL_PROCESSORS.get(type(processor).__name__)
        if option is not None:
            raise ValueError(
                f"Speculative decoding needs logits processors that depend on the text alone, but `{option}` remembers "
                "what it has seen, rejected drafts included; generate without a drafter."
            )


def _check_inputs(model_kwargs: dict[str, Any], generation_config) -> None:
    """Refuses what the loop would leave out: inputs beside token ids, and outputs beside token ids."""
    unread = [
        name
        for name, value in model_kwargs.items()
        if torch.is_tensor(value) and name not in READ_INPUTS and not name.endswith("token_type_ids")
    ]
    methods = [name for name in OTHER_METHODS if getattr(generation_config, name, None)]
    if methods:
        raise ValueError(
            f"A drafter decodes greedily or by plain sampling, got {', '.join(methods)}; leave those out, or generate "
            "without a drafter."
        )
    unwritten = [name for name in EXTRA_OUTPUTS if getattr(generation_config, name, None)]
    if unread or unwritten:
        raise ValueError(
            f"Our loop reads and returns token ids, got {', '.join(unread + unwritten)}; use "
            "`target.generate(..., assistant_model=drafter)`, which has all inputs and outputs."
        )


def resolve_rule(rule: str | None, do_sample: bool, *, sampled: str, tree: bool = False) -> str:
    """The accept rule of a run: the asked one if it suits; by default "greedy", or `sampled` when sampling."""
    if rule is None:
        return sampled if do_sample else "greedy"
    if rule not in RULES:
        raise ValueError(f"`rule` must be one of {', '.join(RULES)}, got {rule!r}.")
    if (rule == "greedy") == do_sample:
        raise ValueError(
            f"`rule={rule!r}` needs {'do_sample=False' if rule == 'greedy' else 'do_sample=True'}, got "
            f"do_sample={do_sample}."
        )
    if tree and rule in ("speculative", "block"):
        raise ValueError(
            f"Trees are verified by `rule='match'` (no lossless rule keeps more of a fixed tree), got {rule!r}."
        )
    return rule


def resolve_width(verify_width: int | None, config, *, least: int = 1) -> int:
    """How many drafts a round verifies at most."""
    if verify_width is None:
        return config.num_draft_tokens
    if type(verify_width) is not int or verify_width < least:
        raise ValueError(f'The verify width must be an integer of at least {least}, or "auto", got {verify_width!r}.')
    return min(verify_width, config.num_draft_tokens)
