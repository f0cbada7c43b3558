"""Keys that come and go while the server runs."""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Sequence
from pathlib import Path

from fedgmm.federation.flower.keys import PublicKey, SiteKeyError, read_public_keys
from fedgmm.federation.flower.processes import Child

_EVERY = 2.0  # seconds between two looks into the folder
_PATIENCE = 10.0

FolderState = tuple[tuple[str, int, int], ...]


class KeyRing:
    """Watches the folder of public keys, and has the SuperLink let in who is there.

    Args:
        folder: of ``NAME.pub`` files; ``None`` watches nothing.
        child: the SuperLink.
        keys: that are let in now.
        names: of their nodes, by id; changed in place.
        notify: told who is let in and who is not any more.
    """

    def __init__(
        self,
        folder: Path | None,
        child: Child,
        keys: Sequence[PublicKey],
        names: dict[str, str],
        notify: Callable[[str], None],
    ) -> None:
        self.names = names
        self._folder, self._child, self._tell = folder, child, notify
        self._keys = {key.name: key.pem for key in keys}
        self._seen: FolderState | None = None
        self._next = 0.0

    def refresh(self) -> None:
        """Look into the folder, though not too often."""
        if self._folder is None or time.monotonic() < self._next:
            return
        self._next = time.monotonic() + _EVERY
        state = _state_of(self._folder)
        if state == self._seen:
            return
        self._seen = state
        try:
            keys = {key.name: key.pem for key in read_public_keys(self._folder)}
        except (SiteKeyError, OSError) as error:  # half copied, perhaps; the next change is seen
            self._tell(f"The keys stay as they are: {error}")
            return
        if keys != self._keys:
            self._let_in(keys)

    def _let_in(self, keys: dict[str, str]) -> None:
        self._child.say(json.dumps({"keys": keys}))
        answer = self._child.next_line(_PATIENCE)
        if not answer:
            self._tell("New keys could not be let in; start the server again.")
            return
        self.names.clear()
        self.names.update(json.loads(answer)["nodes"])
        before, self._keys = self._keys, keys
        for name in sorted(keys.keys() | before.keys()):
            if name not in before:
                self._tell(f"The key of {name} is let in from now on.")
            elif name not in keys:
                self._tell(f"The key of {name} is not let in any more.")
            elif keys[name] != before[name]:
                self._tell(f"{name} has a new key; the old one is not let in any more.")


def _state_of(folder: Path) -> FolderState:
    """Names, sizes and times of the files, which tell whether something changed."""
    try:
        found = [(path.name, path.stat()) for path in sorted(folder.glob("*.pub"))]
    except OSError:  # one went away in between
        return ()
    return tuple((name, state.st_size, state.st_mtime_ns) for name, state in found)
