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
from sklearn.utils._param_validation import InvalidParameterError
from sklearn.utils.validation import check_is_fitted
from torch import Tensor

from fedgmm.core.em import AGGREGATIONS, responsibilities
from fedgmm.core.gaussians import (
    COVARIANCE_TYPES,
    CovarianceType,
    Gaussians,
    covariance_parameters,
    covariance_shape,
    gaussians,
    inverse_of_precisions,
    log_densities,
    residuals,
)
from fedgmm.data.dataset import labelled_without_labels
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
    row_weights,
)
from fedgmm.estimators.base import (
    Id,
    Ids,
    TakesClients,
    chosen_clients,
    column_index,
    keep_parameters,
    thread_count,
)
from fedgmm.methods.base import DENSITY, RoundInfo
from fedgmm.methods.centroids import STARTS
from fedgmm.methods.gmm import FederatedGMM, GivenStart, MixtureShared
from fedgmm.nets.devices import resolve_device, resolve_dtype
from fedgmm.privacy.settings import Privacy
from fedgmm.support.checks import (
    array_of_names,
    check_choice,
    check_flag,
    check_integer,
    check_number,
    given_array,
)
from fedgmm.support.streaming import Block, accumulate, threads
from fedgmm.training.in_process import train
from fedgmm.training.loop import OnRound, Run, StackedClients, as_callbacks, run_rounds
from fedgmm.wording import counted

Rows = ArrayLike | Mapping[Any, ArrayLike] | Iterable[tuple[Any, ArrayLike]]
FloatArray = NDArray[np.float64]
Matrix = NDArray[np.floating]
MixtureRun = Run[MixtureShared, Tensor]


class FederatedGaussianMixture(TakesClients, DensityMixin, BaseEstimator):  # type: ignore[misc]
    """Gaussian mixture of rows that belong to several clients.

    All clients share the means and covariances; each client has its own weights. With exact
    aggregation and ``shared_weights=True`` the fit equals scikit-learn's ``GaussianMixture`` on the
    pooled rows, for any split into clients.

    Parameters
    ----------
    n_components : int, default=1
        Number of Gaussians ``M``.
    covariance_type : {"full", "tied", "diag", "spherical", "identity"}, default="full"
        ``"identity"`` fixes every covariance at the identity and learns only means and weights, as in
        the paper's theorem.
    shared_weights : bool, default=False
        Use one set of weights for all clients.
    aggregation : {"exact", "paper"}, default="exact"
        ``"paper"`` averages the clients' covariances around their own means, as in the paper, so it
        drops the scatter between clients.
    tol : float, default=1e-3
        Stop when a round changes the mean log-likelihood by less.
    reg_covar : float, default=1e-6
        Added to every variance.
    max_iter : int, default=100
        Maximal number of rounds; 0 keeps the start.
    n_init : int, default=1
        Number of starts; the best fit is kept.
    init_params : {"kmeans", "k-means++", "random"}, default="kmeans"
        ``"kmeans"``: each client clusters its rows and sends centroids with counts, the server
        clusters those. ``"k-means++"``: the server picks distant centroids. ``"random"``: random
        responsibilities. No row leaves its client.
    weights_init, means_init, precisions_init : array-like, default=None
        Given parts of the start, shaped as in scikit-learn.
    random_state : int, RandomState or None, default=None
        Seed of the start and of :meth:`sample`.
    warm_start : bool, default=False
        Start the next ``fit`` where the last one ended, for more rounds or with new clients.
    device : str, default="cpu"
        ``"cpu"``, ``"cuda"`` or ``"auto"``.
    dtype : {"float64", "float32"}, default="float64"
        Precision of the products. Sums and parameters are always float64.
    verbose : int, default=0
        1 prints every ``verbose_interval``-th round, 2 prints every round.
    verbose_interval : int, default=10
    client_column, unknown_clients, n_jobs
        As in :class:`fedgmm.FedGMMClassifier`.
    on_round : callable, iterable of callables or None, default=None
        Called after every round with its number and its diagnostics (``log_likelihood``).
    privacy : fedgmm.Privacy or None, default=None
        Fit with differential privacy: a private start and ``privacy.rounds`` rounds of noised sums. Then
        ``tol``, ``n_init`` and ``init_params`` are not used, ``client_weights_`` are learned at home after
        the last round, and ``privacy_`` has what was spent. For full, tied and diag covariances.

    Attributes
    ----------
    means_ : ndarray (n_components, n_features)
    covariances_, precisions_, precisions_cholesky_ : ndarray, shaped by ``covariance_type``
    weights_ : ndarray (n_components,)
        The federation's weights: the mean of the clients' weights, weighted by their rows.
    client_weights_ : ndarray (n_clients, n_components)
    clients_ : ndarray (n_clients,)
    n_iter_ : int
    converged_ : bool
    privacy_ : dict
        The budget, ``spent`` and ``releases``; only with ``privacy``.
    lower_bound_ : float
    lower_bounds_ : list of float
        Mean log-likelihood of every round, under the parameters that entered it.
    n_features_in_ : int
        Number of columns of ``X``, with the client column.
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
        verbose_interval: int = 10,
        client_column: str | int | None = None,
        unknown_clients: str = "error",
        n_jobs: int | None = None,
        on_round: OnRound | Iterable[OnRound] | None = None,
        privacy: Privacy | None = None,
    ) -> None:
        keep_parameters(self, locals())

    # ------------------------------------------------------------------ fitting

    def fit(
        self,
        X: Rows,
        y: object = None,
        sample_weight: ArrayLike | None = None,
        *,
        clients: Ids = None,
    ) -> Self:
        """Fit to the rows of one or many clients.

        Ctrl-C keeps the best parameters so far and warns.

        Parameters
        ----------
        X : array-like (n_rows, n_features), or {client: rows}, or iterable of (client, rows)
        y : ignored
        sample_weight : array-like (n_rows,), default=None
            A row of weight ``w`` counts like ``w`` copies of it; rows of weight zero are left out.
            Rows of several clients follow each other as in ``X``.
        clients : array-like (n_rows,), default=None
            One client id per row. ``None`` means one client, or the ids in ``client_column``.
        """
        return self.fit_with_callbacks(X, sample_weight, clients=clients)

    def fit_with_callbacks(
        self,
        X: Rows,
        sample_weight: ArrayLike | None = None,
        *,
        clients: Ids = None,
        on_round: Iterable[OnRound] = (),
    ) -> Self:
        """Like :meth:`fit`; calls these callbacks of a round, too."""
        before = dict(vars(self))
        try:
            with threads(thread_count(self.n_jobs)):
                callbacks = [*as_callbacks(self.on_round), *on_round]
                best, rows = self._best_run(X, sample_weight, clients, callbacks)
        except BaseException:  # bad input, or Ctrl-C before the first round: keep the last fit
            self.__dict__ = before
            raise
        self._set_fitted(best, rows)
        self._warn(best)
        return self

    def fit_predict(
        self,
        X: Rows,
        y: object = None,
        sample_weight: ArrayLike | None = None,
        *,
        clients: Ids = None,
    ) -> NDArray[np.int64]:
        """Fit, then return the most likely component of every row under its own client's weights."""
        X = as_pairs(X) or X
        return self.fit(X, None, sample_weight, clients=clients).predict(X, clients=clients)

    def _best_run(
        self, X: Rows, sample_weight: ArrayLike | None, clients: Ids, on_round: Iterable[OnRound]
    ) -> tuple[MixtureRun, ClientRows]:
        """Return the best of ``n_init`` runs, and the rows."""
        try:
            method = self._checked_method()
        except (TypeError, ValueError) as error:
            raise InvalidParameterError(str(error)) from None
        rows = self._rows_to_fit(X, clients)
        if sample_weight is not None:
            weights = torch.from_numpy(row_weights(sample_weight, len(rows)))
            rows = rows.with_weights(weights.to(rows.device))
        if len(rows) < self.n_components:
            raise ValueError(
                f"Expected n_samples >= n_components over all clients, got n_components="
                f"{self.n_components} and n_samples = {len(rows)}."
            )
        if self.privacy is not None and self.privacy.is_noised:
            return self._private_run(rows, on_round), rows
        given = self._given_start(rows)
        warm = self._warm_start(rows) if self.warm_start and hasattr(self, "means_") else None
        seeds = check_random_state(self.random_state).randint(
            np.iinfo(np.int32).max, size=1 if warm else self.n_init
        )
        best: MixtureRun | None = None
        for number, seed in enumerate(seeds.tolist(), 1):
            try:
                shared = warm[0] if warm else method.start(rows, self.init_params, seed, given)
                personal = warm[1] if warm else shared.weights.expand(len(rows.names), -1)
                # a warm start compares its first round with the last one of the fit before
                before = warm is not None and np.isfinite(self.lower_bound_)
                run = run_rounds(
                    method,
                    Run(shared, personal, [RoundInfo(self.lower_bound_)] if before else []),
                    StackedClients(rows),
                    last_round=self.max_iter,
                    tol=self.tol,
                    on_round=[*on_round, *self._printer(number)],
                )
            except KeyboardInterrupt:  # during a start; within rounds the run itself ends
                if best is None:
                    raise
                best.interrupted = True
                break
            if best is None or _last_bound(run) > _last_bound(best):
                best = run
            if run.interrupted:
                best.interrupted = True
                break
        assert best is not None
        return best, rows

    def _private_run(self, rows: ClientRows, on_round: Iterable[OnRound]) -> MixtureRun:
        """Return a run of noised sums, with the Gaussians in the units of the rows."""
        kind = self.covariance_type
        starts = (self.weights_init, self.means_init, self.precisions_init)
        refused = {
            "sample_weight": rows.weights is not None,
            "warm_start": self.warm_start,
            "shared_weights": self.shared_weights,
            "a given start": any(start is not None for start in starts),
            f"covariance_type={kind!r}": kind not in ("full", "tied", "diag"),
        }
        for what, given in refused.items():
            if given:
                raise ValueError(f"epsilon cannot be combined with {what}.")
        names = getattr(self, "feature_names_in_", None)
        every = labelled_without_labels(rows, None if names is None else tuple(names.tolist()))

        def report(entry: dict[str, float]) -> None:
            for call in (*on_round, *self._printer(1)):
                call(int(entry["round"]), RoundInfo(entry["log_likelihood"]))

        model = train(
            every,
            DENSITY,
            components=self.n_components,
            covariance_type=self.covariance_type,
            aggregation=self.aggregation,
            reg_covar=float(self.reg_covar),
            rounds=max(1, self.max_iter),
            dtype="float64",
            seed=check_random_state(self.random_state).randint(np.iinfo(np.int32).max),
            privacy=self.privacy,
            on_round=report,
        )
        self.privacy_ = model.privacy
        assert model.scaling is not None
        assert model.prediction.gaussians is not None
        found, mean, scale = model.prediction.gaussians, model.scaling.mean, model.scaling.scale
        factors = scale**2 if self.covariance_type == "diag" else scale[:, None] * scale
        means, covariances = found.means * scale + mean, found.covariances * factors
        own = gaussians(means, covariances, found.covariance_type)
        volume = model.scaling.log_volume
        history = [RoundInfo(entry["log_likelihood"] - volume) for entry in model.history]
        shared = MixtureShared(own, model.prediction.weights)  # type: ignore[arg-type]
        run = Run(shared, model.prediction.client_weights, history, len(history))
        run.converged = True  # all rounds that the budget is planned for
        return run  # type: ignore[return-value]

    def _checked_method(self) -> FederatedGMM:
        """Check the parameters and return the method."""
        smallest = {"n_components": 1, "max_iter": 0, "n_init": 1, "verbose": 0}
        for name, least in {**smallest, "verbose_interval": 1}.items():
            check_integer(name, getattr(self, name), least)
        self._check_clients()
        for name in ("tol", "reg_covar"):
            check_number(name, getattr(self, name), least=0)
        for name in ("shared_weights", "warm_start"):
            check_flag(name, getattr(self, name))
        check_choice("covariance_type", self.covariance_type, COVARIANCE_TYPES)
        check_choice("aggregation", self.aggregation, AGGREGATIONS)
        check_choice("init_params", self.init_params, STARTS)
        return FederatedGMM(
            components=int(self.n_components),
            covariance_type=self.covariance_type,
            aggregation=self.aggregation,
            shared_weights=bool(self.shared_weights),
            reg_covar=float(self.reg_covar),
            dtype=resolve_dtype(self.dtype),
        )

    def _given_start(self, rows: ClientRows) -> GivenStart:
        """Return the parts of the start that the user gave, checked."""
        m, d, kind = self.n_components, rows.columns, self.covariance_type
        parts: list[FloatArray | None] = [None, None, None]
        if self.weights_init is not None:
            weights = _given("weights_init", "weights", self.weights_init, (m,))
            if (weights < 0).any() or (weights > 1).any():
                raise ValueError(
                    "The parameter 'weights' should be in the range [0, 1], but got max value "
                    f"{weights.max():.5f}, min value {weights.min():.5f}; weights_init must be "
                    "non-negative."
                )
            if abs(weights.sum() - 1) > 1e-6:
                raise ValueError(
                    "The parameter 'weights' should be normalized, but got sum(weights) = "
                    f"{weights.sum():.5f}; weights_init must sum to 1."
                )
            parts[0] = weights
        if self.means_init is not None:
            parts[1] = _given("means_init", "means", self.means_init, (m, d))
        if self.precisions_init is not None:
            if kind == "identity":
                raise ValueError("precisions_init cannot be given with covariance_type='identity'.")
            shape = covariance_shape(kind, m, d)
            precisions = _given("precisions_init", f"{kind} precision", self.precisions_init, shape)
            parts[2] = inverse_of_precisions(precisions, kind)
        device = rows.device
        return GivenStart(*(p if p is None else torch.from_numpy(p).to(device) for p in parts))

    def _warm_start(self, rows: ClientRows) -> tuple[MixtureShared, Tensor]:
        """Return the parameters of the last fit; new clients start with the federation's weights."""
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
        known = {name: code for code, name in enumerate(self.clients_.tolist())}
        table = torch.from_numpy(self._weights_table()).to(rows.device)
        shared = MixtureShared(self._gaussians(rows.device), table[-1])
        return shared, table[[known.get(name, NO_CLIENT) for name in rows.names]]

    def _printer(self, start: int) -> list[OnRound]:
        """Return a callback that prints the log-likelihood of rounds; none if ``verbose`` is 0."""
        every = 1 if self.verbose > 1 else self.verbose_interval

        def show(number: int, info: RoundInfo) -> None:
            if number % every == 0 or number == 1:
                print(f"start {start}, round {number}: log-likelihood {info.log_likelihood:.6f}")

        return [show] if self.verbose else []

    def _set_fitted(self, run: MixtureRun, rows: ClientRows) -> None:
        """Set the fitted attributes."""
        shared = run.shared
        # set_params may change covariance_type, so the type of the fitted arrays is kept
        self._kind: CovarianceType = shared.gaussians.covariance_type
        personal = shared.weights.expand_as(run.personal) if self.shared_weights else run.personal
        self.means_ = shared.gaussians.means.cpu().numpy().copy()
        self.covariances_ = shared.gaussians.covariances.cpu().numpy().copy()
        self.precisions_cholesky_ = shared.gaussians.precisions_cholesky.cpu().numpy().copy()
        whiteners = self.precisions_cholesky_
        matrices = self._kind in ("full", "tied")
        # Σ⁻¹ = W Wᵀ
        self.precisions_ = whiteners @ whiteners.swapaxes(-1, -2) if matrices else whiteners**2
        self.client_weights_ = personal.cpu().numpy().copy()
        self.weights_ = shared.weights.cpu().numpy().copy()
        self.clients_ = array_of_names(rows.names)
        finished = run.history[len(run.history) - run.round :]  # without an earlier fit
        self.lower_bounds_ = [info.log_likelihood for info in finished]
        self.lower_bound_ = _last_bound(run)
        self.n_iter_ = run.round
        self.converged_ = run.converged
        self._warned = False

    def _warn(self, run: MixtureRun) -> None:
        def warn(message: str, category: type[Warning]) -> None:
            warnings.warn(message, category, stacklevel=5)  # the line that calls fit

        if run.interrupted:
            warn(
                f"fit was interrupted; the best parameters so far are kept (round {self.n_iter_}).",
                RuntimeWarning,
            )
        elif not run.converged and self.tol > 0 and self.max_iter > 0:
            warn(
                "Best performing initialization did not converge. Try different init parameters, or "
                "increase max_iter, tol, or check for degenerate data.",
                ConvergenceWarning,
            )
        if run.history and run.history[-1].empty_components:
            warn(
                f"Component(s) {list(run.history[-1].empty_components)} have no rows left and keep "
                "their last parameters; use fewer components.",
                ConvergenceWarning,
            )

    # ------------------------------------------------------------------ rows

    def _rows_to_fit(self, X: Rows, clients: Ids) -> ClientRows:
        """Return checked rows, and record their columns."""
        matrices, names, clients = self._read(X, clients, reset=True)
        if names is not None:
            unnamed = [name for name in names if is_missing(name)]
            if unnamed:
                raise ValueError(f"{unnamed[0]!r} cannot name a client; fit needs a name for each.")
            codes = np.repeat(np.arange(len(names)), [len(matrix) for matrix in matrices])
        elif clients is None:
            codes, names = np.zeros(len(matrices[0]), dtype=np.int64), [0]
        else:
            codes, names = encode_clients(clients, len(matrices[0]))
        return self._client_rows(matrices, codes, names)

    def _rows_to_score(self, X: Rows, clients: Ids) -> ClientRows:
        """Return checked rows whose codes index :meth:`_weights_table`."""
        check_is_fitted(self, "means_")
        matrices, names, clients = self._read(X, clients, reset=False)
        if names is not None:
            clients = np.repeat(array_of_names(names), [len(matrix) for matrix in matrices])
        elif clients is None and len(self.clients_) > 1 and not self.shared_weights:
            self._warn_without_clients()
        codes = self._codes(clients, sum(map(len, matrices)))
        codes = np.where(codes == NO_CLIENT, len(self.clients_), codes)
        return self._client_rows(matrices, codes, [*self.clients_.tolist(), None])

    def _read(
        self, X: Rows, clients: Ids, *, reset: bool
    ) -> tuple[list[Matrix], list[Hashable] | None, ArrayLike | None]:
        """Return matrices, the client of each matrix if ``X`` names its clients, and ids of rows.

        ``reset`` records the columns; otherwise they must equal those of the fit.
        """
        pairs = as_pairs(X)
        if pairs is None:
            matrix, clients = self._split_clients(
                X, clients, reset=reset, dtype=[np.float64, np.float32], ensure_all_finite=False
            )
            return [matrix], None, clients
        if clients is not None or self.client_column is not None:
            given = "pass clients" if clients is not None else "set client_column"
            raise ValueError(f"X already names its clients; do not {given} as well.")
        matrices, names = matrices_of_pairs(pairs)
        count, columns = matrices[0].shape[1], columns_of_pairs(pairs)
        if reset:
            self.n_features_in_ = count
            self.__dict__.pop("feature_names_in_", None)
            if columns is not None:
                self.feature_names_in_ = np.array(columns, dtype=object)
            return matrices, names, None
        if count != self.n_features_in_:
            raise ValueError(
                f"X has {counted(count, 'column')}, but the model was fitted on {self.n_features_in_}."
            )
        fitted = getattr(self, "feature_names_in_", None)
        if columns is not None and fitted is not None and columns != fitted.tolist():
            raise ValueError(
                f"X has the columns {columns}, but the model was fitted on {fitted.tolist()}."
            )
        return matrices, names, None

    def _client_rows(
        self, matrices: list[Matrix], codes: NDArray[np.int64], names: list[Hashable]
    ) -> ClientRows:
        """Return finite rows on the device."""
        columns = getattr(self, "feature_names_in_", None)
        if columns is not None and self.client_column is not None:
            columns = columns.tolist()
            del columns[column_index(columns, len(columns), self.client_column)]
        rows = checked_rows(matrices, codes, names, columns, resolve_dtype(self.dtype))
        return rows.to(resolve_device(self.device))

    def _codes(self, clients: Ids, rows: int) -> NDArray[np.int64]:
        """Return the position in ``clients_`` of each row's client, or ``NO_CLIENT``."""
        return codes_of_known_clients(self._known_clients(clients), rows, self.clients_.tolist())

    # ------------------------------------------------------------------ the fitted mixture

    def score_samples(self, X: Rows, *, client: Id = None, clients: Ids = None) -> FloatArray:
        """Return the log-likelihood of every row, ``(n_rows,)``.

        ``client`` is one known id for all rows, ``clients`` is one per row. Rows without an id use the
        federation's ``weights_``.
        """
        return self._evaluate(X, client, clients, lambda log_joint: log_joint.logsumexp(-1))

    def score(self, X: Rows, y: object = None, *, client: Id = None, clients: Ids = None) -> float:
        """Return the mean log-likelihood of the rows."""
        return float(self.score_samples(X, client=client, clients=clients).mean())

    def predict(self, X: Rows, *, client: Id = None, clients: Ids = None) -> NDArray[np.int64]:
        """Return the most likely component of every row, ``(n_rows,)``."""
        return self._evaluate(X, client, clients, lambda log_joint: log_joint.argmax(-1))

    def predict_proba(self, X: Rows, *, client: Id = None, clients: Ids = None) -> FloatArray:
        """Return the responsibilities of the components for every row, ``(n_rows, n_components)``."""
        return self._evaluate(X, client, clients, lambda joint: responsibilities(joint)[0])

    def predict_log_proba(self, X: Rows, *, client: Id = None, clients: Ids = None) -> FloatArray:
        """Return the logarithms of :meth:`predict_proba`, also where those are too small for a float."""
        return self._evaluate(X, client, clients, lambda log_joint: log_joint.log_softmax(-1))

    def _evaluate(
        self, X: Rows, client: Id, clients: Ids, reduce: Callable[[Tensor], Tensor]
    ) -> NDArray[Any]:
        """Return :meth:`_reduced` of rows and their clients."""
        return self._reduced(self._rows_to_score(X, chosen_clients(client, clients)), reduce)

    def _reduced(self, rows: ClientRows, reduce: Callable[[Tensor], Tensor]) -> NDArray[Any]:
        """Return ``reduce`` of ``log π_c(m) + log N(x; μ_m, Σ_m)``, ``(n_rows, ...)``."""
        shared, dtype = self._gaussians(rows.device), resolve_dtype(self.dtype)
        log_pi = torch.log(torch.from_numpy(self._weights_table()).to(rows.device))
        found: dict[int, NDArray[Any]] = {}

        def visit(_: None, block: Block) -> None:
            x, codes, place = rows.read(block)
            densities = log_densities(residuals(x, shared.means, dtype), shared)
            found[place.start] = reduce(densities + log_pi[codes]).cpu().numpy()

        accumulate(rows.blocks(len(self.weights_)), lambda: None, visit, rows.device)
        return np.concatenate([found[start] for start in sorted(found)])

    def bic(self, X: Rows, *, client: Id = None, clients: Ids = None) -> float:
        """Return the Bayesian information criterion on rows; lower is better."""
        return self._criterion(X, client, clients, lambda rows: float(np.log(rows)))

    def aic(self, X: Rows, *, client: Id = None, clients: Ids = None) -> float:
        """Return the Akaike information criterion on rows; lower is better."""
        return self._criterion(X, client, clients, lambda _: 2.0)

    def _criterion(
        self, X: Rows, client: Id, clients: Ids, penalty: Callable[[int], float]
    ) -> float:
        """Return ``-2 log L + parameters · penalty(rows)``; each client's own weights count."""
        rows = self._rows_to_score(X, chosen_clients(client, clients))
        scores = self._reduced(rows, lambda log_joint: log_joint.logsumexp(-1))
        weight_sets = 1 if self.shared_weights else len(torch.unique(rows.codes))
        m, d = self.means_.shape
        parameters = covariance_parameters(self._kind, m, d) + m * d + weight_sets * (m - 1)
        return float(-2.0 * scores.sum() + parameters * penalty(len(scores)))

    def sample(
        self, n_samples: int = 1, *, client: Id = None, clients: Ids = None
    ) -> tuple[FloatArray, NDArray[np.int64]]:
        """Draw rows and return them with their components.

        ``client`` is one id for all rows, ``clients`` is one per row; without either the rows are the
        federation's. They have no client column.
        """
        check_is_fitted(self, "means_")
        if n_samples < 1:
            raise ValueError(f"Invalid value for 'n_samples': {n_samples}; it must be at least 1.")
        check_integer("n_samples", n_samples, 1)
        clients = chosen_clients(client, clients)
        generator = check_random_state(self.random_state)
        if clients is None or np.ndim(clients) == 0:
            weights = self._weights_table()[self._codes(clients, 1)[0]]
            counts = generator.multinomial(n_samples, weights / weights.sum())
            labels = np.repeat(np.arange(len(weights)), counts)
        else:
            entries = len(np.asarray(clients))
            if entries != n_samples:
                raise ValueError(
                    f"clients has {counted(entries, 'entry', 'entries')}, but n_samples={n_samples}; "
                    "give one id for all rows, or one per row."
                )
            weights = self._weights_table()[self._codes(clients, n_samples)]
            draws = generator.uniform(size=(n_samples, 1)) * weights.sum(-1, keepdims=True)
            labels = (draws >= weights.cumsum(-1)).sum(-1).clip(max=weights.shape[1] - 1)
        noise = torch.from_numpy(generator.standard_normal((len(labels), self.means_.shape[1])))
        return _transform_noise(noise, labels, self._gaussians(torch.device("cpu"))), labels

    def _gaussians(self, device: torch.device) -> Gaussians:
        fitted = (self.means_, self.covariances_, self.precisions_cholesky_)
        means, covariances, whiteners = (torch.from_numpy(array).to(device) for array in fitted)
        return Gaussians(means, covariances, whiteners, self._kind)

    def _weights_table(self) -> FloatArray:
        """Return the clients' weights and, last, the federation's, ``(C + 1, M)``."""
        return np.vstack([self.client_weights_, self.weights_])


def _given(name: str, what: str, value: ArrayLike, shape: tuple[int, ...]) -> FloatArray:
    """Return a checked part of the start; the error about its shape is worded as scikit-learn's."""
    if np.shape(value) != shape:
        raise ValueError(
            f"The parameter '{what}' should have the shape of {shape}, but got {np.shape(value)}; "
            f"check {name}."
        )
    return given_array(name, value, shape)


def _last_bound(run: MixtureRun) -> float:
    """Return the last mean log-likelihood of a run; minus infinity if no round was finished."""
    return run.history[-1].log_likelihood if run.history else -np.inf


def _transform_noise(noise: Tensor, labels: NDArray[np.int64], shared: Gaussians) -> FloatArray:
    """Turn standard normal rows ``z`` ``(n, d)`` into rows of their components: ``μ + z W⁻¹``."""
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
