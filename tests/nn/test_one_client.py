"""The layers of one client on a CPU: the same numbers as torch's own, with less memory traffic."""

import pytest
import torch
from torch import Tensor, nn

from offbeat import Problem
from offbeat.core import Batch
from offbeat.engines.local import TaskGradient
from offbeat.nn import layers
from offbeat.nn.layers import (
    ChannelsLastConv2d,
    ChannelsLastMaxPool2d,
    FactoredLinear,
    FasterModule,
    PoolingFirst,
    SameLayoutDropout,
    call_with,
    collect_factors,
    for_one_client,
    with_channels_last,
    with_keyed_dropout,
    with_matmul_convolutions,
)
from offbeat.nn.problem import Precision, cross_entropies

POOLS = [
    nn.MaxPool2d(2),
    nn.MaxPool2d(3, 2),
    nn.MaxPool2d(3, 2, 1),
    nn.MaxPool2d((2, 3), (1, 2)),
    nn.MaxPool2d(2, dilation=2),
    nn.MaxPool2d(2, ceil_mode=True),
]


@pytest.mark.parametrize("pool", POOLS, ids=str)
@pytest.mark.parametrize("layout", [torch.contiguous_format, torch.channels_last])
def test_max_pooling_gives_the_bits_of_torch_and_keeps_the_layout(
    pool: nn.MaxPool2d, layout: torch.memory_format
) -> None:
    own = for_one_client(pool)
    assert type(own) is ChannelsLastMaxPool2d
    # rounded, so that some windows have their maximum twice
    images = (3 * torch.randn(4, 5, 11, 9)).round().contiguous(memory_format=layout).requires_grad_()
    found = []
    for module in (pool, own):
        pooled = module(images)
        weights = torch.arange(float(pooled.numel())).view(pooled.shape)
        found.append((pooled, torch.autograd.grad((pooled * weights).sum(), images)[0]))
    for expected, got in zip(*found, strict=True):
        assert torch.equal(expected, got)
        assert got.is_contiguous(memory_format=layout)


@pytest.mark.parametrize("pool", POOLS, ids=str)
@pytest.mark.parametrize("layout", [torch.contiguous_format, torch.channels_last])
@pytest.mark.parametrize("inplace", [False, True])
def test_relu_after_max_pooling_gives_the_bits_of_relu_before_it(
    pool: nn.MaxPool2d, layout: torch.memory_format, inplace: bool
) -> None:
    module = nn.Sequential(nn.Identity(), nn.ReLU(inplace), pool, nn.MaxPool2d(1), nn.Flatten())
    own = for_one_client(module)
    assert type(own) is PoolingFirst
    # rounded, so that some windows have their maximum twice
    images = (2 * torch.randn(4, 3, 13, 11)).round().contiguous(memory_format=layout)
    images[1, :, 3:9, 3:8] = -1.0  # windows without a positive number
    images[2, 0, 6, 6] = torch.nan
    images.requires_grad_()
    found = []
    for each in (module, own):
        outputs = each(images.clone())
        weights = torch.arange(float(outputs.numel())).view(outputs.shape)
        found.append((outputs, torch.autograd.grad((outputs * weights).sum(), images)[0]))
    for expected, got in zip(*found, strict=True):
        torch.testing.assert_close(got, expected, rtol=0, atol=0, equal_nan=True)
    assert (found[0][0] == 0).any()


def test_relu_stays_before_max_pooling_where_what_it_returns_is_observed() -> None:
    shapes: list[torch.Size] = []
    watched = nn.ReLU()
    watched.register_forward_hook(lambda layer, inputs, outputs: shapes.append(outputs.shape))
    images = torch.randn(2, 3, 8, 6)
    for module in (nn.Sequential(watched, nn.MaxPool2d(2)), nn.Sequential(nn.ReLU(), nn.MaxPool2d(2))):
        own = for_one_client(module)
        assert torch.equal(own(images), module(images))
        assert torch.equal(own[0](images), images.relu())
    assert shapes == [images.shape] * 3
    indices = nn.Sequential(nn.ReLU(), nn.MaxPool2d(2, return_indices=True))
    assert all(map(torch.equal, for_one_client(indices)(images), indices(images)))


def _channels_last(shape: tuple[int, ...]) -> Tensor:
    return torch.randn(shape).contiguous(memory_format=torch.channels_last)


INPUTS = {
    "rows": torch.randn(6, 40),
    "channels first": torch.randn(4, 5, 11, 9),
    "channels last": _channels_last((4, 5, 11, 9)),
    "transposed": torch.randn(7, 3, 5).transpose(0, 2),
    "every second": torch.randn(8, 30)[::2, ::3],
    "repeated": torch.randn(1, 30).expand(4, 30),
    "none": torch.randn(0, 30),
    "float64": torch.randn(6, 40, dtype=torch.float64),
    "bfloat16": torch.randn(6, 40).bfloat16(),
}


@pytest.mark.parametrize("name", INPUTS)
@pytest.mark.parametrize("p", [0.0, 0.01, 0.25, 0.5, 1.0])
@pytest.mark.parametrize("key", [0, 5, 2**40 + 3, 2**61])
def test_dropout_drops_the_same_elements_whatever_their_layout(name: str, p: float, key: int) -> None:
    plain = with_keyed_dropout(nn.Dropout(p))
    plain.get_buffer("key").fill_(key)
    own = for_one_client(plain)
    own.register_buffer("key", plain.get_buffer("key").clone())  # else they share one
    assert type(own) is SameLayoutDropout
    inputs = INPUTS[name].detach().requires_grad_()
    upstream = torch.arange(float(inputs.numel()), dtype=inputs.dtype).view(inputs.shape)
    for _ in range(3):  # the key moves on
        expected, found = plain(inputs), own(inputs)
        assert torch.equal(expected, found)
        grads = [torch.autograd.grad(outputs, inputs, upstream)[0] for outputs in (expected, found)]
        assert torch.equal(*grads)
    assert torch.equal(plain.get_buffer("key"), own.get_buffer("key"))


def test_the_mask_of_dropout_keeps_channels_last() -> None:
    own = for_one_client(with_keyed_dropout(nn.Dropout(0.5)))
    images = _channels_last((4, 5, 6, 7)).requires_grad_()
    dropped = own(images)
    (grad,) = torch.autograd.grad(dropped, images, torch.randn(4, 5, 6, 7))
    assert dropped.is_contiguous(memory_format=torch.channels_last)
    assert grad.is_contiguous(memory_format=torch.channels_last)


@pytest.mark.parametrize("shape", [(1, 512), (3, 512), (10, 512), (2, 7, 512), (0, 512)], ids=str)
@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("available", [False, True], ids=["torch", "oneDNN"])
def test_a_large_linear_layer_has_the_outputs_and_gradients_of_torch(
    shape: tuple[int, ...], bias: bool, available: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    if not available:
        monkeypatch.setattr(layers, "_ONEDNN_LINEAR", None)
    torch.manual_seed(0)
    module = nn.Linear(512, 520, bias)
    own = for_one_client(module)
    assert type(own) is FactoredLinear
    inputs = torch.randn(shape, requires_grad=True)
    upstream = torch.randn(*shape[:-1], 520)
    parameters = list(module.parameters())
    grads = torch.autograd.grad(module(inputs), [inputs, *parameters], upstream)
    with collect_factors() as factors:
        outputs = own(inputs)
        found = torch.autograd.grad(outputs, [inputs, *parameters], upstream, allow_unused=True)
    torch.testing.assert_close(outputs, module(inputs))
    torch.testing.assert_close(found[0], grads[0])
    assert found[1] is None
    ((left, right),) = factors[id(module.weight)]
    torch.testing.assert_close(left.t() @ right, grads[1])
    if bias:
        torch.testing.assert_close(found[2], grads[2])


class StoredByHeight(nn.Module):
    """Images that are stored as (examples, height, width, channels)."""

    def forward(self, images: Tensor) -> Tensor:
        return images.permute(0, 3, 1, 2)


@pytest.mark.parametrize("first", [nn.Identity(), StoredByHeight()], ids=["NCHW", "NHWC"])
def test_convolutions_get_images_with_channels_last_however_they_are_stored(first: nn.Module) -> None:
    seen: list[bool] = []

    class Watched(nn.ReLU):
        def forward(self, images: Tensor) -> Tensor:
            seen.append(images.is_contiguous(memory_format=torch.channels_last))
            return super().forward(images)

    module = nn.Sequential(first, nn.Conv2d(3, 4, 3), Watched(), nn.Conv2d(4, 5, 3), Watched())
    own = for_one_client(module)
    shape = (2, 8, 7, 3) if isinstance(first, StoredByHeight) else (2, 3, 8, 7)
    images = torch.randn(shape)
    torch.testing.assert_close(own(images), module(images))
    assert [type(part) is ChannelsLastConv2d for part in own] == [False, True, False, True, False]
    assert seen[:2] == [True, True]
    assert all(one is other for one, other in zip(own.parameters(), module.parameters(), strict=True))


class Tied(nn.Module):
    """A large layer that is called twice, one whose weight is also used beside it, and one without use."""

    def __init__(self) -> None:
        super().__init__()
        self.twice = nn.Linear(512, 512)
        self.beside = nn.Linear(512, 600, bias=False)
        self.unused = nn.Linear(600, 512)
        self.last = nn.Linear(600, 3)

    def forward(self, inputs: Tensor) -> Tensor:
        hidden = self.twice(self.twice(inputs).relu()).relu()
        return self.last(self.beside(hidden) + self.beside.weight.mean(1))  # type: ignore[no-any-return]


def step(problem: Problem, x: Tensor, batch: Batch, lr: float) -> Tensor:
    """X after one step in place."""
    moved = x.clone()
    problem.sgd_step(problem.leaves(moved), problem.initial()[1] | problem.personal, batch, lr)
    return moved


@pytest.mark.parametrize("decay", [0.0, 0.1])
def test_a_step_with_factors_is_the_step_with_a_gradient(decay: float) -> None:
    torch.manual_seed(0)
    problem = Problem(Tied().double(), cross_entropies, decay)
    assert sum(isinstance(part, FactoredLinear) for part in problem._single.module.modules()) == 3
    x, statistics = problem.initial()
    batch = Batch((torch.randn(6, 512, dtype=torch.float64), torch.arange(6) % 3))
    expected = x - 0.3 * problem.differentiate_by_autograd(x, statistics, batch)[0]
    torch.testing.assert_close(step(problem, x, batch, 0.3), expected, rtol=0, atol=1e-14)


def test_sequences_have_a_row_of_factors_for_each_place() -> None:
    torch.manual_seed(0)
    module = nn.Sequential(nn.Linear(512, 512), nn.Tanh(), nn.Linear(512, 3))
    problem = Problem(module.double(), lambda outputs, targets: cross_entropies(outputs.mean(1), targets))
    x, statistics = problem.initial()
    batch = Batch((torch.randn(4, 5, 512, dtype=torch.float64), torch.arange(4) % 3))
    expected = x - 0.3 * problem.differentiate_by_autograd(x, statistics, batch)[0]
    torch.testing.assert_close(step(problem, x, batch, 0.3), expected, rtol=0, atol=1e-14)


def test_a_personal_layer_is_stepped_by_its_gradient() -> None:
    torch.manual_seed(0)
    module = nn.Sequential(nn.Linear(8, 512), nn.ReLU(), nn.Linear(512, 512), nn.ReLU(), nn.Linear(512, 3))
    problem = Problem(module.double(), cross_entropies, personal=["2"], personal_lr=0.5)
    x, statistics = problem.initial()
    batch = Batch((torch.randn(6, 8, dtype=torch.float64), torch.arange(6) % 3))
    grad, _, moved = problem.differentiate_by_autograd(x, statistics | problem.personal, batch)
    expected = x - 0.3 * grad
    also = problem.sgd_step(problem.leaves(x), statistics | problem.personal, batch, 0.3)
    torch.testing.assert_close(x, expected, rtol=0, atol=1e-14)
    assert not torch.equal(moved["2.weight"], problem.personal["2.weight"])
    torch.testing.assert_close(also["2.weight"], moved["2.weight"], rtol=0, atol=0)


@pytest.mark.parametrize(
    ("norm", "precision", "wanted"),
    [
        (nn.BatchNorm2d(4), Precision.BFLOAT16, True),
        (nn.BatchNorm2d(4), Precision.TF32, True),
        (nn.GroupNorm(2, 4), Precision.BFLOAT16, False),
        (nn.BatchNorm2d(4), Precision.FLOAT32, False),
    ],
)
def test_a_gpu_computes_with_channels_last_where_that_is_faster(
    norm: nn.Module, precision: Precision, wanted: bool
) -> None:
    module = nn.Sequential(nn.Conv2d(3, 4, 3, padding=1), norm, nn.ReLU(), nn.Flatten(), nn.Linear(64, 3))
    assert Problem(module, cross_entropies, precision=precision)._prefers_channels_last() is wanted
    problem = Problem(module.double(), cross_entropies, precision=precision)
    assert not problem._prefers_channels_last()  # in double precision
    x, statistics = problem.initial()
    batch = Batch((torch.randn(6, 3, 4, 4, dtype=torch.float64), torch.arange(6) % 3))
    problem.precision = Precision.FLOAT32  # which a CPU would otherwise round for, too
    problem._single = FasterModule(problem._training, None)
    expected = problem.differentiate_by_autograd(x, statistics, batch)
    problem._single = FasterModule(problem._training, with_channels_last)
    found = problem.differentiate_by_autograd(x, statistics, batch)
    assert problem._single.module is not problem._training
    assert found[2].keys() == expected[2].keys()
    for one, other in zip(
        (*found[:2], *found[2].values()), (*expected[:2], *expected[2].values()), strict=True
    ):
        torch.testing.assert_close(one, other, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("compiled", [False, True])
def test_a_rate_may_be_a_tensor_and_a_compiled_objective_steps_in_place(
    compiled: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    torch.manual_seed(0)
    problem = Problem(nn.Linear(5, 3).double(), cross_entropies, 0.1)
    x, statistics = problem.initial()
    batch = Batch((torch.randn(6, 5, dtype=torch.float64), torch.arange(6) % 3))
    differentiate = problem.compiled("eager") if compiled else problem.differentiate_by_autograd
    expected = x
    for _ in range(2):
        expected = expected - 0.3 * problem.differentiate_by_autograd(expected, statistics, batch)[0]
    read: list[torch.Tensor] = []
    monkeypatch.setattr(torch.Tensor, "__float__", lambda self: read.append(self) or self.item())
    for rate, device in ((0.3, "cpu"), (torch.tensor(0.3, dtype=torch.float64), "cuda")):
        monkeypatch.setattr(Problem, "device", property(lambda self, device=device: torch.device(device)))
        gradient = TaskGradient(problem, differentiate, statistics)
        first = gradient.descend(x, batch, rate)
        second = gradient.descend(first, batch, rate)
        assert second.data_ptr() == first.data_ptr() != x.data_ptr()
        torch.testing.assert_close(second, expected, rtol=0, atol=1e-14)
    assert not read  # which a recording would refuse


class Viewing(nn.Module):
    """As many tutorials write it: the images are viewed as rows, which needs torch's own layout."""

    def __init__(self, p: float = 0.0) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.convolution, self.pool = nn.Conv2d(3, 4, 3), nn.MaxPool2d(2)
        self.p, self.linear = p, nn.Linear(4 * 5 * 5, 10)

    def forward(self, images: Tensor) -> Tensor:
        pooled = self.pool(nn.functional.dropout(self.convolution(images), self.p, self.training))
        outputs: Tensor = self.linear(pooled.view(len(images), -1))
        return outputs


@pytest.mark.parametrize("p", [0.0, 0.5], ids=["exact", "drawing"])
def test_a_module_whose_code_needs_the_layout_of_torch_gets_it(
    p: float, caplog: pytest.LogCaptureFixture
) -> None:
    module, images, labels = Viewing(p), torch.randn(6, 3, 12, 12), torch.arange(6)
    problem = Problem(module, cross_entropies)
    caplog.set_level("INFO")
    x, _ = problem.initial()
    for _ in range(2):
        torch.manual_seed(1)
        grads = torch.autograd.grad(cross_entropies(module(images), labels).mean(), [*module.parameters()])
        expected = x - 0.5 * torch.cat([grad.reshape(-1) for grad in grads])
        torch.manual_seed(1)
        assert torch.allclose(step(problem, x, Batch((images, labels)), 0.5), expected, atol=1e-6)
        assert torch.allclose(problem.outputs(x, images), module.eval()(images), atol=1e-6)
        module.train()
    said = [record.getMessage() for record in caplog.records]
    assert len(said) == 2  # one of training, one of evaluation
    assert all("view size is not compatible" in sentence for sentence in said)


def test_a_module_that_needs_the_layout_of_torch_is_mapped_without_products_of_patches(
    caplog: pytest.LogCaptureFixture,
) -> None:
    """As on a GPU, where small convolutions are products of patches."""
    problem, images, labels = Problem(Viewing(), cross_entropies), torch.randn(6, 3, 12, 12), torch.arange(6)
    expected = problem.differentiate_by_autograd(*problem.initial(), Batch((images, labels)))[0]
    caplog.set_level("INFO")
    problem._mapped = FasterModule(problem._training, with_matmul_convolutions)
    models = torch.stack([problem.initial()[0]] * 2)
    for _ in range(2):
        mapped = torch.func.vmap(lambda x: problem.differentiate(x, {}, Batch((images, labels)))[0])
        assert torch.allclose(mapped(models), expected.expand(2, -1), atol=1e-6)
    (said,) = [record.getMessage() for record in caplog.records]
    assert "view size is not compatible" in said


def test_an_error_of_the_module_itself_is_raised_and_changes_nothing() -> None:
    problem = Problem(nn.Sequential(nn.Conv2d(3, 4, 3), nn.MaxPool2d(2)), cross_entropies)
    x, _ = problem.initial()
    with pytest.raises(RuntimeError, match="expected input"):
        problem.outputs(x, torch.randn(2, 5, 8, 8))
    assert problem.outputs(x, torch.randn(2, 3, 8, 8)).is_contiguous(memory_format=torch.channels_last)


def test_evaluation_in_another_layout_gives_the_outputs_and_can_be_mapped() -> None:
    module = nn.Sequential(nn.Conv2d(3, 4, 3), nn.ReLU(), nn.MaxPool2d(2), nn.Dropout(), nn.Flatten())
    problem, images = Problem(module, cross_entropies), torch.randn(6, 3, 12, 12)
    models = torch.stack([problem.initial()[0] + shift for shift in (0.0, 0.1)])
    each = [problem.outputs(x, images) for x in models]
    assert torch.allclose(each[0], module.eval()(images), atol=1e-6)
    together = torch.func.vmap(lambda x: problem.outputs(x, images))(models)
    assert torch.allclose(together, torch.stack(each), atol=1e-6)


def test_tensors_take_the_place_of_those_of_a_module_for_one_call() -> None:
    module = nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4), nn.Linear(4, 2))
    tensors = {name: torch.randn_like(tensor) for name, tensor in module.named_parameters()}
    tensors |= {name: tensor.clone() for name, tensor in module.named_buffers()}
    before, inputs = {name: tensor.clone() for name, tensor in module.state_dict().items()}, torch.randn(5, 3)
    again = {name: tensor.clone() for name, tensor in tensors.items()}
    expected = torch.func.functional_call(module, tensors, (inputs,))
    assert torch.equal(call_with(module, again, (inputs,), {}), expected)
    assert all(torch.equal(again[name], tensors[name]) for name in tensors)  # moments have moved alike
    assert not torch.equal(again["1.running_mean"], before["1.running_mean"])
    with pytest.raises(RuntimeError):
        call_with(module, again, (torch.randn(5, 7),), {})
    assert all(torch.equal(tensor, before[name]) for name, tensor in module.state_dict().items())
