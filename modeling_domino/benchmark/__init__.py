"""Benchmarks: prompts, the run that writes raw records, and the report that anyone can rebuild from them.

Nothing is imported here: records and report need neither torch nor transformers.
"""
