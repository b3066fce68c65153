"""Which drafter `generate.py` loads; filled in by `domino stage`."""

DRAFTER_ID = None
DRAFTER_REVISION = None
FILES_SHA256 = None
