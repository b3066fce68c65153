"""`python -m modeling_domino.cli`, as `accelerate launch -m` needs it."""

from modeling_domino.cli import app


app()
