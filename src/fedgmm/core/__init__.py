"""The paper's equations: pure functions on tensors.

Start with ``em``: the E-step, the weights ``π_c``, and the server's ``μ_m``, ``Σ_m`` and ``θ_m``.
``gaussians`` has the densities, ``predictive`` equation (3) and the weights of a new client, ``newton``
the exact steps of linear learners, and ``sums`` the type of everything that a client sends in a round.
"""
