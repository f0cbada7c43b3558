"""``python -m fedgmm`` is the command ``fedgmm``."""

from fedgmm.cli import main

main()
