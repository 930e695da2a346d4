"""Text from tokens as they come: whole characters only, and nothing of a stop string."""

from __future__ import annotations

from collections.abc import Sequence

from k3train.data.tokenizer import StreamDecoder, Tokenizer


class TextStream:
    """The text of one sample.

    A character whose bytes are spread over several tokens appears when it is whole, and text that may yet turn out to
    begin a stop string is held back until it is clear. The text ends before the first stop string.
    """

    def __init__(self, tokenizer: Tokenizer, stop: Sequence[str] = ()) -> None:
        self._decoder = StreamDecoder(tokenizer)
        self._stop = tuple(stop)
        self._held = ""
        self.stopped = False

    def push(self, token: int) -> str:
        """The text that is certain with `token`; sets `stopped` where it completes a stop string."""
        return "" if self.stopped else self._release(self._decoder.push(token))

    def finish(self) -> str:
        """What is left, with broken UTF-8 as U+FFFD."""
        if self.stopped:
            return ""
        text = self._release(self._decoder.finish())
        return text if self.stopped else text + self._held

    def _release(self, new: str) -> str:
        self._held += new
        found = [at for at in (self._held.find(s) for s in self._stop) if at >= 0]
        if found:
            self.stopped = True
            return self._held[: min(found)]
        keep = max((_overlap(self._held, s) for s in self._stop), default=0)
        text, self._held = self._held[: len(self._held) - keep], self._held[len(self._held) - keep :]
        return text


def _overlap(text: str, word: str) -> int:
    """The length of the longest end of `text` that begins `word` and is shorter than it."""
    return next((n for n in range(min(len(text), len(word) - 1), 0, -1) if text.endswith(word[:n])), 0)
