"""What is written down of every round: how it went, who answered, and how many bytes it took."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from fedgmm.federation.assembly import Traffic
from fedgmm.methods.base import RoundInfo
from fedgmm.wording import counted


@dataclass
class RoundLog:
    """The history of a federation.

    Attributes:
        entries: one a round. ``bytes`` has what went to and came from each client, ``dropped`` why
            a client's update did not count.
        start: bytes to and from each client before the first round.
    """

    entries: list[dict[str, Any]] = field(default_factory=list)
    start: dict[str, list[int]] = field(default_factory=dict)

    def add_start(self, traffic: Mapping[str, Traffic]) -> None:
        """Add what the start took."""
        for name, own in traffic.items():
            before = self.start.get(name, [0, 0])
            self.start[name] = [before[0] + own.sent, before[1] + own.received]

    def add(
        self,
        number: int,
        info: RoundInfo,
        answered: int,
        dropped: Mapping[str, str],
        traffic: Mapping[str, Traffic],
        seconds: float,
    ) -> str:
        """Add a round; the line that tells of it."""
        before = self.entries[-1]["seconds"] if self.entries else 0.0
        sent = sum(own.sent for own in traffic.values())
        received = sum(own.received for own in traffic.values())
        entry: dict[str, Any] = {
            "round": float(number),
            "log_likelihood": info.log_likelihood,
            "seconds": before + seconds,
            "answered": float(answered),
            "bytes_sent": float(sent),
            "bytes_received": float(received),
            "bytes": {name: [own.sent, own.received] for name, own in sorted(traffic.items())},
        }
        if dropped:
            entry["dropped"] = dict(sorted(dropped.items()))
        self.entries.append(entry)
        clients = max(len(traffic), 1)
        return (
            f"round {number}: log-likelihood {info.log_likelihood:.4f}, "
            f"{counted(answered, 'client')}, {_size(sent / clients)} to and "
            f"{_size(received / clients)} from each, {seconds:.1f} s"
        )

    def add_validation(self, number: int, rows: float, right: float) -> None:
        """Add the accuracy on validation rows that was told after a round."""
        if rows and self.entries and self.entries[-1]["round"] == number:
            self.entries[-1]["validation_accuracy"] = right / rows

    def numbers(self, *, times: bool = True) -> list[dict[str, float]]:
        """The plain numbers of every round."""
        return [
            {k: v for k, v in e.items() if isinstance(v, float) and (times or k != "seconds")}
            for e in self.entries
        ]

    def total_traffic(self) -> dict[str, list[int]]:
        """Bytes to and from every client, for the start and over all rounds."""
        total = {name: list(own) for name, own in self.start.items()}
        for entry in self.entries:
            for name, (sent, received) in entry.get("bytes", {}).items():
                own = total.setdefault(name, [0, 0])
                own[0], own[1] = own[0] + int(sent), own[1] + int(received)
        return dict(sorted(total.items()))


def _size(count: float) -> str:
    return f"{count / 1000:.1f} kB" if count < 1e6 else f"{count / 1e6:.1f} MB"
