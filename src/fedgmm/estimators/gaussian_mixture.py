"""The federated Gaussian mixture as a scikit-learn estimator."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Hashable, Iterable, Mapping
from typing import Any, Self

import numpy as np
import torch
from numpy.typing import ArrayLike, NDArray
from sklearn.base import BaseEstimator, DensityMixin
from sklearn.exceptions import ConvergenceWarning
from sklearn.utils import check_random_state
from sklearn.utils.validation import check_is_fitted, validate_data
from torch import Tensor

from fedgmm.core.checks import (
    array_of_names,
    check_choice,
    check_flag,
    check_integer,
    check_non_negative,
    given_array,
    inverse_of_precisions,
)
from fedgmm.core.em import AGGREGATIONS, responsibilities
from fedgmm.core.gaussians import (
    COVARIANCE_TYPES,
    CovarianceType,
    Gaussians,
    covariance_parameters,
    log_densities,
    residuals,
)
from fedgmm.core.initialise import STARTS
from fedgmm.core.streaming import Block, accumulate
from fedgmm.data.federated import ClientRows
from fedgmm.data.inputs import (
    NO_CLIENT,
    as_pairs,
    checked_rows,
    codes_of_known_clients,
    columns_of_pairs,
    encode_clients,
    is_missing,
    matrices_of_pairs,
)
from fedgmm.methods.base import RoundInfo
from fedgmm.methods.gmm import FederatedGMM, GivenStart, MixtureShared
from fedgmm.nets.devices import resolve_device, resolve_dtype
from fedgmm.training.local import StackedClients
from fedgmm.training.loop import OnRound, Run, run_rounds
from fedgmm.wording import counted

Rows = ArrayLike | Mapping[Any, ArrayLike] | Iterable[tuple[Any, ArrayLike]]
FloatArray = NDArray[np.float64]
MixtureRun = Run[MixtureShared, Tensor]


def bound(run: MixtureRun) -> float:
    """The last mean log-likelihood of a run; minus infinity if no round was finished."""
    return run.history[-1].log_likelihood if run.history else -np.inf


class FederatedGaussianMixture(DensityMixin, BaseEstimator):  # type: ignore[misc]
    """A Gaussian mixture whose rows belong to several owners.

    All clients share the means and covariances; each client keeps its own weights. With exact
    aggregation and ``shared_weights=True`` the fit equals scikit-learn's ``GaussianMixture`` on the
    pooled rows, however they are split.

    Parameters
    ----------
    n_components : int, default=1
        Number of Gaussians ``M``.
    covariance_type : {"full", "tied", "diag", "spherical", "identity"}, default="full"
        ``"identity"`` holds every covariance at the identity and learns means and weights only: the
        setting of the paper's theorem.
    shared_weights : bool, default=False
        One common set of weights instead of one a client.
    aggregation : {"exact", "paper"}, default="exact"
        ``"paper"`` averages the clients' covariances around their own means, as the paper writes;
        that drops the scatter between clients.
    tol : float, default=1e-3
        Stop when the mean log-likelihood changes by less in a round.
    reg_covar : float, default=1e-6
        Added to every variance.
    max_iter : int, default=100
        Most rounds.
    n_init : int, default=1
        Number of starts; the best is kept.
    init_params : {"kmeans", "k-means++", "random"}, default="kmeans"
        ``"kmeans"``: each client clusters its rows and sends centroids with counts, the server
        clusters those. ``"k-means++"``: the server picks far-apart centroids. ``"random"``: random
        responsibilities. No raw row leaves a client.
    weights_init, means_init, precisions_init : array-like, default=None
        Given parts of the start, shaped as in scikit-learn.
    random_state : int, RandomState or None, default=None
        Seed of the start and of :meth:`sample`.
    warm_start : bool, default=False
        Start the next ``fit`` where the last one ended.
    device : str, default="cpu"
        ``"cpu"``, ``"cuda"`` or ``"auto"``.
    dtype : {"float64", "float32"}, default="float64"
        Precision of the products. Sums and parameters are always float64.
    verbose : int, default=0
        1 prints a line a start, 2 a line a round.

    Attributes
    ----------
    means_ : ndarray (n_components, n_features)
    covariances_, precisions_cholesky_ : ndarray, shaped by ``covariance_type``
    weights_ : ndarray (n_components,)
        The federation's weights: the clients' weights, averaged by their rows.
    client_weights_ : ndarray (n_clients, n_components)
    clients_ : ndarray (n_clients,)
    n_iter_ : int
    converged_ : bool
    lower_bound_ : float
    lower_bounds_ : list of float
        Mean log-likelihood of every round, under the parameters that entered it.
    n_features_in_ : int
    feature_names_in_ : ndarray (n_features,)
        Only where ``X`` has string column names.

    Examples
    --------
    >>> import numpy as np
    >>> from fedgmm import FederatedGaussianMixture
    >>> rng = np.random.default_rng(0)
    >>> oslo, bergen = rng.normal(0, 1, (200, 2)), rng.normal(6, 1, (100, 2))
    >>> model = FederatedGaussianMixture(2, random_state=0).fit({"oslo": oslo, "bergen": bergen})
    >>> model.client_weights_.round(2).max(axis=1)
    array([1., 1.])
    """

    def __init__(
        self,
        n_components: int = 1,
        *,
        covariance_type: str = "full",
        shared_weights: bool = False,
        aggregation: str = "exact",
        tol: float = 1e-3,
        reg_covar: float = 1e-6,
        max_iter: int = 100,
        n_init: int = 1,
        init_params: str = "kmeans",
        weights_init: ArrayLike | None = None,
        means_init: ArrayLike | None = None,
        precisions_init: ArrayLike | None = None,
        random_state: int | np.random.RandomState | None = None,
        warm_start: bool = False,
        device: str = "cpu",
        dtype: str = "float64",
        verbose: int = 0,
    ) -> None:
        self.n_components = n_components
        self.covariance_type = covariance_type
        self.shared_weights = shared_weights
        self.aggregation = aggregation
        self.tol = tol
        self.reg_covar = reg_covar
        self.max_iter = max_iter
        self.n_init = n_init
        self.init_params = init_params
        self.weights_init = weights_init
        self.means_init = means_init
        self.precisions_init = precisions_init
        self.random_state = random_state
        self.warm_start = warm_start
        self.device = device
        self.dtype = dtype
        self.verbose = verbose

    # ------------------------------------------------------------------ fitting

    def fit(self, X: Rows, y: object = None, *, clients: ArrayLike | None = None) -> Self:
        """Fit to rows of one or many clients.

        Parameters
        ----------
        X : array-like (n_rows, n_features), or {client: rows}, or iterable of (client, rows)
        y : ignored
        clients : array-like (n_rows,), default=None
            One client id per row. ``None`` means one client.

        Returns
        -------
        self
            Ctrl-C keeps the best parameters so far and warns.
        """
        return self.fit_with_callbacks(X, clients=clients)

    def fit_with_callbacks(
        self, X: Rows, *, clients: ArrayLike | None = None, on_round: Iterable[OnRound] = ()
    ) -> Self:
        """Like :meth:`fit`, calling each of ``on_round`` with the round's number and its facts."""
        before = dict(vars(self))
        try:
            best, rows = self._best_run(X, clients, on_round)
        except BaseException:  # bad input, or Ctrl-C before the first round: the last fit stays
            self.__dict__ = before
            raise
        self._keep(best, rows)
        self._warn(best)
        return self

    def _best_run(
        self, X: Rows, clients: ArrayLike | None, on_round: Iterable[OnRound]
    ) -> tuple[MixtureRun, ClientRows]:
        """The best of ``n_init`` runs, and the rows it saw."""
        method = self._method()
        device = resolve_device(self.device)
        rows = self._rows_to_fit(X, clients).to(device)
        if len(rows) < self.n_components:
            raise ValueError(
                f"Expected at least n_components={self.n_components} rows over all clients, "
                f"got n_samples = {len(rows)}."
            )
        given = self._given_start(rows.columns, device)
        warm = self._warm_state(rows) if self.warm_start and hasattr(self, "means_") else None
        seeds = check_random_state(self.random_state).randint(
            np.iinfo(np.int32).max, size=1 if warm else self.n_init
        )
        best: MixtureRun | None = None
        for number, seed in enumerate(seeds.tolist()):
            try:
                if warm is None:
                    shared = method.start(rows, self.init_params, seed, given)  # type: ignore[arg-type]
                    personal = shared.weights.expand(len(rows.names), -1)
                else:
                    shared, personal = warm
                run: MixtureRun = run_rounds(
                    method,
                    Run(shared, personal),
                    StackedClients(rows),
                    last_round=self.max_iter,
                    tol=self.tol,
                    on_round=[*on_round, *self._console(number)],
                )
            except KeyboardInterrupt:  # during a start; a run itself ends in an orderly way
                if best is None:
                    raise
                best.interrupted = True
                break
            if best is None or bound(run) > bound(best):
                best = run
            if run.interrupted:
                best.interrupted = True
                break
        assert best is not None
        return best, rows

    def fit_predict(
        self, X: Rows, y: object = None, *, clients: ArrayLike | None = None
    ) -> NDArray[np.int64]:
        """Fit, then the most likely component of every row under its own client's weights."""
        X = as_pairs(X) or X
        return self.fit(X, clients=clients).predict(X, clients=clients)

    def _method(self) -> FederatedGMM:
        """The method with checked parameters."""
        check_integer("n_components", self.n_components, 1)
        check_integer("max_iter", self.max_iter, 1)
        check_integer("n_init", self.n_init, 1)
        check_integer("verbose", self.verbose, 0)
        check_non_negative("tol", self.tol)
        check_non_negative("reg_covar", self.reg_covar)
        check_flag("shared_weights", self.shared_weights)
        check_flag("warm_start", self.warm_start)
        check_choice("covariance_type", self.covariance_type, COVARIANCE_TYPES)
        check_choice("aggregation", self.aggregation, AGGREGATIONS)
        check_choice("init_params", self.init_params, STARTS)
        return FederatedGMM(
            components=int(self.n_components),
            covariance_type=self.covariance_type,  # type: ignore[arg-type]
            aggregation=self.aggregation,  # type: ignore[arg-type]
            shared_weights=bool(self.shared_weights),
            reg_covar=float(self.reg_covar),
            dtype=resolve_dtype(self.dtype),
        )

    def _rows_to_fit(self, X: Rows, clients: ArrayLike | None) -> ClientRows:
        pairs = as_pairs(X)
        names: list[Hashable]
        if pairs is None:
            matrix = validate_data(self, X, dtype=[np.float64, np.float32], ensure_all_finite=False)
            if clients is None:
                codes, names = np.zeros(len(matrix), dtype=np.int64), [0]
            else:
                codes, names = encode_clients(clients, len(matrix))
            matrices = [matrix]
        else:
            matrices, codes, names = self._rows_of_pairs(pairs, clients)
            if any(map(is_missing, names)):
                unnamed = next(filter(is_missing, names))
                raise ValueError(f"{unnamed!r} cannot name a client; in fit each has a name.")
            self.n_features_in_ = matrices[0].shape[1]
            columns = columns_of_pairs(pairs)
            if columns is not None:
                self.feature_names_in_ = np.array(columns, dtype=object)
            elif hasattr(self, "feature_names_in_"):
                del self.feature_names_in_  # of an earlier fit
        return self._checked(matrices, codes, names)

    def _checked(
        self,
        matrices: list[NDArray[np.floating]],
        codes: NDArray[np.int64],
        names: list[Hashable],
    ) -> ClientRows:
        columns = getattr(self, "feature_names_in_", None)
        return checked_rows(matrices, codes, names, columns, resolve_dtype(self.dtype))

    def _rows_of_pairs(
        self, pairs: list[tuple[Hashable, Any]], clients: ArrayLike | None
    ) -> tuple[list[NDArray[np.floating]], NDArray[np.int64], list[Hashable]]:
        if clients is not None:
            raise ValueError("X already names its clients; do not pass clients as well.")
        matrices, names = matrices_of_pairs(pairs)
        codes = np.repeat(np.arange(len(names)), [len(matrix) for matrix in matrices])
        return matrices, codes, names

    def _given_start(self, columns: int, device: torch.device) -> GivenStart:
        """The parts of the start that the user gave, checked."""
        m, kind = self.n_components, self.covariance_type
        weights = means = covariances = None
        if self.weights_init is not None:
            weights = given_array("weights_init", self.weights_init, (m,))
            if (weights < 0).any() or abs(weights.sum() - 1) > 1e-6:
                raise ValueError(
                    f"weights_init must be non-negative and sum to 1, got {self.weights_init!r}."
                )
        if self.means_init is not None:
            means = given_array("means_init", self.means_init, (m, columns))
        if self.precisions_init is not None:
            if kind == "identity":
                raise ValueError("precisions_init cannot be given with covariance_type='identity'.")
            shapes = {
                "full": (m, columns, columns),
                "tied": (columns, columns),
                "diag": (m, columns),
            }
            precisions = given_array(
                "precisions_init", self.precisions_init, shapes.get(kind, (m,))
            )
            covariances = inverse_of_precisions(precisions, kind)

        def tensor(array: FloatArray | None) -> Tensor | None:
            return None if array is None else torch.from_numpy(array).to(device)

        return GivenStart(tensor(weights), tensor(means), tensor(covariances))

    def _warm_state(self, rows: ClientRows) -> tuple[MixtureShared, Tensor]:
        """Where the last fit ended; a client that was not there starts at the federation's weights."""
        if self.means_.shape != (self.n_components, rows.columns):
            raise ValueError(
                f"warm_start needs the last fit's shape {self.means_.shape}, got n_components="
                f"{self.n_components} and {counted(rows.columns, 'column')}; set warm_start=False."
            )
        if self._kind != self.covariance_type:
            raise ValueError(
                f"warm_start needs the last fit's covariance_type={self._kind!r}, got "
                f"{self.covariance_type!r}; set warm_start=False."
            )
        shared = MixtureShared(
            self._gaussians(rows.device), torch.from_numpy(self.weights_).to(rows.device)
        )
        known = {name: code for code, name in enumerate(self.clients_.tolist())}
        table = np.vstack([self.client_weights_, self.weights_])
        personal = table[[known.get(name, NO_CLIENT) for name in rows.names]]
        return shared, torch.from_numpy(personal).to(rows.device)

    def _console(self, start: int) -> list[OnRound]:
        if not self.verbose:
            return []
        every = 1 if self.verbose > 1 else 10

        def show(number: int, info: RoundInfo) -> None:
            if number % every == 0 or number == 1:
                print(
                    f"start {start + 1}, round {number}: log-likelihood {info.log_likelihood:.6f}"
                )

        return [show]

    def _keep(self, run: MixtureRun, rows: ClientRows) -> None:
        """Set the fitted attributes."""
        shared = run.shared
        # What the fitted arrays mean must not change with set_params.
        self._kind: CovarianceType = shared.gaussians.covariance_type
        personal = shared.weights.expand_as(run.personal) if self.shared_weights else run.personal
        self.means_ = shared.gaussians.means.cpu().numpy().copy()
        self.covariances_ = shared.gaussians.covariances.cpu().numpy().copy()
        self.precisions_cholesky_ = shared.gaussians.precisions_cholesky.cpu().numpy().copy()
        self.client_weights_ = personal.cpu().numpy().copy()
        self.weights_ = shared.weights.cpu().numpy().copy()
        self.clients_ = array_of_names(rows.names)
        self.lower_bounds_ = [info.log_likelihood for info in run.history]
        self.lower_bound_ = bound(run)
        self.n_iter_ = len(run.history)
        self.converged_ = run.converged

    def _warn(self, run: MixtureRun) -> None:
        if run.interrupted:
            warnings.warn(
                f"fit was interrupted; the best parameters so far are kept (round {self.n_iter_}).",
                RuntimeWarning,
                stacklevel=4,
            )
        elif not run.converged and self.tol > 0:
            warnings.warn(
                f"fit did not converge in max_iter={self.max_iter} rounds; raise max_iter or tol, "
                "or check the data.",
                ConvergenceWarning,
                stacklevel=4,
            )
        if run.history and run.history[-1].empty_components:
            warnings.warn(
                f"No row belongs to component(s) {list(run.history[-1].empty_components)} any more; their "
                "parameters were left as they were. Fewer components may do.",
                ConvergenceWarning,
                stacklevel=4,
            )

    # ------------------------------------------------------------------ what the model says

    def score_samples(self, X: Rows, *, clients: ArrayLike | None = None) -> FloatArray:
        """Log-likelihood of every row, ``(n_rows,)``.

        ``clients`` gives one known client id per row, or one id for all; rows without an id, and
        ``clients=None``, use the federation's ``weights_``.
        """
        rows = self._rows_to_score(X, clients)
        out = np.empty(len(rows))
        self._for_blocks(rows, lambda joint, place: _write(out, place, joint.logsumexp(-1)))
        return out

    def score(self, X: Rows, y: object = None, *, clients: ArrayLike | None = None) -> float:
        """Mean log-likelihood of the rows."""
        return float(self.score_samples(X, clients=clients).mean())

    def predict(self, X: Rows, *, clients: ArrayLike | None = None) -> NDArray[np.int64]:
        """The most likely component of every row, ``(n_rows,)``."""
        rows = self._rows_to_score(X, clients)
        out = np.empty(len(rows), dtype=np.int64)
        self._for_blocks(rows, lambda joint, place: _write(out, place, joint.argmax(-1)))
        return out

    def predict_proba(self, X: Rows, *, clients: ArrayLike | None = None) -> FloatArray:
        """Responsibilities of the components for every row, ``(n_rows, n_components)``."""
        rows = self._rows_to_score(X, clients)
        out = np.empty((len(rows), len(self.weights_)))
        self._for_blocks(rows, lambda joint, place: _write(out, place, responsibilities(joint)[0]))
        return out

    def sample(
        self, n_samples: int = 1, *, clients: ArrayLike | None = None
    ) -> tuple[FloatArray, NDArray[np.int64]]:
        """Draw rows and the components they came from.

        ``clients`` is one id for all rows or one per row; ``None`` draws from the federation.
        """
        check_is_fitted(self, "means_")
        check_integer("n_samples", n_samples, 1)
        generator = check_random_state(self.random_state)
        if clients is None or np.ndim(clients) == 0:
            weights = self._weights_table()[self._codes(clients, 1)[0]]
            counts = generator.multinomial(n_samples, weights / weights.sum())
            labels = np.repeat(np.arange(len(weights)), counts)
        else:
            if len(np.asarray(clients)) != n_samples:
                raise ValueError(
                    f"clients has {counted(len(np.asarray(clients)), 'entry', 'entries')}, but "
                    f"n_samples={n_samples}; give one id for all, or one per row."
                )
            weights = self._weights_table()[self._codes(clients, n_samples)]
            draws = generator.uniform(size=(n_samples, 1)) * weights.sum(-1, keepdims=True)
            labels = (draws >= weights.cumsum(-1)).sum(-1).clip(max=weights.shape[1] - 1)
        noise = torch.from_numpy(generator.standard_normal((len(labels), self.n_features_in_)))
        return _colour(noise, labels, self._gaussians(torch.device("cpu"))), labels

    def bic(self, X: Rows, *, clients: ArrayLike | None = None) -> float:
        """Bayesian information criterion on rows; lower is better."""
        log_likelihood, rows, parameters = self._fit_and_size(X, clients)
        return -2.0 * log_likelihood + parameters * float(np.log(rows))

    def aic(self, X: Rows, *, clients: ArrayLike | None = None) -> float:
        """Akaike information criterion on rows; lower is better."""
        log_likelihood, _, parameters = self._fit_and_size(X, clients)
        return -2.0 * log_likelihood + 2.0 * parameters

    def _fit_and_size(self, X: Rows, clients: ArrayLike | None) -> tuple[float, int, int]:
        """Summed log-likelihood, rows, and the free parameters behind them."""
        pairs = as_pairs(X)
        scores = self.score_samples(pairs or X, clients=clients)
        m, d = self.means_.shape
        if self.shared_weights or (clients is None and pairs is None):
            weight_sets = 1
        elif pairs is not None:
            weight_sets = len(pairs)
        else:
            weight_sets = len(np.unique(self._codes(clients, len(scores))))
        parameters = covariance_parameters(self._kind, m, d) + m * d + weight_sets * (m - 1)
        return float(scores.sum()), len(scores), parameters

    def _gaussians(self, device: torch.device) -> Gaussians:
        return Gaussians(
            torch.from_numpy(self.means_).to(device),
            torch.from_numpy(self.covariances_).to(device),
            torch.from_numpy(self.precisions_cholesky_).to(device),
            self._kind,
        )

    def _weights_table(self) -> FloatArray:
        """``(C + 1, M)``: the clients' weights and, last, the federation's (code ``NO_CLIENT``)."""
        return np.vstack([self.client_weights_, self.weights_])

    def _rows_to_score(self, X: Rows, clients: ArrayLike | None) -> ClientRows:
        """Checked rows whose codes index :meth:`_weights_table`."""
        check_is_fitted(self, "means_")
        pairs = as_pairs(X)
        if pairs is None:
            matrices = [
                validate_data(
                    self, X, reset=False, dtype=[np.float64, np.float32], ensure_all_finite=False
                )
            ]
        else:
            matrices, row_codes, names = self._rows_of_pairs(pairs, clients)
            clients = array_of_names(names)[row_codes]
            if matrices[0].shape[1] != self.n_features_in_:
                raise ValueError(
                    f"X has {counted(matrices[0].shape[1], 'column')}, but the model was fitted on "
                    f"{self.n_features_in_}."
                )
            columns = columns_of_pairs(pairs)
            fitted_columns = getattr(self, "feature_names_in_", np.array(columns))
            if columns is not None and columns != fitted_columns.tolist():
                raise ValueError(
                    f"X has the columns {columns}, but the model was fitted on "
                    f"{fitted_columns.tolist()}."
                )
        codes = self._codes(clients, sum(map(len, matrices)))
        codes = np.where(codes == NO_CLIENT, len(self.clients_), codes)
        names = [*self.clients_.tolist(), None]
        rows = self._checked(matrices, codes, names)
        return rows.to(resolve_device(self.device))

    def _codes(self, clients: ArrayLike | None, rows: int) -> NDArray[np.int64]:
        """Positions in ``clients_`` of each row's client, or ``NO_CLIENT``."""
        return codes_of_known_clients(clients, rows, self.clients_.tolist())

    def _for_blocks(self, rows: ClientRows, write: Callable[[Tensor, slice], None]) -> None:
        """Call ``write`` with ``log π(m) + log N(x; μ_m, Σ_m)`` of every block and its place."""
        shared = self._gaussians(rows.device)
        log_pi = torch.log(torch.from_numpy(self._weights_table()).to(rows.device))
        dtype = resolve_dtype(self.dtype)

        def visit(_: None, block: Block) -> None:
            x, codes, place = rows.read(block)
            densities = log_densities(residuals(x, shared.means, dtype), shared)
            write(densities + log_pi[codes], place)

        accumulate(rows.blocks(len(self.weights_)), lambda: None, visit, rows.device)


def _write(out: NDArray[Any], place: slice, values: Tensor) -> None:
    out[place] = values.cpu().numpy()


def _colour(noise: Tensor, labels: NDArray[np.int64], shared: Gaussians) -> FloatArray:
    """Standard normal rows ``(n, d)`` turned into rows of their components: ``μ + z W⁻¹``."""
    whiteners, rows = shared.precisions_cholesky, torch.empty_like(noise)
    for component in np.unique(labels).tolist():
        here = torch.from_numpy(labels == component)
        own = whiteners if shared.covariance_type == "tied" else whiteners[component]
        drawn = (
            torch.linalg.solve_triangular(own, noise[here], upper=True, left=False)
            if own.ndim == 2
            else noise[here] / own
        )
        rows[here] = shared.means[component] + drawn
    return np.asarray(rows.numpy())
