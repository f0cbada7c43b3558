"""Modules of one's own: by vmap, in a loop, and as plain modules, one client and learner at a time."""

from __future__ import annotations

import copy
import threading
import warnings
from contextlib import nullcontext

import pytest
import torch
from torch import nn

from fedgmm.core.params import is_statistic, stack
from fedgmm.nets.modules import ModuleNetwork
from fedgmm.nets.networks import network
from fedgmm.nets.sgd import SGD, Step, TrainingRows, batch_gradients, plan_batches, train_local

STEPS, COLUMNS, CLASSES = 4, 3, 3


class Recurrent(nn.Module):
    """A recurrent layer, and the logits of its last step."""

    def __init__(self, kind=nn.LSTM):
        super().__init__()
        self.layer, self.out = kind(COLUMNS, 5, batch_first=True), nn.Linear(5, CLASSES)

    def forward(self, x):
        return self.out(self.layer(x)[0][:, -1])


class Attending(nn.Module):
    def __init__(self, dropout=0.0):
        super().__init__()
        self.into, self.out = nn.Linear(COLUMNS, 4), nn.Linear(4, CLASSES)
        self.layer = nn.MultiheadAttention(4, 2, dropout=dropout, batch_first=True)

    def forward(self, x):
        x = self.into(x)
        return self.out(self.layer(x, x, x)[0].mean(1))


class Transformer(nn.Module):
    def __init__(self):
        super().__init__()
        self.into, self.out = nn.Linear(COLUMNS, 4), nn.Linear(4, CLASSES)
        self.layer = nn.TransformerEncoderLayer(4, 2, 8, batch_first=True)

    def forward(self, x):
        return self.out(self.layer(self.into(x)).mean(1))


class Flat(nn.Module):
    """Two layers; subclasses do with the rows what vmap cannot."""

    def __init__(self):
        super().__init__()
        self.layer, self.out = nn.Linear(STEPS * COLUMNS, 6), nn.Linear(6, CLASSES)

    def forward(self, x):
        return self.out(torch.tanh(self.layer(self.seen(x.flatten(1)))))

    def seen(self, x):
        return x


class Branching(Flat):
    def seen(self, x):
        return 2 * x if x[0].sum() >= 0 else x + 1  # the same for the rows of a client


class Reading(Flat):
    def seen(self, x):
        return x * float(self.out.bias.detach().abs().max().item())


class Writing(Flat):
    def seen(self, x):
        x *= 2
        x[:, 0] += 1
        return x


class Buffered(Flat):
    """Buffers of every kind, a frozen layer, and a number that is no parameter."""

    def __init__(self):
        super().__init__()
        self.layer.requires_grad_(False)
        self.register_buffer("scale", torch.rand(STEPS * COLUMNS))
        self.register_buffer("shift", torch.rand(1), persistent=False)
        self.register_buffer("order", torch.randperm(STEPS * COLUMNS))

    def seen(self, x):
        return (x * self.scale + self.shift)[:, self.order]


class Normalised(nn.Module):
    def __init__(self, momentum=0.1):
        super().__init__()
        self.layer, self.norm = nn.Linear(STEPS * COLUMNS, 6), nn.BatchNorm1d(6, momentum=momentum)
        self.out = nn.Linear(6, CLASSES)

    def forward(self, x):
        return self.out(torch.relu(self.norm(self.layer(x.flatten(1)))))


class Tied(Flat):
    """Two layers with one weight."""

    def __init__(self):
        super().__init__()
        size = STEPS * COLUMNS
        self.first, self.second = nn.Linear(size, size), nn.Linear(size, size)
        self.second.weight = self.first.weight

    def seen(self, x):
        return self.second(torch.tanh(self.first(x)))


VECTORISED = {"flat": Flat, "buffered": Buffered, "writing": Writing, "tied": Tied}
LOOPED = {
    "lstm": Recurrent,
    "gru": lambda: Recurrent(nn.GRU),
    "transformer": Transformer,
    "branching": Branching,
    "reading": Reading,
    "normalised": Normalised,
}
PARTLY = {"attention": Attending, "attention, dropout": lambda: Attending(0.3)}
ALL = VECTORISED | LOOPED | PARTLY


def net_of(kind):
    return network(ALL[kind], (STEPS, COLUMNS), CLASSES)


def drawn(net, clients, learners, dtype=torch.float64, seed=0):
    generator = torch.Generator().manual_seed(seed)
    own = [stack([net.initial(generator) for _ in range(learners)]) for _ in range(clients)]
    return {name: value.to(dtype) for name, value in stack(own).items()}


def plain(net, params, *index):
    """A plain module with the parameters of one client and learner, and the network's constants."""
    module = net.factory().to(next(iter(params.values())).dtype)
    values = {**net.constants, **{name: value[index] for name, value in params.items()}}
    with torch.no_grad():
        for name, value in [*module.named_parameters(), *module.named_buffers()]:
            value.copy_(values[name])
    return module


def quiet(kind):
    """The one warning of a module that vmap cannot evaluate."""
    return nullcontext() if kind in VECTORISED else pytest.warns(UserWarning, match="slower")


# ---------------------------------------------------------------------- against plain modules


@pytest.mark.parametrize("kind", ALL)
def test_logits_are_those_of_plain_modules(kind):
    net, rows = net_of(kind), torch.randn(2, 5, STEPS, COLUMNS, dtype=torch.float64)
    params, before = drawn(net, 2, 2), rows.clone()
    with quiet(kind) if kind != "normalised" else nullcontext():
        found = net.logits(params, rows)
    assert found.shape == (2, 5, 2, CLASSES)
    assert torch.equal(rows, before)
    for client in range(2):
        for learner in range(2):
            module = plain(net, params, client, learner).eval()
            expected = module(rows[client].clone())
            torch.testing.assert_close(found[client, :, learner], expected, rtol=1e-10, atol=1e-10)
    shared = net.logits({name: value[0] for name, value in params.items()}, rows[0])
    torch.testing.assert_close(shared, found[0], rtol=1e-10, atol=1e-10)


@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float32, 1e-6), (torch.float64, 1e-10)])
@pytest.mark.parametrize("kind", [*VECTORISED, "attention"])
def test_vmap_and_the_loop_agree(kind, dtype, tolerance):
    """Logits and gradients, of batches with padding."""
    rows = torch.randn(9, STEPS, COLUMNS, dtype=dtype)
    labels = torch.arange(9) % CLASSES
    mask = torch.tensor([[1, 1, 1, 1], [1, 1, 0, 0]])
    step = Step(torch.tensor([[0, 1, 2, 3], [4, 5, 0, 0]]), mask)
    weights = torch.rand(9, 2, dtype=dtype)
    results = []
    for reason in (None, "a test"):
        net = net_of(kind)
        net._reasons.update({True: reason, False: reason})
        params = drawn(net, 2, 2, dtype)
        gradients, _ = batch_gradients(net, params, TrainingRows(rows, labels, weights), step)
        logits = net.logits(params, rows[:8].reshape(2, 4, STEPS, COLUMNS), training=True)
        results.append({**gradients, "logits": logits})
    for name, value in results[0].items():
        torch.testing.assert_close(results[1][name], value, rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize("kind", [*VECTORISED, "lstm", "branching", "reading", "normalised"])
def test_training_is_that_of_torch(kind):
    """Momentum and weight decay, clients of different sizes, a hand-written loop per client."""
    net, sizes = net_of(kind), (7, 1, 4)
    rows = torch.randn(12, STEPS, COLUMNS, dtype=torch.float64)
    labels, offsets = torch.arange(12) % CLASSES, torch.tensor([0, 7, 8, 12])
    order, options = torch.arange(12), SGD(lr=0.2, momentum=0.5, weight_decay=0.01)
    even = net.hints.even_batches
    assert even == (kind == "normalised")
    plan = plan_batches(offsets, torch.arange(3), [order], 3, even)
    params = drawn(net, 3, 1)
    start = {name: value[plan.clients] for name, value in params.items()}
    with quiet(kind):
        found = train_local(net, start, TrainingRows(rows, labels), plan, options)
    for place, client in enumerate(plan.clients.tolist()):
        if kind == "normalised" and sizes[client] == 1:
            continue  # torch refuses to normalise one row
        module = plain(net, params, client, 0).train()
        trained = [value for value in module.parameters() if value.requires_grad]
        optimiser = torch.optim.SGD(trained, lr=0.2, momentum=0.5, weight_decay=0.01)
        for step in plan.steps:
            if place >= len(step.rows):
                break
            own = step.rows[place][step.mask[place].bool()]
            optimiser.zero_grad()
            nn.functional.cross_entropy(module(rows[own].clone()), labels[own]).backward()
            optimiser.step()
        for name, value in module.named_parameters():
            if value.requires_grad:
                torch.testing.assert_close(
                    found[name][place, 0], value.detach(), rtol=1e-10, atol=1e-10
                )
    for value in found.values():
        assert torch.isfinite(value).all()


def test_padding_does_not_reach_the_statistics_of_a_batch():
    """A padding row is a row of another client, and a loop must not show it to the module."""
    net = net_of("normalised")
    rows = torch.randn(9, STEPS, COLUMNS, dtype=torch.float64)
    other = rows.clone()
    other[0] = 100.0
    step = Step(torch.tensor([[4, 5, 0]]), torch.tensor([[1, 1, 0]]))
    results = []
    for values in (rows, other):
        labels = torch.arange(9) % CLASSES
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            results.append(
                batch_gradients(net, drawn(net, 1, 1), TrainingRows(values, labels), step)
            )
    for one, same in zip(*results, strict=True):
        for name, value in one.items():
            assert torch.equal(value, same[name])


# ---------------------------------------------------------------------- batch normalisation


@pytest.mark.parametrize("momentum", [0.1, None])
def test_running_statistics_are_a_mean_over_batches_and_then_move(momentum):
    net = ModuleNetwork(lambda: Normalised(momentum), (STEPS, COLUMNS), CLASSES)
    params = {name: value[0] for name, value in drawn(net, 1, 1).items()}
    assert {name for name in params if is_statistic(name)} == {
        "norm.running_mean",
        "norm.running_var",
    }
    x = torch.randn(20, STEPS, COLUMNS, dtype=torch.float64)
    hidden = x.flatten(1) @ params["layer.weight"][0].mT + params["layer.bias"][0]
    with pytest.warns(UserWarning, match="slower"):
        _, first = net.forward(params, x, training=True, number=1)
    torch.testing.assert_close(first["norm.running_mean"][0], hidden.mean(0))
    torch.testing.assert_close(first["norm.running_var"][0], hidden.var(0))
    _, later = net.forward(params, x, training=True, number=100)
    share = momentum or 0.01
    expected = torch.lerp(params["norm.running_var"][0], hidden.var(0), share)
    torch.testing.assert_close(later["norm.running_var"][0], expected)


def test_one_row_leaves_the_variance():
    net = net_of("normalised")
    params = {name: value[0] for name, value in drawn(net, 1, 1).items()}
    with pytest.warns(UserWarning, match="slower"):
        logits, found = net.forward(params, torch.randn(1, STEPS, COLUMNS).double(), training=True)
    assert logits.shape == (1, 1, CLASSES)
    assert torch.equal(found["norm.running_var"], params["norm.running_var"])
    assert not torch.equal(found["norm.running_mean"], params["norm.running_mean"])


def frozen_norm():
    module = Normalised()
    module.norm.requires_grad_(False)
    return module


def evaluating_norm():
    module = Normalised()
    module.norm.eval()
    return module


@pytest.mark.parametrize("factory", [frozen_norm, evaluating_norm])
def test_a_frozen_normalisation_keeps_its_statistics(factory):
    net = ModuleNetwork(factory, (STEPS, COLUMNS), CLASSES)
    assert "norm.running_mean" in net.constants
    params = drawn(net, 1, 2)
    logits, found = net.forward(params, torch.randn(1, 4, STEPS, COLUMNS).double(), training=True)
    assert not found
    assert torch.isfinite(logits).all()
    assert all(int(v) == 0 for n, v in net.constants.items() if n.endswith("tracked"))


def test_a_module_that_was_left_for_evaluation_is_trained():
    net = ModuleNetwork(lambda: Normalised().eval(), (STEPS, COLUMNS), CLASSES)
    assert "norm.running_mean" in net.parameter_shapes


# ---------------------------------------------------------------------- constants and draws


def test_frozen_layers_and_buffers_are_drawn_once():
    net = net_of("buffered")
    assert set(net.constants) == {"layer.weight", "layer.bias", "scale", "shift", "order"}
    assert set(net.parameter_shapes) == {"out.weight", "out.bias"}
    assert net.constants["order"].dtype == torch.int64
    generator = torch.Generator().manual_seed(0)
    first, second = net.initial(generator), net.initial(generator)
    assert not torch.equal(first["out.weight"], second["out.weight"])
    assert torch.equal(net._module.out.weight, first["out.weight"])  # one call of the factory
    again = net_of("buffered")
    assert again.fingerprint == net.fingerprint
    other = network(Buffered, (STEPS, COLUMNS), CLASSES, seed=1)
    assert other.fingerprint != net.fingerprint


def test_evaluation_for_prediction_does_not_hinder_training():
    net = net_of("buffered")
    params = drawn(net, 1, 1)
    with torch.inference_mode():
        net.logits(params, torch.randn(1, 2, STEPS, COLUMNS).double())
    params["out.weight"].requires_grad_()
    net.logits(params, torch.randn(1, 2, STEPS, COLUMNS).double(), training=True).sum().backward()


def test_dropout_of_a_loop_is_seeded_and_differs_between_learners():
    net = net_of("transformer")
    one = net.initial(torch.Generator().manual_seed(0))
    params, x = stack([one, one]), torch.randn(6, STEPS, COLUMNS)
    found = []
    for _ in range(2):
        with torch.random.fork_rng(), warnings.catch_warnings():
            warnings.simplefilter("ignore")
            torch.manual_seed(3)
            found.append(net.logits(params, x, training=True))
    assert torch.equal(found[0], found[1])
    assert not torch.equal(found[0][:, 0], found[0][:, 1])


def test_trials_leave_the_random_numbers_alone():
    before = torch.random.get_rng_state()
    net = net_of("flat")
    net.check(torch.zeros(3, STEPS, COLUMNS))
    assert torch.equal(before, torch.random.get_rng_state())


def test_one_note_on_speed():
    net = net_of("lstm")
    with pytest.warns(UserWarning, match="slower") as notes:
        net.check(torch.zeros(3, STEPS, COLUMNS))
    assert len(notes) == 1
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        net.logits(drawn(net, 1, 1), torch.zeros(1, 2, STEPS, COLUMNS).double())


@pytest.mark.parametrize("kind", ["flat", "lstm"])
def test_threads_do_not_share_a_module(kind):
    net = net_of(kind)
    params, x = drawn(net, 1, 2), torch.randn(1, 50, STEPS, COLUMNS).double()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        expected, found = net.logits(params, x), []

    def evaluate():
        found.extend([net.logits(params, x) for _ in range(20)])

    threads = [threading.Thread(target=evaluate) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(found) == 80
    for one in found:
        torch.testing.assert_close(one, expected)


def test_a_network_that_was_used_can_be_copied():
    net = net_of("flat")
    params, x = drawn(net, 1, 1), torch.randn(1, 3, STEPS, COLUMNS).double()
    expected = net.logits(params, x)
    assert torch.equal(copy.deepcopy(net).logits(params, x), expected)


class MixesRows(Flat):
    def seen(self, x):
        return x - x.mean(0)


def test_rows_that_depend_on_each_other_are_seen_without_padding():
    net = ModuleNetwork(MixesRows, (STEPS, COLUMNS), CLASSES)
    params, x = drawn(net, 1, 1), torch.randn(1, 5, STEPS, COLUMNS).double()
    with pytest.warns(UserWarning, match="other rows"):
        found, _ = net.forward(params, x, training=True, counts=torch.tensor([3]))
    expected = plain(net, params, 0, 0)(x[0, :3])
    torch.testing.assert_close(found[0, :3, 0], expected.detach())


# ---------------------------------------------------------------------- integers


class Tokens(nn.Module):
    integer_inputs = True

    def __init__(self):
        super().__init__()
        self.words, self.out = nn.Embedding(20, 4), nn.Linear(4, CLASSES)

    def forward(self, x):
        assert x.dtype == torch.int64
        return self.out(self.words(x).mean(1))


class UndeclaredTokens(Tokens):
    integer_inputs = False

    def forward(self, x):
        return self.out(self.words(x).mean(1))


def test_token_ids_stay_integers():
    net = ModuleNetwork(Tokens, (STEPS,), CLASSES)
    x = torch.randint(20, (2, 5, STEPS))
    net.check(x[0])
    params = drawn(net, 2, 2)
    found = net.logits(params, x.double())
    module = plain(net, params, 1, 1)
    torch.testing.assert_close(found[1, :, 1], module(x[1]).detach())

    def factory():
        return UndeclaredTokens()

    factory.integer_inputs = True
    ModuleNetwork(factory, (STEPS,), CLASSES).check(x[0].double())


def test_token_ids_that_are_no_integers_are_refused():
    with pytest.raises(ValueError, match="integers"):
        ModuleNetwork(Tokens, (STEPS,), CLASSES).check(torch.rand(6, STEPS))
    with pytest.raises(ValueError, match="integer_inputs = True"):
        ModuleNetwork(UndeclaredTokens, (STEPS,), CLASSES).check(torch.zeros(6, STEPS))
    net, unknown = ModuleNetwork(Tokens, (STEPS,), CLASSES), torch.zeros(9, STEPS)
    unknown[7, 1] = 20  # a single token that the module does not know
    with pytest.raises(ValueError, match=r"index out of range.* from 0 to 20"):
        net.check(unknown)
    with pytest.raises(ValueError, match="from 0 to 20"):
        net.logits(drawn(net, 1, 1), unknown[None].double())


# ---------------------------------------------------------------------- bad modules


class Returns(nn.Module):
    def __init__(self, change):
        super().__init__()
        self.out, self.change = nn.Linear(5, 2), change

    def forward(self, x):
        return self.change(self.out(x))


@pytest.mark.parametrize(
    ("factory", "message"),
    [
        (nn.Flatten, "no parameters"),
        (lambda: nn.Linear(5, 2).requires_grad_(False), "all are frozen"),
        (lambda: nn.Linear(5, 7), r"\(n, 2\)"),
        (lambda: nn.Linear(6, 2), "cannot read"),
        (lambda: nn.LazyLinear(2), "lazy"),
        (lambda: Returns(lambda x: (x, x)), "tuple"),
        (lambda: Returns(lambda x: x.mT), r"\(n, 2\)"),
        (lambda: Returns(lambda x: x[:, 0]), r"\(n, 2\)"),
        (lambda: Returns(lambda x: x / 0.0), "NaN"),
        (lambda: Returns(torch.Tensor.detach), "depend"),
    ],
)
def test_a_module_that_cannot_be_trained_is_refused(factory, message):
    with pytest.raises(ValueError, match=message):
        network(factory, (5,), 2).check(torch.ones(6, 5))


def test_a_factory_must_make_a_module():
    with pytest.raises(TypeError, match="Module"):
        network(lambda: 3, (5,), 2).check(torch.ones(6, 5))


class Counting(Flat):
    """Counts its calls, in integers."""

    def __init__(self, dtype=torch.int64):
        super().__init__()
        self.register_buffer("calls", torch.zeros((), dtype=dtype))

    def seen(self, x):
        self.calls += 1
        return x + 0 * self.calls


def test_a_buffer_that_learns_is_refused():
    net = ModuleNetwork(lambda: Counting(torch.float32), (STEPS, COLUMNS), CLASSES)
    with pytest.raises(ValueError, match="'calls'"):
        net.check(torch.ones(6, STEPS, COLUMNS))


def test_a_counter_stays_as_it_was():
    net = ModuleNetwork(Counting, (STEPS, COLUMNS), CLASSES)
    net.check(torch.ones(6, STEPS, COLUMNS))
    net.logits(drawn(net, 2, 2), torch.ones(2, 3, STEPS, COLUMNS).double(), training=True)
    assert float(net.constants["calls"]) == 0


class ReadsItsWeights(nn.Module):
    """A module whose constructor reads its own weights."""

    def __init__(self):
        super().__init__()
        self.out = nn.Linear(5, 2)
        self.size = float(self.out.weight.detach().abs().max())

    def forward(self, x):
        return self.out(x) / self.size


def test_a_module_whose_constructor_reads_its_weights_has_shapes():
    net = network(ReadsItsWeights, (5,), 2)
    assert net.parameter_shapes == {"out.weight": (2, 5), "out.bias": (2,)}
