"""Decoding with this repository's drafter: `target.generate(**inputs, custom_generate="ORG/NAME", trust_remote_code=True)`.

transformers hands over whatever its own `generate` was given. All this file does is find the drafter; the decoding, with
every option, is that of `target.generate(..., assistant_model=drafter)`.
"""

import functools

from transformers import AutoModel

from .stamp import DRAFTER_ID, DRAFTER_REVISION


# Meant for the Hub, and passed on by transformers among the arguments of the call.
HUB_ARGUMENTS = ("revision", "token", "cache_dir", "local_files_only", "force_download", "proxies")


@functools.lru_cache(maxsize=1)
def load_drafter(device, revision, **hub):
    """The drafter of this repository; the last one stays loaded for the next call."""
    drafter = AutoModel.from_pretrained(DRAFTER_ID, revision=revision, trust_remote_code=True, **hub)
    return drafter.to(device).eval()


def generate(inputs=None, generation_config=None, *, model, assistant_model=None, **kwargs):
    """Generates with `model` (the target) and `assistant_model`, by default the drafter of this repository.

    Args:
        inputs, generation_config, kwargs: those of `model.generate`; `revision` also pins the drafter.
        model (`PreTrainedModel`): the target.
        assistant_model (`PreTrainedModel`, *optional*): a drafter that is loaded already.

    Returns:
        What `model.generate` returns.

    Raises:
        TypeError: if `model` is a drafter, with the call that works.
        ValueError: if this folder is not stamped with a drafter's id and none is passed.
    """
    hub = {name: kwargs.pop(name) for name in HUB_ARGUMENTS if name in kwargs}
    if hasattr(model, "_domino_assisted_decoding"):
        # The drafter itself was asked to write; its class says how to use it (the instance may call back here).
        return type(model).generate(model)
    if assistant_model is None:
        if DRAFTER_ID is None:
            raise ValueError(
                "This copy of custom_generate does not know its drafter: pass `assistant_model=drafter`, or stage the "
                "folder with `domino stage FOLDER --repo-id ORG/NAME --tag TAG`."
            )
        assistant_model = load_drafter(model.device, hub.pop("revision", DRAFTER_REVISION), **hub)
    return model.generate(inputs, generation_config, assistant_model=assistant_model, **kwargs)
