"""The app of fedgmm for Flower's own SuperLink and SuperNodes, started with ``flwr run``.

It uses Flower's public interfaces only, and needs ``fedgmm[flower]``. ``fedgmm server`` and ``client`` do
not use it.
"""

from pathlib import Path

APP_FOLDER = Path(__file__).parent / "app"
"""The folder that ``flwr run`` takes."""
