"""A federation over several machines, on Flower. Needs ``fedgmm[flower]``.

The rest of the package never imports this one, apart from the commands ``server``, ``client`` and
``keys``.
"""
