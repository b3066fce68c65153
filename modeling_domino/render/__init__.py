"""The one renderer of traces: what each token of a round is (marks), and how a terminal and a page show it.

Nothing here knows of models: all of it takes traces and a function from token ids to text. But for the terminal it needs
Python alone and travels to the Space as the folder `render`, so that the Space, the static page and the tests draw alike.
"""
