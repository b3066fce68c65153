"""What the Hub refused, in one sentence: how far things came, the reason, and what to do."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from huggingface_hub.errors import HfHubHTTPError, LocalTokenNotFoundError, OfflineModeIsEnabled


NOTHING_SENT = "Nothing was sent"
STALE = "changed while this ran; look at what changed, then run the command again"


@contextmanager
def hub_errors(subject: str, so_far: str = NOTHING_SENT) -> Iterator[None]:
    """Turns errors of the Hub into a `ValueError`.

    Args:
        subject: the repository, or what else is asked for.
        so_far: what holds if this fails.
    """
    # The class that huggingface_hub's own errors have, whatever HTTP library it uses.
    http_error = HfHubHTTPError.__mro__[1]
    try:
        yield
    except LocalTokenNotFoundError:
        reason = "publishing needs a token; log in with `hf auth login`, or set HF_TOKEN"
    except OfflineModeIsEnabled:
        reason = f"{subject} cannot be reached, HF_HUB_OFFLINE is set; unset it"
    except HfHubHTTPError as error:
        status = error.response.status_code
        or_propose = ", or --pr" if so_far == NOTHING_SENT else ""
        reasons = {
            401: f"the Hub does not accept this token for {subject}; log in with `hf auth login`, or set HF_TOKEN",
            403: f"this token may not write to {subject}; use one with write access to it{or_propose}",
            404: f"the Hub does not show {subject} to this token",
            409: f"{subject} {STALE}",
            412: f"{subject} {STALE}",
        }
        reason = reasons.get(status, f"the Hub answered with {status} for {subject}; run the command again later")
    except RuntimeError as error:
        # How huggingface_hub tells that a large file did not arrive.
        cause = type(error.__cause__ or error).__name__
        reason = f"{subject} did not take a large file ({cause}); run the command again"
    except http_error as error:
        reason = f"{subject} cannot be reached ({type(error).__name__}); check the network, then run the command again"
    else:
        return
    raise ValueError(f"{so_far}: {reason}.")
