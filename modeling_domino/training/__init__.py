"""Training of Domino drafters: data, objective, trainer, regeneration of answers, ablations.

Nothing is imported here, so that `modeling_domino` works without accelerate and datasets.
"""
