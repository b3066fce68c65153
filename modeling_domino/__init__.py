"""Domino: speculative decoding with a drafter that lives on the Hugging Face Hub.

Importing the package registers the model type `domino` with transformers' Auto classes; it changes nothing else. Without
torch the package holds no models, and the report of a benchmark can be rebuilt all the same.
"""

import importlib.util


__all__ = []

if importlib.util.find_spec("torch") is not None:
    from transformers import AutoConfig, AutoModel, AutoModelForCausalLM

    from .configuration_domino import DominoConfig
    from .modeling_domino import DominoDraftModel, DominoForCausalLM
    from .plug_domino import install_plug, remove_plug

    AutoConfig.register("domino", DominoConfig, exist_ok=True)
    AutoModel.register(DominoConfig, DominoDraftModel, exist_ok=True)
    AutoModelForCausalLM.register(DominoConfig, DominoForCausalLM, exist_ok=True)

    __all__ = ["DominoConfig", "DominoDraftModel", "DominoForCausalLM", "install_plug", "remove_plug"]
