"""A store on another host, read through its server: Reader and Retention over `store.connection`.

Answers above the message size travel in several messages, cut between rows. Reads and removals may be asked again
of a server that was started anew, because doing them twice changes nothing. The writer is `store.remote_writer`.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace

from tracefp4.store.connection import Line, LineSettings
from tracefp4.store.protocol import Handle, Removed, Request, Slices, Stat
from tracefp4.store.refusals import AbsentSpan, span_error
from tracefp4.store.wire import NAMES_PER_MESSAGE, removed_of, slices_of, stat_of, target_content


class RemoteReader:
    """Reader and Retention of the store behind a server; may be called from several threads.

    Args:
        address: of the server.
        settings: of the line.
    """

    def __init__(self, address: str, *, settings: LineSettings | None = None) -> None:
        self._line = Line(address, settings)

    def trajectories(self) -> Mapping[str, bool]:
        """Every readable trajectory -> whether it is finished."""
        found: dict[str, bool] = {}
        after = ""
        while True:
            content = self._line.ask("trajectories", {"after": after}, is_repeatable=True).content
            found |= dict(content["names"])
            if content["is_last"]:
                return found
            after = content["names"][-1][0]

    def stat(self, trajectory: Handle | str) -> Stat:
        """What is known of a trajectory. Raises: MissingTrajectoryError, GoneError, BackendError."""
        return stat_of(self._line.ask("stat", target_content(trajectory), is_repeatable=True).content["stat"])

    def read(
        self, trajectory: Handle | str, columns: Iterable[str], start: int, stop: int
    ) -> Mapping[str, bytes]:
        """Bytes of rows start .. stop - 1 of some columns; see `protocol.Reader`."""
        request = Request(trajectory=trajectory, columns=tuple(columns), start=start, stop=stop)
        found = self.read_available(request)
        if found.absent:
            self.stat(trajectory)  # says so if the whole trajectory is missing or gone
            raise span_error(self._line.address, found.absent)
        return found.data

    def read_available(self, request: Request) -> Slices:
        """What is there of a request, and exactly which spans are not."""
        content = {
            **target_content(request.trajectory),
            "columns": list(request.columns),
            "start": request.start,
            "stop": request.stop,
        }
        answer = self._line.ask("read", content, is_repeatable=True)
        if not answer.content.get("too_large"):
            return slices_of(answer)
        middle = (request.start + request.stop) // 2
        halves = [
            self.read_available(replace(request, start=begin, stop=end))
            for begin, end in ((request.start, middle), (middle, request.stop))
        ]
        return _joined(*halves, request=request)

    def forget(self, below: int) -> Removed:
        """Remove every trajectory whose generation is < `below`."""
        return self._retain("forget", below)

    def keep_last(self, generations: int) -> Removed:
        """Remove all but the newest `generations` distinct generations."""
        return self._retain("keep_last", generations)

    def discard(self, from_generation: int) -> Removed:
        """Remove every trajectory whose generation is >= `from_generation`."""
        return self._retain("discard", from_generation)

    def remove(self, trajectories: Iterable[str]) -> Removed:
        """Remove trajectories by name, as many at once as fit a message; after an error the first ones may be gone."""
        names = sorted(set(trajectories))
        starts = range(0, max(1, len(names)), NAMES_PER_MESSAGE)
        parts = [self._retain("remove", names[start : start + NAMES_PER_MESSAGE]) for start in starts]
        return Removed(
            num_trajectories=sum(part.num_trajectories for part in parts),
            trajectories=tuple(name for part in parts for name in part.trajectories),
            num_bytes=sum(part.num_bytes for part in parts),
        )

    def close(self) -> None:
        """Close the line; a second call does nothing."""
        self._line.close()

    def _retain(self, rule: str, value: object) -> Removed:
        # Removing what is removed already changes nothing, so this may be asked again like a read.
        answer = self._line.ask("retain", {"rule": rule, "value": value}, is_repeatable=True)
        return removed_of(answer.content["removed"])


def _joined(first: Slices, second: Slices, *, request: Request) -> Slices:
    """Put the answers for two neighbouring spans together; spans that meet at the cut become one."""
    middle = (request.start + request.stop) // 2
    data = {}
    for name in request.columns:
        parts = [found.data.get(name) for found in (first, second)]
        sizes = [middle - request.start, request.stop - middle]
        known = [len(part) // size for part, size in zip(parts, sizes, strict=True) if part is not None]
        if known:
            data[name] = b"".join(
                bytes(known[0] * size) if part is None else part
                for part, size in zip(parts, sizes, strict=True)
            )
    absent = [
        span
        for name in request.columns
        for span in _merged([s for s in (*first.absent, *second.absent) if s.column == name])
    ]
    return Slices(data=data, absent=tuple(absent))


def _merged(spans: Sequence[AbsentSpan]) -> list[AbsentSpan]:
    found: list[AbsentSpan] = []
    for span in spans:
        if found and (found[-1].stop, found[-1].reason) == (span.start, span.reason):
            found[-1] = replace(found[-1], stop=span.stop)
        else:
            found.append(span)
    return found
