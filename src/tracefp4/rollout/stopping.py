"""Stop texts: does a completion's text contain one, and with which token does the completion then end?

Tokens and text do not line up: a stop text may span several tokens or end inside one, and a token of a byte-level
vocabulary may hold a part of a character, which decodes to U+FFFD until the rest arrives. So text is only ever compared
with text, and a token belongs to the first prefix of the completion whose text contains it. Nothing here decodes
single tokens, and nothing is encoded again.
"""

from __future__ import annotations

from collections.abc import Callable
from collections.abc import Sequence as Tokens

from tracefp4.rollout.completion import SamplingParams
from tracefp4.rollout.sequence import Sequence

Decode = Callable[[list[int]], str]
"""Token ids to text, special tokens included or left out as the stop texts expect them; must not strip text."""

# Characters beyond the stop text that a window must show: a window that begins inside a character decodes it to at most
# three U+FFFD, and some decoders drop the space that the first token begins with.
MARGIN = 4


def stop_at_text(sequence: Sequence, *, decode: Decode) -> None:
    """End a sequence whose text now contains a stop text, unless a stop token has ended it."""
    if sequence.finish_reason == "stop" or sequence.request.forced is not None:
        return
    kept = stop_cut(sequence.turn_ids, sequence.request.params, decode=decode)
    if kept is not None:
        sequence.stop_after(kept)


def stop_cut(tokens: Tokens[int], params: SamplingParams, *, decode: Decode) -> int | None:
    """Return how many tokens a completion keeps if its text contains a stop text; None if it contains none.

    Called after every token, so the stop text ends in the newest one. Of several stop texts the one that begins first
    counts, of those the shortest.

    Args:
        tokens: ids of the completion (of its last turn), in order.
        params: `stop` and `keeps_stop`.
        decode: token ids to text.

    Returns:
        0 .. len(tokens). With keeps_stop: tokens up to the one that completes the stop text; else the fewest tokens
        whose text contains everything before it.
    """
    if not params.stop or not _may_end(tokens, params.stop, decode=decode):
        return None
    text = decode(list(tokens))
    found = [(text.find(stop), len(stop)) for stop in params.stop if stop in text]
    if not found:
        return None
    begin, length = min(found)
    needed = text[: begin + length] if params.keeps_stop else text[:begin]
    return next(count for count in range(len(tokens) + 1) if decode(list(tokens[:count])).startswith(needed))


def _may_end(tokens: Tokens[int], stops: Tokens[str], *, decode: Decode) -> bool:
    """Look at the end of the text only: the newest token, and enough before it to hold the longest stop text."""
    longest = max(map(len, stops))
    count = longest + MARGIN
    while count < len(tokens) and len(decode(list(tokens[-count:-1]))) < longest + MARGIN:
        count *= 2
    text = decode(list(tokens[-count:]))
    return any(stop in text for stop in stops)
