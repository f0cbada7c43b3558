"""A federation over several machines, on Flower. Needs ``fedgmm[flower]``.

Only the commands ``server``, ``client`` and ``keys`` import this package.
"""
